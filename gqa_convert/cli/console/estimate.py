"""The estimate of a conversion's cost, as one line."""

from typing import TYPE_CHECKING

from gqa_convert.checkpoint.byte_sizes import size

from .screen import stdout_console

if TYPE_CHECKING:
    from gqa_convert.conversion.fit.cost import CostEstimate


def show_estimate(cost: "CostEstimate") -> None:
    """Print the estimate on stdout."""
    stdout_console().print(estimate_line(cost), soft_wrap=True)


def estimate_line(cost: "CostEstimate") -> str:
    """Return time, memory and disk space, rounded as far as an estimate deserves."""
    count = cost.device.count(",") + 1
    place = "" if cost.device.startswith("cpu") else " of the GPU" if count == 1 else " of each GPU"
    divided = f" on {count} devices" if count > 1 else ""
    return (
        f"Estimate on this machine: about {_duration(cost.seconds)}, {_memory(cost.memory_bytes)} of memory{place}, "
        f"{size(cost.disk_bytes)} of disk ({cost.work}{divided})"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        whole = max(1, round(seconds) if seconds < 10 else 5 * round(seconds / 5))
        return f"{whole} second{'s' if whole > 1 else ''}"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} minutes"
    hours = minutes / 60
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _memory(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
