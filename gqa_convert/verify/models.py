"""The checks on what the models compute: OUT against SOURCE with OUT's heads repeated.

transformers loads OUT, then SOURCE. No code in checkpoints runs: the package's own modelling files,
which OUT's must equal, run in their place.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from gqa_convert.errors import first_line
from gqa_convert.families import loading
from gqa_convert.families.layerwise import heads_text

from .files import check_tokenizer
from .inputs import Progress, Tensors
from .probe import logits, make_inputs, run
from .report import Check, Failure, VerificationReport
from .result import MERGED, Module, Result, read_modules

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""
TOLERANCE = 1e-4
"""In float32, for the largest difference of two outputs, relative to their standard deviation."""
HALF_TOLERANCE = 5e-2
"""In half precision, for the root mean square of the difference. Single numbers may be off by more,
for example where a router chooses another expert.
"""
NEGLIGIBLE = 1e-3
"""The error of a module's outputs that roundings to 16 bits may cause. Where mean pooling loses
nothing, as with heads that were repeated upward, no method can do better.
"""
MODULE_LIMIT = 1.25
"""How many times mean pooling's error the error of a module may be. Short fits of tiny models have
0.5 to 1.11 in their worst module, because one module makes up for others; an output that has
nothing to do with SOURCE's has 1.4 or more.
"""


def check_models(report: VerificationReport, result: Result, progress: Progress) -> None:
    """Load and run OUT, then SOURCE, and compare what they compute.

    Args:
        report: for the checks.
        result: OUT.
        progress: called with the stage `logits`.
    """
    inputs = result.inputs
    if not inputs.has_class:
        detail = (
            f"not run: transformers has no class of type {inputs.family.model_type}, and code in "
            "checkpoints is never executed"
        )
        report.checks.append(Check("behaviour", True, detail))
        return
    if inputs.out_config.get("model_type") != inputs.named.config.get("model_type"):
        report.check("tokenizer", check_tokenizer, inputs)
    checks = ModelChecks(result)
    if not report.check("loads", checks.load_out):
        return
    progress("logits", 1, 2)
    if not report.check("source loads", checks.load_source):
        return
    if result.folds:
        report.check("module outputs", checks.module_outputs)
    report.check("logits", checks.same_outputs)
    report.check("cache heads", checks.cache_heads)
    for name in ("cached decoding", "eager attention"):
        report.check(name, checks.same, name)
    progress("logits", 2, 2)
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

        model = _load_model(self.inputs.out, self.dtype)
        self.is_exact = model.dtype in (torch.float32, torch.float64)
        self.probe = make_inputs(model, cross=bool(self.result.kinds["cross"]))
        self.ours, self.caches = run(model, self.probe)
        self.parameters = {}
        for name, parameter in model.named_parameters():
            if any(f".{module}." in f".{name}" for module in self.inputs.family.attention):
                self.parameters[name] = parameter.data
        return f"{type(model).__name__} in {model.dtype}, transformers {transformers.__version__}"

    def load_source(self) -> str:
        """Load SOURCE and find its heads in memory, where names may differ from those in files."""
        self.source = _load_model(self.inputs.source.folder, self.dtype)
        self.rewritten = logits(self.source, self.probe)
        self.own = {}
        for name, parameter in self.source.named_parameters():
            # a rewritten SOURCE holds tensors in a wider type than OUT
            dtype = self.result.weights.tensors.get(name, parameter).dtype
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
            self.own[name] = parameter.data
        modules = read_modules(self.inputs, self.own, self.parameters)
        self.merged = [module for module in modules if module.after < module.before]
        return type(self.source).__name__

    def module_outputs(self) -> str:
        """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs: how far its
        outputs are from SOURCE's, relative to these.
        """
        modules = {self.source.get_submodule(module.name): module for module in self.merged}
        calls: list[tuple[Any, Any, Any, Tensor]] = []

        def keep(part: Any, args: Any, options: Any, output: Any) -> None:
            calls.append((part, args, options, _states(output)))

        handles = [part.register_forward_hook(keep, with_kwargs=True) for part in modules]
        logits(self.source, self.probe)
        for handle in handles:
            handle.remove()
        worst = (0.0, "")
        for part, args, options, expected in calls:
            module = modules[part]
            errors = []
            for out in (self.parameters, None):
                heads = self._repeated(module, out)
                inside = {name[len(module.name) + 1 :]: each for name, each in heads.items()}
                lost = _states(functional_call(part, inside, args, options)) - expected
                error = lost.norm() / expected.norm().clamp(min=1e-30)
                errors.append(float(error.nan_to_num(torch.inf)))
            ours, mean = errors
            worst = max(worst, (ours / max(mean, NEGLIGIBLE), module.name))
        times, name = worst
        detail = f"{times:.2f} times mean pooling's error in {name}"
        if not times <= MODULE_LIMIT:
            raise Failure(f"{detail}, more than {MODULE_LIMIT} times")
        return f"at most {detail}"

    def same_outputs(self) -> str:
        """SOURCE with OUT's heads computes what OUT computes."""
        replaced = 0
        for module in self.merged:
            for name, heads in self._repeated(module, self.parameters).items():
                self.source.get_parameter(name).data = heads
                replaced += 1
        if not replaced and self.result.merged:
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        self.theirs, self.source_caches = run(self.source, self.probe)
        return f"{self.same('logits')}: {replaced} parameters of SOURCE replaced"

    def _repeated(self, module: Module, out: Tensors | None) -> Tensors:
        """SOURCE's parameters of a module with other heads, each K/V head repeated for its group.

        Args:
            module: with fewer K/V heads in OUT.
            out: the parameters of OUT, whose heads they are, with its queries and outputs if the
                method changes these; None for the mean of each group of SOURCE's heads.
        """
        made: Tensors = {}
        for before, after in module.tensors:
            found = before.read(self.own) if out is None else after.read(out)
            heads = {}
            for role, each in found.items():
                if role in MERGED:
                    # of OUT, the mean of each head alone
                    means = each.unflatten(0, (module.after, -1)).mean(1)
                    heads[role] = means.repeat_interleave(module.before // module.after, 0)
                elif out is not None and self.result.folds:
                    heads[role] = each
            if heads:
                made |= before.replace(self.own, heads)
        return made

    def same(self, name: str) -> str:
        """The same for other outputs of both models."""
        return self._compare(self.ours[name], self.theirs[name])

    def same_as_original(self) -> str:
        """The rewritten SOURCE computes what SOURCE computes."""
        del self.source
        original = _load_model(self.inputs.original.folder, self.dtype)
        found = self._compare(self.rewritten, logits(original, self.probe))
        return f"{found}, against SOURCE, a {self.inputs.named.config['model_type']}"

    def _compare(self, ours: Tensor | str, theirs: Tensor | str) -> str:
        """The difference of two outputs in words. In place of an output may stand why the model has
        none.

        Raises:
            Failure: it is over the tolerance, or OUT alone has no output.
        """
        if isinstance(theirs, str):
            return f"not compared: SOURCE cannot run this ({theirs})"
        if isinstance(ours, str):
            raise Failure(f"OUT cannot run this ({ours})")
        gap = ours - theirs
        distance = gap.abs().max() if self.is_exact else gap.square().mean().sqrt()
        tolerance = TOLERANCE if self.is_exact else HALF_TOLERANCE
        error = float(distance / theirs.std().clamp(min=1e-30))
        words = f"largest difference {error:.2g} of the spread of the logits"
        if not error <= tolerance:
            raise Failure(f"{words}, over the tolerance of {tolerance:g}")
        return words

    def cache_heads(self) -> str:
        """Every layer's cache has the shape of SOURCE's, with OUT's number of K/V heads. A copy's
        caches are SOURCE's: Falcon repeats K/V heads before it caches them.
        """
        found = []
        for kind, theirs in self.source_caches.items():
            ours = self.caches[kind]
            wanted = theirs
            if self.result.changed:
                counts = self.result.kv_heads
                if isinstance(counts, int):
                    counts = [counts] * len(theirs)  # some layers may keep no keys
                layers = zip(counts, theirs, strict=True)
                wanted = [(count, count, *sizes) for count, (_, _, *sizes) in layers]
            if not ours or ours != wanted:
                raise Failure(f"{kind}-attention caches {ours}, expected {wanted}")
            span = heads_text([keys for keys, *_ in ours])
            found.append(
                f"{span} heads in each of {len(ours)} layers of {kind}-attention, "
                f"{theirs[0][0]} in SOURCE"
            )
        if not found:
            raise Failure("SOURCE has no cache")
        return "; ".join(found)


def _load_model(folder: Path, dtype: Any) -> Any:
    """A model on the CPU in evaluation mode, without gradients.

    Args:
        folder: the checkpoint.
        dtype: a torch type, or "auto" for the checkpoint's own.

    Raises:
        Failure: transformers cannot load it, or finds no tensor for one of its parameters.
    """
    try:
        model, missing = loading.load_model(folder, dtype)
    except Exception as problem:
        raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if missing:
        raise Failure(
            f"transformers finds no fitting tensor for {min(missing)} in {folder} "
            f"({len(missing)} missing)"
        )
    return model.requires_grad_(False)


def _states(output: Any) -> Tensor:
    """A module's outputs, in numbers of their own."""
    return (output[0] if isinstance(output, tuple) else output).to(torch.float64, copy=True)
