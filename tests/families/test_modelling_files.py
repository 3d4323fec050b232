"""Results that bring a modelling file: they load where gqa-convert is not, and compute what the
stock source computes once each K/V head is replaced by its group's mean.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.family import MODELING, TESTED
from gqa_convert.families.modeling import gqa_bloom, gqa_common, gqa_opt
from gqa_convert.families.table import FAMILIES, Modeling
from tests.helpers.command_line import run_python
from tests.helpers.elsewhere import (
    WAYS,
    Elsewhere,
    attentions,
    first_output,
    logits,
    measure,
    measure_training,
)
from tests.helpers.folding_cases import EXACT, SOURCE_HEADS, Case, pool
from tests.helpers.hub_server import HubServer
from tests.helpers.native import distance
from tests.helpers.own_files import CASES, auto_class, load_stock, make_source
from tests.helpers.selection import slow_but
from tests.helpers.tiny import HEADS

FILES = sorted(MODELING.glob("gqa_*.py"))
OWN = {
    name: family for name, family in FAMILIES.items() if family.modeling and not family.is_converted
}

STOCK_STATIC_CACHE_FAILS = ("falcon, RW",)


def modeling_of(model_type: str) -> Modeling:
    modeling = OWN[model_type].modeling
    assert modeling is not None
    return modeling


def whole(value: Any) -> Any:
    """A measurement, which must not be the trace of an error."""
    assert not isinstance(value, str), value
    return value


@dataclass(frozen=True)
class Row:
    """A conversion: the case, and its K/V heads."""

    case: str
    groups: int = 3

    @property
    def model_type(self) -> str:
        return CASES[self.case][0]

    @property
    def heads(self) -> int:
        return SOURCE_HEADS.get(self.case, HEADS)

    def stock(self, source: Path, auto: str | None = None, **options: Any) -> nn.Module:
        """The source with merged heads."""
        model = load_stock(source, self.model_type, auto, **options)
        return pool(Case(self.model_type, model, self.heads), self.groups)

    def __str__(self) -> str:
        return f"{self.case} to {self.groups}"


FEWER = {"gpt_neo": 4, "falcon": 4, "falcon, 40B with 4": 2}
"""Counts other than 3."""
ROWS = [
    *(Row(case, FEWER.get(case, 3)) for case in CASES),
    *(
        Row(case, 1)
        for case in ("t5", "whisper", "gpt2", "gpt_neox", "bloom", "mpt", "falcon, 40B")
    ),
    *(Row(case, 12) for case in ("falcon, 7B", "falcon, 40B")),
]


@pytest.fixture
def sources(once: Callable[..., Path]) -> Callable[[str], Path]:
    """The tiny checkpoint of a case."""
    return lambda case: once(make_source, CASES[case][0], **CASES[case][1])


def converted(source: Path, groups: int, **options: Any) -> Path:
    """The source with so many K/V heads, converted once, never to another type's stock class."""
    out = source.parent / "-".join(("groups", str(groups), *options))
    if not out.exists():
        convert_checkpoint(
            source, out, groups, ConversionOptions(native=False, method="mean", **options)
        )
    return out


@pytest.mark.parametrize("row", ROWS[: len(CASES)], ids=str)
def test_a_result_is_its_source_with_merged_heads(
    row: Row, sources: Callable[[str], Path], elsewhere: Elsewhere
) -> None:
    """By sdpa and by eager attention: logits of a padded batch, with a cache and without one, the
    heads in it, and tokens. `.ci/run` asks this of the oldest and the newest transformers that
    pyproject.toml allows.
    """
    source = sources(row.case)
    folder = converted(source, row.groups)
    found = whole(
        elsewhere.measure(folder=str(folder), auto=auto_class(row.model_type), ways=["greedy"])
    )
    check_loading(row, source, folder, found)
    assert found["transformers"] == transformers.__version__
    check_results(row, found, row.stock(source), ["greedy"])
    check_results(row, found["eager"], row.stock(source, attn_implementation="eager"), ["greedy"])
    check_merging(row, source, found["logits"])


