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
from gqa_convert.text.scoring.text_loss import context_length, text_loss
from gqa_convert.verify import heads
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.inputs import Inputs, Progress
from gqa_convert.verify.probe import STEPS, Decoding, Probe
from gqa_convert.verify.provenance import read_orders
from gqa_convert.verify.report import Check, Failure, VerificationReport, first_line
from gqa_convert.verify.tensors import FACTORED, FITTED
from gqa_convert.verify.weights import CONFIG, INDEX

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""
TEXT_TOKENS = 1024
"""Tokens of a text on which predictions are compared, since the logits of all of them are kept."""
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
class Subject:
    """What the checks on models are about, and what OUT's model computed."""

    report: VerificationReport
    inputs: Inputs
    geometry: Geometry
    claims: dict[str, Any]
    method: Any
    """By whose rules OUT is judged."""
    modeling: Modeling | None
    """The modelling files that OUT comes with, which equal the package's."""
    progress: Progress

    def load_out(self) -> str:
        """Load OUT and run it on the probe."""
        loaded = load_model(self.inputs.out, self.parameters, self.modeling)
        self.model = loaded.model
        self.has_head = loaded.has_language_model
        self.probe = Probe(loaded.model, cross=any(module.kind == "cross" for module in self.geometry.modules))
        self.output = self.probe.output(loaded.model)
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        own = " of its own modelling file" if self.modeling else ""
        import transformers

        return f"{loaded.class_name}{own} in {dtype}, transformers {transformers.__version__}"

    def run_out(self) -> None:
        """Keep what the comparison needs of OUT, so that one model at a time is in memory."""
        model, inputs = self.model, self.inputs
        self.decoding = self.probe.decode(model)
        self.attention = heads.attention_parameters(model, inputs.family, folds=self.folds)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.ids: list[int] | None = None
        if inputs.text is not None:
            self.report.check("loss of OUT", lambda: self._score_out(inputs.text or ""))
        self.predicted: torch.Tensor | None = None
        self.prediction_problem = ""
        if self.method in FITTED:
            try:
                self.predicted = self.predictions(model)
            except Exception as problem:  # the check `better than mean` reports it
                self.prediction_problem = first_line(problem)
        del self.model

    def _score_out(self, text: str) -> str:
        ids: list[int] = loading.load_tokenizer(self.inputs.out)(text, verbose=False)["input_ids"]
        if len(ids) < 2:
            raise Failure(f"the text has {len(ids)} token(s), a loss needs at least 2")
        self.ids = ids
        self.loss = text_loss(self.model, ids, progress=lambda done, total: self.progress("text", done, 2 * total))
        return f"{self.loss:.4f} nats per token over {len(ids) - 1:,} tokens"

    @property
    def parameters(self) -> int:
        """About how many numbers the models have."""
        return sum(stored.numbers for stored in self.inputs.source.tensors.values())

    @property
    def folds(self) -> bool:
        """Whether the method changes queries and outputs too."""
        return self.method in (*FACTORED, *FITTED)

    @property
    def outputs(self) -> str:
        """The name of what is compared."""
        return "logits" if self.has_head else "hidden states"

    def predictions(self, model: Any) -> torch.Tensor:
        """The logits [tokens, vocabulary] of the text's first tokens or, without a text, of the probe's."""
        if self.ids is None:
            return self.probe.output(model).flatten(0, 1)
        with torch.inference_mode():
            blocks = torch.tensor(self.ids[:TEXT_TOKENS]).split(context_length(model))
            return torch.cat([model(input_ids=block[None], use_cache=False).logits[0].float() for block in blocks])

    @property
    def predicted_on(self) -> str:
        """What the predictions are made on, in words."""
        return self.probe.description if self.ids is None else f"{len(self.ids[:TEXT_TOKENS]):,} tokens of the text"

    def judge(self, error: float, what: str) -> str:
        """A difference in words.

        Raises:
            Failure: it is over the tolerance.
        """
        words = f"largest difference {error:.2g} of the spread of the {self.outputs}"
        if not error <= self.probe.tolerance:
            raise Failure(f"{words}, over the tolerance of {self.probe.tolerance:g}: {what}")
        return f"{words}: {what}"


def check_models(subject: Subject) -> None:
    """Load and run OUT, then SOURCE, and compare what they compute."""
    report, inputs = subject.report, subject.inputs
    if not report.check("loads", subject.load_out):
        return
    subject.progress("logits", 1, 4)
    subject.run_out()
    subject.progress("logits", 2, 4)
    loaded: list[Any] = []

    def load_source() -> str:
        found = load_model(inputs.source.folder, subject.parameters, None)
        loaded.append(found.model)
        return found.class_name

    if not report.check("source loads", load_source):
        return
    subject.progress("logits", 3, 4)
    source = loaded.pop()
    rewritten = None
    if inputs.is_rewritten:
        rewritten = subject.probe.output(source)
        _round(source, inputs)
    _compare(subject, source)
    subject.progress("logits", 4, 4)
    if rewritten is not None:
        del source
        report.check("rewritten source", lambda: _same_as_original(subject, rewritten))


