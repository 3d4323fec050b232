"""Writes families.md from the table in gqa_convert/families.py. With --check: says whether the file is up to date."""

import sys
from collections import defaultdict
from pathlib import Path

from gqa_convert.families import FAMILIES, REFUSALS, Family

DOCUMENT = Path(__file__).with_name("families.md")

HEAD = """\
# Model families

Written by `docs/make_families.py` from `gqa_convert/families.py`; edit the table there, then run the script.

## Converted

{count} model types (`model_type` in `config.json`) have a grouped-query form that stock software loads. Each is tested against
its own source: logits, greedy decoding with and without a cache, heads in the cache.

- Projections: names inside the attention module, in files. `[q | k | v]` is one fused projection; `q (2x)` also yields a gate.
- Key norm: `shared` normalises each head by itself, with one gain for all or none; `per head` has a gain for each head, in one
  tensor or in a list of them; `full` runs over all heads at once. Some types have it only where their config says so.
- Rotary: which numbers of a head form a pair, `half` (j, j + n/2) or `interleaved` (2j, 2j + 1). Some types leave out layers.
- Engines: transformers is tested for every type. vLLM and llama.cpp are named from their lists of architectures, without having
  been run here; others may load a type too. Try the engine on a converted checkpoint before you rely on it.
"""

REFUSED = """
## Refused

Model types that are known and can't be converted, and why.
"""


def projections(family: Family) -> str:
    """The attention modules with the projections in them."""
    query = family.query + (f" ({family.query_outputs}x)" if family.query_outputs > 1 else "")
    inside = f"{family.fused} [q | k | v]" if family.fused else f"{query}, {family.key}, {family.value}"
    return f"{' or '.join(family.attention)}: {inside}, {family.output}".replace("|", "\\|")


def key_norm(family: Family) -> str:
    """The kind of norm, and its name."""
    if family.key_norm == "none":
        return "none"
    return f"{family.key_norm.replace('_', ' ')} ({family.key_norm_name})"


def document() -> str:
    """The whole text."""
    lines = [HEAD.format(count=len(FAMILIES))]
    lines += ["| type | projections | key norm | rotary | K/V-head count | engines |", "|---|---|---|---|---|---|"]
    for model_type, family in sorted(FAMILIES.items()):
        keys = ", ".join(f"`{key}`" for key in family.kv_heads_keys)
        keys += "".join(f"; not with `{key}`" for key, _ in family.refused_when)
        engines = ", ".join(sorted(family.engines, key=str.lower))
        lines.append(f"| {model_type} | {projections(family)} | {key_norm(family)} | {family.rotary} | {keys} | {engines} |")
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
