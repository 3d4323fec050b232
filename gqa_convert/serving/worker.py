"""The process in which one client answers, possibly with another interpreter and other packages than the rest of the
program.

    python -c BOOT FOLDER MODULE

`FOLDER` holds `request.json`; `outcome.json` and `answer.npz` are written beside it. `BOOT` is `boot_code()`: it makes
this package, but nothing beside it, importable there.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from .client import AbsentError, Answer, NotSupportedError, Request

PACKAGE = Path(__file__).resolve().parent.parent
OK, UNSUPPORTED, FAILED, SKIPPED = "ok", "not supported", "failed", "skipped"


def boot_code() -> str:
    """Python source that runs `main`."""
    return (
        "import sys, types\n"
        "package = types.ModuleType('gqa_convert')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['gqa_convert'] = package\n"
        "from gqa_convert.serving.worker import main\n"
        "main()"
    )


def write_request(request: Request, folder: Path) -> None:
    values = {
        "folder": str(request.folder),
        "config": request.config,
        "has_tokenizer": request.has_tokenizer,
        "config_class": request.config_class,
        "config_code": None if request.config_code is None else str(request.config_code),
    }
    lists = {name: getattr(request, name) for name in ("prompts", "sequences", "positions")}
    (folder / "request.json").write_text(json.dumps(values | lists), encoding="utf-8")


def read_request(folder: Path) -> Request:
    values = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    code = values["config_code"]
    paths = {"folder": Path(values["folder"]), "scratch": folder, "config_code": None if code is None else Path(code)}
    return Request(**(values | paths))


def read_outcome(folder: Path) -> tuple[str, str] | None:
    """The status and its detail, None if the process ended before it wrote them."""
    path = folder / "outcome.json"
    if not path.is_file():
        return None
    outcome = json.loads(path.read_text(encoding="utf-8"))
    return outcome["status"], outcome["detail"]


def write_answer(answer: Answer, folder: Path) -> None:
    import numpy as np

    arrays = {f"logits_{number}": each for number, each in enumerate(answer.logits or ())}
    np.savez(folder / "answer.npz", **arrays)
    lists = {
        "tokens": answer.tokens,
        "logits": None if answer.logits is None else len(answer.logits),
    }
    (folder / "answer.json").write_text(json.dumps(lists), encoding="utf-8")


def read_answer(folder: Path) -> Answer:
    import numpy as np

    lists = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    with np.load(folder / "answer.npz") as arrays:
        logits = None if lists["logits"] is None else [arrays[f"logits_{number}"] for number in range(lists["logits"])]
    return Answer(lists["tokens"], logits)


def main() -> None:
    """Answer the request, or write the reason for not answering."""
    folder, module = Path(sys.argv[1]), sys.argv[2]
    status, detail = OK, ""
    try:
        write_answer(import_module(module).answer(read_request(folder)), folder)
    except NotSupportedError as reason:
        status, detail = UNSUPPORTED, str(reason)
    except AbsentError as reason:
        status, detail = SKIPPED, str(reason)
    except Exception as problem:  # any error of an engine on a checkpoint is a result to report
        lines = str(problem).strip().splitlines()
        status, detail = FAILED, f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"
    (folder / "outcome.json").write_text(json.dumps({"status": status, "detail": detail}), encoding="utf-8")
