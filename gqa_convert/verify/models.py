"""The checks on what the models compute: OUT against SOURCE with OUT's heads repeated.

transformers loads OUT, then SOURCE. Of the code in checkpoints, only modelling files that equal this package's own run.
"""

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gqa_convert.families import loading
from gqa_convert.families.family import Modeling
from gqa_convert.text.scoring.text_loss import context_length
from gqa_convert.verify import heads
from gqa_convert.verify.geometry import Geometry, read_geometry
from gqa_convert.verify.inputs import Inputs, Progress
from gqa_convert.verify.optimum import read_orders
from gqa_convert.verify.probe import STEPS, Decoding, Probe
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


@dataclass
class Outcome:
    """What the loaded OUT computed, and the probe that it ran on; models are in memory one at a time."""

    probe: Probe
    has_head: bool
    """Whether the outputs are logits, not hidden states."""
    output: torch.Tensor
    decoding: Decoding
    attention: dict[str, torch.Tensor]
    """The parameters that hold heads."""
    shapes: dict[str, tuple[int, ...]]
    """Of all parameters."""

    @property
    def what(self) -> str:
        """The name of the outputs."""
        return "logits" if self.has_head else "hidden states"

    def judge(self, ours: torch.Tensor, theirs: torch.Tensor, what: str) -> str:
        """The difference of two outputs in words.

        Raises:
            Failure: it is over the tolerance.
        """
        error = self.probe.difference(ours, theirs)
        words = f"largest difference {error:.2g} of the spread of the {self.what}"
        if not error <= self.probe.tolerance:
            raise Failure(f"{words}, over the tolerance of {self.probe.tolerance:g}: {what}")
        return f"{words}: {what}"


def check_models(report: VerificationReport, result: Result, progress: Progress) -> None:
    """Load and run OUT, then SOURCE, and compare what they compute."""
    inputs = result.inputs
    out = report.find("loads", lambda: _run_out(result))
    progress("logits", 1, 3)
    if out is None:
        return
    loaded = report.find("source loads", lambda: _load_source(inputs, out))
    progress("logits", 2, 3)
    if loaded is None:
        return
    source, geometry = loaded
    original = out.probe.output(source) if inputs.is_rewritten else None
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name in inputs.source.result_dtypes:  # a rewritten SOURCE holds it in a wider type than OUT
                parameter.copy_(parameter.to(inputs.source.result_dtypes[name]))
    made = heads.repeated_heads(geometry, source, out.attention, folds=result.folds)
    if result.method == FITTED:
        pooled = heads.pooled_heads(geometry, source)
        report.check("better than mean", lambda: _better_than_mean(out, source, pooled))
        report.check("module outputs", lambda: _module_outputs(out, source, geometry, made, pooled))
    if result.claims.get("head_order"):
        report.check("head order", lambda: _same_in_order(result, out, source, geometry))
    with heads.replaced(source, made):
        report.check(out.what, lambda: _same_outputs(result, out, source, len(made)))
        theirs = out.probe.decode(source)
    report.check("cache heads", lambda: judge_caches(out.decoding, theirs, result.geometry, inputs.family.wrapped))
    report.check("cached decoding", lambda: _judge_decoding(out, theirs))
    progress("logits", 3, 3)
    if original is not None:
        del loaded, source
        report.check("rewritten source", lambda: _same_as_original(inputs, out, original))


