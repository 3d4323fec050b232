"""Writes gqa_convert/families/derived.json: what transformers' classes say about each model type.

python tools/derive_families.py              # every type in gqa_convert/families/facts.toml python
tools/derive_families.py TYPE ...     # only these; the other rows stay

Each type is built as a tiny random model, of the sizes in tests/helpers, and looked at. A row holds
what differs from the defaults of `Family`, and nothing that facts.toml states for the type.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto, tokenization_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers import own_files  # noqa: E402
from tests.helpers.tiny import HEADS, make_config, randomise  # noqa: E402

FAMILIES = ROOT / "gqa_convert" / "families"
DERIVED = FAMILIES / "derived.json"
FACTS = FAMILIES / "facts.toml"

KV_HEADS = 3
"""K/V heads of the tiny models, where the class counts them."""
TOKENS = [[5, 21, 60, 3, 44, 18, 27]]

SEPARATE = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
OUTPUTS = ("o_proj", "out_proj", "dense", "o", "c_proj")
ELSEWHERE = re.compile(r"\b(vision|audio|image|linear_attn)")
"""Parts of a model whose attention is not that of a record."""
SWITCHES = ("use_qk_norm", "qk_layernorm", "use_mem_rope")
"""Config keys without which some classes have no norm of keys, or no rotary positions."""
LEFT_OUT = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rotary_dim",
]
"""Config keys that a config.json may leave to its class."""
TASKS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForTextEncoding": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
USUAL = {
    "layers": [["layers", ["num_hidden_layers"]]],
    "attention": ["self_attn"],
    "without_attention": [],
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "query_outputs": 1,
    "transposed": False,
    "heads_key": "num_attention_heads",
    "rotary": "half",
    "rotary_share": 1.0,
    "reads_rotary_share": False,
    "key_norm_name": "k_norm",
}
"""The defaults of a record, which a row leaves out."""


def derive(model_type: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The row of a type, without what `facts` state."""
    classes = classes_of(model_type)
    config = tiny_config(model_type)
    row: dict[str, Any] = {"classes": classes}
    tokenizer = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(model_type)
    if tokenizer is not None:
        row["tokenizer"] = tokenizer
    row["defaults"] = left_out(type(config))
    row["heads_key"] = config.attribute_map.get("num_attention_heads", "num_attention_heads")
    if "AutoModel" in classes or "AutoModelForCausalLM" in classes:
        model = build(config, classes)
        row |= places(model)
        if config.is_encoder_decoder:
            row["rotary"] = "none"
        elif "AutoModelForCausalLM" in classes:
            row |= rotary(model_type, model, classes, row)
    return {
        key: value for key, value in row.items() if key not in facts and USUAL.get(key) != value
    }


def classes_of(model_type: str) -> dict[str, str]:
    """transformers' classes of a type by auto class, its config's first."""
    found = {"AutoConfig": configuration_auto.CONFIG_MAPPING_NAMES[model_type]}
    for auto, table in TASKS.items():
        name = getattr(modeling_auto, table).get(model_type)
        if isinstance(name, str):
            found[auto] = name
    return found


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The config of a tiny model, with every switch on."""
    if model_type in own_files.SIZES:
        return CONFIG_MAPPING[model_type](**own_files.SIZES[model_type] | overrides)
    known = type(make_config(model_type)).__dataclass_fields__
    switches = {key: True for key in SWITCHES if key in known}
    return make_config(model_type, kv_heads=KV_HEADS, **switches | overrides)


def build(config: Any, classes: dict[str, str]) -> nn.Module:
    """A random model."""
    torch.manual_seed(0)
    auto = "AutoModelForCausalLM" if "AutoModelForCausalLM" in classes else "AutoModel"
    if config.is_encoder_decoder:
        auto = "AutoModel"
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32).eval()
    randomise(model)
    return model


def left_out(config_class: Any) -> dict[str, Any]:
    """Values that a config.json may leave to its class. Of the kinds of layers, every how many has
    full attention.
    """
    fields = config_class.__dataclass_fields__
    values = {key: fields[key].default for key in LEFT_OUT if key in fields}
    found = {key: value for key, value in values.items() if isinstance(value, int | str)}
    try:
        kinds = config_class().layer_types
    except Exception:  # no such key, or a class that has no defaults
        return found
    if kinds and set(kinds) == {"sliding_attention", "full_attention"}:
        every = kinds.index("full_attention") + 1
        regular = [
            ("sliding_attention", "full_attention")[(number + 1) % every == 0]
            for number in range(len(kinds))
        ]
        if kinds == regular:
            found["sliding_window_pattern"] = every
    return found


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attention modules of layers: those with separate projections, or else those with a fused
    one.
    """
    separate, fused = [], []
    for name, module in model.named_modules():
        children = {child for child, _ in module.named_children()}
        if ELSEWHERE.search(name) or not re.search(r"\.\d+\.", name) or not children & set(OUTPUTS):
            continue
        if any(children >= set(each) for each in SEPARATE):
            separate.append((name, module))
        elif children & set(FUSED):
            fused.append((name, module))
    yield from separate or fused


