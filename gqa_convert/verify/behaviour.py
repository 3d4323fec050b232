"""The checks on what the models compute, loaded by transformers: never with code from a checkpoint."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqa_convert.evaluate import text_loss
from gqa_convert.families import Family
from gqa_convert.loading import load_causal_lm, load_tokenizer
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.merging import merge
from gqa_convert.verify.reading import first_line
from gqa_convert.verify.report import Failure, VerificationReport

Progress = Callable[[str, int, int], None]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters are run in the checkpoint's own type, to fit in memory."""

TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
"""Largest difference of two logits over the logits' standard deviation."""
HALF_TOLERANCE = 5e-2
"""The same for half precisions, of the root mean square: single logits may be off by more, as where a router tips over."""

_LENGTH, _STEPS = 32, 4
_PASSES = _STEPS + 5
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
    method: Any,
    seed: int,
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
        family: of both.
        geometry: of both; without it only loading is tried.
        parameters: how many numbers SOURCE has.
        method: how the heads were merged.
        seed: of the random tokens.
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

        model = load_model(out, parameters)
        state["out"], state["probe"] = model, Probe(model, seed)
        state["logits"] = state["probe"].logits(model)
        step()
        return f"{type(model).__name__} in {str(model.dtype).removeprefix('torch.')}, transformers {transformers.__version__}"

    def load_source() -> str:
        state["source"] = load_model(source, parameters)
        return type(state["source"]).__name__

    def score(which: str, offset: int) -> str:
        ids = state["ids"]
        losses[which] = text_loss(state[which], ids, progress=lambda n, of: progress("text", offset * of + n, 2 * of))
        return f"{losses[which]:.4f} nats per token over {len(ids) - 1:,} tokens"

    def text_of_out() -> str:
        state["ids"] = tokenize(out, text or "", max_text_tokens)
        return score("out", 0)

    def same_logits() -> str:
        probe, model = state["probe"], state["source"]
        replaced = replace_heads(model, state["parameters"], family, geometry, method) if geometry else 0
        theirs = probe.logits(model)
        step()
        error = probe.difference(state["logits"], theirs)
        if not error <= probe.tolerance:
            raise Failure(f"{_relative(error)}, over the tolerance of {probe.tolerance:g}: {probe.describe()}")
        return f"{_relative(error)}: {probe.describe()}, {replaced} parameters of SOURCE replaced"

    losses: dict[str, float] = {}
    if not check("loads", load) or geometry is None:
        return
    held, no_cache = state["probe"].cached_shapes(state["out"])
    step()
    cached, reason = state["probe"].decoding_error(state["out"], step)
    if text is not None:
        check("loss of OUT", text_of_out)
    state["parameters"] = {name: parameter for name, parameter in state["out"].named_parameters() if _kv(name, family)}
    del state["out"]
    if not check("source loads", load_source):
        return
    if "out" in losses and check("loss of SOURCE", lambda: score("source", 1)):
        report.losses = {"source": losses["source"], "out": losses["out"], "tokens": len(state["ids"]) - 1}
    there, _ = state["probe"].cached_shapes(state["source"])
    step()
    check("logits", same_logits)
    own = 0.0
    if not cached <= state["probe"].tolerance:  # SOURCE with the same merged heads must be off by as much, or OUT is at fault
        own, _ = state["probe"].decoding_error(state["source"], lambda: None)
    check("cache heads", lambda: judge_cache(held, there, geometry.after, no_cache))
    check("cached decoding", lambda: _judge_decoding(cached, own, state["probe"].tolerance, reason))


def load_model(folder: Path, parameters: int) -> Any:
    """A causal language model on the CPU, in evaluation mode: in float32 unless it has too many parameters."""
    import torch

    try:
        model, missing = load_causal_lm(folder, torch.float32 if parameters <= FLOAT32_LIMIT else "auto")
    except Exception as problem:
        raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if missing:
        raise Failure(f"transformers finds no fitting tensor for {min(missing)} ({len(missing)} such) in {folder}")
    return model