def _compare(subject: Subject, source: Any) -> None:
    """Compare the loaded SOURCE, which is given other heads, with what OUT computed."""
    report, inputs = subject.report, subject.inputs
    if subject.ids is not None:
        report.check("loss of SOURCE", lambda: _score_source(subject, source))
    theirs = subject.probe.decode(source)
    try:
        geometry = heads.loaded_geometry(inputs.family, inputs.decoder_config, source, subject.shapes)
    except Failure as failure:
        report.checks.append(Check(subject.outputs, False, str(failure)))
        return
    if subject.method in FITTED:
        report.check("better than mean", lambda: _better_than_mean(subject, source, geometry))
        report.check("module outputs", lambda: _module_outputs(subject, source, geometry))
    if subject.claims.get("head_order"):
        report.check("head order", lambda: _same_in_order(subject, source, geometry))
    made: dict[str, torch.Tensor] = {}

    def same_outputs() -> str:
        made.update(heads.repeated_heads(geometry, source, subject.attention, folds=subject.folds))
        if not made and any(module.after < module.before for module in subject.geometry.changed):
            raise Failure("the loaded SOURCE has no parameters with K/V heads")
        with heads.replaced(source, made):
            error = subject.probe.difference(subject.output, subject.probe.output(source))
        what = f"{subject.probe.description}, {len(made)} parameters of SOURCE replaced"
        return subject.judge(error, what)

    report.check(subject.outputs, same_outputs)
    with heads.replaced(source, made):
        own = Decoding(error=0.0)
        if not subject.decoding.error <= subject.probe.tolerance:
            own = subject.probe.decode(source)  # unless it is off by as much, OUT is at fault
        report.check(
            "cache heads",
            lambda: judge_caches(subject.decoding, theirs, subject.geometry, wrapped=inputs.family.wrapped),
        )
        report.check("cached decoding", lambda: _judge_decoding(subject, own.error))


def load_model(folder: Path, parameters: int, code: Modeling | None) -> loading.AnyModel:
    """A model on the CPU in evaluation mode, in float32 unless it has too many parameters.

    Args:
        folder: the checkpoint.
        parameters: about how many numbers it has.
        code: the modelling files in it that may run.

    Raises:
        Failure: transformers cannot load it, or finds no tensor for one of its parameters.
    """
    dtype = torch.float32 if parameters <= FLOAT32_LIMIT else "auto"
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


def _round(source: Any, inputs: Inputs) -> None:
    """Round what a rewritten SOURCE holds in a wider type than OUT."""
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name in inputs.source.result_dtypes:
                parameter.copy_(parameter.to(inputs.source.result_dtypes[name]))


def _score_source(subject: Subject, source: Any) -> str:
    ids = subject.ids or []
    loss = text_loss(source, ids, progress=lambda done, total: subject.progress("text", total + done, 2 * total))
    subject.report.losses = {"source": loss, "out": subject.loss, "tokens": len(ids) - 1}
    return f"{loss:.4f} nats per token over {len(ids) - 1:,} tokens"


def _better_than_mean(subject: Subject, source: Any, geometry: Geometry) -> str:
    """OUT's predictions are nearer to SOURCE's than those of mean pooling."""
    if not subject.has_head:
        raise Failure("OUT has no language-model head, and a fit is judged by its predictions")
    if subject.predicted is None:
        raise Failure(f"OUT cannot be run ({subject.prediction_problem})")
    expected = subject.predictions(source)
    found = divergence(expected, subject.predicted)
    subject.predicted = None  # frees memory
    with heads.replaced(source, heads.pooled_heads(geometry, source)):
        mean = divergence(expected, subject.predictions(source))
    detail = f"KL from SOURCE {found:.4g} nats per token, {mean:.4g} for mean pooling: {subject.predicted_on}"
    if not (found < mean or found <= NEGLIGIBLE):
        raise Failure(detail)
    return detail


def divergence(source: torch.Tensor, other: torch.Tensor) -> float:
    """KL(source || other) of two sets of logits [tokens, vocabulary], in nats per token."""
    if source.shape != other.shape:
        return math.inf
    total = 0.0
    for theirs, ours in zip(source.split(_BLOCK), other.split(_BLOCK), strict=True):
        expected, found = (torch.log_softmax(block.double(), -1) for block in (theirs, ours))
        total += float((expected.exp() * (expected - found)).sum())
    return total / len(source)


