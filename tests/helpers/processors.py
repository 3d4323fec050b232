"""The processor of a tiny vision-language model, of a type that needs no package for videos."""

from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.wrappers import IMAGE

_SIDE = 16


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(120)} | {"<unk>": 120, "<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="w0",
        bos_token="w1",
        eos_token="w2",
        extra_special_tokens={"image_token": "<image>"},
    )


def save_llava_processor(folder: Path) -> None:
    """Save the processor of a tiny LLaVA beside its weights."""
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
    )
    transformers.LlavaProcessor(
        images,
        _tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    ).save_pretrained(folder)
