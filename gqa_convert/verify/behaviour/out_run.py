"""Runs OUT's model and keeps what the comparison with SOURCE needs, so that one model at a time is in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gqa_convert.text.scoring.text_loss import text_loss
from gqa_convert.verify.behaviour.caches import Caches
from gqa_convert.verify.behaviour.divergence import Predictions
from gqa_convert.verify.behaviour.image import ImageRun, run_on_image
from gqa_convert.verify.behaviour.model_loading import load_model
from gqa_convert.verify.behaviour.probe import Probe
from gqa_convert.verify.behaviour.replacing import folds_maps, holds_heads
from gqa_convert.verify.behaviour.tokenizers import tokenize
from gqa_convert.verify.checkpoint_reader import first_line
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.modelling_file import modelling_file
from gqa_convert.verify.proofs import FOLDING, Proof, proof_of
from gqa_convert.verify.report import Finding
from gqa_convert.verify.runner import CheckRunner
from gqa_convert.verify.stored import StoredResult

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadedOut:
    """OUT's model and its first pass."""

    model: Any
    class_name: str
    headed: bool
    """Whether it has a language-model head."""
    probe: Probe
    output: Any


@dataclass
class OutRun:
    """What OUT's model computed."""

    headed: bool
    """Whether it has a language-model head."""
    probe: Probe
    output: Any
    """Logits or hidden states of the probe's tokens."""
    caches: Caches
    no_cache: str
    """Why `caches` is empty, if it is."""
    decoding_error: float
    """The distance of cached decoding from one pass."""
    decoding_problem: str
    """Why OUT cannot decode, if it cannot."""
    parameters: dict[str, Any]
    """Parameters that the comparison gives to SOURCE's model."""
    token_ids: list[int] | None = None
    """The token ids of the text."""
    loss: float | None = None
    """The loss on the text, in nats per token."""
    predictions: Predictions | None = None
    """For `fit`: what OUT's predictions are compared on."""
    predicted: Any = None
    """OUT's logits on these."""
    image: ImageRun | None = None
    """What OUT computed of an image; None for a model that sees none."""
    prediction_problem: str | None = None
    """Why OUT has no logits, if it has none."""

    @property
    def outputs(self) -> str:
        """The name of the check on outputs."""
        return "logits" if self.headed else "hidden states"


def run_out(
    runner: CheckRunner,
    inputs: Inputs,
    stored: StoredResult,
    *,
    parameters: int,
    seed: int,
    max_text_tokens: int | None,
    step: Callable[[], None],
    text_progress: Progress,
) -> OutRun | None:
    """Load and run OUT.

    Args:
        runner: runs the checks `loads` and `loss of OUT`.
        inputs: both checkpoints.
        stored: what the checks on stored data found.
        parameters: about how many parameters OUT has.
        seed: of the probe.
        max_text_tokens: tokens of the text that are read at most.
        step: called after each pass.
        text_progress: called as the text is scored.

    Returns:
        What OUT computed; None if it cannot be loaded, or if its geometry is unknown.
    """

    def load() -> LoadedOut:
        loaded = _load(inputs, stored, parameters, seed)
        step()
        return loaded

    loaded = runner.read("loads", load, lambda found: _describe(found, stored))
    if loaded is None or stored.geometry is None:
        return None
    model, probe = loaded.model, loaded.probe
    caches, no_cache = probe.cached_shapes(model)
    step()
    error, problem = probe.decoding_error(model, step)
    found = OutRun(loaded.headed, probe, loaded.output, caches, no_cache, error, problem, _kept(model, inputs, stored))
    if inputs.family.wrapped and loaded.headed:
        found.image = run_on_image(model, inputs.out, seed)
    if inputs.text is not None:
        _score(runner, found, model, inputs, max_text_tokens, text_progress)
    if proof_of(stored.method) is Proof.MEASURED:
        _predict(found, model)
    return found


def _load(inputs: Inputs, stored: StoredResult, parameters: int, seed: int) -> LoadedOut:
    # the modelling file runs from OUT, as it does where this package is not installed
    modeling = None if stored.geometry is None else modelling_file(inputs.family, stored.geometry)
    own_code = [file.name for file in modeling.files] if stored.own_file and modeling else []
    loaded = load_model(inputs.out, parameters, own_code=own_code)
    cross = stored.geometry is not None and "cross" in stored.geometry.counts
    probe = Probe(loaded.model, seed, cross=cross)
    output = probe.output(loaded.model)
    return LoadedOut(loaded.model, loaded.class_name, loaded.has_language_model, probe, output)


def _describe(loaded: LoadedOut, stored: StoredResult) -> Finding:
    import transformers

    name = f"{loaded.class_name} of its own modelling file" if stored.own_file else loaded.class_name
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return Finding(f"{name} in {dtype}, transformers {transformers.__version__}")


def _kept(model: Any, inputs: Inputs, stored: StoredResult) -> dict[str, Any]:
    """The parameters of OUT that `replacing` needs."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if holds_heads(name, inputs.family) or (stored.method in FOLDING and folds_maps(name, inputs.family))
    }


def _score(
    runner: CheckRunner,
    found: OutRun,
    model: Any,
    inputs: Inputs,
    max_text_tokens: int | None,
    progress: Progress,
) -> None:
    def score(ids: list[int]) -> Finding:
        found.loss = text_loss(model, ids, progress=progress)
        return loss_finding(found.loss, ids)

    found.token_ids = runner.read(
        "loss of OUT", lambda: tokenize(inputs.out, inputs.text or "", max_text_tokens), score
    )


def loss_finding(loss: float, token_ids: list[int]) -> Finding:
    """A loss in words."""
    tokens = len(token_ids) - 1
    return Finding(f"{loss:.4f} nats per token over {tokens:,} tokens", {"loss": loss, "tokens": tokens})


def _predict(found: OutRun, model: Any) -> None:
    """Keep OUT's predictions, or the reason why there are none, which the check `better than mean` reports."""
    found.predictions = Predictions(found.probe, found.token_ids)
    try:
        found.predicted = found.predictions.logits(model)
    except Exception as problem:
        found.prediction_problem = first_line(problem)
