"""The checks on what the models compute: OUT against SOURCE with OUT's heads repeated.

transformers loads OUT, then SOURCE. Of the code in checkpoints, only modelling files that equal this package's own run.
"""

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families import loading
from gqa_convert.families.family import Modeling
from gqa_convert.verify import heads
from gqa_convert.verify.geometry import read_geometry, span_of
from gqa_convert.verify.inputs import Progress
from gqa_convert.verify.optimum import read_orders
from gqa_convert.verify.probe import STEPS, Probe
from gqa_convert.verify.report import Failure, VerificationReport, first_line
from gqa_convert.verify.result import FITTED, Result
from gqa_convert.verify.weights import CONFIG, INDEX

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""
NEGLIGIBLE = 1e-3
"""Nats per token that roundings to 16 bits may cause. Where mean pooling loses nothing, as with heads that were repeated
upward, no method can do better.
"""
MODULE_LIMIT = 1.25
"""How many times mean pooling's error the error of a module may be. Short fits of tiny models have 0.5 to 1.11 in their worst
module, because one module makes up for others; an output that has nothing to do with SOURCE's has 1.4 or more."""
_BLOCK = 256
"""Tokens whose divergence is computed at a time."""


class ModelChecks:
    """The checks on OUT, which is loaded first and leaves what it computed, and on SOURCE.

    Args:
        result: OUT.
    """

    def __init__(self, result: Result) -> None:
        self.result, self.inputs = result, result.inputs

    def load_out(self) -> str:
        """Load OUT and run it."""
        import transformers

        inputs = self.inputs
        loaded = load_model(inputs.out, inputs.numbers, self.result.modeling)
        model = loaded.model
        cross = any(module.kind == "cross" for module in self.result.geometry.modules)
        self.probe = Probe(model, cross=cross)
        self.has_head = loaded.has_language_model
        self.outputs = "logits" if self.has_head else "hidden states"
        self.output, self.decoding = self.probe.output(model), self.probe.decode(model)
        self.attention = heads.attention_parameters(model, inputs.family, folds=self.result.folds)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        own = " of its own modelling file" if self.result.modeling else ""
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{loaded.class_name}{own} in {dtype}, transformers {transformers.__version__}"

    def load_source(self) -> str:
        """Load SOURCE and find its heads in memory, where names may differ from those in files."""
        inputs = self.inputs
        loaded = load_model(inputs.source.folder, inputs.numbers, None)
        self.source = loaded.model
        shapes = {name: tuple(parameter.shape) for name, parameter in self.source.named_parameters()}
        self.geometry = read_geometry(inputs.family, inputs.decoder_config, shapes, self.shapes, may_differ=True)
        self.rewritten = self.probe.output(self.source) if inputs.is_rewritten else None
        with torch.no_grad():
            for name, parameter in self.source.named_parameters():
                if name in inputs.source.result_dtypes:  # a rewritten SOURCE holds it in a wider type than OUT
                    parameter.copy_(parameter.to(inputs.source.result_dtypes[name]))
        self.repeated = heads.repeated_heads(self.geometry, self.source, self.attention, folds=self.result.folds)
        return loaded.class_name

    def same_outputs(self) -> str:
        """SOURCE with OUT's heads computes what OUT computes."""
        if not self.repeated and self.result.geometry.merged:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        with heads.replaced(self.source, self.repeated):
            found = self.probe.output(self.source)
            self.source_decoding = self.probe.decode(self.source)
        what = f"{len(self.repeated)} parameters of SOURCE replaced"
        return self._judge(self.output, found, what)

    def same_steps(self) -> str:
        """OUT's steps on a cache compute what those of SOURCE with OUT's heads compute."""
        ours, theirs = self.decoding, self.source_decoding
        if theirs.output is None:
            return f"not compared: SOURCE cannot decode with a cache ({theirs.problem})"
        if ours.output is None:
            raise Failure(f"OUT cannot decode with a cache ({ours.problem})")
        return self._judge(ours.output, theirs.output, f"{STEPS} steps on the cache of a prefill")

    def better_than_mean(self) -> str:
        """OUT's predictions are nearer to SOURCE's than those of mean pooling."""
        if not self.has_head:
            raise Failure("OUT has no language-model head, and a fit is judged by its predictions")
        expected = self.probe.output(self.source)
        with heads.replaced(self.source, heads.pooled_heads(self.geometry, self.source)):
            mean = divergence(expected, self.probe.output(self.source))
        found = divergence(expected, self.output)
        detail = f"KL from SOURCE {found:.4g} nats per token, {mean:.4g} for mean pooling"
        if not (found < mean or found <= NEGLIGIBLE):
            raise Failure(detail)
        return detail

    def module_outputs(self) -> str:
        """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs."""
        pooled = heads.pooled_heads(self.geometry, self.source)
        errors = heads.compare_modules(
            self.geometry, self.source, lambda: self.probe.output(self.source), self.repeated, pooled
        )
        ratios = {name: ours / max(mean, NEGLIGIBLE) for name, (ours, mean) in errors.items()}
        worst = max(ratios, key=lambda name: ratios[name])
        detail = f"{ratios[worst]:.2f} times mean pooling's error in {worst}"
        if not ratios[worst] <= MODULE_LIMIT:
            raise Failure(f"{detail}, more than {MODULE_LIMIT} times")
        return f"at most {detail}"

    def same_in_order(self) -> str:
        """SOURCE computes the same with its heads in the order in which OUT claims that they were merged. Positions or
        biases that belong to the place of a head would change.
        """
        claimed = read_orders(self.result.claims, self.result.geometry)
        modules = [module for module in self.result.geometry.modules if module.name in claimed]
        orders = {(module.kind, module.number): claimed[module.name] for module in modules}
        expected = self.probe.output(self.source)
        with heads.replaced(self.source, heads.reordered_heads(self.geometry, self.source, orders)):
            found = self.probe.output(self.source)
        return self._judge(found, expected, f"SOURCE with the heads of {len(orders)} modules in another order")

    def same_as_original(self) -> str:
        """The rewritten SOURCE computes what SOURCE computes."""
        if self.inputs.why_not_loaded:
            return f"not compared: {self.inputs.why_not_loaded}"
        del self.source
        original = load_model(self.inputs.original.folder, self.inputs.numbers, None).model
        what = f"the rewritten source against SOURCE, a {self.inputs.original_config['model_type']}"
        return self._judge(self.rewritten, self.probe.output(original), what)

    def cache_heads(self) -> str:
        """Every layer's cache has the shape of SOURCE's, with OUT's number of K/V heads. A copy's caches are SOURCE's:
        Falcon repeats K/V heads before it caches them.
        """
        geometry = self.result.geometry
        crosses = [module.after for module in geometry.modules if module.kind == "cross"]
        found = []
        for kind, counts in (("self", geometry.counts), ("cross", crosses)):
            ours, theirs = (each.caches.get(kind, []) for each in (self.decoding, self.source_decoding))
            # the cross-attention of a composite model, to an image, does not run on text
            if not counts or (kind == "cross" and self.inputs.family.wrapped and not ours and not theirs):
                continue
            if not ours or len(ours) != len(theirs):
                raise Failure(
                    f"{len(ours)} layers of {kind}-attention in OUT keep keys, {len(theirs)} in SOURCE do "
                    f"{self.decoding.problem}"
                )
            if len(set(counts)) == 1:  # some layers may keep no keys
                counts = counts[:1] * len(ours)
            for number, (layer, count, shapes) in enumerate(zip(ours, counts, theirs, strict=True)):
                wanted = tuple((rows, count, *rest) for rows, _, *rest in shapes) if geometry.changed else shapes
                if layer != wanted:
                    raise Failure(f"layer {number} of {kind}-attention caches shapes {layer}, expected {wanted}")
            span = span_of([keys[1] for keys, _ in ours])
            found.append(f"{span} heads in each of {len(ours)} layers of {kind}-attention, {theirs[0][0][1]} in SOURCE")
        return "; ".join(found)

    def _judge(self, ours: Any, theirs: Any, what: str) -> str:
        """The difference of two outputs in words.

        Raises:
            Failure: it is over the tolerance.
        """
        error = self.probe.difference(ours, theirs)
        words = f"largest difference {error:.2g} of the spread of the {self.outputs}"
        if not error <= self.probe.tolerance:
            raise Failure(f"{words}, over the tolerance of {self.probe.tolerance:g}: {what}")
        return f"{words}: {what}"


