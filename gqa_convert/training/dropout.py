"""Sets one dropout probability in all modules of a model."""

from typing import Any


def set_dropout(model: Any, probability: float) -> None:
    """Set every dropout of a transformers model: in modules, in the numbers that attention passes to its function, and
    in the config that modules may read.

    The probability of dropping whole layers (`layerdrop`) is not changed.
    """
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = probability
        for name, value in vars(module).items():
            if _is_dropout(name, value):
                setattr(module, name, probability)
    for name, value in model.config.to_dict().items():
        if _is_dropout(name, value):
            setattr(model.config, name, probability)


def _is_dropout(name: str, value: object) -> bool:
    return (
        isinstance(value, float)
        and ("dropout" in name or "pdrop" in name)
        and "classifier" not in name
        and "layerdrop" not in name
    )
