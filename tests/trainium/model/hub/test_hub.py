"""Resolving and downloading from a small hub that answers as the real one."""

import errno
import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainium.errors import TransientError
from trainium.model.errors import HubError, explain
from trainium.model.hub import DownloadProgress, download, resolve
from trainium.model.wanted import wanted_files

REPO = "lab/llama"
TOKEN = "hf_secretsecretsecret"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_branch_is_resolved_to_its_commit(hub: Any, model_files: dict[str, bytes]) -> None:
    commit = hub.add(REPO, model_files)
    assert resolve(REPO, "main", endpoint=hub.endpoint) == commit
    assert resolve(REPO, commit, endpoint=hub.endpoint) == commit


def test_what_a_run_needs_is_downloaded_and_verified(hub: Any, model_files: dict[str, bytes], tmp_path: Path) -> None:
    ballast = {"model.onnx": b"o", "q4.gguf": b"g", "original/consolidated.00.pth": b"p", "pytorch_model.bin": b"b"}
    commit = hub.add(REPO, {**model_files, **ballast, "LICENSE": b"Apache"})
    report = download(REPO, commit, tmp_path / "base", endpoint=hub.endpoint)
    assert names(tmp_path / "base") == {*model_files, "LICENSE"}
    for name, content in model_files.items():
        assert (tmp_path / "base" / name).read_bytes() == content
    assert report.commit == commit
    assert report.downloaded_bytes == sum(map(len, model_files.values())) + 6
    assert not any(file.reused for file in report.files)
    weights = next(file for file in report.files if file.path == "model-00001-of-00002.safetensors")
    assert weights.digest == "sha256:" + hashlib.sha256(model_files[weights.path]).hexdigest()
    config = next(file for file in report.files if file.path == "config.json")
    assert config.digest.startswith("git-sha1:")


