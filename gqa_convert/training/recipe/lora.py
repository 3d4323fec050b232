"""The recipe's key `lora`: low-rank adapters (Hu et al. 2021) on a model whose own weights stay fixed."""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from gqa_convert.errors import LaunchError, MissingExtraError
from gqa_convert.text.keys import key, read_mapping

LoraTargets = Literal["attention", "all-linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The settings of the adapters."""

    rank: int = key("The rank of each adapter.", default=64, most=2**16, aliases=("r", "lora_r"))
    alpha: float | None = key(
        "The adapters' output is scaled by `alpha / rank`. The default is the rank.",
        default=None,
        above=0,
        aliases=("lora_alpha",),
    )
    targets: LoraTargets = key(
        "The projections that get an adapter: `attention` those of every attention module, `all-linear` every linear "
        "layer but the output layer.",
        default="all-linear",
        aliases=("target_modules",),
    )
    dropout: float = key(
        "The dropout of the adapters' input.", default=0.0, least=0, below=1, aliases=("lora_dropout",)
    )
    quantize: str | None = key(
        "`nf4` keeps the fixed weights in 4 bits (QLoRA, Dettmers et al. 2023); needs bitsandbytes.",
        default=None,
        choices=("nf4",),
        aliases=("load_in_4bit", "quantization"),
    )

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    def __str__(self) -> str:
        base = f" on weights in {self.quantize}" if self.quantize else ""
        return f"LoRA of rank {self.rank} ({self.targets}){base}"


def read_lora(where: str, value: Any) -> Lora:
    """The settings from the value of the recipe's key.

    Raises:
        RecipeError: it is no mapping, or a key of it is unknown or not allowed.
    """
    return read_mapping(Lora, where, value, "{rank: 64, targets: all-linear}")


def check_lora(lora: Lora | None, *, sharded: bool, installed: bool = True) -> None:
    """Refuse adapters that can't be trained, before anything is loaded.

    Args:
        lora: the settings; None is not refused.
        sharded: whether the model would be sharded.
        installed: whether the packages have to be installed.

    Raises:
        MissingExtraError: PEFT or bitsandbytes is not installed.
        LaunchError: weights in 4 bits would be sharded.
    """
    if lora is None:
        return
    if installed and importlib.util.find_spec("peft") is None:
        raise MissingExtraError("lora needs PEFT, which is not installed: pip install 'gqa-convert[lora]'")
    if installed and lora.quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"lora.quantize is {lora.quantize}, which needs bitsandbytes: pip install 'gqa-convert[qlora]', or remove quantize"
        )
    if sharded and lora.quantize is not None:
        raise LaunchError(
            f"lora.quantize is {lora.quantize}, whose weights can't be sharded, and the launch asks for FSDP: launch with "
            "recipes/accelerate/multi_gpu.yaml, or remove quantize"
        )
