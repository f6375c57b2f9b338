"""Reading growing files, and what must not be shown of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium.logs.redact import redact
from trainium.logs.tail import LineBuffer, Tail, last_lines


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_bytes(b"one\ntw")
    assert b"".join(tail.read()) == b"one\ntw"
    with path.open("ab") as file:
        file.write(b"o\n")
    assert b"".join(tail.read()) == b"o\n"
    assert list(tail.read()) == []
    assert b"".join(Tail(path, offset=tail.offset - 2).read()) == b"o\n"


def test_a_truncated_or_replaced_file_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"long enough")
    tail = Tail(path)
    list(tail.read())
    path.write_bytes(b"new")
    assert (b"".join(tail.read()), tail.restarts) == (b"new", 1)
    other = tmp_path / "other"
    other.write_bytes(b"another file, longer")
    other.replace(path)
    assert (b"".join(tail.read()), tail.restarts) == (b"another file, longer", 2)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xff", b"\0"]), max_size=30), st.data())
def test_lines_do_not_depend_on_the_pieces(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    buffer = LineBuffer()
    out = b""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for piece in buffer.feed(text[start:end]):
            assert piece.data.endswith((b"\n", b"\r"))
            out += piece.data
    assert out + buffer.rest == text
    assert b"\n" not in buffer.rest


def test_last_lines_are_what_a_terminal_shows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n\nbar 1%\rbar 2%\r\nbad \xff\0 byte\nlast without end")
    assert last_lines(path, 3) == ["bar 2%", "bad � byte", "last without end"]
    assert last_lines(path, 0) == []
    assert last_lines(tmp_path / "none", 3) == []


def test_last_lines_of_a_huge_line_show_no_half_token(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000 + b"hf_" + b"A" * 300_000 + b" end")
    assert last_lines(path, 5) == ["… end"]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("login with hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "hf_AbCdEf"),
        ("HF_TOKEN=abc123", "abc123"),
        ("export HUGGING_FACE_HUB_TOKEN='abc 123'", "abc 123"),
        ('{"HF_TOKEN": "abc123"}', "abc123"),
        ("key AKIAIOSFODNN7EXAMPLE used", "AKIAIOSFODNN7EXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ('"SecretAccessKey": "wJalrXUtnFEMI"', "wJalrXUtnFEMI"),
        ("AWS_SESSION_TOKEN=FwoGZXIvYXdzE", "FwoGZXIvYXdzE"),
        ("GET https://b.s3.amazonaws.com/k?X-Amz-Signature=fe5f80&x=1", "fe5f80"),
        ("Authorization: Bearer abcdefgh12345", "abcdefgh12345"),
        ("https://user:pa55word@example.com/x", "pa55word"),
        ("instance i-0975663b229a10fd1 failed", "i-0975663b229a10fd1"),
        ("58093 ERROR   NRT:nrt_infodump      Nodename: ip-172-31-33-90", "ip-172-31-33-90"),
        ("58093 INFO   NRT:nrt_infodump          MY_VALUE=private", "private"),
        ("a NRT:nrt_infodump   X=private1b NRT:nrt_infodump   Failure: NRT_X in f()", "private"),
    ],
)
def test_secrets_are_redacted(text: str, secret: str) -> None:
    shown = redact(text)
    assert secret not in shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "NRT:nrt_infodump      Failure: NRT_EXEC_OOB in nrt_execute()",
        "num_tokens=4096, tokens_per_second: 3",
        "TOKENIZERS_PARALLELISM=false",
        "bos_token='<s>' eos_token='</s>'",
        "node compute1-dy-queue1-i1-6, hf_tanuki_8B_SFT_config.yaml",
        "https://huggingface.co:443/x and s3://neuron-s3/training_datasets",
        "global_step=3.000, throughput=0.181",
    ],
)
def test_the_rest_is_left_alone(text: str) -> None:
    assert redact(text) == text
