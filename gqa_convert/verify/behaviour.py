"""The checks on what the models compute, loaded by transformers. Of code in checkpoints only the package's own
modelling files run.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqa_convert.families import loading
from gqa_convert.families.table import Family
from gqa_convert.text.scoring.text_loss import text_loss
from gqa_convert.verify.checkpoint_reader import INDEX, first_line
from gqa_convert.verify.distances import Predictions, divergence, judge_distance
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.probe import HALF_TOLERANCE, STEPS, Caches, Probe, Shapes, cache_shapes
from gqa_convert.verify.proofs import FOLDING, Proof, proof_of
from gqa_convert.verify.replacing import folds_maps, holds_heads, pool_heads, replace_heads
from gqa_convert.verify.report import Failure, VerificationReport
from gqa_convert.verify.tokenizers import check_tokenizer, tokenize
from gqa_convert.verify.translated import Translation

__all__ = ["Shapes", "cache_shapes", "check_behaviour", "judge_cache", "judge_caches"]

Progress = Callable[[str, int, int], None]

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters are run in the checkpoint's own type, to fit in memory."""

_PASSES = STEPS + 5
"""Forward passes over both models, for the progress bar."""


def check_behaviour(
    check: Callable[[str, Callable[[], str]], bool],
    report: VerificationReport,
    out: Path,
    source: Path,
    family: Family,
    geometry: Geometry | None,
    *,
    parameters: int,
    own_file: bool | None,
    method: Any,
    seed: int,
    spacing: float = 0.0,
    translation: Translation | None = None,
    text: str | None,
    max_text_tokens: int | None,
    progress: Progress,
) -> None:
    """Run both models, one in memory at a time.

    Args:
        check: runs a named check.
        report: receives the losses.
        out: the converted folder.
        source: the source's folder.
        family: of SOURCE.
        geometry: of both; without it only loading is tried.
        parameters: how many numbers SOURCE has.
        own_file: whether OUT's modelling file is the package's own; None if it needs none.
        method: how the heads were merged.
        seed: of the random tokens.
        spacing: the smallest distance of two numbers of SOURCE's K/V heads on disk.
        translation: of SOURCE to OUT's model type, if it is another.
        text: to measure the loss on.
        max_text_tokens: of it, at most.
        progress: called as work goes on.
    """
    state: dict[str, Any] = {}
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("logits", done, _PASSES)

    def load() -> str:
        import transformers

        code = (
            f"{family.modeling.file}.py" if own_file and family.modeling else None
        )  # as whoever lacks this package loads it
        loaded = load_model(out, parameters, code=code)
        model, state["headed"] = loaded.model, loaded.has_language_model
        state["out"], state["probe"] = (
            model,
            Probe(model, seed, cross=geometry is not None and "cross" in geometry.counts),
        )
        state["output"] = state["probe"].output(model)
        step()
        kind = f"{loaded.class_name} of its own modelling file" if own_file else loaded.class_name
        return f"{kind} in {str(model.dtype).removeprefix('torch.')}, transformers {transformers.__version__}"

    def load_source() -> str:
        loaded = load_model(source, parameters)
        state["source"] = loaded.model
        return loaded.class_name

    def score(which: str, offset: int) -> str:
        ids = state["ids"]
        losses[which] = text_loss(state[which], ids, progress=lambda n, of: progress("text", offset * of + n, 2 * of))
        return f"{losses[which]:.4f} nats per token over {len(ids) - 1:,} tokens"

    def text_of_out() -> str:
        state["ids"] = tokenize(out, text or "", max_text_tokens)
        return score("out", 0)

    def nearer_than_mean() -> str:
        predictions, model = state["predictions"], state["source"]
        if not state["headed"]:
            raise Failure("OUT has no language-model head, whose predictions fit is judged by")
        if "problem" in state:
            raise Failure(f"OUT can't be run ({state['problem']})")
        wanted = predictions.logits(model)
        found = divergence(wanted, state.pop("predicted"))
        if translation is not None:
            translation.pool_heads(model)
        elif geometry is not None:
            pool_heads(model, family, geometry)
        return judge_distance(found, divergence(wanted, predictions.logits(model)), predictions.describe())

    def same_outputs() -> str:
        probe, model = state["probe"], state["source"]
        if translation is not None:
            replaced, rounded = translation.replace_heads(model), translation.rounds_anew()
        else:
            replaced, rounded = 0, ""
            if geometry is not None:
                replaced = replace_heads(model, state["parameters"], family, geometry, method, spacing)
        theirs = probe.output(model)
        step()
        tolerance = HALF_TOLERANCE if rounded else probe.tolerance
        error = probe.difference(state["output"], theirs, rounded=bool(rounded))
        note = f" ({rounded}: judged as half precision)" if rounded else ""
        if not error <= tolerance:
            raise Failure(
                f"{_relative(error, outputs())}, over the tolerance of {tolerance:g}: {probe.describe()}{note}"
            )
        return f"{_relative(error, outputs())}: {probe.describe()}, {replaced} parameters of SOURCE replaced{note}"

    def outputs() -> str:
        return "logits" if state["headed"] else "hidden states"

    if own_file is not None or translation is not None:
        other = (
            translation is not None and translation.target_architecture.out == "gpt_bigcode"
        )  # of which transformers 5 has no tokenizer class
        check("tokenizer", lambda: check_tokenizer(out, source, other_class=other))
    if own_file is False:
        for name in ("loads", "logits", "cache heads", "cached decoding"):
            check(name, _not_executed)
        return
    losses: dict[str, float] = {}
    state["headed"] = True
    if not check("loads", load) or geometry is None:
        return
    held, no_cache = state["probe"].cached_shapes(state["out"])
    step()
    cached, reason = state["probe"].decoding_error(state["out"], step)
    if text is not None:
        check("loss of OUT", text_of_out)
    if proof_of(method) is Proof.MEASURED:
        state["predictions"] = Predictions(state["probe"], state.get("ids"))
        try:
            state["predicted"] = state["predictions"].logits(state["out"])
        except Exception as problem:  # a finding of the check that needs them
            state["problem"] = first_line(problem)
    if translation is None:
        state["parameters"] = {
            name: parameter
            for name, parameter in state["out"].named_parameters()
            if holds_heads(name, family) or (method in FOLDING and folds_maps(name, family))
        }
    del state["out"]
    if not check("source loads", load_source):
        return
    if "out" in losses and check("loss of SOURCE", lambda: score("source", 1)):
        report.losses = {"source": losses["source"], "out": losses["out"], "tokens": len(state["ids"]) - 1}
    there, _ = state["probe"].cached_shapes(state["source"])
    step()
    if proof_of(method) is Proof.MEASURED:
        check("better than mean", nearer_than_mean)
    check(outputs(), same_outputs)
    own = 0.0
    if (
        not cached <= state["probe"].tolerance
    ):  # SOURCE with the same merged heads must be off by as much, or OUT is at fault
        own, _ = state["probe"].decoding_error(state["source"], lambda: None)
    check("cache heads", lambda: judge_caches(held, there, geometry, no_cache))
    check("cached decoding", lambda: _judge_decoding(cached, own, state["probe"].tolerance, reason, outputs()))


