"""Compares what OUT computed with the loaded SOURCE, which is given OUT's heads."""

import math
from collections.abc import Callable
from typing import Any

from gqa_convert.text.scoring.text_loss import text_loss
from gqa_convert.verify.behaviour.caches import judge_caches
from gqa_convert.verify.behaviour.divergence import divergence, judge_divergence
from gqa_convert.verify.behaviour.image import ImageRun, logits_of
from gqa_convert.verify.behaviour.out_run import OutRun, Progress, loss_finding
from gqa_convert.verify.behaviour.probe import STEPS
from gqa_convert.verify.behaviour.replacing import pool_heads, replace_heads, smallest_distance
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.proofs import Proof, proof_of
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.runner import CheckRunner
from gqa_convert.verify.stored import StoredResult


class Comparison:
    """The checks that need SOURCE's model. They run in a fixed order, since some of them change the model.

    Args:
        out: what OUT computed.
        model: the loaded SOURCE.
        inputs: both checkpoints.
        stored: what the checks on stored data found.
    """

    def __init__(self, out: OutRun, model: Any, inputs: Inputs, stored: StoredResult) -> None:
        assert stored.geometry is not None
        self._out = out
        self._model = model
        self._inputs = inputs
        self._stored = stored
        self._geometry: Geometry = stored.geometry

    def run(self, runner: CheckRunner, step: Callable[[], None], text_progress: Progress) -> None:
        """Run all checks.

        Args:
            runner: runs them, and receives the losses in its report.
            step: called after each pass.
            text_progress: called as the text is scored.
        """
        out = self._out
        if out.loss is not None:
            runner.check("loss of SOURCE", lambda: self._score(runner, text_progress))
        caches, _ = out.probe.cached_shapes(self._model)
        step()
        if proof_of(self._stored.method) is Proof.MEASURED:
            runner.check("better than mean", self._better_than_mean)
        runner.check(out.outputs, lambda: self._same_outputs(step))
        if out.image is not None:
            image = out.image
            runner.check("image", lambda: self._same_of_image(image))
        own = 0.0
        if not out.decoding_error <= out.probe.tolerance:
            # unless SOURCE with the same merged heads is off by as much, OUT is at fault
            own, _ = out.probe.decoding_error(self._model, lambda: None)
        runner.check(
            "cache heads",
            lambda: judge_caches(out.caches, caches, self._geometry, out.no_cache, wrapped=self._inputs.family.wrapped),
        )
        runner.check("cached decoding", lambda: judge_decoding(out, own))

    def _score(self, runner: CheckRunner, progress: Progress) -> Finding:
        out = self._out
        assert out.token_ids is not None
        assert out.loss is not None
        loss = text_loss(self._model, out.token_ids, progress=progress)
        runner.report.losses = {"source": loss, "out": out.loss, "tokens": len(out.token_ids) - 1}
        return loss_finding(loss, out.token_ids)

    def _better_than_mean(self) -> Finding:
        """OUT's predictions are nearer to SOURCE's than those of mean pooling."""
        out = self._out
        if not out.headed:
            raise Failure("OUT has no language-model head, and `fit` is judged by its predictions")
        if out.predictions is None or out.predicted is None:
            raise Failure(f"OUT cannot be run ({out.prediction_problem})")
        expected = out.predictions.logits(self._model)
        found = divergence(expected, out.predicted)
        out.predicted = None  # frees memory
        pool_heads(self._model, self._inputs.family, self._geometry)
        mean = divergence(expected, out.predictions.logits(self._model))
        return judge_divergence(found, mean, out.predictions.describe())

    def _same_outputs(self, step: Callable[[], None]) -> Finding:
        """SOURCE with OUT's heads computes what OUT computes."""
        out = self._out
        replaced = self._replace()
        theirs = out.probe.output(self._model)
        step()
        tolerance = out.probe.tolerance
        error = out.probe.difference(out.output, theirs)
        numbers = {"error": error, "tolerance": tolerance, "replaced": replaced}
        difference = _difference(error, out.outputs)
        if not error <= tolerance:
            raise Failure(f"{difference}, over the tolerance of {tolerance:g}: {out.probe.describe()}", numbers)
        return Finding(f"{difference}: {out.probe.describe()}, {replaced} parameters of SOURCE replaced", numbers)

    def _same_of_image(self, image: ImageRun) -> Finding:
        """SOURCE, which has OUT's heads by now, computes of an image what OUT computes."""
        if image.inputs is None:
            return Finding(f"not compared: {image.reason}")
        theirs = logits_of(self._model, image.inputs)
        if image.output is None:
            raise Failure(f"OUT cannot be run on an image ({image.reason})")
        tolerance, error = self._out.probe.tolerance, self._out.probe.difference(image.output, theirs)
        numbers = {"error": error, "tolerance": tolerance}
        difference, tokens = _difference(error, "logits"), theirs.shape[1]
        if not error <= tolerance:
            raise Failure(f"{difference}, over the tolerance of {tolerance:g}: a random image and a question", numbers)
        return Finding(f"{difference}: a random image and a question, {tokens} tokens", numbers)

    def _replace(self) -> int:
        """Give SOURCE's model OUT's heads, and return how many parameters changed."""
        self._round()
        return replace_heads(
            self._model,
            self._out.parameters,
            self._inputs.family,
            self._geometry,
            self._stored.method,
            smallest_distance(self._inputs.weights, self._geometry),
        )

    def _round(self) -> None:
        """Round what a rewritten SOURCE holds in a wider type than OUT."""
        import torch

        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                dtype = self._inputs.weights.result_dtypes.get(name)
                if dtype is not None:
                    parameter.copy_(parameter.to(dtype))


def judge_decoding(out: OutRun, own: float) -> Finding:
    """OUT's cached decoding equals one pass, or SOURCE's own cached decoding is off by as much.

    Args:
        out: what OUT computed.
        own: the decoding error of SOURCE with OUT's heads, where OUT's is over the tolerance.
    """
    error, tolerance = out.decoding_error, out.probe.tolerance
    numbers = {"error": error, "tolerance": tolerance}
    difference = _difference(error, out.outputs)
    if error <= tolerance:
        return Finding(f"{difference}: prefill and {STEPS} steps against one pass", numbers)
    if math.isinf(error) and math.isinf(own):
        return Finding(f"neither model can decode with a cache ({out.decoding_problem})", numbers)
    if own > tolerance and error <= 1.1 * own:
        return Finding(f"{difference}, but SOURCE with the same heads is off by {own:.2g} too", numbers)
    what = f"prefill and {STEPS} steps against one pass {out.decoding_problem}".rstrip()
    raise Failure(f"{difference}, over the tolerance of {tolerance:g}: {what}", numbers)


def _difference(error: float, outputs: str) -> str:
    return f"largest difference {error:.2g} of the spread of the {outputs}"
