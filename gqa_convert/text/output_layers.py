"""Takes output layers out of models, so that logits, a batch's largest tensor by far, need not be made at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

_CAP = "final_logit_softcapping"
_TRIED = 8
"""Positions on which a model is tried."""
_TRIAL = (1000.0, -1.0, 0.001, -300.0)
"""Numbers that a model must multiply by one factor: caps and clamps change large ones, sums change small ones."""


class OutputLayer(NamedTuple):
    """What makes logits of the states before them; V tokens, states of d numbers."""

    weight: Tensor
    """[V, d]"""
    bias: Tensor | None = None
    """[V]"""
    cap: float | None = None
    """The bound that logits approach, as in Gemma 2 (Gemma Team 2024, section 2)."""

    def logits(self, states: Tensor) -> Tensor:
        """The logits [..., V] of states [..., d]."""
        logits = linear(states, self.weight, self.bias)
        return logits if self.cap is None else capped(logits, self.cap)


def capped(logits: Tensor, cap: float) -> Tensor:
    """Logits bounded by a cap, as transformers computes them."""
    return torch.tanh(logits / cap) * cap


class _Removed(torch.nn.Linear):  # type: ignore[misc]
    """Takes the place of an output layer and returns the states that it is given."""

    _capped: tuple[Any, ...]
    _cap: float | None

    def forward(self, states: Tensor) -> Tensor:
        return states


class _Tried(torch.nn.Linear):  # type: ignore[misc]
    """Takes the place of an output layer during a trial."""

    _calls: list[torch.Size]

    def forward(self, states: Tensor) -> Tensor:
        self._calls.append(states.shape)
        return _trial(states)


def remove_output_layer(model: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Take the output layer out of a model, which from then on returns, as its logits, the states [b, L, d] of which
    `removed_output_layer` makes them. Parameters and their names stay.

    This is possible for a model that does nothing else with its logits than to multiply or to cap them. Whether it does
    is tried.

    Args:
        model: a transformers model with a language-model head. If it is sharded, all processes must call this.
        inputs: arguments of the model, of which the first row and few positions are used.

    Returns:
        Whether the layer was removed; if not, the model is as before.
    """
    layer = _layer_of(model)
    if type(layer) is not torch.nn.Linear:
        return False
    holders = _capping(model)
    cap = getattr(holders[0], _CAP) if holders else None
    _set_cap(holders, None)
    layer.__class__, layer._calls = _Tried, []
    few = {name: value[:1, :_TRIED] for name, value in inputs.items()}
    was_training = model.training
    try:
        with torch.no_grad():
            logits = model.eval()(**few, use_cache=False).logits
        fits = len(layer._calls) == 1 and logits.shape == layer._calls[0] and _is_multiple(logits)
    except (RuntimeError, TypeError, ValueError, IndexError):  # the model needs logits of V tokens
        fits = False
    model.train(was_training)
    del layer._calls
    layer.__class__, layer._capped, layer._cap = _Removed, holders, cap
    if not fits:
        restore_output_layer(model)
    return fits


def restore_output_layer(model: Any) -> None:
    """Undo `remove_output_layer`."""
    layer = _layer_of(model)
    if isinstance(layer, _Removed):
        _set_cap(layer._capped, layer._cap)
        del layer._capped, layer._cap
        layer.__class__ = torch.nn.Linear


def removed_output_layer(model: Any) -> OutputLayer | None:
    """The output layer that `remove_output_layer` took out of a model; None if the model makes logits itself."""
    layer = _layer_of(model)
    return OutputLayer(layer.weight, layer.bias, layer._cap) if isinstance(layer, _Removed) else None


@contextmanager
def without_output_layer(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[OutputLayer | None]:
    """A context in which the output layer is removed, where this is possible."""
    remove_output_layer(model, inputs)
    try:
        yield removed_output_layer(model)
    finally:
        restore_output_layer(model)


def _layer_of(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _capping(model: Any) -> tuple[Any, ...]:
    """The objects by whose attribute a model caps its logits."""
    config = model.config
    every = (model, config, config.get_text_config() if hasattr(config, "get_text_config") else config)
    found = {id(each): each for each in every if getattr(each, _CAP, None) is not None}
    return tuple(found.values())


def _set_cap(holders: tuple[Any, ...], cap: float | None) -> None:
    for holder in holders:
        object.__setattr__(holder, _CAP, cap)  # past the checks of configs that want a number


def _trial(states: Tensor) -> Tensor:
    """Numbers of the shape of states."""
    values = torch.tensor(_TRIAL, dtype=states.dtype, device=states.device)
    return values.repeat(-(-states.numel() // len(_TRIAL)))[: states.numel()].view(states.shape)


def _is_multiple(logits: Tensor) -> bool:
    """Whether logits are the trial's numbers times one factor."""
    logits = logits.float()
    ratios = logits / _trial(logits)
    factor = ratios.flatten()[0]
    return bool(factor.isfinite() and factor != 0 and torch.allclose(ratios, factor.expand_as(ratios), rtol=0.01))
