"""Clocks, and turns that alternate: other work and a processor that heats up must not favour one of the contenders."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Measured = TypeVar("Measured")


class Clock(Protocol):
    """Takes marks in the device's own order of work."""

    def mark(self) -> Any:
        """Now, behind the work that the device was given so far."""
        ...

    def wait(self) -> None:
        """Until the device is idle."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Between two marks; the device has been waited for."""
        ...


class HostClock:
    """For a CPU, which works when it is called."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        return

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """For a GPU, which works behind the program: marks are events of its stream."""

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
    """Seconds that the work takes on the device."""
    clock.wait()
    began = clock.mark()
    work()
    ended = clock.mark()
    clock.wait()
    return clock.seconds(began, ended)


def order(contenders: int, repetition: int) -> list[int]:
    """Who takes which turn: round-robin, begun one further on in every repetition."""
    return [(repetition + place) % contenders for place in range(contenders)]


def alternate(
    turns: Sequence[Callable[[], Measured]], repetitions: int, warm_up: int = 0, done: Callable[[], None] = lambda: None
) -> list[list[Measured]]:
    """Let every contender take its turn in each repetition.

    Args:
        turns: a call for each contender, which measures it once.
        repetitions: that count.
        warm_up: repetitions before those, whose measures are dropped.
        done: called after each turn.

    Returns:
        What each contender's turns measured, in order.
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
