"""The checks on what the models compute: OUT against SOURCE with OUT's heads repeated.

transformers loads OUT, then SOURCE. Of the code in checkpoints, only modelling files that equal
this package's own run.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import first_line
from gqa_convert.families import loading
from gqa_convert.families.family import Modeling
from gqa_convert.families.layerwise import heads_text
from gqa_convert.verify.files import check_tokenizer
from gqa_convert.verify.inputs import Inputs, Progress, Tensors
from gqa_convert.verify.probe import STEPS, Probe
from gqa_convert.verify.report import Check, Failure, VerificationReport
from gqa_convert.verify.result import MERGED, Module, Result, read_modules

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""
NEGLIGIBLE = 1e-3
"""The error of a module's outputs that roundings to 16 bits may cause. Where mean pooling loses
nothing, as with heads that were repeated upward, no method can do better.
"""
MODULE_LIMIT = 1.25
"""How many times mean pooling's error the error of a module may be. Short fits of tiny models have
0.5 to 1.11 in their worst module, because one module makes up for others; an output that has
nothing to do with SOURCE's has 1.4 or more.
"""


def check_models(
    report: VerificationReport, inputs: Inputs, result: Result | None, progress: Progress
) -> None:
    """Load and run OUT, then SOURCE, and compare what they compute.

    Args:
        report: for the checks.
        inputs: the checkpoints.
        result: OUT; None if it is too damaged to run, or its modelling files are not the package's
            own.
        progress: called with the stage `logits`.
    """
    if not inputs.has_class:
        detail = (
            f"not run: transformers has no class of type {inputs.family.model_type}, and code in "
            "checkpoints is never executed"
        )
        report.checks.append(Check("behaviour", True, detail))
        return
    if inputs.out_config.get("model_type") != inputs.named.config.get("model_type"):
        report.check("tokenizer", check_tokenizer, inputs)
    if result is None:
        detail = (
            "not run: OUT's files or heads did not pass their checks, and code other than the "
            "package's is not executed"
        )
        report.checks.append(Check("loads", False, detail))
        return
    checks = ModelChecks(result)
    loads = report.check("loads", checks.load_out)
    progress("logits", 1, 3)
    loads = loads and report.check("source loads", checks.load_source)
    progress("logits", 2, 3)
    if not loads:
        return
    if result.folds:
        report.check("module outputs", checks.module_outputs)
    report.check("logits", checks.same_outputs)
    report.check("cache heads", checks.cache_heads)
    steps = f"{STEPS} steps on the cache of a prefill"
    report.check("cached decoding", checks.same, "steps", steps)
    report.check("eager attention", checks.same, "eager", "eager attention in both models")
    progress("logits", 3, 3)
    if inputs.original is not inputs.source:
        report.check("rewritten source", checks.same_as_original)


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
        """Load OUT, run it, and keep the parameters of its attention."""
        import transformers

        modeling = self.result.modeling
        model = _load_model(self.inputs.out, self.dtype, modeling)
        self.probe = Probe(model, cross=bool(self.result.kinds["cross"]))
        self.ours = self.probe.run(model)
        self.parameters = {}
        for name, parameter in model.named_parameters():
            if any(f".{module}." in f".{name}" for module in self.inputs.family.attention):
                self.parameters[name] = parameter.data
        own = " of its own modelling file" if modeling else ""
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{type(model).__name__}{own} in {dtype}, transformers {transformers.__version__}"

    def load_source(self) -> str:
        """Load SOURCE and find its heads in memory, where names may differ from those in files."""
        inputs = self.inputs
        self.source = _load_model(inputs.source.folder, self.dtype)
        self.rewritten = self.probe.logits(self.source)
        if inputs.result_dtypes:  # a rewritten SOURCE holds tensors in a wider type than OUT
            for name, parameter in self.source.named_parameters():
                dtype = inputs.result_dtypes.get(name, parameter.dtype)
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        own = {name: parameter.data for name, parameter in self.source.named_parameters()}
        modules = read_modules(inputs, own, self.parameters)
        self.merged = [module for module in modules if module.after < module.before]
        self.pooled = repeated_heads(self.merged, own, None, folds=False)
        self.repeated = repeated_heads(self.merged, own, self.parameters, folds=self.result.folds)
        return type(self.source).__name__

    def module_outputs(self) -> str:
        """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs: how far its
        outputs are from SOURCE's, relative to these.
        """
        names = {self.source.get_submodule(module.name): module.name for module in self.merged}
        worst = (0.0, "")

        def compare(module: Any, args: Any, options: Any, output: Any) -> None:
            nonlocal worst
            expected = _states(output)
            errors = []
            for parameters in (self.repeated, self.pooled):
                with replaced(self.source, parameters):
                    lost = _states(module.forward(*args, **options)) - expected
                error = lost.norm() / expected.norm().clamp(min=1e-30)
                errors.append(float(error.nan_to_num(torch.inf)))
            ours, mean = errors
            worst = max(worst, (ours / max(mean, NEGLIGIBLE), names[module]))

        handles = [module.register_forward_hook(compare, with_kwargs=True) for module in names]
        try:
            self.probe.logits(self.source)
        finally:
            for handle in handles:
                handle.remove()
        times, name = worst
        detail = f"{times:.2f} times mean pooling's error in {name}"
        if not times <= MODULE_LIMIT:
            raise Failure(f"{detail}, more than {MODULE_LIMIT} times")
        return f"at most {detail}"

    def same_outputs(self) -> str:
        """SOURCE with OUT's heads computes what OUT computes."""
        if not self.repeated and self.result.merged:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        with replaced(self.source, self.repeated):
            self.theirs = self.probe.run(self.source)
        return self.same("logits", f"{len(self.repeated)} parameters of SOURCE replaced")

    def same(self, part: str, what: str) -> str:
        """The same for a part of what both models computed, which is named in words too."""
        return self._compare(getattr(self.ours, part), getattr(self.theirs, part), what)

    def same_as_original(self) -> str:
        """The rewritten SOURCE computes what SOURCE computes."""
        del self.source
        original = _load_model(self.inputs.original.folder, self.dtype)
        what = f"the rewritten source against SOURCE, a {self.inputs.named.config['model_type']}"
        return self._compare(self.rewritten, self.probe.logits(original), what)

    def _compare(self, ours: Tensor | str, theirs: Tensor | str, what: str) -> str:
        """The difference of two outputs in words. In place of an output may stand why the model has
        none.

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

    def cache_heads(self) -> str:
        """Every layer's cache has the shape of SOURCE's, with OUT's number of K/V heads. A copy's
        caches are SOURCE's: Falcon repeats K/V heads before it caches them.
        """
        result = self.result
        counts = {"self": result.counts}
        if result.kinds["cross"] and not self.inputs.family.reads_images_alone:
            counts["cross"] = [each.after for each in result.modules if each.kind == "cross"]
        found = []
        for kind, by_layer in counts.items():
            ours = self.ours.caches.get(kind, [])
            theirs = self.theirs.caches.get(kind, [])
            if len(set(by_layer)) == 1:
                by_layer = by_layer[:1] * len(theirs)  # some layers may keep no keys
            wanted = theirs
            if result.changed:
                pairs = zip(theirs, by_layer, strict=True)
                wanted = [((k[0], heads, *k[2:]), (v[0], heads, *v[2:])) for (k, v), heads in pairs]
            if not ours or ours != wanted:
                raise Failure(f"{kind}-attention caches shapes {ours}, expected {wanted}")
            span = heads_text([keys[1] for keys, _ in ours])
            found.append(
                f"{span} heads in each of {len(ours)} layers of {kind}-attention, "
                f"{theirs[0][0][1]} in SOURCE"
            )
        return "; ".join(found)


def _load_model(folder: Path, dtype: Any, code: Modeling | None = None) -> Any:
    """A model on the CPU in evaluation mode, without gradients.

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
            # a constant name: transformers keeps a copy of the code under it
            loaded = Path(root) / "gqa_checkpoint"
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
        raise Failure(
            f"transformers finds no fitting tensor for {min(missing)} in {folder} "
            f"({len(missing)} missing)"
        )
    return model.requires_grad_(False)


