"""ChatGLM2 and 3, whose code lives in their checkpoints: converted without running it, and compared with a reference of
the architecture.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import UnsupportedFamilyError
from tests.helpers.chatglm import CONFIG, GROUPS, HEADS, HIDDEN, VOCAB, WIDTH, reference, write_source


def merged_and_repeated(tensors: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """The source with every K/V head replaced by the mean of its group."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            heads = tensor.unflatten(0, (-1, WIDTH)).double()
            query, *both = heads.split([HEADS, GROUPS, GROUPS])
            size = GROUPS // groups
            both = [part.unflatten(0, (groups, size)).mean(1).repeat_interleave(size, dim=0) for part in both]
            result[name] = torch.cat([query, *both]).flatten(0, 1)
    return result


@pytest.mark.parametrize("groups", [1, 2, 3, 6, 12])
def test_result_is_the_source_with_merged_heads(groups: int, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out", groups, method="mean")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config == CONFIG | {"multi_query_group_num": groups}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["transformer.encoder.layers.0.self_attention.query_key_value.weight"].shape == (
        (HEADS + 2 * groups) * WIDTH,
        HIDDEN,
    )
    ids = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    ours = reference(tensors, config, ids)
    theirs = reference(merged_and_repeated(source, groups) if groups < GROUPS else source, CONFIG, ids)
    assert float((ours - theirs).abs().max() / theirs.std()) < 1e-5
    if groups < GROUPS:
        assert float((ours - reference(source, CONFIG, ids)).abs().max() / theirs.std()) > 0.05
    assert result.plan.route == "checkpoint's own code"
    assert (tmp_path / "out" / "modeling_chatglm.py").is_file()


def test_the_first_chatglm_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(
        json.dumps(CONFIG | {"multi_query_attention": False}), encoding="utf-8"
    )
    with pytest.raises(UnsupportedFamilyError, match="only ChatGLM2 and later"):
        make_plan(open_checkpoint(tmp_path / "source"), 3)
