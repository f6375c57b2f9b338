"""A small Hugging Face hub on loopback: model info, tree, resolve; answers and headers as the real one sends them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".bin", ".gguf", ".onnx")


@dataclass
class Repository:
    files: dict[str, bytes]
    revisions: dict[str, str]
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """What it has and how it misbehaves.

    `cut` maps a file to the bytes after which its next GET breaks off; `corrupt` files arrive with other bytes of the
    same length; `refuse` maps the first segments of a URL path to (status, headers).
    """

    readers: set[str] = field(default_factory=set)  # tokens with access to gated and private repositories
    accounts: set[str] = field(default_factory=set)  # tokens that the hub knows
    repositories: dict[str, Repository] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    refuse: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    endpoint: str = ""
    cdn: str = ""  # another host, as the real one: signed addresses that must not get the token
    leaked: bool = False

    def add(self, name: str, files: dict[str, bytes], *, gated: bool = False, private: bool = False) -> str:
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories[name] = Repository(files, {"main": commit, commit: commit}, gated, private)
        return commit

    def transfers(self) -> list[tuple[str, str | None]]:
        """GETs of file content: (file name, Range)."""
        return [(p.rpartition("/")[2], r) for m, p, r in self.requests if m == "GET" and not p.startswith("/api/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        for start, (status, headers) in self.hub.refuse.items():
            if path.startswith(start):
                return self._send(status, b"", headers)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token and token not in self.hub.accounts | self.hub.readers:
            message = "Invalid credentials in Authorization header"
            return self._send(401, json.dumps({"error": message}).encode(), {"X-Error-Message": message})
        if path.startswith("/cdn/"):
            self.hub.leaked |= token is not None
            return self._content(path.removeprefix("/cdn/"))
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and token not in self.hub.readers):
            # The real hub does not tell strangers which names exist: 401 for them, 404 for accounts.
            return self._send(
                404 if token else 401, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"}
            )
        return self._repository(name, repository, path, token)

    def _repository(self, name: str, repository: Repository, path: str, token: str | None) -> None:
        api = path.startswith("/api/models/")
        rest = path.removeprefix("/api/models/" if api else "/").removeprefix(name).strip("/")
        verb, _, rest = rest.partition("/")
        revision, _, file = rest.partition("/")
        commit = repository.revisions.get(revision or "main")
        if commit is None:
            return self._send(404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        if api and verb == "tree":
            return self._send(200, json.dumps([_entry(*item) for item in repository.files.items()]).encode())
        if api:
            info = {
                "id": name,
                "modelId": name,
                "sha": commit,
                "siblings": [{"rfilename": f} for f in repository.files],
            }
            return self._send(200, json.dumps(info).encode())
        if repository.gated and token not in self.hub.readers:
            message = (
                f"Access to model {name} is restricted. You must have access to it and be authenticated to access it."
            )
            return self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        headers = {"X-Repo-Commit": commit}
        if file not in repository.files:
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        content = repository.files[file]
        if file.endswith(LFS):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            return self._send(302, b"", headers | {"Location": f"{self.hub.cdn}/cdn/{name}/{file}"})
        return self._content(f"{name}/{file}", headers | {"ETag": f'"{_blob(content)}"'})

    def _content(self, path: str, headers: dict[str, str] | None = None) -> None:
        owner, name, file = path.split("/", 2)
        content = self.hub.repositories[f"{owner}/{name}"].files[file]
        if file in self.hub.corrupt:
            content = bytes(len(content))
        status, start, size = 200, 0, len(content)
        headers = (headers or {}) | {"Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status, headers = 206, headers | {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        self._send(status, content[start:], headers, self.hub.cut.pop(file, None) if self.command == "GET" else None)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}
    if path.endswith(LFS):
        digest = hashlib.sha256(content).hexdigest()
        entry |= {"lfs": {"oid": digest, "size": len(content), "pointerSize": 134}}
    return entry


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers while inside."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint, hub.cdn = f"http://127.0.0.1:{server.server_port}", f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