def repeated_heads(
    modules: list[Module], source: Tensors, out: Tensors | None, *, folds: bool
) -> Tensors:
    """SOURCE's parameters with other heads, each K/V head repeated for its group.

    Args:
        modules: those with fewer K/V heads in OUT, in the loaded models.
        source: the loaded SOURCE's parameters.
        out: the loaded OUT's, whose heads they are; None for the mean of each group of SOURCE's
            heads.
        folds: whether queries and outputs are OUT's too.
    """
    made: Tensors = {}
    for module in modules:
        for before, after in module.tensors:
            found = before.read(source) if out is None else after.read(out)
            heads = {}
            for role, each in found.items():
                if role in MERGED:
                    # of OUT, the mean of each head alone
                    means = each.unflatten(0, (module.after, -1)).mean(1)
                    heads[role] = means.repeat_interleave(module.before // module.after, 0)
                elif folds:
                    heads[role] = each
            if heads:
                made |= before.replace(source, heads)
    return made


@contextmanager
def replaced(model: Any, parameters: Tensors) -> Iterator[None]:
    """Put other numbers into a model's parameters for a while."""
    own = {name: model.get_parameter(name) for name in parameters}
    kept = {name: parameter.data for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            parameter.data = parameters[name]
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = kept[name]


def _states(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).double()
