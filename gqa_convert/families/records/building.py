"""What the records of several families have in common: constructors and repeated values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from gqa_convert.families.engines import run_in
from gqa_convert.families.family import (
    CONVERTED_PREFIX,
    Family,
    LegacyConfigKeys,
    Modeling,
    RotaryCount,
    RotaryPairs,
    RotaryShare,
    make_family,
)

Fields = dict[str, Any]

NO_ROTARY: Final[Fields] = {"rotary": "none", "rotary_dimensions": None}
WHOLE_HEAD: Final[Fields] = {"rotary": "half", "rotary_dimensions": RotaryShare(1.0)}
"""Every dimension of a head is rotary, whatever the config states: the class reads no share."""

RECURRENT: Final = "its recurrences or convolutions carry text from one document into the next"
GATED_OUTPUT: Final = "a gate scales every channel of its attention's output"
ALIBI_SLOPES: Final = "each head has its own ALiBi slope, given by its number"
ALIBI_FROM_PADDING: Final = "transformers computes its ALiBi from a padding mask and accepts no other mask"


def share_of_head(default: float, *, pairs: RotaryPairs = "half", count_key: str | None = None) -> Fields:
    """Rotary fields of a type whose config may state the share of rotary dimensions.

    Args:
        default: the share where the config states none.
        pairs: which rows form a pair.
        count_key: config key of the number of rotary dimensions, which counts where no share is stated.
    """
    keys = ("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct")
    return {"rotary": pairs, "rotary_dimensions": RotaryShare(default, keys, count_key)}


INTERLEAVED: Final[Fields] = WHOLE_HEAD | {"rotary": "interleaved"}
"""Every dimension of a head is rotary, in pairs of neighbours."""
GPTJ_ROTARY: Final[Fields] = {"rotary": "interleaved", "rotary_dimensions": RotaryCount("rotary_dim", default=64)}


def at(layers: str, count_keys: str, base: str) -> Fields:
    """Where the layers of a type with one kind of layers are.

    Args:
        layers: what precedes a layer's number in the model without a head.
        count_keys: config keys of the number of layers.
        base: the name that models with a head give to the model without one.
    """
    return {"layers": ((layers, tuple(count_keys.split())),), "prefixes": ("", f"{base}.", f"{base}.{base}.")}


def stock(model_types: str, **fields: Any) -> Iterator[Family]:
    """A record for each of several model types that store attention alike and whose stock classes hold fewer K/V
    heads.
    """
    for model_type in model_types.split():
        engines = frozenset({"transformers"}) | run_in(model_type)
        yield make_family(model_type=model_type, engines=engines, **fields)


TASKS: Final = {
    "Model": "AutoModel",
    "EncoderModel": "AutoModelForTextEncoding",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
"""Endings of class names, and the auto class of each."""
SPEECH_TASKS: Final = TASKS | {
    "ForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "ForAudioClassification": "AutoModelForAudioClassification",
}


def own_file(
    file: str,
    model_type: str,
    class_prefix: str,
    tasks: str,
    *,
    tokenizer: str,
    auto_classes: dict[str, str] = TASKS,
    **fields: Any,
) -> Iterator[Family]:
    """Two records of a family that a modelling file serves: of the stock model type, and of the converted one.

    Args:
        file: name of the modelling file in `gqa_convert/families/modeling/`, without `.py`.
        model_type: the stock one.
        class_prefix: what the names of its classes in transformers begin with.
        tasks: what they end in: `Model` first, then the class for language modelling.
        tokenizer: the tokenizer class that transformers chooses by the stock model type.
        auto_classes: the auto class of each task.
        fields: of both records.
    """
    converted = f"{CONVERTED_PREFIX}{model_type.replace('-', '_')}"
    models = tuple((auto_classes[task], f"GQA{class_prefix}{task}") for task in tasks.split())
    modeling = Modeling(
        file=file,
        source_type=model_type,
        model_type=converted,
        classes=(("AutoConfig", f"GQA{class_prefix}Config"), *models),
        tokenizer=tokenizer,
    )
    defaults: Fields = {"kv_heads": "heads", "engines": frozenset()}
    record = make_family(model_type=model_type, modeling=modeling, **defaults | fields)
    yield record
    # transformers 4 can't load the result, whose config therefore has no legacy keys
    yield replace(record, model_type=converted, kv_heads="stated", fused_layout="blocks", legacy=LegacyConfigKeys())
