"""Dataset files from a local folder and from S3: moto's server, and a relay in front of it that breaks connections."""

import hashlib
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from trainium.dataset.fetch import S3Access, fetch
from trainium.dataset.s3_errors import FetchError
from trainium.dataset.verify import Expected
from trainium.errors import TransientError

BUCKET = "training-data"
ROWS = b"".join(json.dumps({"input": f"q{i}", "output": "a" * 200}).encode() + b"\n" for i in range(20_000))
SECRET = "secretsecretsecretsecret"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of whoever runs the tests is used."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def s3(moto: str) -> Any:
    request = urllib.request.Request(f"{moto}/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()
    client = access(moto).client()
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="sft/training.jsonl", Body=ROWS)
    client.put_object(Bucket=BUCKET, Key="sft/validation.jsonl", Body=ROWS[:1000])
    return client


def access(endpoint: str) -> S3Access:
    return S3Access(endpoint_url=endpoint, region="us-east-1", access_key_id="key", secret_access_key=SECRET)


class Relay:
    """Passes requests on; breaks the next GET of an object off after `cut` bytes, or answers `refuse` to everything."""

    def __init__(self, target: str) -> None:
        self.cut: int | None = None
        self.refuse: int | None = None
        self.drop_range = False
        self.ranges: list[str | None] = []
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.pass_on()

            def do_GET(self) -> None:
                if "?" not in self.path or "x-id=GetObject" in self.path:
                    relay.ranges.append(self.headers.get("Range"))
                self.pass_on()

            def pass_on(self) -> None:
                if relay.refuse:
                    self.send_response(relay.refuse)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                headers = dict(self.headers)
                if relay.drop_range:
                    headers.pop("Range", None)
                request = urllib.request.Request(target + self.path, headers=headers, method=self.command)
                try:
                    answer = urllib.request.urlopen(request)
                except urllib.error.HTTPError as error:
                    answer = error
                body = answer.read()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in {"connection", "server", "date"}:
                        self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    cut, relay.cut = relay.cut, None
                    self.wfile.write(body[:cut])
                    if cut is not None:
                        self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def relay(moto: str) -> Iterator[Relay]:
    relay = Relay(moto)
    yield relay
    relay.server.shutdown()
    relay.server.server_close()


