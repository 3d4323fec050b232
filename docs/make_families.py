"""Writes supported-models.md from the records in gqa_convert/families/. With --check, it only
reports a file that is out of date.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from gqa_convert.conversion.rewriting.source import STOCK_TYPES
from gqa_convert.families.engines import LOADERS
from gqa_convert.families.records import DECILM_SOURCES, record_of
from gqa_convert.families.table import COMPOSITES, FAMILIES, REFUSALS

DOCUMENT = Path(__file__).with_name("supported-models.md")

PAGE = """\
<!-- Written by docs/make_families.py: change that script or the records in gqa_convert/families/, and run it. -->

# Supported models

After this page you know what becomes of your model and what loads it. Look for the `model_type` of your `config.json`, or ask `gqa-convert convert SOURCE --kv-heads N --dry-run`.

| your type is | its result | loads with |
|---|---|---|
| [native](#native) | keeps its type | transformers, and the engines named there |
| a [composite](#composites) model | keeps its type; the decoder inside is converted | transformers |
| [rewritten as a stock type](#rewritten-as-a-stock-type) | has another type | transformers, and the engines named there |
| one [with a modelling file](#modelling-file) | is a `gqa_...` and carries two Python files | transformers 5, `trust_remote_code=True` |
| `chatglm` (ChatGLM2 and later) | keeps the code in the checkpoint, which gqa-convert never runs | transformers, `trust_remote_code=True`; vLLM and llama.cpp list it |
| [refused](#refused) | does not exist | |
| on no list | keeps its type | transformers |

A type on no list needs `num_key_value_heads` in its config and projections with Llama's names. Nothing is written unless [verify](verification.md) finds the logits equal.

## Native

**yes**: a tiny result with 3 K/V heads of 12 gave transformers' tokens and logits. **listed**: the engine names the type, but was not run. Nothing: it failed or was not tried. `gqa-convert check-serving OUT` tests [yours](serving-and-publishing.md).

| vLLM | llama.cpp | types |
|---|---|---|
{native}

A Gemma 4 may have one number in layers with a sliding window and another in the rest.

vLLM and llama.cpp ([versions](serving-and-publishing.md#which-engines-load-which-types)) differ from transformers on the same files:

- **Sliding windows.** llama.cpp attends to all tokens in {wide} (a Qwen only with `use_sliding_window`); vLLM lets cohere2 and cohere2_moe see one token more. `convert --dry-run` states up to how many tokens the result is the same.
- **llama.cpp**: gpt_oss has logits that differ by up to 5.3% of their spread. dots1, phi and olmoe load only with as many K/V heads as query heads, ernie4_5_moe not at all. bamba and solar_open gave different tokens. glm and nemotron load if `head_dim` is `hidden_size` / heads. granitemoehybrid is wrong with rotary positions.
- **vLLM**: lfm2_moe gave different tokens, gemma3n_text different logits, phimoe no finite logits. In float32, falcon_h1, granitemoehybrid, jamba, nemotron_h and qwen3_next fail.

## Composites

Tested with an image (canary hears, t5gemma reads text) and the decoder in brackets; another native decoder is accepted. Everything outside the decoder stays byte for byte.

{composites}

## Rewritten as a stock type

`--no-native` keeps the source's type.

| type | becomes | where | vLLM | llama.cpp |
|---|---|---|---|---|
{stock}

## Modelling file

transformers runs the files that the result carries; where gqa-convert is installed, `gqa_convert.register_modeling()` makes plain `from_pretrained` work. CTranslate2 runs [some](serving-and-publishing.md#which-engines-load-which-types) of these types, no other engine any. An encoder-decoder is converted in its decoder.

- Decoders: {decoders}.
- Encoder-decoders: {encoder_decoders}.

Of those that hear or see, only whisper is calibrated; speech_to_text, florence2 and vision-encoder-decoder (Donut: an mbart behind a Swin) are converted from their weights alone. gpt_neo runs with eager attention only.

## Layers that differ

[A number of K/V heads for each layer](methods.md#a-number-for-each-layer) is possible in {count} types. The result carries `gqa_by_layer.py`, and only transformers runs it. {decilm} become a DeciLM (`nemotron-nas`) where they can, which vLLM and llama.cpp [run](serving-and-publishing.md#which-engines-load-which-types).

{listed}

## Refused

A dry run names the reason.

| why | types |
|---|---|
{refused}
"""


def engines(model_type: str) -> str:
    """What is known of a type in each engine besides transformers, as cells."""
    record = record_of({"model_type": model_type})
    run, listed = record.run_in, record.listed_in
    return " | ".join(
        "yes" if name in run else "listed" if name in listed else "" for name in LOADERS[1:]
    )


def rows(types: dict[str, list[str]]) -> str:
    """A row for each key."""
    return "\n".join(f"| {key} | {', '.join(sorted(names))} |" for key, names in types.items())


def pairs(items: Iterable[tuple[str, str]]) -> str:
    return ", ".join(
        f"{name} ({other})" for name, other in sorted(items, key=lambda pair: pair[0].lower())
    )


def document() -> str:
    """The whole text."""
    native = defaultdict(list)
    for name, family in FAMILIES.items():
        if family.native:
            native[engines(name)].append(name)
    own = [name for name, family in FAMILIES.items() if family.modeling and not family.is_converted]
    listed = sorted(
        family.stock_type for family in FAMILIES.values() if family.kv_heads == "listed"
    )
    wide = sorted(
        name for name, family in FAMILIES.items() if "llama.cpp" in family.beyond_window_in
    )
    stock = [
        f"| {form.model_type} | {form.stock} | {form.condition} | {engines(form.stock)} |"
        for form in STOCK_TYPES
    ]
    refused = defaultdict(list)
    for name, reason in REFUSALS.items():
        refused[reason].append(name)
    return PAGE.format(
        native=rows(
            dict(sorted(native.items(), key=lambda item: (-item[0].count("yes"), -len(item[1]))))
        ),
        wide=", ".join(wide),
        composites=pairs(COMPOSITES.items()),
        stock="\n".join(stock),
        decoders=", ".join(sorted(name for name in own if not FAMILIES[name].encoder)),
        encoder_decoders=", ".join(sorted(name for name in own if FAMILIES[name].encoder)),
        count=len(listed),
        decilm=", ".join(DECILM_SOURCES),
        listed=", ".join(listed),
        refused=rows(refused),
    )


def main(arguments: list[str]) -> int:
    """Write the document, or with --check compare it; the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: make_families.py [--check]", file=sys.stderr)
        return 2
    if not arguments:
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != document():
        print(f"{DOCUMENT} is out of date: run python docs/make_families.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
