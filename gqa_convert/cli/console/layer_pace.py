"""The time left of fitting layers and of training all of them together."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """What was estimated before the work began, in seconds."""

    layer: float
    last_stage: float
    """Of the stage that trains all layers together; 0 where there is none."""


class LayerPace:
    """The pace of layers that are fitted in this process. Layers of an earlier, interrupted process do not count.

    Until the first layer is done, and for the last stage, the time left follows from the estimate, if there is one. Once
    layers have been timed, they also scale the estimate of the last stage, because other work may slow the machine.

    Args:
        expected: the estimate; None where there is none.
    """

    def __init__(self, expected: Expected | None = None) -> None:
        self._expected = expected
        self._began: float | None = None
        self._fitted = False
        self._times: list[float] = []

    def stage(self, *, fits: bool) -> None:
        """Note that a stage of a layer is running.

        Args:
            fits: whether the layer itself is being fitted, rather than the layers before it run again.
        """
        if self._began is None:
            self._began = time.monotonic()
        self._fitted |= fits

    def layer_done(self) -> None:
        """Note that a layer is done."""
        now = time.monotonic()
        if self._began is not None and self._fitted:
            self._times.append(now - self._began)
        self._began, self._fitted = now, False

    @property
    def per_layer(self) -> float | None:
        """Seconds per layer, as far as known."""
        if self._times:
            return sum(self._times) / len(self._times)
        return self._expected.layer if self._expected else None

    @property
    def share(self) -> float:
        """The share of the current layer that is done, at most 0.99."""
        each = self.per_layer
        if not each or self._began is None:
            return 0.0
        return min(0.99, (time.monotonic() - self._began) / each)

    @property
    def last_stage(self) -> float:
        """Seconds of the stage that trains all layers together, as far as known."""
        if self._expected is None or not self._expected.last_stage:
            return 0.0
        each = self.per_layer
        return self._expected.last_stage * (each / self._expected.layer if each and self._expected.layer else 1.0)

    def left(self, done: int, total: int) -> float | None:
        """Return the seconds left of layers and last stage; None where they are not known."""
        each = self.per_layer
        if each is None:
            return None
        return max(0.0, total - done - self.share) * each + self.last_stage
