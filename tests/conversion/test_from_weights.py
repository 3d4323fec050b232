"""`factor` without text is resumed where it was killed, and writes the same bytes."""

import shutil
import signal
from pathlib import Path

import pytest

from gqa_convert.conversion import prepared_layers
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OutputError
from tests.helpers.checkpoints import digests, llama_arrays, write_llama
from tests.helpers.command_line import run_python

KILLED = """
import os, signal, sys
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OutputError
def done(progress):
    if progress.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert_checkpoint(sys.argv[1], sys.argv[2], 3, ConversionOptions(method="factor"), on_layer=done)
"""


@pytest.mark.parametrize(("groups", "seed", "made_again"), [(3, 0, 1), (4, 0, 0), (3, 1, 0)])
def test_a_kill_between_layers(
    groups: int, seed: int, made_again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run goes on where it was killed if it is for the same of an unchanged source, and
    refuses to begin anew if not.
    """
    source, out, config = tmp_path / "source", tmp_path / "out", {"num_hidden_layers": 3}
    write_llama(source, arrays=llama_arrays(layers=3), config=config)
    ended = run_python("-c", KILLED, source, out)
    assert ended.returncode == -signal.SIGKILL
    assert not out.exists()
    if seed:
        write_llama(source, arrays=llama_arrays(layers=3, seed=seed), config=config)
    made = []
    original = prepared_layers.merge_layer
    monkeypatch.setattr(
        prepared_layers, "merge_layer", lambda *given: made.append(given) or original(*given)
    )
    if not made_again:
        with pytest.raises(
            OutputError, match="keeps 2 merged layers of an interrupted run with another"
        ):
            convert_checkpoint(source, out, groups, ConversionOptions(method="factor"))
        assert not made
        shutil.rmtree(tmp_path / ".out.gqa-merging")
        made_again = 3
    convert_checkpoint(source, out, groups, ConversionOptions(method="factor"))
    assert len(made) == made_again
    convert_checkpoint(source, tmp_path / "fresh", groups, ConversionOptions(method="factor"))
    assert digests(out) == digests(tmp_path / "fresh")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "fresh"}
