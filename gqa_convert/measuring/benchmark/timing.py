"""Clocks, and alternating turns, so that other work and a warming processor affect all versions alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Measured = TypeVar("Measured")


class Clock(Protocol):
    """Takes time marks in the order of the device's work."""

    def mark(self) -> Any:
        """A mark after the work that was submitted so far."""
        ...

    def wait(self) -> None:
        """Wait until the device is idle."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two marks; call `wait` before."""
        ...


class HostClock:
    """The clock of a CPU, which works synchronously."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        return

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """The clock of a GPU, which works asynchronously: marks are events of its stream."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def mark(self) -> Any:
        import torch

        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def seconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


def clock_for(device: Any) -> Clock:
    """The clock of a torch device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def timed(clock: Clock, work: Callable[[], object]) -> float:
    """The seconds that the work takes on the device."""
    clock.wait()
    began = clock.mark()
    work()
    ended = clock.mark()
    clock.wait()
    return clock.seconds(began, ended)


def order(contenders: int, repetition: int) -> list[int]:
    """The order of turns in a repetition: round-robin, starting one version later in every repetition."""
    return [(repetition + place) % contenders for place in range(contenders)]


def alternate(
    turns: Sequence[Callable[[], Measured]], repetitions: int, warm_up: int = 0, done: Callable[[], None] = lambda: None
) -> list[list[Measured]]:
    """Run every version once per repetition.

    Args:
        turns: a call for each version, which measures it once.
        repetitions: number of measured repetitions.
        warm_up: repetitions before them, whose results are dropped.
        done: called after each turn.

    Returns:
        The results of each version's turns, in order.
    """
    measured: list[list[Measured]] = [[] for _ in turns]
    for repetition in range(-warm_up, repetitions):
        for number in order(len(turns), repetition):
            found = turns[number]()
            if repetition >= 0:
                measured[number].append(found)
            done()
    return measured


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
