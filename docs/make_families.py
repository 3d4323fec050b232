"""Writes families.md from the records in gqa_convert/families/. With --check, it only reports a file that is out of
date.
"""

import sys
from collections import defaultdict
from pathlib import Path

from gqa_convert.conversion.rewriting.decoders import DECODERS
from gqa_convert.families.engines import ENGINES, listed_in, run_in
from gqa_convert.families.records import DECILM_SOURCES
from gqa_convert.families.table import COMPOSITES, FAMILIES, REFUSALS, RESTATED, Family

DOCUMENT = Path(__file__).with_name("families.md")

HEAD = """\
<!-- Written by docs/make_families.py: change that script or the records in gqa_convert/families/, and run it. -->

# Model families

Look for the `model_type` that your checkpoint's `config.json` states. `gqa-convert convert SOURCE --groups N --dry-run` gives the same answer for the checkpoint itself.

| the type stands under | the result | it loads with |
|---|---|---|
| [Native](#native): {native} types, among them Llama, Mistral, Qwen and Gemma | keeps its type | transformers, and the engines in the table |
| [Wrappers](#wrappers): vision-language models | keeps its type; the decoder inside is converted | transformers |
| [Rewritten as a stock type](#rewritten-as-a-stock-type): GPT-NeoX, GPT-J, CodeGen, GPT-2 | becomes another stock type | transformers, and the engines in the table |
| [Modelling file](#modelling-file): {own} types, among them T5, BART, Whisper and OPT | carries two Python files | transformers 5 with `trust_remote_code=True` |
| [Layers that differ](#layers-that-differ): a number of K/V heads for each layer | a type with that number in its config | transformers 5 with `trust_remote_code=True` |
| [Code in the checkpoint](#code-in-the-checkpoint): ChatGLM | keeps the source's own code | transformers with `trust_remote_code=True` |
| [Rewritten first](#rewritten-first): Baichuan, InternLM, Yi and others | is the stock type that `convert` rewrites it to first | as that type |
| [Refused](#refused) | none, with the reason | |
| [no heading of this page](#types-on-no-list) | keeps its type, once the result is proved | transformers |

In the columns of the engines, **yes** says that a tiny checkpoint of the type, converted from 12 to 3 K/V heads, gave transformers' tokens and logits there, and **listed** that the engine names the type but it was not run. An empty cell says that it failed or was not tried. `gqa-convert check-serving OUT` tests your own result ([serving](serving-and-publishing.md)).

## Types on no list

A type that stands nowhere on this page is converted like a Llama if its config has `num_key_value_heads` and its attention has separate projections named as Llama's. Before OUT appears, [verify](verification.md) compares its logits with the source's; where they differ, nothing is written. Methods that change queries and outputs leave them alone where only a record could say that they may.

## Where engines differ from transformers

Found with vLLM 0.32.0 on a CPU (with transformers 5.19) and llama.cpp as of llama-cpp-python 0.3.36, each against transformers 5.23 on the same files.

- **Sliding windows.** llama.cpp attends to all tokens in mistral, mixtral, phi3 and starcoder2, and in the Qwen types with `use_sliding_window`. vLLM lets cohere2 and cohere2_moe see one token more than the window. `convert --dry-run` states up to how many tokens the result is the same.
- **llama.cpp**: gpt_oss has logits that differ by up to 5.3% of their spread. dots1, phi and olmoe load only with as many K/V heads as query heads, ernie4_5_moe not at all. bamba and solar_open gave different tokens. glm and nemotron load if `head_dim` is `hidden_size` / heads. granitemoehybrid is wrong with rotary positions.
- **vLLM**: lfm2_moe gave different tokens, gemma3n_text different logits, phimoe no finite logits. On a CPU in float32 it fails in falcon_h1, granitemoehybrid, jamba, nemotron_h and qwen3_next.
- Both need config keys that transformers 5 does not write (`rotary_pct` of cohere2, `conv_dim` of lfm2 and others): `convert` keeps them if the source has them.

## Native

The result keeps its type, and the config key states its number of K/V heads. The layers of a Gemma 4 with a sliding window may have another number than those without; the class reads both from the config.
"""

WRAPPED = """
## Wrappers

The decoder inside a vision-language model is converted and all else stays byte for byte. Each type is tested with the decoder named here and an image among its inputs; another decoder of the table above is accepted if the config names it. Methods that read text run the decoder alone; an mllama, whose cross-attention runs on images alone, is merged from its weights.
"""

