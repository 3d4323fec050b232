"""A server in this process, on a port of its own."""

import threading
from types import TracebackType
from typing import Any


class LocalServer:
    """A context whose `__enter__` calls `serve`; leaving it ends the server."""

    _server: Any

    def serve(self, server: Any) -> None:
        """Answer in a thread.

        Args:
            server: a `socketserver.BaseServer` that listens at 127.0.0.1.
        """
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"
