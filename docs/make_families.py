"""Writes families.md from the tables in gqa_convert/. With --check: says whether the file is up to date."""

import sys
from collections import defaultdict
from pathlib import Path

from gqa_convert.families import target_architectures as target_architectures
from gqa_convert.families.engines import listed_in
from gqa_convert.families.table import FAMILIES, REFUSALS, RESTATED, Family

DOCUMENT = Path(__file__).with_name("families.md")

HEAD = """\
# Model families

Written by `docs/make_families.py` from `families.py`, `engines.py` and `translation/homes.py` in `gqa_convert/`; edit the tables there,
then run the script.

{native} model types (`model_type` in `config.json`) have a grouped-query form that stock classes of their own type load, {own} get a
modelling file, and one brings code of its own. `gqa-convert plan` says which route a checkpoint takes and what loads the result. Each type
is tested against its own source: logits, decoding with and without a cache, heads in the cache.

- Projections: names inside the attention module, in files. `[q | k | v]` is one fused projection; `q (2x)` also yields a gate.
- Key norm: `shared` normalises each head by itself, with one gain for all or none; `per head` has a gain for each head, in one
  tensor or in a list of them; `full` runs over all heads at once. Some types have it only where their config says so.
- Rotary: which numbers of a head form a pair, `half` (j, j + n/2) or `interleaved` (2j, 2j + 1). Some types leave out layers.
- Engines: transformers is tested for every type. vLLM and llama.cpp stand where a tiny random checkpoint of the type, converted from 12 to 3
  K/V heads, gave transformers' tokens and logits; *in italics* where only their lists of architectures name it. `gqa-convert plan` says
  "yes" and "by its list"; "not known to" is what failed or was not tried. Try the engine on your own: `gqa-convert check-serving`.

## What engines compute otherwise

Found with vLLM 0.32.0 on a CPU (with transformers 5.19) and llama.cpp as of llama-cpp-python 0.3.36, each against transformers 5.23 on the
same files.

- **Sliding windows.** llama.cpp attends to everything in mistral, mixtral, phi3 and starcoder2, and in qwen2 and qwen3 with
  `use_sliding_window`: from the window on, other tokens. vLLM lets cohere2 and cohere2_moe see one token more than the window. `plan`
  says up to how many tokens the result is the same.
- **gpt_oss in llama.cpp** has other logits, by up to 5.3% of their spread: it rounds the bounds of YaRN (`truncate: false` is not heard).
- **dots1 in llama.cpp** is taken to have as many K/V heads as heads, and a converted one does not load. So it is with **phi**.
- **ernie4_5_moe in llama.cpp** does not load: the converter computes the width of the shared experts from the number of K/V heads.
- **olmoe in llama.cpp** loads with as many K/V heads as heads only: its norm of keys is taken to be as wide as that of queries.
- **lfm2_moe in vLLM** gave other tokens, **gemma3n_text** other logits, **phimoe** none that are finite; **bamba** and **solar_open in
  llama.cpp** gave other tokens.
- vLLM on a CPU in float32 ends with errors in falcon_h1, granitemoehybrid, jamba, nemotron_h and qwen3_next.
- **glm and nemotron in llama.cpp** load where heads are hidden size / heads wide; granitemoehybrid is right there without rotary positions,
  and wrong with them.
- llama.cpp's converter and vLLM's own classes want config keys that transformers 5 does not write (`rotary_pct` of cohere2, `rotary_dim`
  and `scoring_func` of minimax_m2, `score_func` of afmoe, `conv_dim` of lfm2, "attention" and "mamba" as layer types of granitemoehybrid):
  `convert` keeps them where the source has them.

## Native

The result keeps its type; the config key says how many K/V heads there are.
"""

TRANSLATED = """
## Translated

Stock classes of another type compute the same function and have a K/V-head count: norms are folded into projections, rotary rows put in
the other order, missing biases filled with zeros. With as many K/V heads as before, logits are the source's up to rounding (tested to
1e-5 in float32). This route is taken where it is open, unless `--no-native` is given; `--native` says why it is closed.

phi with fewer K/V heads than query heads loads in transformers (4.57 and 5 were run) and in vLLM, by transformers' class; llama.cpp takes it
to have as many K/V heads as heads.
"""

OWN = """
## Own file

The result has the type `gqa_...` and brings one Python file: transformers 5 loads it with `trust_remote_code=True`, without gqa-convert
being installed. Where it is installed, `gqa_convert.register_modeling()` makes plain `from_pretrained` work. Other engines do not know
these types. All have the config keys `num_key_value_heads` and, with an encoder, `encoder_num_key_value_heads` (written with `--encoder`).
In encoder-decoder models self-attention and cross-attention of the decoder are converted, and both caches shrink. At the source's own count
nothing changes but the two `multi_query` keys, and stock classes load the copy.

- Fused projections lie in the source as `[q k v] per head` (Falcon: per K/V head, `[queries k v]`), as `4 x [q | v | k]` or as
  `[q | k | v]`; the result always has `[q | k | v]`.
"""

CODE = """
## Code of its own

transformers loads the result by the code in the checkpoint (`trust_remote_code=True`), which is copied and never run by gqa-convert.
"""