def _module_outputs(subject: Subject, source: Any, geometry: Geometry) -> str:
    """No module of OUT is far worse than with mean pooling, on SOURCE's own inputs."""
    made = heads.repeated_heads(geometry, source, subject.attention, folds=True)
    pooled = heads.pooled_heads(geometry, source)
    errors = heads.output_errors(geometry, source, lambda: subject.predictions(source), made, pooled)
    ratios = {name: ours / max(mean, NEGLIGIBLE) for name, (ours, mean) in errors.items()}
    worst = max(ratios, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else math.inf)
    detail = f"{ratios[worst]:.2f} times mean pooling's error in {worst}"
    if not ratios[worst] <= MODULE_LIMIT:
        raise Failure(f"{detail}, more than {MODULE_LIMIT} times: {subject.predicted_on}")
    return f"at most {detail}: {subject.predicted_on}"


def _same_in_order(subject: Subject, source: Any, geometry: Geometry) -> str:
    """SOURCE computes the same with its heads in the order in which OUT claims that they were merged. Positions or biases
    that belong to the place of a head would change.
    """
    claimed = read_orders(subject.claims, subject.geometry)
    modules = [module for module in subject.geometry.modules if module.name in claimed]
    orders = {(module.kind, module.number): claimed[module.name] for module in modules}
    expected = subject.probe.output(source)
    with heads.replaced(source, heads.reordered_heads(geometry, source, orders)):
        error = subject.probe.difference(subject.probe.output(source), expected)
    return subject.judge(error, f"SOURCE with the heads of {len(orders)} modules in another order")


def _same_as_original(subject: Subject, rewritten: torch.Tensor) -> str:
    """The rewritten SOURCE computes what SOURCE computes."""
    inputs = subject.inputs
    if inputs.why_not_loaded:
        return f"not compared: {inputs.why_not_loaded}"
    original = load_model(inputs.original.folder, subject.parameters, None).model
    error = subject.probe.difference(rewritten, subject.probe.output(original))
    return subject.judge(error, f"the rewritten source against SOURCE, a {inputs.original_config['model_type']}")


def _judge_decoding(subject: Subject, own: float) -> str:
    """OUT's cached decoding equals one pass, or that of SOURCE with OUT's heads is off by as much.

    Args:
        subject: with what OUT computed.
        own: the decoding error of SOURCE with OUT's heads, where OUT's is over the tolerance.
    """
    error, problem = subject.decoding.error, subject.decoding.problem
    if error > subject.probe.tolerance and own > subject.probe.tolerance and (error <= 1.1 * own or math.isinf(own)):
        return f"off from one pass by {error:.2g}, as SOURCE with the same heads is by {own:.2g} {problem}".rstrip()
    return subject.judge(error, f"prefill and {STEPS} steps against one pass {problem}".rstrip())


def judge_caches(ours: Decoding, theirs: Decoding, geometry: Geometry, *, wrapped: bool) -> str:
    """Every layer's cache holds OUT's number of K/V heads, in the layers in which SOURCE's holds keys. A copy's caches are
    SOURCE's: Falcon repeats K/V heads before it caches them.

    Args:
        ours: OUT's caches.
        theirs: SOURCE's caches.
        geometry: of both checkpoints.
        wrapped: whether the decoder is that of a composite model, whose cross-attention to an image does not run on text.
    """
    counts = {"self": geometry.counts, "cross": [module.after for module in geometry.modules if module.kind == "cross"]}
    found = []
    for kind, expected in counts.items():
        mine, its = ours.heads.get(kind, []), theirs.heads.get(kind, [])
        if not expected or (kind == "cross" and wrapped and not mine and not its):
            continue
        if not mine or len(mine) != len(its):
            raise Failure(
                f"{len(mine)} layers of {kind}-attention in OUT keep keys, {len(its)} in SOURCE do {ours.problem}"
            )
        wanted = its if not geometry.changed else [(count, count) for count in expected]
        if len(set(wanted)) == 1:  # some layers may keep no keys
            wanted = wanted[:1] * len(mine)
        if mine != wanted:
            raise Failure(f"the layers of {kind}-attention cache {mine} heads of keys and values, expected {wanted}")
        heads = [pair[0] for pair in mine]
        span = f"{min(heads)} to {max(heads)}" if len(set(heads)) > 1 else str(heads[0])
        found.append(f"{span} heads in each of {len(mine)} layers of {kind}-attention, {its[0][0]} in SOURCE")
    return "; ".join(found)
