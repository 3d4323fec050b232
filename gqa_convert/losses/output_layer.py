"""Takes output layers out of models, so that logits, a batch's largest tensor by far, need not be
made at once.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

_CAP = "final_logit_softcapping"
_TRIED = 8
"""Positions on which a model is tried."""
_EQUAL = 0.01
"""The largest relative difference of factors that are equal, in bfloat16."""
_TRIAL = (1000.0, -1.0, 0.001, -300.0)
"""Numbers that a model must multiply by one factor: caps and clamps change large ones, sums change
small ones.
"""


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
        return capped(linear(states, self.weight, self.bias), self.cap)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits bounded by a cap, as transformers computes them; the same logits without one."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


class _Removed(torch.nn.Linear):  # type: ignore[misc]
    """Takes the place of an output layer and returns the states that it is given.

    Attributes:
        cap: the model's cap, which is applied where the logits are made.
    """

    cap: float | None

    def forward(self, states: Tensor) -> Tensor:
        return states


def remove_output_layer(model: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Take the output layer out of a model, which from then on returns, as its logits, the states
    [b, L, d] of which `removed_output_layer` makes them. Parameters and their names stay.

    This is possible for a model that does nothing else with its logits than to multiply or to cap
    them, and that adds no bias to logits that it multiplies. Whether it does is tried.

    Args:
        model: a transformers model with a language-model head. If it is sharded, all processes must
            call this.
        inputs: arguments of the model, of which the first row and few tokens are used.

    Returns:
        Whether the layer was removed; if not, the model is as before.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not torch.nn.Linear:
        return False
    layer.cap = getattr(model.config.get_text_config(), _CAP, None)
    _set_cap(model, None)
    layer.__class__ = _Removed
    factor = _factor(model, layer, inputs)
    # the states are multiplied instead, which is the same for logits without a bias or a cap
    if factor and (abs(factor - 1) < _EQUAL or (layer.bias is None and layer.cap is None)):
        return True
    restore_output_layer(model)
    return False


def restore_output_layer(model: Any) -> None:
    """Undo `remove_output_layer`."""
    layer = model.get_output_embeddings()
    if isinstance(layer, _Removed):
        layer.__class__ = torch.nn.Linear
        _set_cap(model, layer.cap)
        del layer.cap


def removed_output_layer(model: Any) -> OutputLayer | None:
    """The output layer that `remove_output_layer` took out of a model; None if the model makes
    logits itself.
    """
    layer = model.get_output_embeddings()
    return OutputLayer(layer.weight, layer.bias, layer.cap) if isinstance(layer, _Removed) else None


@contextmanager
def without_output_layer(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[OutputLayer | None]:
    """A context in which the output layer is removed, where this is possible."""
    remove_output_layer(model, inputs)
    try:
        yield removed_output_layer(model)
    finally:
        restore_output_layer(model)


def _set_cap(model: Any, cap: float | None) -> None:
    config = model.config.get_text_config()
    if hasattr(config, _CAP):
        object.__setattr__(config, _CAP, cap)  # past the checks of configs that want a number


def _factor(model: Any, layer: Any, inputs: Mapping[str, Tensor]) -> float:
    """The number by which a model multiplies what its output layer returns; 0 if it does anything
    else with it.
    """
    made: list[Tensor] = []

    def substitute(_: Any, __: Any, states: Tensor) -> Tensor:
        made.append(states.new_tensor(_TRIAL).repeat(states.numel())[: states.numel()])
        return made[-1].view(states.shape)

    few = {
        name: value[:1] if value.is_floating_point() else value[:1, :_TRIED]
        for name, value in inputs.items()
    }
    was_training = model.training
    hook = layer.register_forward_hook(substitute)
    try:
        with torch.no_grad():
            logits = model.eval()(**few, use_cache=False).logits.float()
    except (RuntimeError, TypeError, ValueError, IndexError):  # the model needs logits of V tokens
        return 0.0
    finally:
        hook.remove()
        model.train(was_training)
    if len(made) != 1 or logits.numel() != made[0].numel():
        return 0.0
    ratios = logits.flatten() / made[0].float()
    factor = float(ratios[0])
    is_constant = torch.allclose(ratios, ratios[0], rtol=_EQUAL)
    return factor if math.isfinite(factor) and is_constant else 0.0