def test_files_of_a_prefix_are_downloaded_and_verified(s3: Any, moto: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = f"s3://{BUCKET}/sft/"
    files = ["training.jsonl", "validation.jsonl"]
    train, validation = fetch(
        source, files, tmp_path, access=access(moto), progress=lambda done, size: seen.append((done, size))
    )
    assert train.path.read_bytes() == ROWS
    assert train.source == f"s3://{BUCKET}/sft/training.jsonl"
    assert (train.bytes, train.verified, train.reused) == (len(ROWS), "md5", False)
    assert train.sha256 == hashlib.sha256(ROWS).hexdigest()
    assert validation.path == tmp_path / "validation.jsonl"
    assert (len(ROWS), len(ROWS)) in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_one_object_is_a_source_and_a_bucket_needs_no_prefix(s3: Any, moto: str, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="top.jsonl", Body=b"{}")
    assert fetch(f"s3://{BUCKET}/top.jsonl", [], tmp_path, access=access(moto))[0].bytes == 2
    assert fetch(f"s3://{BUCKET}", ["top.jsonl"], tmp_path, access=access(moto))[0].reused


def test_a_public_object_needs_no_credentials(s3: Any, moto: str, tmp_path: Path) -> None:
    s3.put_object_acl(Bucket=BUCKET, Key="sft/training.jsonl", ACL="public-read")
    public = S3Access(unsigned=True, endpoint_url=moto, region="us-east-1")
    assert fetch(f"s3://{BUCKET}/sft", ["training.jsonl"], tmp_path, access=public)[0].bytes == len(ROWS)


def test_a_second_fetch_transfers_nothing_unless_the_file_is_wrong(s3: Any, relay: Relay, tmp_path: Path) -> None:
    source = f"s3://{BUCKET}/sft"
    fetch(source, ["training.jsonl"], tmp_path, access=access(relay.endpoint))
    relay.ranges.clear()
    assert fetch(source, ["training.jsonl"], tmp_path, access=access(relay.endpoint))[0].reused
    assert relay.ranges == []
    (tmp_path / "training.jsonl").write_bytes(bytes(len(ROWS)))
    assert not fetch(source, ["training.jsonl"], tmp_path, access=access(relay.endpoint))[0].reused
    assert (tmp_path / "training.jsonl").read_bytes() == ROWS


def test_an_interrupted_download_goes_on_where_it_broke(s3: Any, relay: Relay, tmp_path: Path) -> None:
    source = f"s3://{BUCKET}/sft"
    relay.cut = 3_000_000
    with pytest.raises(TransientError, match=r"training.jsonl: no connection to S3, or it broke"):
        fetch(source, ["training.jsonl"], tmp_path, access=access(relay.endpoint))
    assert not (tmp_path / "training.jsonl").exists()
    (part,) = tmp_path.glob(".training.jsonl.*.part")
    kept = part.stat().st_size
    assert 0 < kept <= 3_000_000
    (file,) = fetch(source, ["training.jsonl"], tmp_path, access=access(relay.endpoint))
    assert relay.ranges == [None, f"bytes={kept}-"]
    assert file.path.read_bytes() == ROWS
    assert [path.name for path in tmp_path.iterdir()] == ["training.jsonl"]


def test_a_server_without_ranges_starts_afresh(s3: Any, relay: Relay, tmp_path: Path) -> None:
    relay.cut = 3_000_000
    with pytest.raises(TransientError):
        fetch(f"s3://{BUCKET}/sft/training.jsonl", [], tmp_path, access=access(relay.endpoint))
    relay.drop_range = True
    (file,) = fetch(f"s3://{BUCKET}/sft/training.jsonl", [], tmp_path, access=access(relay.endpoint))
    assert file.path.read_bytes() == ROWS


def test_a_new_version_is_never_glued_to_an_old_part(s3: Any, relay: Relay, tmp_path: Path) -> None:
    source = f"s3://{BUCKET}/sft/training.jsonl"
    relay.cut = 3_000_000
    with pytest.raises(TransientError):
        fetch(source, [], tmp_path, access=access(relay.endpoint))
    s3.put_object(Bucket=BUCKET, Key="sft/training.jsonl", Body=ROWS[::-1])
    (file,) = fetch(source, [], tmp_path, access=access(relay.endpoint))
    assert file.path.read_bytes() == ROWS[::-1]
    assert [path.name for path in tmp_path.iterdir()] == ["training.jsonl"]


def test_a_damaged_part_is_found_and_thrown_away(s3: Any, relay: Relay, tmp_path: Path) -> None:
    source = f"s3://{BUCKET}/sft/training.jsonl"
    relay.cut = 3_000_000
    with pytest.raises(TransientError):
        fetch(source, [], tmp_path, access=access(relay.endpoint))
    (part,) = tmp_path.glob(".*.part")
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(TransientError, match="arrived with other bytes than S3 states"):
        fetch(source, [], tmp_path, access=access(relay.endpoint))
    assert list(tmp_path.iterdir()) == []


def test_a_multipart_upload_is_verified_by_its_parts(s3: Any, moto: str, tmp_path: Path) -> None:
    parts, mark = [b"a" * (5 << 20), b"b" * (5 << 20), b"c" * 100], {"Bucket": BUCKET, "Key": "big.jsonl"}
    mark["UploadId"] = s3.create_multipart_upload(**mark)["UploadId"]
    tags = [s3.upload_part(**mark, PartNumber=i, Body=part)["ETag"] for i, part in enumerate(parts, 1)]
    s3.complete_multipart_upload(
        **mark, MultipartUpload={"Parts": [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(tags, 1)]}
    )
    (file,) = fetch(f"s3://{BUCKET}/big.jsonl", [], tmp_path, access=access(moto))
    assert file.verified == "md5-parts"
    assert file.path.read_bytes() == b"".join(parts)
    file.path.write_bytes(bytes(file.bytes))
    assert not fetch(f"s3://{BUCKET}/big.jsonl", [], tmp_path, access=access(moto))[0].reused


@pytest.mark.parametrize(
    ("stated", "how"),
    [
        ({"ChecksumSHA256": "ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0="}, "sha256"),
        ({}, "md5"),
        ({"ServerSideEncryption": "aws:kms", "ChecksumCRC32": "NSRBwg=="}, "crc32"),
        ({"ServerSideEncryption": "aws:kms"}, "size"),
        ({"SSECustomerAlgorithm": "AES256", "ChecksumSHA256": "AAAA-2"}, "size"),
    ],
)
def test_the_strongest_statement_is_checked(stated: dict[str, str], how: str, tmp_path: Path) -> None:
    (tmp_path / "right").write_bytes(b"abc")
    (tmp_path / "wrong").write_bytes(b"abd")
    head = {"ContentLength": 3, "ETag": '"900150983cd24fb0d6963f7d28e17f72"', **stated}
    expected = Expected.of(head, lambda: 0)
    proof = expected.check(tmp_path / "right")
    assert proof is not None
    assert proof.how == how
    assert (expected.check(tmp_path / "wrong") is None) == (how != "size")


def test_a_missing_object_names_what_is_there(s3: Any, moto: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"train.jsonl does not exist. There are: training.jsonl, validation.jsonl\."):
        fetch(f"s3://{BUCKET}/sft", ["train.jsonl"], tmp_path, access=access(moto))
    for number in range(12):
        s3.put_object(Bucket=BUCKET, Key=f"many/{number:02}.jsonl", Body=b"")
    with pytest.raises(FetchError, match=r"00.jsonl, .*, 09.jsonl …\.$"):
        fetch(f"s3://{BUCKET}/many", ["x.jsonl"], tmp_path, access=access(moto))
    with pytest.raises(FetchError, match="There is nothing there"):
        fetch(f"s3://{BUCKET}/elsewhere", ["x.jsonl"], tmp_path, access=access(moto))


def test_a_missing_bucket_is_named(s3: Any, moto: str, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="there is no bucket 'training-dota'"):
        fetch("s3://training-dota/sft", ["training.jsonl"], tmp_path, access=access(moto))


def test_a_refusal_says_how_to_sign(s3: Any, relay: Relay, tmp_path: Path) -> None:
    relay.refuse = 403
    with pytest.raises(
        FetchError, match=r"access denied, or no such file.*dataset\.unsigned=true.*S3Storage"
    ) as refused:
        fetch(f"s3://{BUCKET}/sft", ["training.jsonl"], tmp_path, access=access(relay.endpoint))
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(access(relay.endpoint))


def test_no_credentials_is_said(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"there are no AWS credentials.*dataset\.unsigned=true"):
        fetch(f"s3://{BUCKET}/sft", ["training.jsonl"], tmp_path, access=S3Access(region="us-east-1"))


def test_trouble_that_passes_may_be_tried_again(s3: Any, relay: Relay, tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="no connection to S3"):
        fetch(f"s3://{BUCKET}/sft", ["training.jsonl"], tmp_path, access=access("http://127.0.0.1:9"))
    relay.refuse = 503
    with pytest.raises(TransientError, match="S3 answered 503"):
        fetch(f"s3://{BUCKET}/sft", ["training.jsonl"], tmp_path, access=access(relay.endpoint))


def test_local_files_are_used_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(ROWS)
    (by_folder,) = fetch(tmp_path, ["train.jsonl"], tmp_path / "never")
    (by_file,) = fetch(str(tmp_path / "train.jsonl"), [], tmp_path / "never")
    assert by_folder == by_file
    assert by_folder.path == tmp_path / "train.jsonl"
    assert (by_folder.sha256, by_folder.verified) == (hashlib.sha256(ROWS).hexdigest(), "local")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("source", "files", "message"),
    [
        ("{here}", ["x.jsonl"], r"x.jsonl does not exist. There are: train.jsonl\."),
        ("{here}", [], r"is a folder: say which of its files. There are: train.jsonl\."),
        ("{here}/nowhere", ["x.jsonl"], "is no folder"),
        ("s3://", ["x.jsonl"], "names no bucket"),
        ("s3://bucket/", [], "names no file"),
        ("s3://bucket", ["a/x.jsonl", "b/x.jsonl"], "do not have different names"),
        ("gs://bucket/x", ["x.jsonl"], "only local paths and s3://"),
    ],
)
def test_a_source_that_cannot_be_is_refused(source: str, files: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(ROWS[:100])
    with pytest.raises(FetchError, match=message):
        fetch(source.format(here=tmp_path), files, tmp_path / "out")