def check_results(row: Row, found: dict[str, Any], stock: nn.Module, ways: list[str]) -> None:
    expected = measure(stock, ways)
    assert distance(whole(found["logits"]), whole(expected["logits"])) < EXACT
    assert distance(whole(found["logits in parts"]), whole(expected["logits in parts"])) < EXACT
    assert whole(found["heads"]) == {key: [row.groups] for key in whole(expected["heads"])}
    check_tokens(row, found["tokens"], expected["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_result_trains_and_is_saved_as_its_source(
    row: Row, sources: Callable[[str], Path], elsewhere: Elsewhere
) -> None:
    """The same in every way to generate and with eager attention; attention weights, gradients, and
    saving again.
    """
    source = sources(row.case)
    folder = converted(source, row.groups)
    asked = {"folder": str(folder), "auto": auto_class(row.model_type), "ways": list(WAYS)}
    found = whole(
        elsewhere.measure(**asked, saved=True, thorough=True, compiled=row.case in ("t5", "gpt2"))
    )
    check_loading(row, source, folder, found)
    stock = row.stock(source)
    eager = row.stock(source, attn_implementation="eager")
    check_results(row, found, stock, list(WAYS))
    check_results(row, found["eager"], eager, ["greedy", "static cache"])
    check_merging(row, source, found["logits"])
    check_attentions(whole(found["attentions"]), attentions(eager))
    check_gradients(row, whole(found["training"]), measure_training(stock)["plain"])
    check_saved(row, found)
    half = whole(found["bfloat16"])
    assert half.dtype == torch.bfloat16
    assert (
        nn.functional.cosine_similarity(half.float().flatten(), found["logits"].flatten(), dim=0)
        > 0.98
    )
    assert torch.equal(whole(found["device map"]), found["logits"])
    if "compiled" in found:
        assert distance(whole(found["compiled"]), found["logits"]) < EXACT


def check_loading(row: Row, source: Path, folder: Path, found: dict[str, Any]) -> None:
    """It runs the files that it brings, which are the package's, and its config is the source's but
    for the keys that lead to them.
    """
    modeling = modeling_of(row.model_type)
    assert found["info"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    config, before = (json.loads((each / "config.json").read_text()) for each in (folder, source))
    module, _, name = found["class"].rpartition(".")
    assert module.startswith("transformers_modules.")
    assert name == f"GQA{before['architectures'][0]}"
    for file in modeling.files:
        assert (folder / file.name).read_bytes() == file.read_bytes()
        assert Path(found["file"]).with_name(file.name).read_bytes() == file.read_bytes()
    added = {
        "model_type": modeling.model_type,
        "architectures": [name],
        "auto_map": modeling.auto_map,
        "num_key_value_heads": row.groups,
        "multi_query_attention": True,
        "multi_query_group_num": row.groups,
        "transformers_tested": TESTED,
    }
    config.pop("tokenizer_class")
    assert config == before | added


def check_tokens(row: Row, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """They are the stock class's, except where that has a defect of its own."""
    for way, tokens in found.items():
        wanted = expected[way]
        if way == "static cache" and row.case in STOCK_STATIC_CACHE_FAILS:
            assert isinstance(wanted, str)
            continue
        assert whole(tokens) == whole(wanted), way


def check_merging(row: Row, source: Path, found: torch.Tensor) -> None:
    """Something was merged, namely neighbours."""
    others = []
    if row.groups < row.heads:
        others.append(load_stock(source, row.model_type))
    if 1 < row.groups < row.heads:
        strided = load_stock(source, row.model_type)
        others.append(pool(Case(row.model_type, strided, row.heads), row.groups, strided=True))
    for other in others:
        assert distance(found, logits(other)) > 0.01


def check_attentions(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for kind, weights in expected.items():
        assert found[kind].shape == weights.shape
        assert (found[kind] - weights).abs().max() < EXACT


def check_gradients(
    row: Row, found: dict[str, dict[str, Any]], expected: dict[str, torch.Tensor]
) -> None:
    """They are those of the stock source, summed over a group for keys and values, with gradient
    checkpointing too.
    """
    assert found["plain"].keys() == expected.keys()
    rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in found["plain"].items():
        assert gradient.isfinite().all()
        allowed = 1e-3 * expected[name].abs().max() + rounding
        assert (found["checkpointing"][name] - gradient).abs().max() < allowed
        if gradient.shape == expected[name].shape:
            assert (gradient - expected[name]).abs().max() < allowed
        elif name.split(".")[-2] in ("k", "v", "k_proj", "v_proj"):
            size = len(expected[name]) // len(gradient)
            summed = expected[name].unflatten(0, (row.groups, size, -1)).sum(1).flatten(0, 1)
            assert (gradient - summed).abs().max() < allowed


def check_saved(row: Row, found: dict[str, Any]) -> None:
    modeling, saved = modeling_of(row.model_type), whole(found["saved"])
    assert not saved["differing"]
    assert {file.name for file in modeling.files} <= set(saved["files"])
    assert saved["config"]["auto_map"] == modeling.auto_map
    assert saved["config"]["model_type"] == modeling.model_type
    assert saved["config"]["num_key_value_heads"] == row.groups
    assert torch.equal(saved["logits"], found["logits"])


@pytest.mark.parametrize(
    "model_type", slow_but(("bart", "t5", "gpt_neox", "whisper", "bloom"), OWN)
)
def test_every_auto_class_loads_it(
    model_type: str, sources: Callable[[str], Path], elsewhere: Elsewhere
) -> None:
    """Each one that the config names: what it lacks is what the stock class lacks, and it computes
    the same.
    """
    row, source = Row(model_type), sources(model_type)
    autos = list(modeling_of(model_type).classes)[1:]
    folder = str(converted(source, 3))
    answer = whole(
        elsewhere.measure(folder=folder, auto=auto_class(model_type), ways=[], autos=autos)
    )
    for auto, found in whole(answer["autos"]).items():
        found = whole(found)
        model = row.stock(source, auto)
        _, info = getattr(transformers, auto).from_pretrained(source, output_loading_info=True)
        assert found["missing"] == sorted(info["missing_keys"]), auto
        assert found["unexpected"] == sorted(info["unexpected_keys"]), auto
        assert distance(found["output"], first_output(model, found["missing"])) < EXACT, auto


FROM_HUB = """
import sys, torch, transformers
sys.modules["gqa_convert"] = None
auto, commit = sys.argv[1:]
load = getattr(transformers, auto).from_pretrained
model = load("org/result", trust_remote_code=True, code_revision=commit)
print(type(model).__module__, type(model).__name__)
"""


@pytest.mark.parametrize("model_type", slow_but(("marian",), ["marian", "gpt_neox"]))
def test_it_loads_from_a_hub(
    model_type: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers downloads both files."""
    folder = converted(sources(model_type), 3)
    with HubServer({"org/result": {"main": folder}}) as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "OMP_NUM_THREADS": "1",
        }
        words = auto_class(model_type), hub.commit("org/result", "main")
        done = run_python("-c", FROM_HUB, *words, environment=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        assert all(hub.sent(file.name) for file in modeling_of(model_type).files)
    assert "transformers_modules.org.result." in done.stdout


WITHOUT_MARIAN = """
import sys, transformers
sys.modules["gqa_convert"] = sys.modules["transformers.models.marian.modeling_marian"] = None
transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


@pytest.mark.slow
def test_a_module_that_transformers_lacks_breaks_no_other(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for model_type, code in (("bart", 0), ("marian", 1)):
        done = run_python(
            "-c", WITHOUT_MARIAN, converted(sources(model_type), 3), environment=environment
        )
        assert done.returncode == code, done.stderr[-2000:]


def eager_attention_forward(module: Any, query: Any, softcap: Any, **kwargs: Any) -> None:
    """What a later release could hand to attention."""


ALL_ATTENTION_FUNCTIONS = None


class Renamed(nn.Module):
    def forward(
        self, hidden_states: Any, memory: Any, attention_mask: Any, output_attentions: Any
    ) -> None: ...


class Longer(nn.Module):
    def forward(
        self, hidden_states: Any, cache: Any, window: Any, attention_mask: Any, **kwargs: Any
    ) -> None: ...


class Shorter(nn.Module):
    def forward(self, hidden_states: Any, cache: Any, **kwargs: Any) -> None: ...


class Another(nn.Module):
    def forward(self, hidden_states: Any, cache: Any, **kwargs: Any) -> None: ...


class Softcapped(nn.Module):
    def forward(self, hidden_states: Any, cache: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return eager_attention_forward, ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("stock", "grouped", "expected"),
    [
        (Renamed, "GroupedOPTAttention", "takes its cache under another name"),
        (Longer, "GroupedOPTAttention", "takes window"),
        (Shorter, "GroupedOPTAttention", "has no argument attention_mask"),
        (Another, "GroupedAttention", "does without eager_attention_forward"),
        (Softcapped, "GroupedAttention", "hands softcap to attention"),
    ],
)
def test_a_class_that_a_file_does_not_know_is_an_error(
    stock: type, grouped: str, expected: str
) -> None:
    with pytest.raises(
        ImportError,
        match=rf"^{stock.__name__} of transformers [0-9.]+ {expected}, which this modelling",
    ):
        gqa_common.attention_class(stock, getattr(gqa_opt, grouped))


def test_a_cache_under_a_new_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gqa_common, "CACHE_NAMES", ("layer_past",))
    gqa_common.attention_class.cache_clear()
    stock = transformers.models.bart.modeling_bart.BartAttention
    with pytest.raises(
        ImportError, match=r"BartAttention of .* takes its cache under another name, which"
    ):
        gqa_common.attention_class(stock, gqa_common.GroupedAttention)


def test_bloom_needs_position_biases_in_sdpa_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, ALiBi would be left out in silence."""
    monkeypatch.setattr(
        gqa_bloom, "sdpa_attention_forward", lambda module, query, key, value, mask, **options: None
    )
    config = gqa_bloom.GQABloomConfig(
        hidden_size=24, n_head=12, n_layer=1, vocab_size=9, num_key_value_heads=3
    )
    with pytest.raises(ImportError, match="can't add ALiBi in sdpa attention"):
        gqa_bloom.GQABloomForCausalLM(config)


def test_every_modelling_file_has_a_record() -> None:
    named: set[Path] = set()
    for family in FAMILIES.values():
        for form in filter(None, (family.modeling, *family.layerwise)):
            named |= set(form.files)
    assert set(FILES) == named, "facts.toml names other files"


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_imports(file: Path) -> None:
    """Nothing but torch, transformers, what comes with it, the standard library and the file that
    all share.
    """
    imported = re.findall(r"^\s*(?:from|import) (\.?\w+)", file.read_text(), re.MULTILINE)
    assert (
        set(imported)
        <= {"torch", "transformers", "huggingface_hub", ".gqa_common"} | sys.stdlib_module_names
    )


def test_pyproject_states_the_versions_that_were_tested() -> None:
    project = tomllib.loads((MODELING.parents[2] / "pyproject.toml").read_text())["project"]
    assert f"transformers{TESTED}" in project["dependencies"]
