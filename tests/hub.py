"""A stand-in for Hugging Face on this machine, to be named in HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import http.server
import threading

COMMIT = "0" * 40


class Server(http.server.ThreadingHTTPServer):
    """Serves files by path; one named in `held` is not answered before `release` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.requests: list[str] = []
        self.held = ""
        self.holding = threading.Event()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.command == "GET" and self.path == self.server.held:
            self.server.holding.set()
            self.server.release.wait()
        content, headers = self.server.files.get(self.path, (b"", {}))
        self.send_response(200 if self.path in self.server.files else 404)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def offer(
    server: Server, repo: str, file: str, content: bytes, *, sha256: str | None = None
) -> None:
    """Have a file in a repository, with a wrong hash if one is given."""
    headers = {
        "ETag": f'"{sha256 or hashlib.sha256(content).hexdigest()}"',
        "X-Repo-Commit": COMMIT,
    }
    for revision in ("main", COMMIT):
        server.files[f"/{repo}/resolve/{revision}/{file}"] = (content, headers)
