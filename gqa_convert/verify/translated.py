"""The checks on a result that was translated to another stock model type."""

import json
import re
from pathlib import Path
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.verify.checkpoint_reader import Weights, read_object
from gqa_convert.verify.geometry import Counts, Cut, Geometry
from gqa_convert.verify.layout import alone
from gqa_convert.verify.report import Failure
from gqa_convert.verify.rewriting import Rewriting, split_heads
from gqa_convert.verify.sizes import Sizes, query_scale, read_sizes
from gqa_convert.verify.target_architectures import TargetArchitecture, find_target_architecture, is_target
from gqa_convert.verify.translated_config import check_translated_config
from gqa_convert.verify.translated_heads import TranslatedHeads

TOKENIZER = "tokenizer_config.json"


def out_type(out: Path) -> Any:
    """The model type that OUT states; None if there is none to read."""
    try:
        return read_object(out / "config.json").get("model_type")
    except (OSError, ValueError):  # reported by the check on the config
        return None


def is_translated(out: Path, original: dict[str, Any], claimed: Any) -> bool:
    """Whether OUT is to be judged as a translation: it claims to be one, or its model type is that of one."""
    return claimed == "translated" or is_target(original.get("model_type"), out_type(out))


class Translation:
    """What SOURCE and OUT are, and what OUT must hold, once both are found to fit.

    Args:
        original: SOURCE's config.
        out: OUT's folder.
    """

    def __init__(self, original: dict[str, Any], out: Path) -> None:
        self.target_architecture: TargetArchitecture = find_target_architecture(original, out_type(out))
        self.sizes: Sizes = read_sizes(original, self.target_architecture)
        self.rewriting: Rewriting | None = None
        self.folded: TranslatedHeads | None = None
        """Where queries and outputs have absorbed maps of keys and values."""
        self._original = original

    def describe(self) -> str:
        return f"{self.target_architecture.source} translated to {self.target_architecture.out}"

    def read_geometry(self, source: Weights, out: Weights) -> Geometry:
        """How many K/V heads OUT has, by the rows of its first layer."""
        target_architecture, sizes = self.target_architecture, self.sizes
        prefix = (
            target_architecture.new.prefix
            if f"{target_architecture.new.prefix}{target_architecture.new.embedding}.weight" in out.file_of
            else ""
        )
        probe = f"{prefix}{target_architecture.new.layers}.0.{target_architecture.new.attention}.{target_architecture.new.heads[-1]}.weight"
        if probe not in out.file_of:
            raise Failure(f"{probe} is missing, so that OUT's number of K/V heads can't be told")
        rows, odd = divmod(out.shape(probe)[0], sizes.width)
        after, half = divmod(rows - sizes.heads, 2) if len(target_architecture.new.heads) == 1 else (rows, 0)
        if odd or half or after < 1 or sizes.heads % after or (target_architecture.out == "gpt_bigcode" and after != 1):
            raise Failure(f"{probe} has {out.shape(probe)[0]} rows, which are no fit number of heads of {sizes.width}")
        geometry = Geometry({"decoder": Counts(sizes.heads, sizes.heads, after)}, {}, translated=True)
        roles = tuple(alone(part, sizes.heads, sizes.width)[0] for part in ("query", "key", "value"))
        old = target_architecture.old
        for name in source.file_of:
            found = re.fullmatch(rf"(?:.*\.)?({re.escape(old.layers)}\.\d+\.{old.attention})\.([^.]+)\.weight", name)
            if found and found[2] in old.heads:
                geometry.modules[found[1]] = "decoder"
                geometry.cuts[name] = Cut(
                    "decoder", roles if len(old.heads) == 1 else (roles[old.heads.index(found[2])],)
                )
        if len(geometry.modules) != sizes.layers:
            raise ConfigError(
                f"{source.folder} has {len(geometry.modules)} attention modules where its config has {sizes.layers}"
            )
        return geometry

    def rewrite(self, source: Weights, groups: int, method: Any, seed: int) -> Rewriting:
        self.rewriting = Rewriting(source, self._original, self.target_architecture, self.sizes, groups, method, seed)
        return self.rewriting

    def check_config(self, config: dict[str, Any], groups: int) -> str:
        return check_translated_config(config, self._original, self.target_architecture, self.sizes, groups)

    def rounds_anew(self) -> str:
        """Why OUT's numbers may be off by roundings that SOURCE's have not; empty if they may not."""
        rewriting = self.rewriting
        assert rewriting is not None
        numbers = {rewriting.source.dtype(name) for name in rewriting.source.file_of if name.endswith(".weight")}
        if all(dtype.itemsize > 2 for dtype in numbers):
            return ""
        if self.target_architecture.folded:
            return "folding rounds half-precision weights anew"
        scales = [query_scale(self._original, self.sizes, layer) for layer in range(self.sizes.layers)]
        return "scaling rounds half-precision queries anew" if any(scale != 1.0 for scale in scales) else ""

    def replace_heads(self, model: Any) -> int:
        """Give the loaded SOURCE the merged heads, each as often as its group has heads; returns how many parameters
        changed.
        """
        return self.pool_heads(model) if self.folded is None else self.folded.replace(model)

    def pool_heads(self, model: Any) -> int:
        """The same with heads recomputed from SOURCE's: their mean, where they can't be."""
        import torch

        rewriting, target_architecture = self.rewriting, self.target_architecture
        assert rewriting is not None
        if rewriting.groups == self.sizes.heads:
            return 0
        pattern = re.compile(
            rf"(?:.*\.)?{target_architecture.old.layers}\.(\d+)\.{target_architecture.old.attention}\.([^.]+)\.(weight|bias)"
        )
        replaced = 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found = pattern.fullmatch(name)
                if found is None or found[2] not in target_architecture.old.heads:
                    continue
                layer, at = rewriting.layer(int(found[1])), target_architecture.old.heads.index(found[2])
                if target_architecture.layout != "alone":
                    views = split_heads(target_architecture, parameter, self.sizes.heads)
                    for role in ("key", "value"):
                        views[role].copy_(layer.in_sources_order(role, found[3]).reshape(views[role].shape))
                elif at:
                    parameter.copy_(
                        layer.in_sources_order(("query", "key", "value")[at], found[3]).reshape(parameter.shape)
                    )
                replaced += target_architecture.layout != "alone" or at > 0
        if not replaced:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        return replaced

    def completed(self) -> frozenset[str]:
        """Files of SOURCE that OUT has in other words."""
        return frozenset({TOKENIZER}) if self.target_architecture.special_tokens else frozenset()

    def check_tokenizer_config(self, out: Path, source: Path) -> str:
        """What SOURCE's tokenizer class has by default is written out for OUT's; all else is SOURCE's."""
        had = (source / TOKENIZER).is_file()
        if not had and not (source / "tokenizer.json").is_file():
            if (out / TOKENIZER).is_file():
                raise Failure(f"{TOKENIZER} is not in SOURCE")
            return "SOURCE has none"
        stated = read_object(source / TOKENIZER) if had else {}
        named = (
            stated.get("tokenizer_class") or self._original.get("tokenizer_class") or self.target_architecture.tokenizer
        )
        usual = str(named).startswith(
            self.target_architecture.tokenizer
        )  # another class has these tokens only where they are stated
        added = {key: "<|endoftext|>" for key in self.target_architecture.special_tokens if usual and key not in stated}
        if not (out / TOKENIZER).is_file():
            if had or added:
                raise Failure(f"{TOKENIZER} is missing")
            return "SOURCE has none"
        found, wanted = read_object(out / TOKENIZER), stated | added
        if wanted.get("tokenizer_class") == "TokenizersBackend":  # which only transformers 5 knows
            wanted["tokenizer_class"] = "PreTrainedTokenizerFast"
        for key in sorted(set(found) | set(wanted)):
            if (
                json.dumps([found.get(key)], sort_keys=True) != json.dumps([wanted.get(key)], sort_keys=True)
                or key not in found
            ):
                raise Failure(f"{TOKENIZER} has {key} = {found.get(key)!r} where {wanted.get(key)!r} belongs")
        return f"SOURCE's, and {len(added)} special token(s) that its class has by default"
