"""The K/V heads of a model's layers: one number, or a number for each layer."""

KVHeads = int | tuple[int, ...]
"""The number of K/V heads of all layers; where layers differ, that of each layer in their order."""


def mean_heads(heads: KVHeads) -> float:
    """K/V heads per layer on average, by which models are placed on an axis."""
    return heads if isinstance(heads, int) else sum(heads) / len(heads)


def order_of(heads: KVHeads) -> tuple[float, tuple[int, ...]]:
    """A sort key: the mean, then the numbers."""
    return mean_heads(heads), (heads,) if isinstance(heads, int) else heads


def in_words(heads: KVHeads) -> str:
    """The numbers in words: "4", or "1 to 8 (mean 3.25)" where layers differ."""
    return f"{heads:,}" if isinstance(heads, int) else f"{min(heads)} to {max(heads)} (mean {mean_heads(heads):.3g})"


def by_number(heads: tuple[int, ...]) -> str:
    """The layers of each number of heads, largest number first: "3 in layers 0-5 and 7, 1 in layer 6"."""
    return ", ".join(
        f"{count} in {_layers([layer for layer, each in enumerate(heads) if each == count])}"
        for count in sorted(set(heads), reverse=True)
    )


def _layers(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "layers 0-2 and 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    *first, last = ["-".join(map(str, run)) for run in runs]
    return ("layers " if len(numbers) > 1 else "layer ") + (f"{', '.join(first)} and {last}" if first else last)


def one_or_each(heads: tuple[int, ...]) -> KVHeads:
    """The numbers of all layers as one number if they are equal."""
    return heads[0] if len(set(heads)) == 1 else heads