class Probe:
    """Random tokens, three rows with left padding of different lengths, and what models make of them."""

    def __init__(self, model: Any, seed: int) -> None:
        import torch

        config = model.config.get_text_config()
        generator = torch.Generator().manual_seed(seed)
        longest = getattr(config, "max_position_embeddings", None)
        length = min(_LENGTH, longest) if isinstance(longest, int) and longest > _STEPS + 4 else _LENGTH
        self._ids = torch.randint(0, config.vocab_size, (3, length), generator=generator)
        self._mask = torch.ones_like(self._ids)
        for row, padding in ((1, length // 8), (2, length // 3)):
            self._mask[row, :padding] = 0
            pad = config.pad_token_id
            self._ids[row, :padding] = pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else 0
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._real = self._mask.bool()
        dtype = str(model.dtype).removeprefix("torch.")
        self._exact = dtype in TOLERANCE
        self.tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)

    def describe(self) -> str:
        return f"{int(self._real.sum())} random tokens, left padding"

    def _forward(self, model: Any, start: int, stop: int, **options: Any) -> Any:
        import torch

        if "position_ids" in inspect.signature(model.forward).parameters:
            options["position_ids"] = self._positions[:, start:stop]
        with torch.no_grad():
            return model(input_ids=self._ids[:, start:stop], attention_mask=self._mask[:, :stop], **options)

    def _prefill(self, model: Any, stop: int) -> tuple[Any, Any]:
        """Logits and the cache, which is updated in place by later steps; some models fill only one given to them."""
        from transformers import DynamicCache

        result = self._forward(model, 0, stop, use_cache=True)
        cache = getattr(result, "past_key_values", None)
        if cache is None:
            cache = DynamicCache(config=model.config)
            result = self._forward(model, 0, stop, use_cache=True, past_key_values=cache)
        return result.logits, cache

    def logits(self, model: Any) -> Any:
        """Logits of every token that is no padding, without a cache."""
        return self._forward(model, 0, self._ids.shape[1], use_cache=False).logits[self._real].double()

    def difference(self, ours: Any, theirs: Any) -> float:
        """Distance of logits, as a share of their standard deviation; NaN counts as infinite."""
        if ours.shape != theirs.shape:
            return math.inf
        distance = (ours - theirs).abs().max() if self._exact else (ours - theirs).square().mean().sqrt()
        error = float(distance / theirs.std().clamp(min=1e-30))
        return error if math.isfinite(error) else math.inf

    def decoding_error(self, model: Any, step: Callable[[], None]) -> tuple[float, str]:
        """Difference of logits from a prefill and steps on its cache to those of one pass; infinite, and why, on failure."""
        import torch

        length = self._ids.shape[1]
        prefill = length - _STEPS
        try:
            logits, cache = self._prefill(model, prefill)
            parts = [logits]
            step()
            for at in range(prefill, length):
                parts.append(self._forward(model, at, at + 1, use_cache=True, past_key_values=cache).logits)
                step()
            return self.difference(torch.cat(parts, dim=1)[self._real].double(), self.logits(model)), ""
        except Exception as problem:  # judged as any other difference: unless SOURCE can do it, OUT need not
            return math.inf, first_line(problem)

    def cached_shapes(self, model: Any) -> tuple[list[Shapes], str]:
        """The shapes of keys and values that the model keeps after a pass, by layer; none, and why, if there is no cache."""
        try:
            return cache_shapes(self._prefill(model, self._ids.shape[1])[1]), "its cache is empty"
        except Exception as problem:
            return [], first_line(problem)


def cache_shapes(cache: Any) -> list[Shapes]:
    """The shapes [batch, heads, length, width] of keys and values, in every layer of a cache that keeps them."""
    if hasattr(cache, "layers"):
        return _shapes([(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers])
    if hasattr(cache, "key_cache"):
        return _shapes(list(zip(cache.key_cache, cache.value_cache, strict=True)))
    raise Failure(f"the model's cache is a {type(cache).__name__}, which has no keys to look at")


def _shapes(pairs: list[tuple[Any, Any]]) -> list[Shapes]:
    """Layers of other kinds (recurrence, convolution) keep no keys, or an empty tensor in their place."""
    shapes = [tuple(tuple(getattr(tensor, "shape", ())) for tensor in pair) for pair in pairs]
    return [(keys, values) for keys, values in shapes if len(keys) == len(values) == 4 and 0 not in keys]


def judge_cache(ours: list[Shapes], theirs: list[Shapes], heads: int, reason: str) -> str:
    """OUT keeps `heads` heads in every layer where SOURCE keeps keys.

    Args:
        ours: of OUT.
        theirs: of SOURCE.
        heads: K/V heads of OUT.
        reason: why there is nothing to look at, if so.
    """
    if not ours:
        raise Failure(f"no layer of OUT keeps keys: {reason}")
    for number, pair in enumerate(ours):
        for what, shape in zip(("keys", "values"), pair, strict=True):
            if shape[1] != heads:
                raise Failure(f"layer {number} of those with keys caches {what} {list(shape)} where {heads} heads belong")
    if len(ours) != len(theirs):
        raise Failure(f"{len(ours)} layers keep keys and values where {len(theirs)} do in SOURCE")
    return f"{heads} heads in each of {len(ours)} layers, {theirs[0][0][1]} in SOURCE"


def _judge_decoding(error: float, own: float, tolerance: float, reason: str) -> str:
    if error <= tolerance:
        return f"{_relative(error)}: prefill and {_STEPS} steps against one pass"
    if math.isinf(error) and math.isinf(own):
        return f"can be done with neither model ({reason})"
    if own > tolerance and error <= 1.1 * own:
        return f"{_relative(error)}, but SOURCE with the same heads is off by {own:.2g}: the model's own fault"
    what = f"prefill and {_STEPS} steps against one pass {reason}".rstrip()
    raise Failure(f"{_relative(error)}, over the tolerance of {tolerance:g}: {what}")


def _relative(error: float) -> str:
    return f"largest difference {error:.2g} of the logits' spread"


def _kv(name: str, family: Family) -> bool:
    """Whether a parameter in memory belongs to K/V heads. Prefixes differ from those on disk; the ends are the same."""
    parts = (family.fused,) if family.fused else (family.key, family.value)
    endings = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    in_attention = any(f".{module}." in f".{name}" for module in family.attention)
    return in_attention and (name.endswith(endings) or (family.key_norm != "none" and f".{family.key_norm_name}." in name))


def replace_heads(model: Any, ours: dict[str, Any], family: Family, geometry: Geometry, method: Any) -> int:
    """Give every K/V head of the loaded source the merged head of its group; returns how many parameters changed.

    The merged heads are made of the loaded source's own heads, except for `random`, where they can only be OUT's.
    """
    import torch

    size = geometry.size
    if size <= 1:
        return 0
    theirs = {name: parameter for name, parameter in model.named_parameters() if _kv(name, family)}
    replaced: set[str] = set()
    with torch.no_grad():
        for name, parameter in theirs.items():
            if name in replaced:
                continue
            if family.key_norm == "per_head_list" and f".{family.key_norm_name}." in name:
                stem, _, kind = name.rpartition(f".{family.key_norm_name}.")
                kind = kind.split(".", 1)[1]
                names = [f"{stem}.{family.key_norm_name}.{head}.{kind}" for head in range(geometry.before)]
                heads = [theirs[one].data for one in names]
                made = [_made(heads[g * size : (g + 1) * size], method, ours.get(names[g])) for g in range(geometry.after)]
                for head, one in enumerate(names):
                    theirs[one].copy_(made[head // size])
                replaced.update(names)
                continue
            if name not in ours:
                raise Failure(f"{name} exists in the loaded SOURCE and not in the loaded OUT")
            if family.key_norm == "shared" and f".{family.key_norm_name}." in name:
                continue
            fused = family.fused is not None and f".{family.fused}." in name
            first = 0
            if fused:
                width = parameter.shape[0] // (geometry.heads + 2 * geometry.before)
                first = geometry.heads * width
            sections = 2 if fused else 1
            old = parameter[first:].view(sections, geometry.before, -1, *parameter.shape[1:])
            new = ours[name][first:].reshape(sections, geometry.after, -1, *parameter.shape[1:])
            if old.shape[2:] != new.shape[2:]:
                shapes = f"{list(ours[name].shape)} in the loaded OUT, {list(parameter.shape)} in the loaded SOURCE"
                raise Failure(f"{name} is {shapes}, which does not fit")
            for section, merged in zip(old, new, strict=True):  # `old` is a view, so that this writes into the parameter
                for group in range(geometry.after):
                    heads = section[group * size : (group + 1) * size]
                    heads.copy_(_made(list(heads.clone()), method, merged[group]).expand_as(heads))
            replaced.add(name)
    if not replaced:
        raise Failure("the loaded SOURCE has no parameters with K/V heads")
    return len(replaced)


def _made(heads: list[Any], method: Any, ours: Any) -> Any:
    """A merged head. A mean has more digits than OUT's on disk, so that OUT's stands in once it is seen to be near."""
    if method == "random":
        return ours
    made = merge(heads, method)
    spread = float(max(head.abs().max() for head in heads))
    if ours is None or not float((made - ours).abs().max()) <= 2.0**-8 * spread:
        raise Failure("the loaded OUT holds a K/V head that is not the merge of the loaded SOURCE's")
    return ours


def tokenize(folder: Path, text: str, limit: int | None) -> list[int]:
    """The text's token ids by the checkpoint's own tokenizer, at most `limit` of them."""
    ids: list[int] = load_tokenizer(folder)(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise Failure(f"the text has {len(ids)} token(s), too few for a loss")
    return ids
