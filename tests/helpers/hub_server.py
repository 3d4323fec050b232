"""A stand-in for the Hugging Face Hub: the few answers that a plan and a download need, and a
log of what was sent.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

GATED = "org/gated"
BROKEN = "org/broken"


@dataclass
class Sent:
    """One answer: the file (or the address, for what is no file), the range asked for, and the
    bytes of the body.
    """

    method: str
    file: str
    range: str | None
    nbytes: int


@dataclass
class HubServer:
    """A context that serves folders as repositories.

    Args:
        repos: id -> branch -> folder.
        together: where as many range requests for weights wait for one another before they are
            answered.
        moves_to: the branch whose commit is the main branch's from the second question for the main
            branch on.
    """

    repos: dict[str, dict[str, Path]]
    together: threading.Barrier | None = None
    moves_to: str | None = None
    asked: bool = False
    log: list[Sent] = field(default_factory=list)

    def __enter__(self) -> "HubServer":
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                hub.receive(self, self.rfile.read(length))

            do_PUT = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def _elsewhere(self) -> str:
        """Another host's name, as the client trusts headers of redirections within one host
        only.
        """
        return f"http://localhost:{self._server.server_port}/cdn"

    @staticmethod
    def commit(repo: str, branch: str) -> str:
        return hashlib.sha1(f"{repo}@{branch}".encode()).hexdigest()

    def sent(self, file: str) -> int:
        """Bytes of a file that were sent."""
        return sum(
            entry.nbytes for entry in self.log if entry.file == file and entry.method == "GET"
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        path = unquote(url.path)
        if path.startswith("/cdn/"):
            return self._send_file(request, path.removeprefix("/cdn/"))
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path):
            repo, kind, revision = match.groups()
        elif match := re.fullmatch(r"/([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", path):
            repo, revision, file = match.groups()
            kind = "resolve"
        else:
            return self._refuse(request, 404, "EntryNotFound")
        if repo == GATED and kind == "resolve":
            return self._refuse(request, 403, "GatedRepo")
        if repo == BROKEN:
            return self._send(request, 500, b"")
        if repo not in self.repos:
            return self._refuse(request, 401, "RepoNotFound")
        commits = {self.commit(repo, branch): branch for branch in self.repos[repo]}
        branch = commits.get(revision or "", revision or "main")
        if branch not in self.repos[repo]:
            return self._refuse(request, 404, "RevisionNotFound")
        if self.moves_to is not None and (revision or "main") == "main":
            branch = self.moves_to if self.asked else branch
            self.asked = True
        folder, commit = self.repos[repo][branch], self.commit(repo, branch)
        if kind == "resolve":
            return self._resolve(request, folder, file, commit)
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        sizes = {name: {"size": path.stat().st_size} for name, path in files.items()}
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "oid": self._etag(files[name])} | sizes[name]
                for name in files
            ]
            return self._json(request, entries)
        with_sizes = "blobs" in parse_qs(url.query)
        siblings = [{"rfilename": name} | (sizes[name] if with_sizes else {}) for name in files]
        return self._json(request, described(repo, commit, siblings, private=False))

    def receive(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer a request with a body; the stand-in in `hub_uploads.py` accepts one."""
        del body
        self._send(request, 405, b"")

    def _resolve(
        self, request: BaseHTTPRequestHandler, folder: Path, file: str, commit: str
    ) -> None:
        path = folder / file
        if not path.is_file():
            return self._refuse(request, 404, "EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{self._etag(path)}"'}
        if path.suffix in (".safetensors", ".bin"):  # large files lie elsewhere
            linked = {
                "X-Linked-Size": str(path.stat().st_size),
                "X-Linked-Etag": headers["ETag"],
                "Location": f"{self._elsewhere}{path}",
            }
            return self._send(request, 302, b"", headers | linked)
        return self._send_file(request, str(path), headers)

    def _send_file(
        self, request: BaseHTTPRequestHandler, name: str, headers: dict[str, str] | None = None
    ) -> None:
        raw = Path("/", name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        if not asked:
            return self._send(request, 200, raw, headers or {})
        if self.together is not None and name.endswith(".safetensors"):
            self.together.wait()  # an error closes the connection
        first, last = int(asked[1]), int(asked[2] or len(raw) - 1)
        part = raw[first : last + 1]
        span = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(raw)}"}
        return self._send(request, 206, part, (headers or {}) | span)

    def _refuse(
        self, request: BaseHTTPRequestHandler, status: int, code: str, commit: str = ""
    ) -> None:
        self._send(
            request,
            status,
            b"",
            {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": commit},
        )

    def _json(self, request: BaseHTTPRequestHandler, value: Any, status: int = 200) -> None:
        self._send(
            request, status, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(key, value)
        request.end_headers()
        nbytes = 0
        try:
            if request.command != "HEAD":
                for start in range(0, len(body), 1 << 14):
                    nbytes += request.wfile.write(body[start : start + (1 << 14)])
        except OSError:  # the other side has seen enough
            request.close_connection = True
        name = unquote(urlsplit(request.path).path).rsplit("/", 1)[-1]
        self.log.append(Sent(request.command, name, request.headers.get("Range"), nbytes))

    @staticmethod
    def _etag(path: Path) -> str:
        return hashlib.sha1(path.read_bytes()).hexdigest()


def described(
    repo: str, commit: str, siblings: list[dict[str, Any]], *, private: bool
) -> dict[str, Any]:
    """What the Hub says of a repository at a commit."""
    return {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": private}