def test_a_second_download_transfers_nothing(hub: Any, model_files: dict[str, bytes], tmp_path: Path) -> None:
    commit = hub.add(REPO, model_files)
    download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    hub.requests.clear()
    report = download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert hub.transfers() == []
    assert all(file.reused for file in report.files)
    assert report.downloaded_bytes == 0


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_only_a_damaged_file_is_fetched_again(
    hub: Any, model_files: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    commit = hub.add(REPO, model_files)
    download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    (tmp_path / name).write_bytes(bytes(len(model_files[name])))
    hub.requests.clear()
    report = download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert [transfer[0] for transfer in hub.transfers()] == [name]
    assert (tmp_path / name).read_bytes() == model_files[name]
    assert [file.path for file in report.files if not file.reused] == [name]


def test_a_lost_connection_goes_on_inside_the_file(hub: Any, model_files: dict[str, bytes], tmp_path: Path) -> None:
    chunk = 10 << 20  # huggingface_hub writes in chunks of this size
    big = bytes(range(256)) * (12 << 12)
    commit = hub.add(REPO, {"config.json": b"{}", "model.safetensors": big})
    hub.cut["model.safetensors"] = chunk + 1000
    seen: list[DownloadProgress] = []
    download(REPO, commit, tmp_path, endpoint=hub.endpoint, progress=seen.append)
    ranges = [wanted for name, wanted in hub.transfers() if name == "model.safetensors"]
    assert ranges == [None, f"bytes={chunk}-"]
    assert (tmp_path / "model.safetensors").read_bytes() == big
    assert seen[-1] == DownloadProgress(len(big) + 2, len(big) + 2)


def test_other_bytes_than_the_hub_states_are_never_kept(
    hub: Any, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.add(REPO, model_files)
    hub.corrupt.add("model-00001-of-00002.safetensors")
    with pytest.raises(TransientError, match=r"model-00001-of-00002.safetensors arrived with other bytes"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert "model-00001-of-00002.safetensors" not in names(tmp_path)
    hub.corrupt.clear()
    again = download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert sum(file.bytes for file in again.files) == sum(map(len, model_files.values()))


def test_a_gated_model_says_how_to_get_access(hub: Any, model_files: dict[str, bytes], tmp_path: Path) -> None:
    commit = hub.add(REPO, model_files, gated=True)
    with pytest.raises(HubError, match=r"gated and no valid token was sent.*accept its terms.*HuggingFaceHub block"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    hub.accounts.add(TOKEN)
    with pytest.raises(HubError, match="account of this token is not on its list") as refused:
        download(REPO, commit, tmp_path, token=TOKEN, endpoint=hub.endpoint)
    assert TOKEN not in str(refused.value)
    hub.readers.add(TOKEN)
    download(REPO, commit, tmp_path, token=TOKEN + "\n", endpoint=hub.endpoint)
    assert not hub.leaked
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_missing_or_private_repository_is_named(hub: Any, token: str | None) -> None:
    hub.accounts.add(TOKEN)
    with pytest.raises(HubError, match=r"model lab/nothing is not on http.*If it is private") as missing:
        resolve("lab/nothing", "main", token=token, endpoint=hub.endpoint)
    assert TOKEN not in str(missing.value)


def test_an_unknown_revision_is_named(hub: Any, model_files: dict[str, bytes]) -> None:
    hub.add(REPO, model_files)
    with pytest.raises(HubError, match="lab/llama has no revision 'v9'"):
        resolve(REPO, "v9", endpoint=hub.endpoint)


def test_a_wrong_token_is_said_to_be_wrong_and_not_shown(hub: Any, model_files: dict[str, bytes]) -> None:
    hub.add(REPO, model_files)
    with pytest.raises(HubError, match="wrong, expired or revoked") as wrong:
        resolve(REPO, "main", token=TOKEN, endpoint=hub.endpoint)
    assert TOKEN not in str(wrong.value)
    with pytest.raises(HubError, match="on one line") as broken:
        resolve(REPO, "main", token=f"{TOKEN}\n{TOKEN}", endpoint=hub.endpoint)
    assert TOKEN not in str(broken.value)


def test_something_that_is_no_hub_is_named(hub: Any, model_files: dict[str, bytes], tmp_path: Path) -> None:
    commit = hub.add(REPO, model_files)
    hub.refuse[f"/{REPO}/resolve"] = (200, {})
    with pytest.raises(HubError, match="does not answer as a Hugging Face hub"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)


def test_what_a_server_echoes_is_cut_out(hub: Any) -> None:
    hub.refuse["/api/models/"] = (403, {"X-Error-Message": f"{TOKEN} may not"})
    with pytest.raises(HubError, match=r"\[token\] may not") as refused:
        resolve(REPO, "main", token=TOKEN, endpoint=hub.endpoint)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize("repo", ["/fsx/models/llama", "a/b/c", "--help"])
def test_a_name_that_no_repository_can_have_is_refused(repo: str) -> None:
    with pytest.raises(HubError, match="write owner/name"):
        resolve(repo, "main", endpoint="http://127.0.0.1:9")


def test_no_network_may_be_tried_again() -> None:
    with pytest.raises(TransientError, match=r"no connection to http://127.0.0.1:9.*local folder"):
        resolve(REPO, "main", endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_may_be_tried_again(hub: Any, status: int) -> None:
    hub.refuse["/api/models/"] = (status, {})
    with pytest.raises(TransientError, match=f"answered {status}"):
        resolve(REPO, "main", endpoint=hub.endpoint)


def test_a_disk_too_small_is_found_before_the_first_byte(
    hub: Any, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(REPO, model_files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100, used=90, free=10))
    with pytest.raises(HubError, match="has 10 B free and the download needs"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert hub.transfers() == []


def test_a_disk_that_fills_up_is_named() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/fsx/base/model.safetensors")
    known = explain(full, repo=REPO, revision="main", endpoint=None, token=None)
    assert isinstance(known, HubError)
    assert "disk is full (/fsx/base/model.safetensors)" in str(known)


def test_weights_of_another_model_in_the_folder_are_refused(
    hub: Any, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.add(REPO, model_files)
    (tmp_path / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(HubError, match=r"weights of another model or revision: model.safetensors"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)
    assert (tmp_path / "model.safetensors").read_bytes() == b"another model"


def test_a_repository_without_usable_weights_is_refused(hub: Any, tmp_path: Path) -> None:
    commit = hub.add(REPO, {"config.json": b"{}", "model-q4.gguf": b"g"})
    with pytest.raises(HubError, match=r"neither \*.safetensors nor pytorch_model\*.bin .* only .gguf"):
        download(REPO, commit, tmp_path, endpoint=hub.endpoint)


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (["model.safetensors", "model-00001-of-00001.safetensors", "a.json"], ["a.json", "model.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors", "model.safetensors.index.json"],
         ["model-1.safetensors", "model.safetensors.index.json"]),
        (["pytorch_model-1.bin", "pytorch_model.bin.index.json", "training_args.bin", "tf_model.h5"],
         ["pytorch_model-1.bin", "pytorch_model.bin.index.json"]),
        (["pytorch_model.bin", "model.safetensors", "pytorch_model.bin.index.json"], ["model.safetensors"]),
        (["onnx/model.onnx", "onnx/config.json", "tokenizer.model", "chat_template.jinja", "x.png", ".gitattributes"],
         ["chat_template.jinja", "tokenizer.model"]),
    ],
)  # fmt: skip
def test_one_copy_of_the_weights_is_wanted(there: list[str], wanted: list[str]) -> None:
    assert wanted_files(there) == wanted
