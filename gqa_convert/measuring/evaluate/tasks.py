"""lm-eval's tasks (Gao et al., github.com/EleutherAI/lm-evaluation-harness), through its Python API; its results are
not touched.
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
    """What of lm-eval is to be run.

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
        raise OptionError(f"--tasks-folder {tasks.folder} is no folder: name the one that holds the tasks' YAML files")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if tasks.folder is None else str(tasks.folder))
    known = manager.match_tasks(list(tasks.names))
    unknown = [name for name in tasks.names if not manager.match_tasks([name])]
    if unknown or not known:
        raise OptionError(f"lm-eval has no task {', '.join(unknown)!r}: see lm-eval ls tasks, or name --tasks-folder")
    return manager


def run_tasks(model: Any, tokenizer: Any, tasks: Tasks, manager: Any, *, batch: int, seed: int) -> dict[str, Any]:
    """What lm-eval says about a model, without the texts of its questions.

    Args:
        model: a transformers model.
        tokenizer: its own.
        tasks: which ones.
        manager: from `open_tasks`.
        batch: questions at a time.
        seed: of the choice of examples.

    Raises:
        DataError: a task could not be run, its data could not be fetched perhaps.
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
    """What lm-eval and its helpers print: bars on a terminal, else nothing, and in no case on stdout, where the results
    go.
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
    """As JSON has it: what it can't say becomes text, numbers that are none become null."""
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