STOCK = """
## Rewritten as a stock type

A stock class of another type computes the same function and has a K/V-head count. `convert` rewrites such a source with all its heads, and converts that; `verify` checks the logits of both steps. `--no-native` keeps the source's type, except GPT-J's and CodeGen's, which have no modelling file, and `--native` says why a source is not rewritten.

phi with fewer K/V heads than query heads loads in transformers and in vLLM; llama.cpp assumes as many K/V heads as query heads.
"""

OWN = """
## Modelling file

The result has the type `gqa_...` and carries its modelling file and `gqa_common.py`, by which transformers 5 loads it with `trust_remote_code=True`. Where gqa-convert is installed, `gqa_convert.register_modeling()` makes plain `from_pretrained` work. Other engines do not know these types. In encoder-decoder models, self-attention and cross-attention of the decoder are converted, and both caches shrink.
"""

LAYERWISE = """
## Layers that differ

These {types} types may have [a number of K/V heads for each layer](methods.md#a-number-for-each-layer). The result carries `gqa_by_layer.py`, and `num_key_value_heads` is a list; no other engine runs it. {decilm} become a DeciLM where they can: `nemotron-nas`, which vLLM and llama.cpp [run](serving-and-publishing.md#which-engines-load-which-types) with code of their own.

{names}
"""

CODE = """
## Code in the checkpoint

transformers loads the result with the code in the checkpoint (`trust_remote_code=True`), which gqa-convert copies and never runs.
"""

RESTATED_HEAD = """
## Rewritten first

These types load with custom code and compute what a stock type computes. `convert` and `verify` rewrite such a source as that type, without running its code; with `--groups` at the source's own number of K/V heads, the result is the rewritten source. Functions that no stock class computes are refused: the ALiBi of Baichuan 13B, the experts and the sparse attention of MiniCPM, the stable embedding of open_llama. Qwen is the same up to `seq_length` tokens, beyond which its own code scales positions and queries by the length of the text.
"""

REFUSED = """
## Refused

| reason | types |
|---|---|
"""


def _engines(run: frozenset[str], listed: frozenset[str] = frozenset()) -> str:
    """A cell for each engine besides transformers."""
    return " | ".join("yes" if name in run else "listed" if name in listed else "" for name in ENGINES[1:])


def table(families: dict[str, Family]) -> list[str]:
    """A row for each of several families."""
    lines = [f"| type | {' | '.join(ENGINES[1:])} | config key |", f"|---{'|---' * len(ENGINES)}|"]
    for model_type, family in sorted(families.items()):
        keys = ", ".join(f"`{key}`" for key in family.kv_heads_keys)
        keys += "".join(f"; not with `{key}` = {values[0]}" for key, values, _ in family.refused_values)
        lines.append(f"| {model_type} | {_engines(family.engines, listed_in(model_type))} | {keys} |")
    return lines


def document() -> str:
    """The whole text."""
    native = {name: family for name, family in FAMILIES.items() if family.native}
    own = {name: family for name, family in FAMILIES.items() if family.modeling and not family.is_converted}
    code = {
        name: family for name, family in FAMILIES.items() if not (family.native or family.modeling or family.becomes)
    }
    lines = [HEAD.format(native=len(native), own=len(own)), *table(native)]
    lines += [WRAPPED, "| type | decoder inside |", "|---|---|"]
    lines += [f"| {name} | {decoder} |" for name, decoder in sorted(COMPOSITES.items())]
    lines.append(STOCK)
    lines += [f"| type | becomes | where | {' | '.join(ENGINES[1:])} |", f"|---|---|---{'|---' * len(ENGINES[1:])}|"]
    for form in DECODERS:
        lines.append(f"| {form.model_type} | {form.stock} | {form.condition} | {_engines(run_in(form.stock))} |")
    lines += [OWN, "| type | file | converted |", "|---|---|---|"]
    for name, family in sorted(own.items()):
        assert family.modeling
        what = "decoder; the encoder with `--encoder`" if family.encoder else "all layers"
        lines.append(f"| {name} | {family.modeling.file}.py | {what} |")
    listed = sorted(each.stock_type for each in FAMILIES.values() if each.kv_heads == "listed")
    lines.append(LAYERWISE.format(types=len(listed), decilm=", ".join(DECILM_SOURCES), names=", ".join(listed)))
    lines += [CODE, *table(code)]
    lines += [RESTATED_HEAD, "| type | becomes |", "|---|---|"]
    lines += [f"| {name} | {stock} |" for name, stock in sorted(RESTATED.items(), key=lambda pair: pair[0].lower())]
    lines.append(REFUSED.rstrip())
    reasons = defaultdict(list)
    for model_type, reason in REFUSALS.items():
        reasons[reason].append(model_type)
    lines += [f"| {reason} | {', '.join(sorted(model_types))} |" for reason, model_types in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


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
