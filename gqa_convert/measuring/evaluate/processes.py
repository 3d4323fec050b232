"""The processes that share an evaluation; a single one needs no launcher."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.errors import LaunchError, OptionError
from gqa_convert.training.distributed import check_environment, join, waiting_group


@dataclass(frozen=True)
class Processes:
    """This process among those of a run; `training.distributed.together` accepts it in place of an accelerator.

    Attributes:
        device: the device that it computes on.
    """

    num_processes: int
    process_index: int
    device: str

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def share(self, count: int) -> range:
        """The indices, of `count`, that this process computes."""
        return range(self.process_index, count, self.num_processes)

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value on every process."""
        if self.num_processes == 1:
            return value
        import torch

        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, group=waiting_group())
        return box[0]

    def joined(self, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The sum of the processes' arrays; every element is nonzero in one process at most, so nothing is rounded."""
        if self.num_processes == 1:
            return array
        import torch

        tensor = torch.from_numpy(array)
        torch.distributed.all_reduce(tensor, group=waiting_group())
        return array


def come_together(device: str | None) -> Processes:
    """Join the processes of a run. A single one uses the first GPU, several use a GPU each; without GPUs they use the
    CPU.

    Args:
        device: to use instead, such as `cpu` or `cuda:1`; several processes accept `cpu` or `cuda`.

    Raises:
        LaunchError: the launcher's environment variables contradict the devices or one another.
        OptionError: there is no such device.
    """
    check_environment(os.environ)
    import torch

    chosen = chosen_device(device)
    on_cpu = chosen == "cpu"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(1, 0, chosen)
    if device not in (None, "cpu", "cuda"):
        raise OptionError(
            f"--device is {device}, and several processes would share it: leave it out, and each process gets a separate GPU"
        )
    if on_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = join()
    if not on_cpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        raise LaunchError(
            f"there are {torch.cuda.device_count()} GPUs and more processes here: start as many as there are GPUs, or use --device cpu"
        )
    own = "cpu" if on_cpu else str(accelerator.device)
    return Processes(int(accelerator.num_processes), int(accelerator.process_index), own)
