"""lm-eval's tasks (Gao et al., github.com/EleutherAI/lm-evaluation-harness), run through its Python API; the results
stay unchanged.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.errors import DataError, MissingExtraError, OptionError


@dataclass(frozen=True)
class Tasks:
    """The tasks of lm-eval to run.

    Attributes:
        names: of tasks, groups or tags.
        folder: with YAML files of further tasks.
        fewshot: examples before each question; None for each task's own number.
        limit: questions of each task, at most.
    """

    names: Sequence[str]
    folder: Path | None = None
    fewshot: int | None = None
    limit: int | None = None


def open_tasks(tasks: Tasks) -> Any:
    """lm-eval's index of tasks.

    Raises:
        MissingExtraError: lm-eval is not installed.
        OptionError: there is no such task, or no such folder.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError("--tasks needs lm-eval, which is not installed: pip install 'gqa-convert[tasks]'")
    if tasks.folder is not None and not tasks.folder.is_dir():
        raise OptionError(f"--tasks-folder {tasks.folder} is not a folder: name the folder with the tasks' YAML files")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if tasks.folder is None else str(tasks.folder))
    known = manager.match_tasks(list(tasks.names))
    unknown = [name for name in tasks.names if not manager.match_tasks([name])]
    if unknown or not known:
        raise OptionError(f"lm-eval has no task {', '.join(unknown)!r}: see lm-eval ls tasks, or name --tasks-folder")
    return manager


def run_tasks(model: Any, tokenizer: Any, tasks: Tasks, manager: Any, *, batch: int, seed: int) -> dict[str, Any]:
    """lm-eval's results for a model, without the texts of the questions.

    Args:
        model: a transformers model.
        tokenizer: of the model.
        tasks: to run.
        manager: from `open_tasks`.
        batch: questions at a time.
        seed: of the choice of examples.

    Raises:
        DataError: a task failed, for example because its data could not be downloaded.
    """
    with _own_screen():
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        try:
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
            found = lm_eval.simple_evaluate(
                wrapped,
                tasks=list(tasks.names),
                num_fewshot=tasks.fewshot,
                limit=tasks.limit,
                task_manager=manager,
                log_samples=False,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except Exception as problem:
            reason = " ".join(str(problem).split())[:300] or type(problem).__name__
            raise DataError(
                f"lm-eval could not run {', '.join(tasks.names)} ({reason}): check the task, or the network for its data"
            ) from problem
    return plain(found)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _own_screen() -> Iterator[None]:
    """A context in which lm-eval shows its bars on a terminal, prints nothing otherwise, and never writes to stdout,
    which is for the results.
    """
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if not sys.stderr.isatty():
            kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 2)
            stack.callback(sys.stderr.flush)
        yield


def plain(value: Any) -> Any:
    """The value as JSON: objects that JSON lacks become text, numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    if hasattr(value, "item") and not hasattr(value, "items") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        json.dumps(value)
    except TypeError:
        return str(value)
    return value
