"""The processes of a run: are there as many as were meant, and what they agree on.

One job that silently runs as one process, or as several that each think themselves alone, costs days before anybody looks.
"""

import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa_convert.errors import LaunchError

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which srun and MPI launchers say how many tasks they started."""


def check_launch(environment: Mapping[str, str], processes: int) -> None:
    """Refuse a launch that is not what it looks like.

    Args:
        environment: of this process.
        processes: how many take part in the run, as accelerate sees it.

    Raises:
        LaunchError: fewer processes take part than the launcher started or was told to start.
    """
    stated = int(environment.get("WORLD_SIZE") or 1)
    if processes != stated:
        raise LaunchError(
            f"the launcher started {stated} processes and this run has {processes}: without a GPU, launch with "
            "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N -m gqa_convert uptrain ..."
        )
    if processes > 1:
        return
    for name in _TASK_COUNTS:
        if int(environment.get(name) or 1) > 1:
            raise LaunchError(
                f"{environment[name]} tasks were started ({name}) and each would train by itself: start one task per node, and "
                "in it torchrun or accelerate launch"
            )
    if "MASTER_ADDR" in environment and "WORLD_SIZE" not in environment:
        raise LaunchError(
            "a launcher was told to start several processes (MASTER_ADDR is set) and started one: accelerate does so with --cpu; use "
            "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N -m gqa_convert uptrain ..., or unset MASTER_ADDR"
        )


class OutputLock:
    """Holds an output folder for one job, until the process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise LaunchError(
                f"another process is training into {folder}: wait for it, or name another output; if it is part of this very job, the "
                "launcher started processes that do not know of one another"
            ) from None

    def release(self) -> None:
        self._file.close()


def summed(accelerator: Any, numbers: list[float]) -> list[float]:
    """Each number's sum over all processes, in float64."""
    if accelerator.num_processes == 1:
        return numbers
    import torch

    device = "cpu" if accelerator.device.type == "mps" else accelerator.device
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor)
    return [float(number) for number in tensor.tolist()]
