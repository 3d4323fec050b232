"""`factor` without text: odd numbers, errors and interruptions."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.conversion.fit import from_weights
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.checkpoints import digests, llama_arrays, read_weights, write_llama
from tests.helpers.command_line import run_python

Array = np.ndarray[Any, Any]


def test_only_attention_changes_and_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    """And every layer is announced."""
    seen: list[tuple[int, int, str]] = []

    def done(progress: Any) -> None:
        seen.append((progress.done, progress.total, progress.layer.module))

    source = write_llama(tmp_path / "source", shards=3)
    for out in ("first", "second"):
        convert_checkpoint(source, tmp_path / out, 3, ConversionOptions(method="factor"), on_layer=done)
    assert seen == [(1, 2, "model.layers.0.self_attn"), (2, 2, "model.layers.1.self_attn")] * 2
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    before, after = read_weights(source), read_weights(tmp_path / "first")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkvo"}


KILLED = """
import os, signal, sys
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
def done(progress):
    if progress.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert_checkpoint(sys.argv[1], sys.argv[2], 3, ConversionOptions(method="factor"), on_layer=done)
"""


@pytest.mark.parametrize(("groups", "seed", "made_again"), [(3, 0, 1), (4, 0, 3), (3, 1, 3)])
def test_a_kill_between_layers(
    groups: int, seed: int, made_again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run goes on where it was killed if it is for the same of an unchanged source, and begins anew if
    not.
    """
    source, out, config = tmp_path / "source", tmp_path / "out", {"num_hidden_layers": 3}
    write_llama(source, arrays=llama_arrays(layers=3), config=config)
    ended = run_python("-c", KILLED, source, out)
    assert ended.returncode == -signal.SIGKILL
    assert not out.exists()
    if seed:
        write_llama(source, arrays=llama_arrays(layers=3, seed=seed), config=config)
    made = []
    original = from_weights.merge_layer
    monkeypatch.setattr(from_weights, "merge_layer", lambda *given: made.append(given) or original(*given))
    convert_checkpoint(source, out, groups, ConversionOptions(method="factor"))
    assert len(made) == made_again
    convert_checkpoint(source, tmp_path / "fresh", groups, ConversionOptions(method="factor"))
    assert digests(out) == digests(tmp_path / "fresh")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "fresh"}