def places(model: nn.Module) -> dict[str, Any]:
    """Where layers, attention and projections are, and how keys are normalised."""
    base = f"{model.base_model_prefix}."
    model_layers: dict[str, None] = {}
    attentions: dict[str, None] = {}
    inside: set[str] = set()
    row: dict[str, Any] = {}
    for name, module in attention_modules(model):
        parts = name.removeprefix(base).split(".")
        numbers = [position for position, part in enumerate(parts) if part.isdecimal()]
        model_layers[".".join(parts[: numbers[0]])] = None
        attentions[".".join(parts[numbers[-1] + 1 :])] = None
        inside.add(".".join(parts[: numbers[0] + 1]))
        row |= projections(module, model.config)
    count = model.config.attribute_map.get("num_hidden_layers")
    count_keys = [count, "num_hidden_layers"] if count else ["num_hidden_layers"]
    row["layers"] = [[place, count_keys] for place in model_layers]
    row["attention"] = list(attentions)
    row["without_attention"] = in_place_of_attention(model, base, list(model_layers), inside)
    if base != "model.":
        row["prefixes"] = ["", base, base + base]
    return row


def projections(attention: nn.Module, config: Any) -> dict[str, Any]:
    """The projections of an attention module and its norm of keys."""
    children = dict(attention.named_children())
    row: dict[str, Any] = {"output": next(name for name in OUTPUTS if name in children)}
    kv_heads = kv_heads_of(config)
    for names in SEPARATE:
        if children.keys() >= set(names):
            row["query"], row["key"], row["value"] = names
            width = children[row["key"]].weight.shape[0] // kv_heads
            row["query_outputs"] = children[row["query"]].weight.shape[0] // (HEADS * width)
            return row | key_norm(attention, kv_heads, width)
    row["fused"] = next(name for name in FUSED if name in children)
    row["transposed"] = type(children[row["fused"]]).__name__ == "Conv1D"
    return row | key_norm(attention, kv_heads, fused_width(children[row["fused"]], kv_heads))


def kv_heads_of(config: Any) -> int:
    """K/V heads of a tiny model."""
    section = getattr(config, "attn_config", None)
    stated = getattr(config, "num_key_value_heads", None) or getattr(section, "kv_n_heads", None)
    return KV_HEADS if stated == KV_HEADS else HEADS


def fused_width(projection: nn.Module, kv_heads: int) -> int:
    """The head_dim of a fused projection."""
    return max(projection.weight.shape[0], projection.weight.shape[-1]) // (HEADS + 2 * kv_heads)


