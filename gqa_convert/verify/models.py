"""The checks on what the models compute: OUT against SOURCE with OUT's heads repeated.

transformers loads OUT, then SOURCE. Of the code in checkpoints, only modelling files that equal this package's own run.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from gqa_convert.errors import first_line
from gqa_convert.families import loading
from gqa_convert.families.family import Modeling
from gqa_convert.families.layerwise import heads_text
from gqa_convert.verify import heads
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.inputs import Progress
from gqa_convert.verify.probe import STEPS, Probe
from gqa_convert.verify.report import Failure, VerificationReport
from gqa_convert.verify.result import Result

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""
NEGLIGIBLE = 1e-3
"""Nats per token that roundings to 16 bits may cause. Where mean pooling loses nothing, as with heads that were repeated
upward, no method can do better.
"""
MODULE_LIMIT = 1.25
"""How many times mean pooling's error the error of a module may be. Short fits of tiny models have 0.5 to 1.11 in their worst
module, because one module makes up for others; an output that has nothing to do with SOURCE's has 1.4 or more."""


class ModelChecks:
    """The checks on OUT, which is loaded first and leaves what it computed, and on SOURCE.

    Args:
        result: OUT.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        self.inputs = result.inputs
        numbers = sum(tensor.numel() for tensor in self.inputs.source.tensors.values())
        self.dtype: Any = torch.float32 if numbers <= FLOAT32_LIMIT else "auto"

    def load_out(self) -> str:
        """Load OUT and run it."""
        import transformers

        modeling = self.result.modeling
        model = load_model(self.inputs.out, self.dtype, modeling)
        self.probe = Probe(model, cross=bool(self.result.geometry.kinds["cross"]))
        self.ours, self.caches = self.probe.run(model)
        self.attention = heads.attention_parameters(model, self.inputs.family)
        own = " of its own modelling file" if modeling else ""
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{type(model).__name__}{own} in {dtype}, transformers {transformers.__version__}"

    def load_source(self) -> str:
        """Load SOURCE and find its heads in memory, where names may differ from those in files."""
        inputs = self.inputs
        self.source = load_model(inputs.source.folder, self.dtype)
        self.rewritten = self.expected = self.probe.output(self.source)
        if inputs.source.result_dtypes:  # a rewritten SOURCE holds tensors in a wider type than OUT
            for name, parameter in self.source.named_parameters():
                dtype = inputs.source.result_dtypes.get(name, parameter.dtype)
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)
            self.expected = self.probe.output(self.source)
        own = heads.attention_parameters(self.source, inputs.family)
        self.geometry = Geometry(inputs, own, self.attention)
        self.repeated = heads.repeated_heads(self.geometry, own, self.attention, folds=self.result.folds)
        self.pooled = heads.repeated_heads(self.geometry, own, None, folds=False)
        return type(self.source).__name__

    def same_outputs(self) -> str:
        """SOURCE with OUT's heads computes what OUT computes."""
        if not self.repeated and self.result.geometry.merged:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        with heads.replaced(self.source, self.repeated):
            self.theirs, self.source_caches = self.probe.run(self.source)
        return self.same("logits", f"{len(self.repeated)} parameters of SOURCE replaced")

    def same(self, part: str, what: str) -> str:
        """The same for a part of what both models computed, which is named in words too."""
        return self._judge(self.ours[part], self.theirs[part], what)

    def better_than_mean(self) -> str:
        """OUT's predictions are nearer to SOURCE's than those of mean pooling."""
        with heads.replaced(self.source, self.pooled):
            pooled = self.probe.output(self.source)
        found = divergence(self.expected, self.ours["logits"])
        mean = divergence(self.expected, pooled)
        detail = f"KL from SOURCE {found:.4g} nats per token, {mean:.4g} for mean pooling"
        if not (found < mean or found <= NEGLIGIBLE):
            raise Failure(detail)
        return detail

    def module_outputs(self) -> str:
        """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs."""
        errors = heads.compare_modules(
            self.geometry, self.source, lambda: self.probe.output(self.source), self.repeated, self.pooled
        )
        worst, name = max((ours / max(mean, NEGLIGIBLE), name) for name, (ours, mean) in errors.items())
        detail = f"{worst:.2f} times mean pooling's error in {name}"
        if not worst <= MODULE_LIMIT:
            raise Failure(f"{detail}, more than {MODULE_LIMIT} times")
        return f"at most {detail}"

    def same_as_original(self) -> str:
        """The rewritten SOURCE computes what SOURCE computes."""
        del self.source
        original = load_model(self.inputs.original.folder, self.dtype)
        what = f"the rewritten source against SOURCE, a {self.inputs.named.config['model_type']}"
        return self._judge(self.rewritten, self.probe.output(original), what)

    def cache_heads(self) -> str:
        """Every layer's cache has the shape of SOURCE's, with OUT's number of K/V heads. A copy's caches are SOURCE's:
        Falcon repeats K/V heads before it caches them.
        """
        geometry = self.result.geometry
        counts = {"self": geometry.counts}
        if geometry.kinds["cross"] and not self.inputs.family.reads_images_alone:
            counts["cross"] = [module.after for module in geometry.modules if module.kind == "cross"]
        found = []
        for kind, by_layer in counts.items():
            ours, theirs = (caches.get(kind, []) for caches in (self.caches, self.source_caches))
            if len(set(by_layer)) == 1:
                by_layer = by_layer[:1] * len(theirs)  # some layers may keep no keys
            wanted = theirs
            if geometry.changed:
                pairs = zip(theirs, by_layer, strict=True)
                wanted = [((k[0], heads, *k[2:]), (v[0], heads, *v[2:])) for (k, v), heads in pairs]
            if not ours or ours != wanted:
                raise Failure(f"{kind}-attention caches shapes {ours}, expected {wanted}")
            span = heads_text([keys[1] for keys, _ in ours])
            found.append(f"{span} heads in each of {len(ours)} layers of {kind}-attention, {theirs[0][0][1]} in SOURCE")
        return "; ".join(found)

    def _judge(self, ours: Tensor | str, theirs: Tensor | str, what: str) -> str:
        """The difference of two outputs in words. In place of an output may stand why the model has none.

        Raises:
            Failure: it is over the tolerance, or OUT alone has no output.
        """
        if isinstance(theirs, str):
            return f"not compared: SOURCE cannot run {what} ({theirs})"
        if isinstance(ours, str):
            raise Failure(f"OUT cannot run {what} ({ours})")
        error = self.probe.difference(ours, theirs)
        words = f"largest difference {error:.2g} of the spread of the logits"
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
    if result.folds and result.has_text:
        report.check("better than mean", checks.better_than_mean)
    if result.folds:
        report.check("module outputs", checks.module_outputs)
    report.check("logits", checks.same_outputs)
    report.check("cache heads", checks.cache_heads)
    report.check("cached decoding", checks.same, "steps", f"{STEPS} steps on the cache of a prefill")
    report.check("eager attention", checks.same, "eager", "eager attention in both models")
    progress("logits", 3, 3)
    if result.inputs.original is not result.inputs.source:
        report.check("rewritten source", checks.same_as_original)


