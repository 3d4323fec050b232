"""The process in which an engine runs, possibly with another interpreter and other packages.

    python -c BOOT MODULE

The working directory holds `request.json`; `outcome.json` and `logits.npz` are written beside it.
BOOT makes this package, but nothing beside it, importable there.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .request import AbsentError, NotSupportedError, Request, TokenIds


def run(
    command: Sequence[str], folder: Path, seconds: float = 60.0
) -> tuple[int | None, list[str], list[str]]:
    """Run a command offline, and kill all its descendants when it ends, when its time is up and
    when this program is stopped. Another interpreter does not get this program's module path.

    Args:
        command: its words.
        folder: in which it works, and what it prints is kept.
        seconds: time limit.

    Returns:
        Its exit code, the negative signal number if a signal killed it, None if its time was up;
        and lines of stdout and of stderr.

    Raises:
        OSError: the program does not exist.
    """
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if command[0] != sys.executable:
        variables.pop("PYTHONPATH", None)
    files = [folder / name for name in ("output", "errors")]
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    printed, complained = (file.read_text(errors="replace").strip().splitlines() for file in files)
    return code, printed, complained


OK, UNSUPPORTED, FAILED, SKIPPED = "ok", "not supported", "failed", "skipped"

_BOOT = f"""
import sys, types
package = types.ModuleType("gqa_convert")
package.__path__ = [{str(Path(__file__).resolve().parent.parent)!r}]
sys.modules["gqa_convert"] = package
from gqa_convert.serving.worker import main
main()
"""


@dataclass(frozen=True)
class Outcome:
    """What an engine did.

    Attributes:
        status: ok, failed, not supported or skipped.
        detail: the reason, if it is not ok.
        tokens: decoded greedily after each prompt.
        logits: that choose the tokens after each prompt, float32 [tokens, vocabulary].
    """

    status: str
    detail: str = ""
    tokens: list[TokenIds] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)


def ask(python: str, module: str, request: Request, seconds: float) -> Outcome:
    """Run an adapter in another process.

    Args:
        python: the interpreter.
        module: the full name of the module with the adapter.
        request: for the adapter.
        seconds: time limit.
    """
    with tempfile.TemporaryDirectory(prefix="gqa-convert-serving-") as made:
        folder = Path(made).resolve()
        (folder / "request.json").write_text(json.dumps(asdict(request)))
        code, _, errors = run([python, "-c", _BOOT, module], folder, seconds)
        how = "not done when its time was up" if code is None else f"ended with exit code {code}"
        outcome = Outcome(FAILED, ": ".join((how, *errors[-1:])))
        if (folder / "outcome.json").is_file():
            outcome = Outcome(**json.loads((folder / "outcome.json").read_bytes()))
        # a file of the engine is called by its name: its folder is gone when the user reads this
        outcome = replace(outcome, detail=outcome.detail.replace(f"{folder}/", ""))
        if outcome.status != OK:
            return outcome
        import numpy as np

        with np.load(folder / "logits.npz") as arrays:
            return replace(outcome, logits=list(arrays.values()))


def main() -> None:
    """Do what the request asks for, or write the reason for not doing it."""
    try:
        request = Request(**json.loads(Path("request.json").read_bytes()))
        adapter = import_module(sys.argv[1]).Adapter(request)
        tokens = adapter.generate(request.prompts)
        logits = list(map(adapter.logits, request.prompts, request.written))
        import numpy as np

        np.savez("logits.npz", *logits)
        outcome = Outcome(OK, tokens=tokens)
    except NotSupportedError as reason:
        outcome = Outcome(UNSUPPORTED, str(reason))
    except AbsentError as reason:
        outcome = Outcome(SKIPPED, str(reason))
    except Exception as problem:  # any error of an engine on a checkpoint is a result to report
        outcome = Outcome(FAILED, f"{type(problem).__name__}: {problem}".partition("\n")[0])
    Path("outcome.json").write_text(json.dumps(asdict(outcome)))
