"""The processes of a run, which join, compare values, add sums, and fail together.

Misconfigured launches are refused at once, because a job that silently runs as one process, or as
several independent ones, wastes days. An error on one process is raised on all of them, so that
none waits for a process that has ended.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from gqa_convert.errors import (
    DeviceMemoryError,
    GQAConvertError,
    InterruptedRunError,
    LaunchError,
    is_out_of_memory,
)

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables in which srun and MPI launchers state how many tasks they started."""
_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` set for each of several processes."""
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": (
        "this program does not use the optimizer and checkpoints of DeepSpeed"
    ),
    "ACCELERATE_USE_MEGATRON_LM": "this program does not use the models of Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": (
        "this program does not split layers or sequences over processes"
    ),
    "FSDP_OFFLOAD_PARAMS": "this program keeps parameters on the GPUs",
    "FSDP_ACTIVATION_CHECKPOINTING": "the recipe's gradient_checkpointing does this",
}
"""Switches of accelerate that would have no effect or a different one, and the reason."""
_ADVICE = (
    "launch with torchrun --nproc_per_node N -m gqa_convert COMMAND ... "
    "(without a GPU, set ACCELERATE_USE_CPU=true)"
)
_BROKEN = (
    "DistBackendError",
    "DistNetworkError",
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo/",
)
"""Texts in torch's errors when another process has ended."""

Say = Callable[[str], None]
"""Called on the main process with messages about events between the steps."""

_waiting_group: Any = None
_device: Any = None
"""Where this process computes, and sums of all processes are made."""
_leads = False
"""Whether this process works while the others wait for what it sends."""


def join(**options: Any) -> Any:
    """Join the processes of the run and return accelerate's Accelerator for this process.

    Args:
        options: arguments of the Accelerator.

    Raises:
        LaunchError: the launcher did not start the requested processes.
    """
    check_environment()
    from accelerate import Accelerator

    # the recipe's precision decides, in trainer and sharding
    accelerator = Accelerator(mixed_precision="no", **options)
    stated = _number("WORLD_SIZE") or 1
    if accelerator.num_processes != stated:
        raise LaunchError(
            f"the launcher started {stated} processes and this run has "
            f"{accelerator.num_processes}: {_ADVICE}"
        )
    # otherwise transformers would leave the weights uninitialised on all processes but the first,
    # for accelerate to broadcast them
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if accelerator.num_processes > 1:
        from torch.distributed import new_group

        global _waiting_group, _device
        _device = accelerator.device
        # long enough for tokenising; a process that ends is noticed immediately regardless
        _waiting_group = new_group(backend="gloo", timeout=timedelta(days=7))
    return accelerator


def is_set(name: str) -> bool:
    """Whether a switch of accelerate is on."""
    return os.getenv(name, "false").lower() in ("1", "true", "yes", "on")


def check_environment() -> None:
    """Refuse inconsistent environment variables before processes begin to wait for one another.

    Raises:
        LaunchError: variables of a launcher or a user contradict one another, or are not supported.
    """
    for name, reason in _REFUSED.items():
        if is_set(name):
            raise LaunchError(
                f"{name} is set, perhaps by accelerate's configuration, but {reason}: "
                "use recipes/accelerate/fsdp2.yaml, or remove that key"
            )
    # torchrun, started once on each node, knows of as many groups as there are tasks
    known = _number("GROUP_WORLD_SIZE") or _number("WORLD_SIZE") or 1
    for name in _TASK_COUNTS:
        tasks = _number(name) or 1
        if tasks > known:
            raise LaunchError(
                f"{tasks} tasks were started ({name}) and this one knows of {known}, "
                "so each would work alone: start one task per node, "
                "and in each torchrun with --nnodes and --rdzv_endpoint, "
                "as recipes/slurm/uptrain.sbatch does"
            )
    # all of a launcher's variables or none, unlike when accelerate starts one process with --cpu
    needed = _LAUNCHER[:3] if _number("WORLD_SIZE") == 1 else _LAUNCHER
    missing = [name for name in needed if not os.getenv(name)]
    present = [name for name in needed if name not in missing]
    if missing and present:
        raise LaunchError(
            f"{present[0]} is set and {missing[0]} is not: {_ADVICE}, or unset {present[0]}"
        )


def _number(name: str) -> int | None:
    text = os.getenv(name)
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r}, expected a whole number: {_ADVICE}")
    return int(text)


def rank() -> int:
    """The number of this process."""
    return 0 if _waiting_group is None else int(_waiting_group.rank())


def started() -> int:
    """How many processes this run has."""
    return 1 if _waiting_group is None else int(_waiting_group.size())


def on_this_machine() -> int:
    """How many processes of this run share a machine with this one."""
    return _number("LOCAL_WORLD_SIZE") or 1


def count() -> int:
    """How many processes do the present work: all of the run, or this one while the others wait for
    it.
    """
    return 1 if _leads else started()


def waiting_group() -> Any:
    """A process group on CPUs with a long timeout, so that a slow disk does not trigger NCCL's ten
    minutes; None for a single process.
    """
    return _waiting_group


@contextmanager
def together() -> Iterator[None]:
    """A context for independent work of every process or of one. An error of any process is raised
    on all of them when the context ends.

    Processes must not wait for one another inside the context, unless they also do so when they
    fail.
    """
    own: Any = None
    try:
        yield
    except (Exception, InterruptedRunError) as raised:
        own = out_of_memory() if is_out_of_memory(raised) else raised
    for process, theirs in enumerate(gathered(own and _for_others(own))):
        if theirs:
            error = own or theirs
            error.reported_elsewhere = process != rank()
            raise error


def out_of_memory() -> DeviceMemoryError:
    """The error about a lack of memory on any device."""
    return DeviceMemoryError(
        "out of memory: lower micro_batch_size, "
        "set gradient_checkpointing to true or use more GPUs with fsdp2.yaml; then run the same "
        "command again, which resumes from the last checkpoint"
    )


def _for_others(problem: BaseException) -> BaseException:
    """What other processes raise about an error of this one."""
    if isinstance(problem, GQAConvertError | InterruptedRunError):
        return problem
    return LaunchError(f"process {rank()} failed: {type(problem).__name__}: {problem}")


def gathered(value: Any) -> list[Any]:
    """The value of every process, in the order of their numbers; for small Python objects. Every
    process calls this, and waits for the others without a time limit; accelerate's gather_object
    would end the job after ten minutes.
    """
    if count() == 1:
        return [value]
    from torch.distributed import all_gather_object

    found = [None] * started()
    all_gather_object(found, value, group=_waiting_group)
    return found


def by_first(work: Callable[[], Any]) -> Any:
    """What a function returns on the first process, on all; an error is raised on all too."""
    if count() == 1:
        return work()
    if rank():
        return _broadcast()
    try:
        found = work()
    except (Exception, InterruptedRunError) as problem:
        _broadcast(problem=_for_others(problem))
        raise
    return _broadcast(found)


def _broadcast(value: Any = None, problem: BaseException | None = None) -> Any:
    """What the first process gives, on all; all others raise the error that it gives."""
    from torch.distributed import broadcast_object_list

    found = [value, problem]
    try:
        broadcast_object_list(found, src=0, group=_waiting_group)
    except RuntimeError:
        if problem is None:  # which says more
            raise
    value, error = found
    if error and rank():
        error.reported_elsewhere = True
        raise error
    return value


@contextmanager
def sharing(function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """A context in which this process, the first, does what all others, which `follow`, do in a
    function.

    Args:
        function: of a module, which other processes find by its name.
        arguments: what pickle can send.
    """
    global _leads
    if started() == 1:
        yield
        return
    _broadcast((function, arguments))
    _leads = False
    yield
    _leads = True


@contextmanager
def leading() -> Iterator[None]:
    """A context of the first process, at whose end the others stop following, with the same error
    if there is one.
    """
    global _leads
    if started() == 1:
        yield
        return
    _leads = True
    try:
        yield
    except BaseException as problem:
        if _leads:  # else they notice that this process ends
            _broadcast(problem=_for_others(problem))
        raise
    finally:
        _leads = False
    _broadcast()


def follow() -> None:
    """Do what the first process asks for, until it ends.

    Raises:
        GQAConvertError: the first process fails, or this one.
    """
    while work := _broadcast():
        function, arguments = work
        function(*arguments)


def total(own: Any) -> Any:
    """The sum of a tensor or a float over all processes, the same on each.

    Args:
        own: this process's; the int 0 where it has no part in the sum.
    """
    if count() == 1:
        return own
    import torch

    if isinstance(own, float):
        return float(total(torch.tensor(own, dtype=torch.float64)))
    stated = None if isinstance(own, int) else (own.shape, own.dtype)
    shape, dtype = next(each for each in gathered(stated) if each)
    found = torch.zeros(shape, dtype=dtype, device=_device)
    found.copy_(torch.as_tensor(own).detach())
    torch.distributed.all_reduce(found)
    return found if isinstance(own, int) else found.to(own.device)


def check_agreement(values: dict[str, Any]) -> None:
    """Refuse to go on where a process has another value than the first one. Every process calls
    this.

    Args:
        values: small Python objects, by what messages call them.

    Raises:
        LaunchError: two processes differ.
    """
    first, *others = gathered(values)
    with together():
        for process, found in enumerate(others, 1):
            for name in first | found:
                if found.get(name) != first.get(name):
                    raise LaunchError(
                        f"{name} differs between the processes of this run: "
                        f"{first.get(name)} on the first, "
                        f"{found.get(name)} on process {process}: "
                        "give every machine the same files and versions"
                    )


def summed(numbers: list[float]) -> list[float]:
    """The sum of each number over all processes, in float64."""
    import torch

    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device)
    if _waiting_group is not None:
        torch.distributed.all_reduce(tensor)
    return tensor.tolist()  # type: ignore[no-any-return]


@contextmanager
def taking_part() -> Iterator[None]:
    """A context inside which `join` may be called. Afterwards torch's process groups are destroyed,
    since torch may otherwise abort the process at exit.

    Raises:
        LaunchError: torch says that another process has ended.
    """
    try:
        yield
    except (GQAConvertError, InterruptedRunError):
        _leave()
        raise
    except RuntimeError as problem:
        text = f"{type(problem).__name__} {problem}"
        if _waiting_group is None or not any(word in text for word in _BROKEN):
            raise
        raise LaunchError(
            "another process of this run has ended or can't be reached: "
            f"see its message ({' '.join(str(problem).split())[:200]})"
        ) from None
    _leave()


def _leave() -> None:
    global _waiting_group
    _waiting_group = None
    # not imported if a signal interrupted the import, which must not start again
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
