"""A small hub on this machine: the four routes that the real clients ask, over real HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1234567890abcdef1234567890abcdef12345678"


class LocalHub:
    """Serves one repository at one commit.

    Args:
        kind: ``models`` or ``datasets``.
        name: ``OWNER/NAME``.
        folder: Its files.
    """

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        self.kind, self.name, self.folder = kind, name, folder
        self.requests: list[str] = []
        self.fail_on = ""
        """A file whose download breaks off in the middle."""

    def files(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file())

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.answer(self, with_body=True)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path, _, query = request.path.partition("?")
        self.requests.append(f"{request.command} {path}")
        api = f"/api/{self.kind}/{self.name}"
        resolve = f"{'/datasets' if self.kind == 'datasets' else ''}/{self.name}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/{COMMIT}", f"{api}/revision/main"):
            siblings = [{"rfilename": self.relative(p), "size": p.stat().st_size} for p in self.files()]
            self.send_json(
                request, {"id": self.name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            )
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            below = path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
            self.send_json(request, self.tree(self.folder / below, "recursive=true" in query.lower()))
        elif path.startswith(resolve) and (self.folder / path[len(resolve) :]).is_file():
            self.send_file(request, self.folder / path[len(resolve) :], with_body)
        else:
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in path else "RevisionNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()

    def relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def tree(self, below: Path, recursive: bool) -> list[dict]:
        entries = []
        for path in sorted(below.rglob("*") if recursive else below.glob("*")):
            entry = {"path": self.relative(path), "size": 0, "oid": "0" * 40, "type": "directory"}
            if path.is_file():
                oid = hashlib.sha1(path.read_bytes()).hexdigest()
                entry |= {"type": "file", "size": path.stat().st_size, "oid": oid}
            entries.append(entry)
        return entries

    def send_json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def send_file(self, request: BaseHTTPRequestHandler, path: Path, with_body: bool) -> None:
        content = path.read_bytes()
        start, stop = 0, len(content)
        wanted = request.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, stop) if last else stop
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(stop - start))
        request.end_headers()
        if with_body and path.name == self.fail_on:
            request.wfile.write(content[start : start + (stop - start) // 2])
            request.close_connection = True
        elif with_body:
            request.wfile.write(content[start:stop])
