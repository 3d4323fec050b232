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

_BROKEN = (
    "DistBackendError",
    "DistNetworkError",
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/transport",
)
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
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="no", **options)
    check_launch(os.environ, accelerator.num_processes)
    # otherwise transformers would leave the weights uninitialised on all processes but the first, for accelerate to
    # broadcast them
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if accelerator.num_processes > 1:
        global _waiting_group
        _waiting_group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return accelerator


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse inconsistent environment variables before processes begin to wait for one another.

    Raises:
        LaunchError: variables of a launcher or a user contradict one another, or are not supported.
    """
    for name, reason in _REFUSED.items():
        if environment.get(name, "false").lower() in ("1", "true", "yes", "on"):
            raise LaunchError(
                f"{name} is set, perhaps by accelerate's configuration, but {reason}: use recipes/accelerate/fsdp2.yaml, or remove that key"
            )
    stated, rank, local = (_number(environment, name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    processes = stated or 1
    tasks, counter = max((_number(environment, name) or 1, name) for name in _TASK_COUNTS)
    knows = processes if stated is None else _number(environment, "GROUP_WORLD_SIZE") or processes
    if tasks > knows:
        raise LaunchError(
            f"{tasks} tasks were started ({counter}) and this one knows of {knows}, so each would train separately: start one task per node, "
            "and in each torchrun with --nnodes and --rdzv_endpoint, as recipes/slurm/uptrain.sbatch does"
        )
    if "MASTER_ADDR" in environment and stated is None:
        raise LaunchError(
            "MASTER_ADDR is set, as for several processes, and WORLD_SIZE is not, as when accelerate starts one process with --cpu or MULTI_CPU: "
            f"{_ADVICE}, or unset MASTER_ADDR"
        )
    if stated is None and rank is None and local is None:
        return
    needed = ["WORLD_SIZE", "RANK", "LOCAL_RANK"] + (["MASTER_ADDR", "MASTER_PORT"] if processes > 1 else [])
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        present = next(name for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if environment.get(name))
        raise LaunchError(f"{present} is set and {missing[0]} is not: {_ADVICE}, or unset {present}")
    assert rank is not None
    assert local is not None
    if not (0 <= rank < processes and 0 <= local <= rank):
        raise LaunchError(
            f"WORLD_SIZE is {processes}, RANK {rank} and LOCAL_RANK {local}, which is impossible: {_ADVICE}"
        )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name} is {text!r}, expected a whole number: {_ADVICE}") from None


def waiting_group() -> Any:
    """A process group on CPUs with a long timeout, so that a slow disk does not trigger NCCL's; None for a single
    process.
    """
    return _waiting_group


def local_processes() -> int:
    """The number of the run's processes on this machine."""
    return _number(os.environ, "LOCAL_WORLD_SIZE") or 1


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
    if accelerator.num_processes == 1:
        if problem is not None:
            raise problem
        return
    stated = None if problem is None else (type(problem).__name__, str(problem))
    found: list[tuple[str, str] | None] = gathered(accelerator, stated)
    first = next((number for number, each in enumerate(found) if each is not None), None)
    if first is None:
        return
    error = problem or _error(first, *(found[first] or ("", "")))
    if isinstance(error, GQAConvertError):
        error.reported_elsewhere = first != accelerator.process_index
    raise error


def gathered(accelerator: Any, value: Any) -> list[Any]:
    """The value of every process, in the order of their numbers; for small Python objects. Every process calls this."""
    if accelerator.num_processes == 1:
        return [value]
    import torch

    found: list[Any] = [None] * accelerator.num_processes
    with _partners():
        torch.distributed.all_gather_object(found, value, group=_waiting_group)
    return found


def _error(process: int, name: str, text: str) -> GQAConvertError:
    """The error of another process."""
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, GQAConvertError):
        return known(text)
    return LaunchError(f"process {process} failed: {name}: {text}")


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


def wait(accelerator: Any) -> None:
    """Wait until all processes have arrived, without a timeout; raises an error if one of them has ended."""
    if accelerator.num_processes > 1:
        import torch

        with _partners():
            torch.distributed.barrier(group=_waiting_group)


@contextmanager
def _partners() -> Iterator[None]:
    """Turn torch's errors about a process that has ended into one line."""
    try:
        yield
    except RuntimeError as problem:
        raise _ended(problem) from None


def _ended(problem: RuntimeError) -> LaunchError:
    return LaunchError(
        f"another process of this run has ended or can't be reached: see its message ({' '.join(str(problem).split())[:200]})"
    )


def summed(accelerator: Any, numbers: list[float], *, patiently: bool = False) -> list[float]:
    """The sum of each number over all processes, in float64.

    Args:
        accelerator: accelerate's Accelerator.
        numbers: of this process.
        patiently: wait without a time limit, for a process that may still wait for text. NCCL's collectives end the job
            after ten minutes.
    """
    if accelerator.num_processes == 1:
        return numbers
    import torch

    tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu" if patiently else accelerator.device)
    with _partners():
        torch.distributed.all_reduce(tensor, group=_waiting_group if patiently else None)
        return [float(number) for number in tensor.tolist()]
