"""A translation: the target architecture, the heads of both checkpoints, and SOURCE's model given OUT's heads."""

import re
from pathlib import Path
from typing import Any

from gqa_convert.errors import ConfigError
from gqa_convert.verify.checkpoint_reader import CONFIG, Weights, read_object
from gqa_convert.verify.geometry import Counts, Cut, Geometry
from gqa_convert.verify.layout import separate
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.translated.heads import TranslatedHeads
from gqa_convert.verify.translated.rewriting import Rewriting
from gqa_convert.verify.translated.sizes import Sizes, query_scale, read_sizes
from gqa_convert.verify.translated.source_heads import ROLES, split_heads
from gqa_convert.verify.translated.target_architectures import TargetArchitecture, find_target_architecture, is_target


def out_type(out: Path) -> Any:
    """The model type that OUT states; None if its config cannot be read, which the check on configs reports."""
    try:
        return read_object(out / CONFIG).get("model_type")
    except (OSError, ValueError):
        return None


def is_translated(out: Path, original: dict[str, Any], claimed: Any) -> bool:
    """Whether OUT is judged as a translation: it claims to be one, or its model type is the target of one."""
    return claimed == "translated" or is_target(original.get("model_type"), out_type(out))


class Translation:
    """What SOURCE and OUT are, once OUT's type is known to compute what SOURCE computes.

    Args:
        original: SOURCE's config.
        out: OUT's folder.

    Raises:
        Failure: OUT's type cannot compute what SOURCE computes.
    """

    def __init__(self, original: dict[str, Any], out: Path) -> None:
        self.target: TargetArchitecture = find_target_architecture(original, out_type(out))
        self.sizes: Sizes = read_sizes(original, self.target)
        self.rewriting: Rewriting | None = None
        """Set by `rewrite`."""
        self.folded: TranslatedHeads | None = None
        """Both checkpoints' heads, where the method folds maps into queries and outputs."""
        self._original = original

    def describe(self) -> Finding:
        """Both model types."""
        return Finding(f"{self.target.source} translated to {self.target.out}")

    def read_geometry(self, source: Weights, out: Weights) -> Geometry:
        """The heads of both checkpoints; OUT's number is that of its first layer's rows."""
        sizes, old = self.sizes, self.target.old
        geometry = Geometry({"decoder": Counts(sizes.heads, sizes.heads, self._count_in_out(out))}, {}, translated=True)
        roles = tuple(separate(part, sizes.heads, sizes.head_dim)[0] for part in ("query", "key", "value"))
        pattern = re.compile(rf"(?:.*\.)?({re.escape(old.layers)}\.\d+\.{old.attention})\.([^.]+)\.weight")
        for name in source.file_of:
            found = pattern.fullmatch(name)
            if found and found[2] in old.heads:
                geometry.modules[found[1]] = "decoder"
                runs = roles if len(old.heads) == 1 else (roles[old.heads.index(found[2])],)
                geometry.cuts[name] = Cut("decoder", runs)
        if len(geometry.modules) != sizes.layers:
            raise ConfigError(
                f"{source.folder} has {len(geometry.modules)} attention modules, but its config states {sizes.layers}: "
                "copy the checkpoint again"
            )
        return geometry

    def _count_in_out(self, out: Weights) -> int:
        new, sizes = self.target.new, self.sizes
        prefix = new.prefix if f"{new.prefix}{new.embedding}.weight" in out.file_of else ""
        name = f"{prefix}{new.layers}.0.{new.attention}.{new.heads[-1]}.weight"
        if name not in out.file_of:
            raise Failure(f"{name} is missing, from which OUT's number of K/V heads follows")
        rows, odd = divmod(out.shape(name)[0], sizes.head_dim)
        after, half = divmod(rows - sizes.heads, 2) if len(new.heads) == 1 else (rows, 0)
        if odd or half or after < 1 or sizes.heads % after or (self.target.out == "gpt_bigcode" and after != 1):
            raise Failure(
                f"{name} has {out.shape(name)[0]} rows, which do not make a possible number of heads of {sizes.head_dim}"
            )
        return after

    def rewrite(self, source: Weights, groups: int, method: Any) -> Rewriting:
        """The formulas of OUT's tensors."""
        self.rewriting = Rewriting(source, self._original, self.target, self.sizes, groups, method)
        return self.rewriting

    def rounds_anew(self) -> str:
        """Why OUT's numbers may have roundings that SOURCE's have not; empty if they cannot."""
        assert self.rewriting is not None
        source = self.rewriting.source
        if all(source.dtype(name).itemsize > 2 for name in source.file_of if name.endswith(".weight")):
            return ""
        if self.target.folded:
            return "folding rounds half-precision weights anew"
        scales = [query_scale(self._original, self.sizes, layer) for layer in range(self.sizes.layers)]
        return "scaling rounds half-precision queries anew" if any(scale != 1.0 for scale in scales) else ""

    def replace_heads(self, model: Any) -> int:
        """Give the loaded SOURCE the merged heads, each repeated for its group.

        Returns:
            How many parameters changed.
        """
        return self.pool_heads(model) if self.folded is None else self.folded.replace(model)

    def pool_heads(self, model: Any) -> int:
        """Give the loaded SOURCE heads merged from its own: by the method, or by their mean for a method that folds.

        Returns:
            How many parameters changed.
        """
        import torch

        rewriting, old = self.rewriting, self.target.old
        assert rewriting is not None
        if not rewriting.changed:
            return 0
        pattern = re.compile(rf"(?:.*\.)?{old.layers}\.(\d+)\.{old.attention}\.([^.]+)\.(weight|bias)")
        replaced = 0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found = pattern.fullmatch(name)
                if found is None or found[2] not in old.heads:
                    continue
                layer = rewriting.layer(int(found[1]))
                if self.target.layout == "separate":
                    role = ROLES[old.heads.index(found[2])]
                    views = {role: parameter}
                else:
                    views = split_heads(self.target, parameter, self.sizes.heads)
                views.pop("query", None)
                for role, view in views.items():
                    view.copy_(layer.repeated(role, found[3]).reshape(view.shape))
                replaced += bool(views)
        if not replaced:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        return replaced