def load_model(folder: Path, parameters: int, *, code: str | None = None) -> loading.AnyModel:
    """A model on the CPU, in evaluation mode: in float32 unless it has too many parameters.

    Args:
        folder: the checkpoint.
        parameters: how many numbers it has, more or less.
        code: the name of the modelling file in it that may run.
    """
    import torch

    dtype = torch.float32 if parameters <= FLOAT32_LIMIT else "auto"
    try:
        if code is None:
            found = loading.load_any_model(folder, dtype)
        else:
            with _only(folder, code) as alone:
                found = loading.load_any_model(alone, dtype, run_code=True)
    except Exception as problem:
        raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if found.missing:
        raise Failure(
            f"transformers finds no fitting tensor for {min(found.missing)} ({len(found.missing)} such) in {folder}"
        )
    return found


@contextmanager
def _only(out: Path, code: str) -> Iterator[Path]:
    """OUT's weights, configs and modelling file in a folder of their own, away from any other code that lies beside
    them.
    """
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "gqa_checkpoint"  # always the same: transformers keeps a copy of the code under this name
        folder.mkdir()
        names = {"config.json", "generation_config.json", INDEX} | {path.name for path in out.glob("*.safetensors")}
        for name in names:
            if (out / name).is_file():
                (folder / name).symlink_to((out / name).resolve())
        shutil.copyfile(out / code, folder / code)
        yield folder


def _not_executed() -> str:
    raise Failure(
        "not run: the modelling file in OUT did not pass its check, and other code than the package's own is not executed"
    )


def judge_caches(ours: Caches, theirs: Caches, geometry: Geometry, reason: str) -> str:
    """The caches of self-attention and, where there is any, of cross-attention."""
    kept = {shape[1] for layers in ours.values() for pair in layers for shape in pair}
    if (
        not geometry.changed and kept != {geometry.after} and ours and ours == theirs
    ):  # Falcon repeats K/V heads before it caches them
        return f"{max(kept)} heads, as the same class keeps them of SOURCE"
    found = [judge_cache(ours.get("self", []), theirs.get("self", []), geometry.after, reason)]
    if "cross" in geometry.counts:
        found.append(
            judge_cache(ours.get("cross", []), theirs.get("cross", []), geometry.after, reason, "cross-attention ")
        )
    return "; ".join(found)


def judge_cache(ours: list[Shapes], theirs: list[Shapes], heads: int, reason: str, kind: str = "") -> str:
    """OUT keeps `heads` heads in every layer where SOURCE keeps keys.

    Args:
        ours: of OUT.
        theirs: of SOURCE.
        heads: K/V heads of OUT.
        reason: why there is nothing to look at, if so.
        kind: of attention, for the message.
    """
    if not ours:
        raise Failure(f"no {kind}layer of OUT keeps keys: {reason}")
    for number, pair in enumerate(ours):
        for what, shape in zip(("keys", "values"), pair, strict=True):
            if shape[1] != heads:
                raise Failure(
                    f"{kind}layer {number} of those with keys caches {what} {list(shape)} where {heads} heads belong"
                )
    if len(ours) != len(theirs):
        raise Failure(f"{len(ours)} {kind}layers keep keys and values where {len(theirs)} do in SOURCE")
    return f"{heads} heads in each of {len(ours)} {kind}layers, {theirs[0][0][1]} in SOURCE"


def _judge_decoding(error: float, own: float, tolerance: float, reason: str, outputs: str) -> str:
    if error <= tolerance:
        return f"{_relative(error, outputs)}: prefill and {STEPS} steps against one pass"
    if math.isinf(error) and math.isinf(own):
        return f"can be done with neither model ({reason})"
    if own > tolerance and error <= 1.1 * own:
        return f"{_relative(error, outputs)}, but SOURCE with the same heads is off by {own:.2g}: the model's own fault"
    what = f"prefill and {STEPS} steps against one pass {reason}".rstrip()
    raise Failure(f"{_relative(error, outputs)}, over the tolerance of {tolerance:g}: {what}")


def _relative(error: float, outputs: str) -> str:
    return f"largest difference {error:.2g} of the spread of the {outputs}"