def load_model(folder: Path, dtype: Any, code: Modeling | None = None) -> Any:
    """A model on the CPU in evaluation mode.

    Args:
        folder: the checkpoint.
        dtype: a torch type, or "auto" for the checkpoint's own.
        code: the modelling files in it that may run.

    Raises:
        Failure: transformers cannot load it, or finds no tensor for one of its parameters.
    """
    with tempfile.TemporaryDirectory() as root:
        loaded = folder
        if code is not None:
            loaded = Path(root) / "gqa_checkpoint"  # a constant name: transformers keeps a copy of the code under it
            loaded.mkdir()
            for path in folder.iterdir():  # none of the other code beside the modelling files
                if path.is_file() and path.suffix != ".py":
                    (loaded / path.name).symlink_to(path.resolve())
            for file in code.files:
                shutil.copyfile(folder / file.name, loaded / file.name)
        try:
            model, missing = loading.load_model(loaded, dtype, run_code=code is not None)
        except Exception as problem:
            raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if missing:
        raise Failure(f"transformers finds no fitting tensor for {min(missing)} in {folder} ({len(missing)} missing)")
    return model


def divergence(source: Tensor, other: Tensor) -> float:
    """KL(source || other) of two sets of logits [rows, length, vocabulary], in nats per token."""
    expected, found = (torch.log_softmax(logits.double().flatten(0, 1), -1) for logits in (source, other))
    return float(kl_div(found, expected, reduction="batchmean", log_target=True))