def check_models(report: VerificationReport, result: Result, progress: Progress) -> None:
    """Load and run OUT, then SOURCE, and compare what they compute."""
    checks = ModelChecks(result)
    loads = report.check("loads", checks.load_out)
    progress("logits", 1, 3)
    loads = loads and report.check("source loads", checks.load_source)
    progress("logits", 2, 3)
    if not loads:
        return
    if result.method == FITTED:
        report.check("better than mean", checks.better_than_mean)
        report.check("module outputs", checks.module_outputs)
    if result.claims.get("head_order"):
        report.check("head order", checks.same_in_order)
    report.check(checks.outputs, checks.same_outputs)
    report.check("cache heads", checks.cache_heads)
    report.check("cached decoding", checks.same_steps)
    progress("logits", 3, 3)
    if result.inputs.is_rewritten:
        report.check("rewritten source", checks.same_as_original)


def load_model(folder: Path, numbers: int, code: Modeling | None) -> loading.AnyModel:
    """A model on the CPU in evaluation mode, in float32 unless it is too large.

    Args:
        folder: the checkpoint.
        numbers: about how many it has.
        code: the modelling files in it that may run.

    Raises:
        Failure: transformers cannot load it, or finds no tensor for one of its parameters.
    """
    dtype = torch.float32 if numbers <= FLOAT32_LIMIT else "auto"
    try:
        if code is None:
            found = loading.load_any_model(folder, dtype)
        else:
            with tempfile.TemporaryDirectory() as root:
                alone = Path(root) / "gqa_checkpoint"  # a constant name: transformers keeps a copy of the code under it
                _link_with_code(folder, code, alone)
                found = loading.load_any_model(alone, dtype, run_code=True)
    except Exception as problem:
        raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if found.missing:
        raise Failure(
            f"transformers finds no fitting tensor for {min(found.missing)} in {folder} ({len(found.missing)} missing)"
        )
    return found


def _link_with_code(out: Path, code: Modeling, folder: Path) -> None:
    """Make a folder with OUT's weights, configs and modelling files, and none of the other code beside them."""
    folder.mkdir()
    for path in [out / CONFIG, out / "generation_config.json", out / INDEX, *out.glob("*.safetensors")]:
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    for file in code.files:
        shutil.copyfile(out / file.name, folder / file.name)


def divergence(source: Tensor, other: Tensor) -> float:
    """KL(source || other) of two sets of logits [rows, length, vocabulary], in nats per token."""
    total = 0.0
    for theirs, ours in zip(source.flatten(0, 1).split(_BLOCK), other.flatten(0, 1).split(_BLOCK), strict=True):
        expected, found = (torch.log_softmax(block.double(), -1) for block in (theirs, ours))
        total += float((expected.exp() * (expected - found)).sum())
    return float(total / math.prod(source.shape[:-1]))
