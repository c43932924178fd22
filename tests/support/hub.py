"""A hub of models on loopback: what huggingface_hub asks of huggingface.co, for folders of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """``revisions`` are folders by the repository and the name of a branch; their commits follow from their files."""

    def __init__(self) -> None:
        self.revisions: dict[tuple[str, str], Path] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []  # paths, in order
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(path)
        is_api = path.startswith("/api/models/")
        owner, name, what, revision, *rest = [*path.removeprefix("/api/models").split("/", 5)[1:], "", "", ""]
        repository = f"{owner}/{name}"
        if repository not in {known for known, _ in self.revisions}:
            return _send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if repository in self.gated:
            return _send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        folder = self._folder(repository, revision)
        if folder is None:
            return _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if is_api and what == "revision":
            siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
            return _send_json(request, {"id": repository, "sha": commit_of(folder), "siblings": siblings})
        if is_api:
            assert what == "tree", path
            return _send_json(request, [_entry(file, folder) for file in files])
        assert what == "resolve", path
        file = folder / rest[0]
        return _send(request, 200, file.read_bytes(), {"ETag": f'"{_id_of(file)}"', "X-Repo-Commit": commit_of(folder)})

    def _folder(self, repository: str, revision: str) -> Path | None:
        commits = {commit_of(folder): folder for (of, _), folder in self.revisions.items() if of == repository}
        return self.revisions.get((repository, revision)) or commits.get(revision)


def commit_of(folder: Path) -> str:
    return hashlib.sha1("".join(_id_of(file) for file in sorted(folder.rglob("*"))).encode()).hexdigest()


def _entry(file: Path, folder: Path) -> dict[str, object]:
    name = str(file.relative_to(folder))
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _id_of(file)}


def _id_of(file: Path) -> str:
    return hashlib.sha1(f"{file}|{file.stat().st_size}|{file.stat().st_mtime_ns}".encode()).hexdigest()


def _send_json(request: BaseHTTPRequestHandler, value: object) -> None:
    _send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(body))}).items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)
