"""An S3 server (moto's) in this process, with a log of what travelled and a way to interfere."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.local_server import LocalServer


@dataclass(frozen=True)
class Request:
    """One request: its method, the key of the object (with the bucket), the range asked for, and the bytes answered."""

    method: str
    key: str
    range: str | None
    nbytes: int


@dataclass
class S3Server(LocalServer):
    """A context that serves S3 at `url`.

    Args:
        before: called with the method and the key of a request before it is answered; an exception refuses access.
    """

    before: Callable[[str, str], None] = lambda method, key: None
    log: list[Request] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)
    """Of the objects with which a test begins, so that the next one need not upload them again."""

    def __enter__(self) -> "S3Server":
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._application = DomainDispatcherApplication(create_backend_app)
        self.serve(make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler))
        return self

    def sent(self, key: str) -> int:
        """Bytes of an object that were sent."""
        return sum(request.nbytes for request in self.log if request.method == "GET" and request.key == key)

    def received(self) -> list[str]:
        """Keys of the objects that were written, in order."""
        return [request.key for request in self.log if request.method == "PUT"]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].lstrip("/")
        try:
            self.before(method, key)
        except PermissionError:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        body = b"".join(self._application(environ, start))
        self.log.append(Request(method, key, environ.get("HTTP_RANGE"), len(body)))
        return [body]


def put_folder(files: Any, folder: Path, prefix: str) -> None:
    """Upload a folder through an fsspec file system."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.pipe_file(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def etags(files: Any, prefix: str = "models") -> dict[str, str]:
    """The ETags of the objects under a prefix by their paths."""
    return {path: entry["ETag"] for path, entry in files.find(prefix, detail=True).items()}


def objects(files: Any, prefix: str) -> dict[str, bytes]:
    """The objects under a prefix by their names."""
    files.invalidate_cache()
    return {path.split(f"{prefix}/", 1)[1]: files.cat_file(path) for path in files.find(prefix)}
