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

Look for the `model_type` that your checkpoint's `config.json` states. `gqa-convert convert SOURCE --groups N --dry-run` gives the same answer for the checkpoint itself, before anything is
written.

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

Each type is tested against its own source: logits, decoding with and without a cache, and the number of heads in the cache. The columns of the engines say:

- **yes**: a tiny random checkpoint of the type, converted from 12 to 3 K/V heads, gave transformers' tokens and logits in the engine.
- **listed**: the engine's list of architectures names the type, but it was not run here. `convert --dry-run` says "untested".
- an empty cell: it failed, or was not tried. `convert --dry-run` says "not known".

`gqa-convert check-serving OUT` tests your own result in the engines that you have installed ([serving](serving.md)).

## Where engines differ from transformers

These differences were found with vLLM 0.32.0 on a CPU (with transformers 5.19) and llama.cpp as of llama-cpp-python 0.3.36, each against transformers 5.23 on the
same files.

- **Sliding windows.** llama.cpp attends to all tokens in mistral, mixtral, phi3 and starcoder2, and in qwen2 and qwen3 with
  `use_sliding_window`, so tokens differ beyond the window. vLLM lets cohere2 and cohere2_moe see one token more than the window. `convert --dry-run`
  states up to how many tokens the result is the same.
- **gpt_oss in llama.cpp** has logits that differ by up to 5.3% of their spread: it rounds the bounds of YaRN and ignores `truncate: false`.
- **dots1, phi and olmoe in llama.cpp** load only with as many K/V heads as query heads. **ernie4_5_moe** does not load in llama.cpp either.
- **lfm2_moe in vLLM** gave different tokens, **gemma3n_text** different logits, **phimoe** no finite logits; **bamba** and **solar_open in llama.cpp** gave different tokens.
- vLLM on a CPU in float32 fails with errors in falcon_h1, granitemoehybrid, jamba, nemotron_h and qwen3_next.
- **glm and nemotron in llama.cpp** load if `head_dim` is `hidden_size` / heads; granitemoehybrid is right there without rotary positions and wrong with them.
- llama.cpp's converter and vLLM's own classes need config keys that transformers 5 does not write (`rotary_pct` of cohere2, `conv_dim` of lfm2 and others): `convert` keeps them if the source has them.

## Native

The result keeps its type, and the config key states its number of K/V heads.
"""

WRAPPED = """
## Wrappers

The decoder inside a vision-language model is converted and all else stays byte for byte. The count is written to `text_config`, or to the config itself where an early one (Qwen2-VL) states the decoder's keys there. Each type is tested with the decoder named here, with an image among its inputs; another decoder of the table
above is accepted too if the config names it. Methods that read text run the decoder alone, without an image; an mllama, whose cross-attention runs on images alone, is merged from its weights. `verify` also compares a random image and a question, where the folder has a processor that runs on this machine. transformers'
class of the wrapper loads the result (`AutoModelForImageTextToText`); no other engine was tried.
"""

STOCK = """
## Rewritten as a stock type

Stock classes of another type compute the same function and have a K/V-head count. `convert` rewrites such a source as one of that type first, with all its heads, in a folder beside OUT that goes afterwards: it folds norms into projections, reorders rotary rows and fills missing biases with zeros. Then it converts that like any
checkpoint of the type. Logits of the rewritten source are the source's up to rounding, which `verify` checks. `--no-native` keeps the source's type; `--native` says why a source is not rewritten.

phi with fewer K/V heads than query heads loads in transformers and in vLLM; llama.cpp assumes as many K/V heads as query heads.
"""

OWN = """
## Modelling file

The result has the type `gqa_...` and carries two Python files, the one below and `gqa_common.py`: transformers 5 loads it with `trust_remote_code=True`, without gqa-convert being installed. Where it is installed, `gqa_convert.register_modeling()` makes plain `from_pretrained` work. Other engines do not know these types. All have the config keys
`num_key_value_heads` and, with an encoder, `encoder_num_key_value_heads` (written with `--encoder`). In encoder-decoder models, self-attention and cross-attention of the decoder are converted, and both caches shrink.
"""

LAYERWISE = """
## Layers that differ

These {types} types may have [a number of K/V heads for each layer](methods.md#a-number-for-each-layer). The result has the type `gqa_...` and carries the file
`gqa_by_layer.py`, by which transformers 5 loads it with `trust_remote_code=True`; `num_key_value_heads` is a list. No other engine runs it. {decilm} become a DeciLM
where they can: `nemotron-nas`, with the file `gqa_decilm.py` and the config key `block_configs`, which vLLM and llama.cpp [run](serving.md#layers-that-differ) with code of their own.
Each type is tested against its stock class with the merged heads repeated: logits, and decoding with a cache.

{names}
"""

CODE = """
## Code in the checkpoint

transformers loads the result with the code in the checkpoint (`trust_remote_code=True`), which gqa-convert copies and never runs.
"""

RESTATED_HEAD = """
## Rewritten first

These types load with custom code and compute what a stock type computes. `convert` rewrites such a source in the same way: it renames tensors, splits fused projections and writes the stock type's config. `verify --source SOURCE` does the same. Code from the checkpoint is never run; the code of its model is
left behind, that of its tokenizer is kept. With `--groups` at the source's own number of K/V heads, the result is the rewritten source, which serves as the source in every other command. Logits are the source's up to rounding. Functions that no stock class computes are refused: the ALiBi of Baichuan 13B, the experts and the sparse attention of MiniCPM, the stable embedding of open_llama.

Qwen is the same up to `seq_length` tokens, beyond which its own code scales positions and queries by the length of the text.
"""

REFUSED = """
## Refused

These model types are known and cannot be converted, for the reason given.
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
    code = {name: family for name, family in FAMILIES.items() if not family.native and not family.modeling}
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
    lines.append(REFUSED)
    reasons = defaultdict(list)
    for model_type, reason in REFUSALS.items():
        reasons[reason].append(model_type)
    lines += [f"- {reason}: {', '.join(sorted(model_types))}" for reason, model_types in sorted(reasons.items())]
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
