"""What the commands besides convert do with a vision-language model: an image is verified too, and text is causal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.loading import load_model, outline_model
from tests.helpers.processors import save_llava_processor
from tests.helpers.wrappers import make_wrapper


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny wrapper of a type, once, with a processor where there is one for it."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make_wrapper(model_type, tmp_path_factory.mktemp(model_type) / "source")
            if model_type == "llava":
                save_llava_processor(made[model_type])
        return made[model_type]

    return make


def converted(folder: Path) -> Path:
    out = folder.parent / "out"
    if not out.exists():
        convert_checkpoint(folder, out, 3, ConversionOptions(method="mean"))
    return out


@pytest.mark.parametrize("load", [load_model, outline_model])
@pytest.mark.parametrize("model_type", ["llava", "paligemma"])
def test_text_is_causal(model_type: str, load: Any, source: Callable[[str], Path]) -> None:
    """PaliGemma's prompts are not, and transformers takes text without token types for one with some attention functions."""
    loaded = load(source(model_type), torch.float32)
    model = loaded[0] if load is load_model else loaded
    if load is outline_model:
        model.load_state_dict(load_model(source(model_type), torch.float32)[0].state_dict())
        for module, other in zip(
            model.modules(), load_model(source(model_type), torch.float32)[0].modules(), strict=True
        ):
            module._buffers.update(other._buffers)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    changed = ids.clone()
    changed[0, -1] = 20
    with torch.no_grad():
        one, other = (
            model(input_ids=each, attention_mask=torch.ones_like(each)).logits[:, :-1] for each in (ids, changed)
        )
    torch.testing.assert_close(one, other)
