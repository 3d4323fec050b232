"""The rates that `plan` takes from one product in numpy against those that `convert` measures: each quick one over the
measured one, for layers of several sizes.

    python -m benchmarks.quick_rates --rounds 3

A CPU's cores are timed, so that other work on the machine counts little. The middle of the measured rates over these
sizes made the constants of `gqa_convert/conversion/fit/probe.py`.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from gqa_convert.conversion.fit.probe import has_fast_bfloat16, probed_rates
from gqa_convert.conversion.fit.rates import LayerSizes, Rates, measured_rates

HEAD_DIM, BLOCK = 64, 256


def sizes_of(hidden_size: int) -> LayerSizes:
    """A layer as of a Llama of this size, with a quarter of its K/V heads trained."""
    heads = hidden_size // HEAD_DIM
    return LayerSizes(
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=heads,
        trained_kv_heads=max(1, heads // 4),
        key_head_dim=HEAD_DIM,
        value_head_dim=HEAD_DIM,
        feed_forward=8 * hidden_size**2,
        vocabulary=8 * hidden_size,
        block=BLOCK,
        batch=2 * BLOCK,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[192, 512, 1024], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    precisions: dict[str, Callable[[], AbstractContextManager[Any]]] = {"float32": nullcontext}
    if has_fast_bfloat16():
        precisions["bfloat16"] = partial(torch.autocast, "cpu", torch.bfloat16)
    names = [rate.name for rate in fields(Rates)]
    print(f"{'':16}" + "".join(f"{name:>23}" for name in names))
    for name, precision in precisions.items():
        for hidden_size in options.hidden_sizes:
            sizes = sizes_of(hidden_size)
            found: dict[str, list[float]] = {rate: [] for rate in names}
            for _ in range(options.rounds):
                quick = probed_rates(sizes, reduced=name != "float32")
                timed = measured_rates(sizes, "cpu", precision)
                for rate in names:
                    found[rate].append(getattr(quick, rate) / getattr(timed, rate))
            ratios = "".join(f"{statistics.median(each):23.2f}" for each in found.values())
            print(f"{name} {hidden_size:<7}{ratios}", flush=True)


if __name__ == "__main__":
    main()
