"""The decoders whose layers may differ in their number of K/V heads, and the modelling files of such results."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from gqa_convert.families import decilm
from gqa_convert.families.family import CONVERTED_PREFIX, Family, FamilyRecordError, LegacyConfigKeys, Modeling

_FAST: Final = "PreTrainedTokenizerFast"

_CLASSES: Final = {
    "apertus": "Apertus",
    "arcee": "Arcee",
    "bitnet": "BitNet",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "cwm": "Cwm",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "granite_swa": "GraniteSWA",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hyperclovax": "HyperCLOVAX",
    "jais2": "Jais2",
    "llama": "Llama",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "nanochat": "NanoChat",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "vaultgemma": "VaultGemma",
}
"""The model types that `gqa_by_layer.py` serves, and what the names of their classes in transformers begin with. Their
attention modules are made from the config and the layer's number alone, and their files have the tensors of the loaded
model.
"""
_TOKENIZERS: Final = {
    "cohere": "CohereTokenizer",
    "cohere2": "CohereTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "jais2": "GPT2Tokenizer",
    "olmo": "GPTNeoXTokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
"""The tokenizer classes that transformers chooses for these types; for the others it reads tokenizer.json."""


def decilm_form(model_type: str) -> Modeling:
    """The modelling file of a result of this type as DeciLM."""
    return Modeling(
        file="gqa_decilm",
        source_type=model_type,
        model_type=decilm.MODEL_TYPE,
        classes=(
            ("AutoConfig", "DeciLMConfig"),
            ("AutoModel", "DeciLMModel"),
            ("AutoModelForCausalLM", decilm.ARCHITECTURE),
        ),
        tokenizer=_TOKENIZERS.get(model_type, _FAST),
    )


def own_form(model_type: str) -> Modeling:
    """The modelling file of a result of this type with the type's own classes."""
    prefix = _CLASSES[model_type]
    return Modeling(
        file="gqa_by_layer",
        source_type=model_type,
        model_type=CONVERTED_PREFIX + model_type,
        classes=(
            ("AutoConfig", f"GQA{prefix}Config"),
            ("AutoModel", f"GQA{prefix}Model"),
            ("AutoModelForCausalLM", f"GQA{prefix.removesuffix('Text')}ForCausalLM"),
        ),
        tokenizer=_TOKENIZERS.get(model_type, _FAST),
    )


def with_forms(families: Iterable[Family]) -> Iterator[Family]:
    """The records with the forms that layers which differ can have, and the records of such results.

    Args:
        families: decoders that stock classes hold with fewer K/V heads.

    Raises:
        FamilyRecordError: a type of the table is not among them.
    """
    left = set(_CLASSES)
    for family in families:
        if family.model_type not in _CLASSES:
            yield family
            continue
        left.remove(family.model_type)
        own = own_form(family.model_type)
        forms = (decilm_form(family.model_type), own) if family.model_type in decilm.SOURCES else (own,)
        yield replace(family, layerwise=forms)
        yield replace(  # transformers 4 can't load the result, whose config therefore has no legacy keys
            family,
            model_type=own.model_type,
            kv_heads="listed",
            engines=frozenset(),
            modeling=own,
            layerwise=(own,),
            legacy=LegacyConfigKeys(),
        )
    if left:
        raise FamilyRecordError(min(left), "is missing, and the table of classes in records/by_layer.py names it")
