"""Python processes that have imported the large libraries and run programs in forks of themselves.

Importing torch and transformers takes seconds of processor time, which every command that loads a model would spend
anew. A fork is a process of its own with its own working directory, streams, signals and exit code, and it imports
gqa_convert itself. Where the imports are what a test is about, or the environment differs from the server's, a new
interpreter is needed: `tests.helpers.command_line` decides.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

ROOT = Path(__file__).parents[2]
SMALL = (
    "filelock",
    "jinja2",
    "ml_dtypes",
    "numpy",
    "pydantic.fields",
    "pydantic.root_model",
    "pydantic.type_adapter",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors.numpy",
    "tqdm.auto",
    "typer",
    "yaml",
)
"""Libraries that read none of the Hub's variables."""

LARGE = (
    *SMALL,
    "safetensors.torch",
    "torch",
    "transformers",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""Libraries that commands load models with."""

OF_THE_HUB = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_")
AT_IMPORT = (*OF_THE_HUB, "TORCH_", "PYTHON", "OMP_", "MALLOC_", "HOME", "PATH", "TMPDIR")
"""How the names of variables begin that a library, C's too, or the interpreter may read before the program runs."""

QUIET = {"TRANSFORMERS_VERBOSITY": "error"}
"""What gqa_convert sets before it imports transformers."""


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be those of the server."""
    return {name: value for name, value in environment.items() if name.startswith(AT_IMPORT) and name not in QUIET}


STARTED_IN = at_import(os.environ)
"""What the servers start with, taken before any test can change it."""


def libraries_for(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The libraries whose server runs a program as a new interpreter in this environment would, or None."""
    changed = {name for name, _ in at_import(environment).items() ^ STARTED_IN.items()}
    if not changed:
        return LARGE
    return SMALL if all(name.startswith(OF_THE_HUB) for name in changed) else None


class ForkServer:
    """Starts the server and sends it programs to run.

    Args:
        libraries: the names of the modules that the server imports.
    """

    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {libraries})"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | STARTED_IN | QUIET,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def run(
        self, arguments: list[str], environment: Mapping[str, str], timeout: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python ARGUMENTS`, which begin with `-m MODULE` or `-c CODE`, in the caller's working directory.

        Raises:
            subprocess.TimeoutExpired: the program took more than `timeout` seconds and was killed.
        """
        request = {
            "arguments": arguments,
            "folder": str(Path.cwd()),
            "environment": dict(environment),
        }
        message = json.dumps(request).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            self._socket.settimeout(60)
            socket.send_fds(self._socket, [len(message).to_bytes(8, "big")], [out.fileno(), err.fileno()])
            self._socket.sendall(message)
            pid = self._receive()
            self._socket.settimeout(timeout)
            try:
                code = self._receive()
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._socket.settimeout(60)
                self._receive()
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, _decoded(out.read()), _decoded(err.read()))

    def close(self) -> None:
        """End the server, and wait for it."""
        self._socket.close()
        self._process.wait()

    def _receive(self) -> int:
        received = b""
        while len(received) < 8:
            part = self._socket.recv(8 - len(received))
            assert part, "the fork server has ended"
            received += part
        return int.from_bytes(received, "big", signed=True)


def _decoded(output: bytes) -> str:
    """As `subprocess` does with `text=True`."""
    return output.decode().replace("\r\n", "\n").replace("\r", "\n")


def serve(descriptor: int, libraries: tuple[str, ...]) -> None:
    """Answer requests until the other side of the socket closes."""
    for name in libraries:
        importlib.import_module(name)
    _settle()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            header, streams, _, _ = socket.recv_fds(connection, 8, 2)
            if not header:
                return
            size = int.from_bytes(header, "big")
            message = b""
            while len(message) < size:
                message += connection.recv(size - len(message))
            pid = os.fork()
            if not pid:
                connection.detach()
                os.close(descriptor)
                _run(json.loads(message), streams)
            for stream in streams:
                os.close(stream)
            connection.sendall(pid.to_bytes(8, "big"))
            _, status = os.waitpid(pid, 0)
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))


def _settle() -> None:
    """Make forks cheap: they neither traverse the server's objects in search of garbage, which would copy their memory,
    nor run the server's finalizers when they end.
    """
    gc.collect()
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _run(request: dict[str, Any], streams: "array.array[int] | list[int]") -> Never:
    """Do in this fork what an interpreter does from its start to its end."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    flag, program, *rest = request["arguments"]
    sys.argv = [flag, *rest]
    code = 1
    try:
        if flag == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        else:
            code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)
