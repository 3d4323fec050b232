"""Which parameters are trained, and the optimizer that trains them."""

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from gqa_convert.errors import RecipeError, UnsupportedFamilyError
from gqa_convert.families.table import Family, find_family
from gqa_convert.training.recipe import Recipe, Trainable

Groups = list[dict[str, Any]]


def trained_names(family: Family, names: Iterable[str], trainable: Trainable) -> list[str]:
    """Those of a model's parameter names that `trainable` stands for, in their order.

    `attention` is every projection of every attention, encoder and cross-attention included, with biases; `kv` is the
    key and value projections. A fused projection that holds keys and values counts for both and is trained whole, its
    query rows too: they are one tensor. Norms of queries and keys, and position biases, are no projections.
    """
    if trainable == "all":
        return list(names)
    keys_values = [family.key, family.value] if family.fused is None else [family.fused]
    if family.fused is None or trainable == "attention":
        keys_values += [] if trainable == "kv" else [family.query, family.output]
    pattern = re.compile(rf"(?:.*\.)?(?:{_either(family.attention)})\.(?:{_either(keys_values)})\.(?:weight|bias)")
    return [name for name in names if pattern.fullmatch(name)]


def _either(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def choose_trained(model: nn.Module, trainable: Trainable) -> list[str]:
    """Let only the parameters that `trainable` stands for take gradients; what the model itself holds fixed stays so.

    Returns:
        Their names.

    Raises:
        RecipeError: there are none, or the model's type is not known well enough to tell.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if trainable != "all":
        try:
            names = trained_names(find_family(model_type), names, trainable)
        except UnsupportedFamilyError:
            raise RecipeError(
                f"trainable is {trainable}, and where model type {model_type!r} has its attention is unknown: use all"
            ) from None
    if not names:
        raise RecipeError(
            f"trainable is {trainable}, and model type {model_type!r} has no parameter of that kind to train: use all"
        )
    chosen = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return names


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that take gradients; call `choose_trained` first."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RecipeError(f"trainable is {recipe.trainable}, and no parameter of the model takes gradients: use all")
    if recipe.optimizer == "adafactor":
        return Adafactor(_decay_groups(trained, recipe.weight_decay), lr=recipe.learning_rate)
    if recipe.optimizer == "muon":
        return _muon(model, trained, recipe)
    return _adamw(trained, recipe)


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Matrices, which decay, and vectors (biases, gains), which don't."""
    parameters = list(parameters)
    groups: Groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), in one kernel where every parameter's device has it."""
    fused = all(parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point() for parameter in parameters)
    groups = _decay_groups(parameters, recipe.weight_decay)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=1e-8, fused=fused)


class Adafactor(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Adafactor (Shazeer & Stern 2018) as T5 was trained with it: the given rate times each parameter's own scale, no
    first moment.

    With w a parameter, g its gradient, t the step and rms(x) the root of the mean square of x's numbers:

        decay = 1 - t^-0.8
        v     = decay * v + (1 - decay) * (g^2 + 1e-30)         of a matrix only the row means r and the column means c
        are kept, u     = g / sqrt(v)                                     and v = r c / mean(r) w     = w - lr *
        max(1e-3, rms(w)) * u / max(1, rms(u) / clipping)

    transformers' Adafactor with `scale_parameter=True, relative_step=False` computes the same; torch's has another
    floor under v and caps the rate at 1 / sqrt(t). Neither runs on parameters that FSDP2 has sharded, as this one does:
    means over a sharded dimension are summed over the processes. T5's own code does not factor matrices with a side
    below 128; neither does this one.

    Args:
        params: parameters or groups of them.
        lr: the rate before scaling; the T5 paper's fine-tuning, and its pretraining at the millionth step, had 1e-3.
        clipping: largest rms of an update before scaling.
        weight_decay: decoupled, times the same scaled rate; T5 had none.
        least_factored: matrices with a shorter side keep v whole.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, clipping: float = 1.0, weight_decay: float = 0.0, least_factored: int = 128
    ) -> None:
        super().__init__(
            params, {"lr": lr, "clipping": clipping, "weight_decay": weight_decay, "least_factored": least_factored}
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, weight = parameter.grad.float(), parameter.float()
        square = gradient.square() + 1e-30
        factored = parameter.ndim >= 2 and min(parameter.shape[-2:]) >= group["least_factored"]
        means = {"rows": _mean(square, -1), "columns": _mean(square, -2)} if factored else {"squares": square}
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(mean) for name, mean in means.items()})
        state["step"] += 1
        fresh = float(state["step"]) ** -0.8
        for name, mean in means.items():
            state[name].mul_(1 - fresh).add_(mean, alpha=fresh)
        if factored:
            rows, columns = state["rows"], state["columns"]
            update = gradient * (rows / _mean(rows, -2)).rsqrt() * columns.rsqrt()
        else:
            update = gradient * state["squares"].rsqrt()
        scale = group["lr"] * _rms(weight).clamp(min=1e-3)
        update = update * (scale / (_rms(update) / group["clipping"]).clamp(min=1.0))
        if group["weight_decay"]:
            update = update + weight * (scale * group["weight_decay"])
        parameter.copy_(weight - update)


def _mean(numbers: Tensor, dim: int) -> Tensor:
    """Over one dimension, which stays with length 1; the same on every process."""
    return _summed(numbers.sum(dim, keepdim=True)) / numbers.shape[dim]


def _rms(numbers: Tensor) -> Tensor:
    return (_summed(numbers.square().sum()) / numbers.numel()).sqrt()


def _summed(numbers: Tensor) -> Tensor:
    """With the processes' partial sums added up, where the tensor is spread over several."""
    if not isinstance(numbers, DTensor):
        return numbers
    return numbers.redistribute(
        placements=[Replicate() if isinstance(place, Partial) else place for place in numbers.placements]
    )


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """torch's Muon on some groups and AdamW on the others, as one optimizer: one list of groups, one state, saved as
    any other.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, is_muon in zip(self._parts, (True, False), strict=True):
            # Loading a state replaces groups and state, and so may whoever wraps this optimizer
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == is_muon]
            part.step()
        return loss


def _muon(model: nn.Module, parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """Muon (Jordan et al. 2024) on the hidden matrices, AdamW on embeddings, output layer, vectors and tensors of other
    shapes.

    Muon's rate is scaled so that its updates are as large as AdamW's (Liu et al. 2025): one learning rate serves both.
    A fused projection is orthogonalised whole.
    """
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise RecipeError(
            f"optimizer muon needs torch 2.9 or newer, and this is {torch.__version__}: update torch or use adamw"
        )
    ends = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, nn.Module):
        ends |= {id(parameter) for parameter in head.parameters()}
    hidden = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in ends]
    inner = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in parameters if id(parameter) not in inner]
    if not hidden:
        raise RecipeError(
            f"optimizer muon trains hidden matrices, and trainable {recipe.trainable} leaves none: use adamw"
        )
    matrices = muon(
        [{"params": hidden}],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    if not rest:
        return cast(torch.optim.Optimizer, matrices)
    return MuonWithAdamW(matrices, _adamw(rest, recipe))