def _run_out(result: Result) -> tuple[Outcome, str]:
    """Load OUT and run it."""
    import transformers

    inputs = result.inputs
    loaded = load_model(inputs.out, inputs.numbers, result.modeling)
    model, tokens = loaded.model, None
    if inputs.tokens is not None:
        length = min(len(inputs.tokens), context_length(model))
        tokens = torch.tensor(inputs.tokens[: len(inputs.tokens) // length * length]).unflatten(0, (-1, length))
    cross = any(module.kind == "cross" for module in result.geometry.modules)
    probe = Probe(model, cross=cross, tokens=tokens)
    attention = heads.attention_parameters(model, inputs.family, folds=result.folds)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    output, decoding = probe.output(model), probe.decode(model)
    own = " of its own modelling file" if result.modeling else ""
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        Outcome(probe, loaded.has_language_model, output, decoding, attention, shapes),
        f"{loaded.class_name}{own} in {dtype}, transformers {transformers.__version__}",
    )


def _load_source(inputs: Inputs, out: Outcome) -> tuple[tuple[Any, Geometry], str]:
    """Load SOURCE and find its heads in memory, where names may differ from those in files."""
    loaded = load_model(inputs.source.folder, inputs.numbers, None)
    shapes = {name: tuple(parameter.shape) for name, parameter in loaded.model.named_parameters()}
    geometry = read_geometry(inputs.family, inputs.decoder_config, shapes, out.shapes, may_differ=True)
    return (loaded.model, geometry), loaded.class_name


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


def _same_outputs(result: Result, out: Outcome, source: Any, count: int) -> str:
    """SOURCE, in which that many parameters have OUT's heads, computes what OUT computes."""
    if not count and result.geometry.merged:
        raise Failure("the loaded SOURCE has no parameters with K/V heads")
    what = f"{out.probe.description}, {count} parameters of SOURCE replaced"
    return out.judge(out.output, out.probe.output(source), what)


def _better_than_mean(out: Outcome, source: Any, pooled: dict[str, torch.Tensor]) -> str:
    """OUT's predictions are nearer to SOURCE's than those of mean pooling."""
    if not out.has_head:
        raise Failure("OUT has no language-model head, and a fit is judged by its predictions")
    expected = out.probe.output(source)
    found = divergence(expected, out.output)
    with heads.replaced(source, pooled):
        mean = divergence(expected, out.probe.output(source))
    detail = f"KL from SOURCE {found:.4g} nats per token, {mean:.4g} for mean pooling: {out.probe.description}"
    if not (found < mean or found <= NEGLIGIBLE):
        raise Failure(detail)
    return detail


def divergence(source: torch.Tensor, other: torch.Tensor) -> float:
    """KL(source || other) of two sets of logits [rows, length, vocabulary], in nats per token."""
    if source.shape != other.shape:
        return math.inf
    total = 0.0
    for theirs, ours in zip(source.flatten(0, 1).split(_BLOCK), other.flatten(0, 1).split(_BLOCK), strict=True):
        expected, found = (torch.log_softmax(block.double(), -1) for block in (theirs, ours))
        total += float((expected.exp() * (expected - found)).sum())
    return float(total / math.prod(source.shape[:-1]))


def _module_outputs(
    out: Outcome, source: Any, geometry: Geometry, made: dict[str, torch.Tensor], pooled: dict[str, torch.Tensor]
) -> str:
    """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs."""
    errors = heads.output_errors(geometry, source, lambda: out.probe.output(source), made, pooled)
    ratios = {name: ours / max(mean, NEGLIGIBLE) for name, (ours, mean) in errors.items()}
    worst = max(ratios, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else math.inf)
    detail = f"{ratios[worst]:.2f} times mean pooling's error in {worst}"
    if not ratios[worst] <= MODULE_LIMIT:
        raise Failure(f"{detail}, more than {MODULE_LIMIT} times: {out.probe.description}")
    return f"at most {detail}: {out.probe.description}"


def _same_in_order(result: Result, out: Outcome, source: Any, geometry: Geometry) -> str:
    """SOURCE computes the same with its heads in the order in which OUT claims that they were merged. Positions or biases
    that belong to the place of a head would change.
    """
    claimed = read_orders(result.claims, result.geometry)
    modules = [module for module in result.geometry.modules if module.name in claimed]
    orders = {(module.kind, module.number): claimed[module.name] for module in modules}
    expected = out.probe.output(source)
    with heads.replaced(source, heads.reordered_heads(geometry, source, orders)):
        found = out.probe.output(source)
    return out.judge(found, expected, f"SOURCE with the heads of {len(orders)} modules in another order")


def _same_as_original(inputs: Inputs, out: Outcome, rewritten: torch.Tensor) -> str:
    """The rewritten SOURCE computes what SOURCE computes."""
    if inputs.why_not_loaded:
        return f"not compared: {inputs.why_not_loaded}"
    original = load_model(inputs.original.folder, inputs.numbers, None).model
    what = f"the rewritten source against SOURCE, a {inputs.original_config['model_type']}"
    return out.judge(rewritten, out.probe.output(original), what)


def _judge_decoding(out: Outcome, theirs: Decoding) -> str:
    """OUT's steps on a cache compute what those of SOURCE with OUT's heads compute."""
    if theirs.output is None:
        return f"not compared: SOURCE cannot decode with a cache ({theirs.problem})"
    if out.decoding.output is None:
        raise Failure(f"OUT cannot decode with a cache ({out.decoding.problem})")
    return out.judge(out.decoding.output, theirs.output, f"{STEPS} steps on the cache of a prefill")


def judge_caches(ours: Decoding, theirs: Decoding, geometry: Geometry, wrapped: bool) -> str:
    """Every layer's cache has the shape of SOURCE's, with OUT's number of K/V heads. A copy's caches are SOURCE's: Falcon
    repeats K/V heads before it caches them.

    Args:
        ours: OUT's caches.
        theirs: SOURCE's caches.
        geometry: of both checkpoints.
        wrapped: whether the decoder is that of a composite model, whose cross-attention to an image does not run on text.
    """
    counts = {"self": geometry.counts, "cross": [module.after for module in geometry.modules if module.kind == "cross"]}
    found = []
    for kind, expected in counts.items():
        mine, its = ours.caches.get(kind, []), theirs.caches.get(kind, [])
        if not expected or (kind == "cross" and wrapped and not mine and not its):
            continue
        if not mine or len(mine) != len(its):
            raise Failure(
                f"{len(mine)} layers of {kind}-attention in OUT keep keys, {len(its)} in SOURCE do {ours.problem}"
            )
        if len(set(expected)) == 1:  # some layers may keep no keys
            expected = expected[:1] * len(mine)
        for number, (layer, count, shapes) in enumerate(zip(mine, expected, its, strict=True)):
            wanted = tuple((rows, count, *rest) for rows, _, *rest in shapes) if geometry.changed else shapes
            if layer != wanted:
                raise Failure(
                    f"layer {number} of {kind}-attention caches keys and values of shapes {layer}, expected {wanted}"
                )
        kept = sorted({keys[1] for keys, _ in mine})
        span = f"{kept[0]} to {kept[-1]}" if len(kept) > 1 else str(kept[0])
        found.append(f"{span} heads in each of {len(mine)} layers of {kind}-attention, {its[0][0][1]} in SOURCE")
    return "; ".join(found)
