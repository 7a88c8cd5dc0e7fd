"""A hub of a few files on this machine, for tests: what huggingface_hub asks of one, and no more."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

COMMIT = "0" * 40


class Server(NamedTuple):
    """The address of a server, what it has been asked for, and the names of files whose next answer breaks off."""

    address: str
    asked: list[tuple[str, str, str | None]]  # the method, the path and the range
    broken: list[str]


@contextlib.contextmanager
def serving(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[Server]:
    """Serve the files of models, by their names, as the hub does."""
    asked: list[tuple[str, str, str | None]] = []
    broken: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, body: bool) -> None:
            path, wanted = self.path.partition("?")[0], self.headers.get("Range")
            asked.append((self.command, path, wanted))
            for name, held in models.items():
                if path.startswith(f"/api/models/{name}/tree/"):
                    listed = [{"type": "file", "path": file, "size": len(held[file]), "oid": COMMIT} for file in held]
                    return self._send(200, json.dumps(listed).encode(), {}, body)
                if path.startswith(f"/api/models/{name}"):
                    siblings = [{"rfilename": file} for file in held]
                    about = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                    return self._send(200, json.dumps(about).encode(), {}, body)
                for file, content in held.items():
                    if path in (f"/{name}/resolve/{revision}/{file}" for revision in ("main", COMMIT)):
                        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                        if wanted is None:
                            return self._send(200, content, headers, body, cut=file in broken)
                        first = int(wanted.removeprefix("bytes=").split("-")[0])
                        headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                        return self._send(206, content[first:], headers, body)
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

        def _send(self, status: int, content: bytes, headers: Mapping[str, str], body: bool, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content[:-1] if cut else content)
            if cut and body:
                broken.clear()
                self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", asked, broken)
    finally:
        server.shutdown()
        server.server_close()
