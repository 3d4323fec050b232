"""The time left of fitting layers."""

import time


class LayerPace:
    """The pace of layers that are fitted in this process. Layers of an earlier, interrupted process do not count.

    Until the first layer is done, no time left is known.
    """

    def __init__(self) -> None:
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
        """Seconds per layer; None until one is done."""
        return sum(self._times) / len(self._times) if self._times else None

    @property
    def share(self) -> float:
        """The share of the current layer that is done, at most 0.99."""
        each = self.per_layer
        if not each or self._began is None:
            return 0.0
        return min(0.99, (time.monotonic() - self._began) / each)

    def left(self, done: int, total: int) -> float | None:
        """Return the seconds left of the layers; None where they are not known."""
        each = self.per_layer
        if each is None:
            return None
        return max(0.0, total - done - self.share) * each
