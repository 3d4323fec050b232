"""The processes of a run, which join, compare values, and fail together.

Misconfigured launches are refused at once, because a job that silently runs as one process, or as several independent
ones, wastes days. An error on one process is raised on all of them, so that none waits for a process that has ended.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from gqa_convert import errors
from gqa_convert.errors import GQAConvertError, LaunchError

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which srun and MPI launchers state how many tasks they started."""
_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` set for each of several processes."""
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "this program does not use the optimizer and checkpoints of DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "this program does not use the models of Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "this program does not split layers or sequences over processes",
    "FSDP_OFFLOAD_PARAMS": "this program keeps parameters on the GPUs",
    "FSDP_ACTIVATION_CHECKPOINTING": "the recipe's gradient_checkpointing does this",
}
"""Switches of accelerate that would have no effect or a different one, and the reason."""
_LONGEST_WAIT = timedelta(days=7)
"""The time limit of waits, long enough for tokenising. A process that ends is noticed immediately regardless."""
_ADVICE = (
    "launch with torchrun --nproc_per_node N -m gqa_convert COMMAND ... (without a GPU, set ACCELERATE_USE_CPU=true)"
)
_BROKEN = ("DistBackendError", "DistNetworkError", "Connection closed by peer", "Connection reset by peer", "gloo/")
"""Texts in torch's errors when another process has ended."""

_waiting_group: Any = None


def join(**options: Any) -> Any:
    """Join the processes of the run and return accelerate's Accelerator for this process.

    Args:
        options: arguments of the Accelerator.

    Raises:
        LaunchError: the launcher did not start the requested processes.
    """
    check_environment(os.environ)
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="no", **options
    )  # the recipe's precision decides, in trainer and sharding
    check_launch(os.environ, accelerator.num_processes)
    # otherwise transformers would leave the weights uninitialised on all processes but the first, for accelerate to
    # broadcast them
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if accelerator.num_processes > 1:
        import torch

        global _waiting_group
        _waiting_group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return accelerator


def is_set(environment: Mapping[str, str], name: str) -> bool:
    """Whether a switch of accelerate is on."""
    return environment.get(name, "false").lower() in ("1", "true", "yes", "on")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse inconsistent environment variables before processes begin to wait for one another.

    Raises:
        LaunchError: variables of a launcher or a user contradict one another, or are not supported.
    """
    for name, reason in _REFUSED.items():
        if is_set(environment, name):
            raise LaunchError(
                f"{name} is set, perhaps by accelerate's configuration, but {reason}: use recipes/accelerate/fsdp2.yaml, or remove that key"
            )
    # torchrun, started once on each node, knows of as many groups as there are tasks
    known = _number(environment, "GROUP_WORLD_SIZE") or _number(environment, "WORLD_SIZE") or 1
    for name in _TASK_COUNTS:
        tasks = _number(environment, name) or 1
        if tasks > known:
            raise LaunchError(
                f"{tasks} tasks were started ({name}) and this one knows of {known}, so each would train separately: start one task per node, "
                "and in each torchrun with --nnodes and --rdzv_endpoint, as recipes/slurm/uptrain.sbatch does"
            )
    needed = _LAUNCHER[:3] if _number(environment, "WORLD_SIZE") == 1 else _LAUNCHER
    present = [name for name in needed if environment.get(name)]
    missing = [name for name in needed if not environment.get(name)]
    if present and missing:  # as when accelerate starts one process with --cpu or MULTI_CPU
        raise LaunchError(f"{present[0]} is set and {missing[0]} is not: {_ADVICE}, or unset {present[0]}")


def check_launch(environment: Mapping[str, str], processes: int) -> None:
    """Refuse a launch in which some of the started processes do not take part.

    Args:
        environment: the environment variables of this process.
        processes: the number of processes in the run according to accelerate.

    Raises:
        LaunchError: the launcher started a different number of processes.
    """
    stated = _number(environment, "WORLD_SIZE") or 1
    if processes != stated:
        raise LaunchError(f"the launcher started {stated} processes and this run has {processes}: {_ADVICE}")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name) or None
    if text is not None and not text.isdecimal():
        raise LaunchError(f"{name} is {text!r}, expected a whole number: {_ADVICE}")
    return None if text is None else int(text)


def waiting_group() -> Any:
    """A process group on CPUs with a long timeout, so that a slow disk does not trigger NCCL's ten minutes; None for a
    single process.
    """
    return _waiting_group


def local_processes() -> int:
    """The number of the run's processes on this machine."""
    return _number(os.environ, "LOCAL_WORLD_SIZE") or 1


@contextmanager
def together(accelerator: Any) -> Iterator[None]:
    """A context for independent work of every process or of one. An error of any process is raised on all of them when
    the context ends.

    Processes must not wait for one another inside the context, unless they also do so when they fail.

    Args:
        accelerator: accelerate's Accelerator.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as raised:
        problem = raised
    stated = None if problem is None else (type(problem).__name__, str(problem))
    for process, found in enumerate(gathered(accelerator, stated)):
        if found is None:
            continue
        error = problem or _error(process, *found)
        if isinstance(error, GQAConvertError):
            error.reported_elsewhere = process != accelerator.process_index
        raise error


def _error(process: int, name: str, text: str) -> GQAConvertError:
    """The error of another process."""
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GQAConvertError):
        return known(text)
    return LaunchError(f"process {process} failed: {name}: {text}")


def gathered(accelerator: Any, value: Any) -> list[Any]:
    """The value of every process, in the order of their numbers; for small Python objects. Every process calls this,
    and waits for the others without a time limit; accelerate's gather_object would end the job after ten minutes.
    """
    if accelerator.num_processes == 1:
        return [value]
    import torch

    found: list[Any] = [None] * accelerator.num_processes
    try:
        torch.distributed.all_gather_object(found, value, group=_waiting_group)
    except RuntimeError as problem:
        raise _ended(problem) from None
    return found


def broadcast(accelerator: Any, value: Any) -> Any:
    """The main process's value, on every process; every process calls this."""
    if accelerator.num_processes == 1:
        return value
    import torch

    values = [value]
    torch.distributed.broadcast_object_list(values, src=0, group=_waiting_group)
    return values[0]


def wait(accelerator: Any) -> None:
    """Wait until all processes have arrived, without a time limit; raises an error if one of them has ended."""
    gathered(accelerator, None)


def summed(accelerator: Any, numbers: list[float]) -> list[float]:
    """The sum of each number over all processes, in float64."""
    import torch

    tensor = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    return [float(number) for number in accelerator.reduce(tensor, "sum").tolist()]


@contextmanager
def taking_part() -> Iterator[None]:
    """A context inside which `join` may be called. Afterwards torch's process groups are destroyed, since torch may
    otherwise abort the process at exit.
    """
    try:
        yield
    except GQAConvertError:
        _leave()
        raise
    except RuntimeError as problem:  # in the middle of a step
        if _waiting_group is not None and any(word in f"{type(problem).__name__} {problem}" for word in _BROKEN):
            raise _ended(problem) from None
        raise
    _leave()


def _leave() -> None:
    global _waiting_group
    _waiting_group = None
    torch = sys.modules.get("torch")  # not imported if a signal interrupted the import, which must not start again
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _ended(problem: RuntimeError) -> LaunchError:
    return LaunchError(
        f"another process of this run has ended or can't be reached: see its message ({' '.join(str(problem).split())[:200]})"
    )