RESTATED_HEAD = """
## Rewritten first

These types load by code of their own, in the names that it has, and compute what a stock type computes. `gqa-convert restate SOURCE STOCK`
writes a checkpoint of the stock type: tensors are renamed, fused projections split, config keys put in the stock type's words; K/V heads stay
as many as they are. Code from the checkpoint is never run, and code for its model is left behind; a tokenizer's is kept. Then convert STOCK,
which also stands for the source in every other command. Logits are the source's up to rounding: each type is tested, to 1e-5 in float32,
against a forward pass written down from its published code. Whatever a stock class does not compute is refused: the ALiBi of Baichuan 13B,
the experts and the sparse attention of MiniCPM, the stable embedding of open_llama.

Baichuan 2 scales the rows of its output projection to length one in every forward pass; here that is done once. Qwen is the same up to
`seq_length` tokens, beyond which its own code scales positions and queries by the length of the text.
"""

REFUSED = """
## Refused

Model types that are known and can't be converted, and why.
"""


HOMES = (
    (target_architectures.PHI_FROM_GPT_NEOX, "`use_parallel_residual` (Pythia, GPT-NeoX-20B)"),
    (
        target_architectures.STARCODER2_FROM_GPT_NEOX,
        "not `use_parallel_residual`, and rotary positions on whole heads (RedPajama-INCITE)",
    ),
    (target_architectures.PHI_FROM_GPTJ, "any"),
    (target_architectures.PHI_FROM_CODEGEN, "any"),
    (target_architectures.GPT_BIGCODE_FROM_GPT2, "one K/V head, no cross-attention"),
)


def projections(family: Family) -> str:
    """The attention modules with the projections in them."""
    query = family.query + (f" ({family.query_outputs}x)" if family.query_outputs > 1 else "")
    layout = {"blocks": "[q | k | v]", "grouped": "[q k v] per head", "quarters": "4 x [q | v | k]"}[
        family.fused_layout
    ]
    inside = f"{family.fused} {layout}" if family.fused else f"{query}, {family.key}, {family.value}"
    return f"{' or '.join(family.attention)}: {inside}, {family.output}".replace("|", "\\|")


def key_norm(family: Family) -> str:
    """The kind of norm, and its name."""
    if family.key_norm == "none":
        return "none"
    return f"{family.key_norm.replace('_', ' ')} ({family.key_norm_name})"


def _engines(run: frozenset[str], listed: frozenset[str] = frozenset()) -> str:
    return ", ".join(f"*{name}*" if name in listed else name for name in sorted(run | listed, key=str.lower))


def table(families: dict[str, Family]) -> list[str]:
    """A row for each of several families."""
    lines = ["| type | projections | key norm | rotary | K/V-head count | engines |", "|---|---|---|---|---|---|"]
    for model_type, family in sorted(families.items()):
        keys = ", ".join(f"`{key}`" for key in family.kv_heads_keys)
        keys += "".join(f"; not with `{key}`" for key, _ in family.refused_when)
        keys += "".join(f"; only with `{key}`" for key, _ in family.refused_unless)
        engines = _engines(family.engines, listed_in(model_type))
        lines.append(
            f"| {model_type} | {projections(family)} | {key_norm(family)} | {family.rotary} | {keys} | {engines} |"
        )
    return lines


def document() -> str:
    """The whole text."""
    native = {name: family for name, family in FAMILIES.items() if family.native}
    own = {name: family for name, family in FAMILIES.items() if family.modeling and family.modeling.model_type != name}
    code = {name: family for name, family in FAMILIES.items() if not family.native and not family.modeling}
    lines = [HEAD.format(native=len(native), own=len(own)), *table(native), TRANSLATED]
    lines += ["| type | becomes | where | engines |", "|---|---|---|---|"]
    for target_architecture, where in HOMES:
        lines.append(
            f"| {target_architecture.source_type} | {target_architecture.model_type} | {where} | {_engines(target_architectures.engines_of(target_architecture))} |"
        )
    lines += [OWN, "| type | file | projections | converted | rotary |", "|---|---|---|---|---|"]
    for name, family in sorted(own.items()):
        assert family.modeling
        what = "decoder; the encoder with `--encoder`" if family.encoder else "all layers"
        lines.append(f"| {name} | {family.modeling.file}.py | {projections(family)} | {what} | {family.rotary} |")
    lines += [CODE, *table(code)]
    lines += [RESTATED_HEAD, "| type | becomes |", "|---|---|"]
    lines += [f"| {name} | {stock} |" for name, stock in sorted(RESTATED.items(), key=lambda pair: pair[0].lower())]
    lines.append(REFUSED)
    reasons = defaultdict(list)
    for refusal in REFUSALS.values():
        reasons[refusal.reason].append(refusal.model_type)
    lines += [f"- {reason}: {', '.join(sorted(model_types))}" for reason, model_types in reasons.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write the document, or with --check compare it; the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: make_families.py [--check]", file=sys.stderr)
        return 2
    if not arguments:
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif not DOCUMENT.is_file() or DOCUMENT.read_text(encoding="utf-8") != document():
        print(f"{DOCUMENT} is out of date: run docs/make_families.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
