"""What plan refuses of a checkpoint's names and shapes, held against what transformers misses when
it loads the same files.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan
from gqa_convert.errors import ConfigError
from gqa_convert.families.table import FAMILIES, Family
from tests.helpers import own_files
from tests.helpers.selection import slow_but
from tests.helpers.tiny import make_checkpoint

_TWICE = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
PLAIN = (
    "llama llama4_text phi3 nemotron_h zamba2 gemma3n_text dbrx t5 bart opt gpt_neox falcon bloom "
    "mpt"
)
"""The last layers of gemma3n_text use others' keys and values."""
CASES: dict[str, dict[str, Any]] = {name: {} for name in PLAIN.split()} | {
    "jamba": {"num_hidden_layers": 4},
    "qwen3_next": _TWICE,
    "minimax": _TWICE,
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "recurrent_gemma": {"num_hidden_layers": 4},
    "gpt2": {"add_cross_attention": True},
}
"""Model types that keep their layers in different places, with and without layers that have no
attention, and config values.
"""


@dataclass
class Case:
    """A checkpoint, to be changed and written."""

    model_type: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def layers(self) -> tuple[str, int]:
        """The config key of the number of layers, or of a list with an entry for each, and that
        number.
        """
        key = next(key for key in self.family.layers[0][1] if key in self.config)
        return key, self.config[key] if isinstance(self.config[key], int) else len(self.config[key])

    def last_attention(self) -> str:
        attention = "|".join(map(re.escape, self.family.attention))
        pattern = re.compile(
            rf"(.*\b(?:{attention}))\.{re.escape(self.family.fused or self.family.key)}\.weight"
        )
        return max(match[1] for name in self.tensors if (match := pattern.fullmatch(name)))

    def remove(self, pattern: str) -> None:
        self.tensors = {
            name: tensor for name, tensor in self.tensors.items() if not re.match(pattern, name)
        }

    def rename(self, new: Callable[[str], str]) -> None:
        self.tensors = {new(name): tensor for name, tensor in self.tensors.items()}


@pytest.fixture(
    scope="module", params=slow_but(("llama", "phi3", "qwen3_next", "lfm2", "gpt2", "t5"), CASES)
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model_type: str = request.param
    folder = tmp_path_factory.mktemp(model_type) / "source"
    own_files.make_source(model_type, folder, **CASES[model_type])
    return Case(
        model_type,
        json.loads((folder / "config.json").read_bytes()),
        load_file(folder / "model.safetensors"),
    )


def is_missed(folder: Path, model_type: str, *, head: bool) -> bool:
    """Whether transformers lacks a tensor, which it fills with fresh numbers."""
    auto = getattr(transformers, own_files.auto_class(model_type) if head else "AutoModel")
    _, info = auto.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    return bool(info["missing_keys"])


def resized(by: int) -> Callable[[Case], None]:
    """A config of a layer more than there are, or of one fewer."""

    def resize(case: Case) -> None:
        key, length = case.layers
        for name, value in case.config.items():
            if isinstance(value, list) and len(value) == length:
                case.config[name] = [*value, value[-1]][: length + by]
        if isinstance(case.config[key], int):
            case.config[key] += by

    return resize


def without_last_keys(case: Case) -> None:
    """And without values; those of a later layer may be other layers'."""
    inner = case.family.fused or f"{case.family.key}|{case.family.value}"
    case.remove(rf"{re.escape(case.last_attention())}\.(?:{inner})\.")


def without_base(case: Case) -> None:
    """As the model without a head is saved."""
    pattern = "|".join(
        map(re.escape, sorted(filter(None, case.family.prefixes), key=len, reverse=True))
    )
    case.rename(lambda name: re.sub(f"^(?:{pattern})", "", name))


PREFIXES = ("model.", "model.model.", "transformer.", "language_model.", "student.")
CHANGES: dict[str, Callable[[Case], None]] = {
    "nothing": lambda case: None,
    "longer": resized(1),
    "shorter": resized(-1),
    "no first layer": lambda case: case.remove(
        rf"(.*\.)?{re.escape(case.family.layers[0][0])}\.0\."
    ),
    "no last attention": lambda case: case.remove(re.escape(case.last_attention()) + r"\."),
    "no last keys": without_last_keys,
    "no last output": lambda case: case.remove(
        re.escape(f"{case.last_attention()}.{case.family.output}.weight")
    ),
    "model without a head": without_base,
    **{
        prefix: lambda case, prefix=prefix: case.rename(lambda name: prefix + name)
        for prefix in PREFIXES
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_plan_refuses_what_transformers_misses(change: str, case: Case, tmp_path: Path) -> None:
    if change == "shorter" and case.model_type == "gemma3n_text":
        # its embeddings have columns for each layer, so that it has no layers to spare
        change = "nothing"
    changed = copy.deepcopy(case)
    CHANGES[change](changed)
    (tmp_path / "config.json").write_text(json.dumps(changed.config))
    save_file(changed.tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    missed = is_missed(tmp_path, case.model_type, head=change != "model without a head")
    if change in ("nothing", "longer", "shorter", "no last output", "student."):
        assert missed == (change not in ("nothing", "shorter"))  # else the test would say nothing
    native = False if case.family.modeling else None
    if missed:
        with pytest.raises(ConfigError) as caught:
            make_plan(open_checkpoint(tmp_path), 3, method="mean", native=native)
        assert str(caught.value).isprintable()
    else:
        make_plan(open_checkpoint(tmp_path), 3, method="mean", native=native)


def test_a_config_without_a_number_of_layers(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, shards="50GB", num_hidden_layers=3)
    tensors, config = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_bytes()),
    )
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"no tensor layers\.1\..* in each of 3 layers \(num_hidden_layers\)"
    ):
        make_plan(open_checkpoint(tmp_path), 3)