def key_norm(attention: nn.Module, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """The norm of keys, by the shape of its gains."""
    for name, parameter in attention.named_parameters():
        if not re.match(r"(k|key)_\w*norm\b", name):
            continue
        module = name.rpartition(".")[0]
        if module.rpartition(".")[2].isdecimal():
            return {"key_norm": "per_head_list", "key_norm_name": module.rpartition(".")[0]}
        kind = "full" if parameter.numel() == kv_heads * head_dim else "shared"
        return {"key_norm": "per_head" if parameter.dim() == 2 else kind, "key_norm_name": module}
    return {}


def in_place_of_attention(
    model: nn.Module, base: str, model_layers: list[str], inside: set[str]
) -> list[str]:
    """What layers without attention have and the others have not."""
    with_attention: set[str] = set()
    without: set[str] = set()
    place = "|".join(map(re.escape, model_layers))
    for name, _ in model.named_modules():
        match = re.fullmatch(rf"((?:{place})\.\d+)\.([^.]+)", name.removeprefix(base))
        if match:
            (with_attention if match[1] in inside else without).add(match[2])
    return sorted(without - with_attention)


def rotary(
    model_type: str, model: nn.Module, classes: dict[str, str], row: dict[str, Any]
) -> dict[str, Any]:
    """Which rows of a key head form pairs, what share of a head that is, and whether a config may
    state another.
    """
    stated = model.config.to_dict().get("rope_parameters") or {}
    share: dict[str, Any] = {}
    if pairs_of(model) and not any(isinstance(value, dict) for value in stated.values()):
        stated = {"rope_theta": 10000.0} | stated | {"rope_type": "default"}
        configs = [
            tiny_config(model_type, rope_parameters=stated | {"partial_rotary_factor": each})
            for each in (1.0, 0.5)
        ]
        whole, half = (build(config, classes) for config in configs)
        share["reads_rotary_share"] = pairs_of(whole) != pairs_of(half)
        share["rotary_share"] = pairs_of(by_default(model_type, classes)) / pairs_of(whole)
        model = whole
    partners = reached_rows(model, row)
    if not partners:
        return {"rotary": "none"}
    return share | {"rotary": "interleaved" if partners == {1} else "half"}


def by_default(model_type: str, classes: dict[str, str]) -> nn.Module:
    """A model with the class's own rotary parameters."""
    try:
        return build(tiny_config(model_type, rope_parameters=None), classes)
    except (TypeError, KeyError):  # the class has none
        return build(tiny_config(model_type), classes)


def pairs_of(model: nn.Module) -> int:
    """Rotary pairs of a head, by the buffer of their frequencies; 0 without one."""
    found = [
        b.shape[0]
        for n, b in model.named_buffers()
        if n.endswith("inv_freq") and not ELSEWHERE.search(n)
    ]
    return max(found, default=0)


@torch.no_grad()
def reached_rows(model: nn.Module, row: dict[str, Any]) -> set[int]:
    """The rows of a cached key head that a number in its first row reaches, besides the first."""
    kv_heads = kv_heads_of(model.config)
    found: set[int] = set()
    for first in first_rows(model, row, kv_heads):

        def one_number(
            _: nn.Module, __: Any, output: torch.Tensor, first: int = first
        ) -> torch.Tensor:
            result = torch.zeros_like(output)
            result[..., first] = 1.0
            return result

        name = row.get("fused") or row["key"]
        handles = [
            module.get_submodule(name).register_forward_hook(one_number)
            for _, module in attention_modules(model)
        ]
        try:
            found |= reached(cached_keys(model))
        finally:
            for handle in handles:
                handle.remove()
    return found


def first_rows(model: nn.Module, row: dict[str, Any], kv_heads: int) -> list[int]:
    """Where the first key head may begin: behind all query heads, or behind those of its group."""
    if "fused" not in row:
        return [0]
    attention = next(module for _, module in attention_modules(model))
    width = fused_width(attention.get_submodule(row["fused"]), kv_heads)
    return [HEADS * width, HEADS // kv_heads * width]


def cached_keys(model: nn.Module) -> list[torch.Tensor]:
    """The keys [batch, head, position, row] that layers cache."""
    result = model.generate(
        torch.tensor(TOKENS),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    keys = [getattr(layer, "keys", None) for layer in getattr(result.past_key_values, "layers", [])]
    return [key for key in keys if key is not None and key.dim() == 4]


def reached(keys: list[torch.Tensor]) -> set[int]:
    """The rows that are far from zero beside the first; a norm that subtracts the mean leaves a
    little in every row.
    """
    found: set[int] = set()
    for key in keys:
        size = key[0, 0].abs().amax(0)
        if size[0] > 0.3 * size.max():
            found |= set(torch.nonzero(size > 0.2 * size.max()).flatten().tolist()) - {0}
    return found


def read_facts() -> dict[str, dict[str, Any]]:
    """The handwritten rows, each with those of the type that it is like."""
    rows = tomllib.loads(FACTS.read_text(encoding="utf-8"))["types"]
    return {name: rows.get(row.get("like"), {}) | row for name, row in rows.items()}


def derive_all(names: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of several types, or of all that transformers knows."""
    transformers.utils.logging.set_verbosity_error()
    facts = read_facts()
    known = [name for name in facts if name in configuration_auto.CONFIG_MAPPING_NAMES]
    return {name: derive(name, facts[name]) for name in names or known}


def main(names: list[str]) -> None:
    """Write the file."""
    rows = json.loads(DERIVED.read_text(encoding="utf-8")) if names else {}
    rows |= derive_all(names)
    lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
    DERIVED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
