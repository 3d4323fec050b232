"""Results that bring a modelling file: they load where gqa-convert is not, and compute what the stock source computes
once each K/V head is replaced by its group's mean.
"""

import ast
import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.models.auto import modeling_auto

import gqa_convert
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.modeling import generate
from gqa_convert.families.table import FAMILIES, Modeling
from tests.helpers.elsewhere import (
    WAYS,
    Elsewhere,
    attentions,
    cached_heads,
    first_output,
    generated,
    logits,
    logits_in_parts,
    measure,
    measure_training,
)
from tests.helpers.folding_cases import SOURCE_HEADS, Case, pool
from tests.helpers.native import distance
from tests.helpers.own_files import CASES, SIZES, auto_class, load_stock, make_source
from tests.helpers.tiny import HEADS

MODELING = Path(gqa_convert.__file__).parent / "families" / "modeling"
FILES = sorted(MODELING.glob("gqa_*.py"))
OWN = {name: family for name, family in FAMILIES.items() if family.modeling and not family.is_converted}

ROUNDING = 2e-5
"""How far equal models may lie apart in float32, as a share of the logits' spread."""

GROUPS = {
    **dict.fromkeys(CASES, (3,)),
    **dict.fromkeys(("t5", "bart", "whisper", "opt", "gpt2", "gptj", "codegen", "gpt_neox", "bloom", "mpt"), (3, 1)),
    "gpt_neo": (4,),
    "falcon": (4, 1),
    "falcon, 7B": (3, 12),
    "falcon, 40B": (3, 1, 12),
    "falcon, 40B with 4": (2, 1),
}
"""The counts that each case is converted to."""

CONVERSIONS = [(case, groups) for case in CASES for groups in GROUPS[case]]

STOCK_STATIC_CACHE_FAILS = ("falcon, RW",)
STOCK_STATIC_CACHE_IS_WRONG = ("gpt_neo",)
"""Its window is counted from the end of the cache, empty places included."""


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def whole(value: Any) -> Any:
    """A measurement, which must not be the trace of an error."""
    assert not isinstance(value, str), value
    return value


@dataclass
class Result:
    """A converted checkpoint, what it computes elsewhere, and what the stock source with merged heads computes here."""

    case: str
    model_type: str
    groups: int
    source: Path
    folder: Path
    answer: Any

    @property
    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = whole(self.answer)
        return found

    @property
    def modeling(self) -> Modeling:
        modeling = OWN[self.model_type].modeling
        assert modeling is not None
        return modeling

    def stock(self, auto: str | None = None, **options: Any) -> nn.Module:
        """The source with merged heads."""
        model = load_stock(self.source, self.model_type, auto, **options)
        return pool(Case(self.model_type, model, SOURCE_HEADS.get(self.case, HEADS)), self.groups)

    @functools.cached_property
    def expected(self) -> dict[str, Any]:
        return measure(self.stock(), list(WAYS))


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the tiny checkpoint of a case, once."""
    made: dict[str, Path] = {}

    def make(case: str, **options: Any) -> Path:
        model_type, changes = CASES[case]
        key = repr((case, options))
        if key not in made:
            made[key] = make_source(model_type, tmp_path_factory.mktemp(model_type) / "source", **changes, **options)
        return made[key]

    return make


def converted(source: Path, groups: int, **options: Any) -> Path:
    """The source with so many K/V heads, converted once, never to another type's stock class."""
    out = source.parent / "-".join(("groups", str(groups), *(f"{key}-{value}" for key, value in options.items())))
    if not out.exists():
        convert_checkpoint(source, out, groups, ConversionOptions(**{"native": False, "method": "mean", **options}))
    return out


@pytest.fixture(scope="module")
def ask(elsewhere: Elsewhere, sources: Callable[..., Path]) -> Callable[..., Result]:
    """Measures a conversion elsewhere."""

    def measured(case: str, groups: int, **request: Any) -> Result:
        model_type, _ = CASES[case]
        source = sources(case)
        folder = converted(source, groups)
        answer = elsewhere.ask("measure", folder=str(folder), auto=auto_class(model_type), **request)
        return Result(case, model_type, groups, source, folder, answer)

    return measured


@pytest.fixture(scope="module", params=CONVERSIONS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def result(request: pytest.FixtureRequest, ask: Callable[..., Result]) -> Result:
    return ask(*request.param, ways=list(WAYS), saved=True)


@pytest.fixture(
    scope="module", params=[(case, GROUPS[case][0]) for case in CASES], ids=lambda pair: f"{pair[0]} to {pair[1]}"
)
def trained(request: pytest.FixtureRequest, ask: Callable[..., Result]) -> Result:
    return ask(*request.param, ways=[], thorough=True, compiled=request.param[0] in ("t5", "gpt2"))


@pytest.fixture(scope="module", params=[(case, 3) for case in SIZES], ids=lambda pair: pair[0])
def loaded(request: pytest.FixtureRequest, ask: Callable[..., Result]) -> Result:
    modeling = OWN[request.param[0]].modeling
    assert modeling is not None
    return ask(*request.param, ways=[], autos=[auto for auto, _ in modeling.classes[1:]])


class TestResult:
    """Every family and variant, in every number of groups."""

    def test_loads_with_the_file_that_it_brings(self, result: Result) -> None:
        assert result.found["info"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        module, _, name = result.found["class"].rpartition(".")
        assert module.startswith("transformers_modules.")
        assert name in dict(result.modeling.classes).values()
        assert name == f"GQA{json.loads((result.source / 'config.json').read_text())['architectures'][0]}"
        brought = (result.folder / f"{result.modeling.file}.py").read_bytes()
        assert (
            brought == (MODELING / f"{result.modeling.file}.py").read_bytes() == Path(result.found["file"]).read_bytes()
        )

    def test_config(self, result: Result) -> None:
        config = json.loads((result.folder / "config.json").read_text())
        before = json.loads((result.source / "config.json").read_text())
        assert config["model_type"] == result.modeling.model_type
        assert config["num_key_value_heads"] == result.groups
        assert config["auto_map"] == result.modeling.auto_map
        assert config["architectures"] == [f"GQA{name}" for name in before["architectures"]]
        assert {key for key, value in config.items() if value != before.get(key)} - {"tokenizer_class"} == {
            "model_type",
            "architectures",
            "auto_map",
            "num_key_value_heads",
            "multi_query_attention",
            "multi_query_group_num",
        }
        assert before.keys() <= config.keys()

    def test_logits(self, result: Result) -> None:
        found = whole(result.found["logits"])
        assert distance(found, whole(result.expected["logits"])) < ROUNDING
        assert distance(whole(result.found["logits in parts"]), whole(result.expected["logits in parts"])) < ROUNDING
        if result.groups < SOURCE_HEADS.get(result.case, HEADS):
            assert distance(found, logits(load_stock(result.source, result.model_type))) > 0.01
            if result.groups > 1:  # neighbours share a group, and no others
                stock = load_stock(result.source, result.model_type)
                case = Case(result.model_type, stock, SOURCE_HEADS.get(result.case, HEADS))
                assert distance(found, logits(pool(case, result.groups, strided=True))) > 0.01

    def test_caches_shrink(self, result: Result) -> None:
        kinds = whole(result.expected["heads"])
        assert whole(result.found["heads"]) == {kind: [result.groups] for kind in kinds}

    @pytest.mark.parametrize("way", WAYS)
    def test_generates_the_same_tokens(self, result: Result, way: str) -> None:
        expected = result.expected["tokens"][way]
        if way == "static cache" and result.case in STOCK_STATIC_CACHE_FAILS:
            assert isinstance(expected, str)
            return
        if way == "static cache" and result.case in STOCK_STATIC_CACHE_IS_WRONG:
            assert expected != (expected := result.expected["tokens"]["greedy"])
        assert whole(result.found["tokens"][way]) == whole(expected)

    def test_saves_what_it_loaded(self, result: Result) -> None:
        saved = whole(result.found["saved"])
        assert not saved["differing"]
        assert f"{result.modeling.file}.py" in saved["files"]
        assert saved["config"]["auto_map"] == result.modeling.auto_map
        assert saved["config"]["model_type"] == result.modeling.model_type
        assert saved["config"]["num_key_value_heads"] == result.groups
        assert torch.equal(saved["logits"], whole(result.found["logits"]))


class TestThoroughly:
    """Every family and variant, in one number of groups."""

    def test_eager_attention(self, trained: Result) -> None:
        """Attention weights, and what comes of them."""
        stock = trained.stock(attn_implementation="eager")
        expected, found = attentions(stock), whole(trained.found["attentions"])
        assert found.keys() == expected.keys()
        for kind, weights in expected.items():
            assert found[kind].shape == weights.shape
            assert (found[kind] - weights).abs().max() < ROUNDING
        eager, tokens = trained.found["eager"], generated(stock)
        assert distance(whole(eager["logits"]), logits(stock)) < ROUNDING
        assert distance(whole(eager["logits in parts"]), logits_in_parts(stock)) < ROUNDING
        assert whole(eager["tokens"]["greedy"]) == tokens
        if trained.case not in STOCK_STATIC_CACHE_FAILS:
            assert whole(eager["tokens"]["static cache"]) == tokens

    def test_gradients(self, trained: Result) -> None:
        """They are those of the stock source, summed over a group for keys and values, with gradient checkpointing
        too.
        """
        found = whole(trained.found["training"])
        stock = trained.stock()
        expected = measure_training(stock)["plain"]
        assert found["plain"].keys() == expected.keys()
        rounding = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in found["plain"].items():
            assert gradient.isfinite().all()
            allowed = 1e-3 * expected[name].abs().max() + rounding
            assert (found["checkpointing"][name] - gradient).abs().max() < allowed
            if gradient.shape == expected[name].shape:
                assert (gradient - expected[name]).abs().max() < allowed
            elif name.split(".")[-2] in ("k", "v", "k_proj", "v_proj"):
                summed = expected[name].unflatten(0, (trained.groups, HEADS // trained.groups, -1)).sum(1).flatten(0, 1)
                assert (gradient - summed).abs().max() < allowed

    def test_bfloat16(self, trained: Result) -> None:
        found = whole(trained.found["bfloat16"])
        assert found.dtype == torch.bfloat16
        assert nn.functional.cosine_similarity(found.float().flatten(), trained.found["logits"].flatten(), dim=0) > 0.98

    def test_device_map(self, trained: Result) -> None:
        assert torch.equal(whole(trained.found["device map"]), trained.found["logits"])

    def test_compiled(self, trained: Result) -> None:
        if "compiled" not in trained.found:
            return
        assert distance(whole(trained.found["compiled"]), trained.found["logits"]) < ROUNDING


def test_every_auto_class_loads_it(loaded: Result) -> None:
    """Each one that the config names: what it lacks is what the stock class lacks, and it computes the same."""
    for auto, found in whole(loaded.found["autos"]).items():
        found = whole(found)
        model = loaded.stock(auto)
        _, info = getattr(transformers, auto).from_pretrained(loaded.source, output_loading_info=True)
        assert found["missing"] == sorted(info["missing_keys"]), auto
        assert found["unexpected"] == sorted(info["unexpected_keys"]), auto
        assert distance(found["output"], first_output(model, found["missing"])) < ROUNDING, auto


@pytest.mark.parametrize("case", CASES)
def test_own_count_is_a_stock_checkpoint(case: str, sources: Callable[..., Path]) -> None:
    source, (model_type, _) = sources(case), CASES[case]
    folder = converted(source, SOURCE_HEADS.get(case, HEADS))
    assert not list(folder.glob("*.py"))
    before, after = (json.loads((each / "config.json").read_text()) for each in (source, folder))
    nested = before.get("rope_parameters") or {}
    base, part = (
        ("rotary_emb_base", "rotary_pct") if model_type == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    )
    older = {"torch_dtype": before["dtype"], base: nested.get("rope_theta"), part: nested.get("partial_rotary_factor")}
    words = {key: value for key, value in older.items() if value is not None}
    assert after == before | words | {
        "multi_query_attention": True,
        "multi_query_group_num": SOURCE_HEADS.get(case, HEADS),
    }
    ours, theirs = tensors(folder), tensors(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in theirs.items())
    assert torch.equal(logits(load_stock(folder, model_type)), logits(load_stock(source, model_type)))


@pytest.mark.parametrize(
    ("case", "groups"), [("t5", 3), ("umt5", 4), ("bart", 4), ("whisper", 3), ("marian", 2), ("switch_transformers", 3)]
)
def test_encoder(case: str, groups: int, sources: Callable[..., Path], elsewhere: Elsewhere) -> None:
    """An encoder's own attention, too, with as many query heads as the decoder's or fewer."""
    source, (model_type, _) = sources(case), CASES[case]
    folder = converted(source, groups, encoder=True)
    answer = whole(
        elsewhere.ask(
            "measure", folder=str(folder), auto=auto_class(model_type), ways=["greedy"], saved=True, thorough=True
        )
    )
    assert answer["info"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    stock = pool(Case(model_type, load_stock(source, model_type), HEADS), groups)
    assert distance(whole(answer["logits"]), logits(stock)) > 0.01, "the encoder is left as it was"
    heads = stock.config.num_attention_heads
    pool(Case(model_type, stock, heads, heads, encoder=True), groups)
    assert distance(answer["logits"], logits(stock)) < ROUNDING
    assert whole(answer["tokens"]["greedy"]) == generated(stock)
    assert torch.equal(whole(answer["saved"])["logits"], answer["logits"])


@pytest.mark.parametrize("case", CASES)
def test_full_heads_do_not_load_as_merged_ones(
    case: str, sources: Callable[..., Path], elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """The weights of one count under the config of another raise, rather than be misread."""
    source = sources(case)
    heads = SOURCE_HEADS.get(case, HEADS)
    folder = converted(source, 2 if heads == 4 else 3)
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    shutil.copyfile(
        (converted(source, 12) if heads == 1 else source) / "model.safetensors", mixed / "model.safetensors"
    )
    error = elsewhere.ask("load", folder=str(mixed), auto=auto_class(CASES[case][0]))
    assert error
    assert "mismatch" in error


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """A process with gqa-convert, whose classes transformers knows."""
    process = Elsewhere(tmp_path_factory.mktemp("package"), package=True)
    yield process
    process.close()


@pytest.mark.parametrize("model_type", ["t5", "whisper", "gpt2", "falcon"])
def test_package_is_used_where_it_is(
    model_type: str, sources: Callable[..., Path], elsewhere: Elsewhere, package: Elsewhere
) -> None:
    """Registered classes load results without running code from them, and win where running it is allowed."""
    modeling = OWN[model_type].modeling
    assert modeling is not None
    request = {"folder": str(converted(sources(model_type), 3)), "auto": auto_class(model_type), "ways": ["greedy"]}
    alone = whole(elsewhere.ask("measure", **request))
    answer = whole(package.ask("measure", trust=False, saved=True, **request))
    module = f"gqa_convert.families.modeling.{modeling.file}"
    assert answer["class"].rpartition(".")[0] == module
    assert answer["trusted class"] == module
    assert torch.equal(whole(answer["logits"]), whole(alone["logits"]))
    assert whole(answer["tokens"]["greedy"]) == alone["tokens"]["greedy"]
    saved = whole(answer["saved"])
    assert not saved["differing"]
    assert f"{modeling.file}.py" in saved["files"]
    assert saved["config"]["auto_map"] == modeling.auto_map


def definitions(file: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse((MODELING / file).read_text()).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("model_type", OWN)
def test_auto_map_names_classes_of_the_file(model_type: str) -> None:
    modeling = OWN[model_type].modeling
    assert modeling is not None
    classes = definitions(f"{modeling.file}.py")
    assert {name for _, name in modeling.classes} <= classes.keys()
    assert {home.partition(".")[0] for home in modeling.auto_map.values()} == {modeling.file}
    types = [
        node.value.value
        for node in classes[dict(modeling.classes)["AutoConfig"]].body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and ast.unparse(node.targets[0]) == "model_type"
    ]
    assert types == [modeling.model_type]
    assert FAMILIES[modeling.model_type].modeling == modeling


@pytest.mark.parametrize("model_type", OWN)
def test_classes_stand_for_transformers_own(model_type: str) -> None:
    """Each auto class that loads a stock model loads the class here that is derived from it."""
    modeling = OWN[model_type].modeling
    assert modeling is not None
    classes = definitions(f"{modeling.file}.py")
    for auto in sorted(name for name in dir(modeling_auto) if name.startswith("AutoModel")):
        table = getattr(getattr(modeling_auto, auto), "_model_mapping", None)
        stock = table._model_mapping.get(model_type) if table is not None else None
        if stock is None or auto in ("AutoModelForPreTraining", "AutoModelForMaskedLM"):  # other names of what is there
            continue
        if f"GQA{stock}" in classes:
            assert modeling.auto_map[auto] == f"{modeling.file}.GQA{stock}"
            assert any(ast.unparse(base).endswith(f".{stock}") for base in classes[f"GQA{stock}"].bases)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_shared_part_is_generated(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == generate.generated(file), (
        f"{file.name} differs from shared.py: run python -m gqa_convert.families.modeling.generate"
    )


def test_a_stale_shared_part_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("shared.py", "gqa_opt.py"):
        shutil.copy(MODELING / name, tmp_path)
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    stale = tmp_path / "gqa_opt.py"
    stale.write_text(stale.read_text().replace("def pack_heads", "def pack_heads_otherwise"))
    assert generate.main(["--check"]) == 1
    assert "gqa_opt.py differs from shared.py" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert stale.read_bytes() == (MODELING / "gqa_opt.py").read_bytes()
    assert generate.main(["--check"]) == 0
    stale.write_text(stale.read_text().replace(generate.END, ""))
    with pytest.raises(ValueError, match=r"gqa_opt.py lacks the lines"):
        generate.main(["--check"])


def test_every_modelling_file_has_a_record() -> None:
    named = {each.file for family in FAMILIES.values() for each in (family.modeling, *family.layerwise) if each}
    assert {file.stem for file in FILES} == named, (
        "gqa_convert/families/modeling/ and the files that own_file(...) names in gqa_convert/families/records/ differ"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_imports(file: Path) -> None:
    """Nothing but torch, transformers, what comes with it, and the standard library; nothing relative."""
    roots = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            roots.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
    assert roots <= {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


@pytest.mark.parametrize("case", CASES)
def test_plan_tells_what_is_needed(case: str, sources: Callable[..., Path]) -> None:
    model_type, _ = CASES[case]
    modeling = OWN[model_type].modeling
    assert modeling is not None
    source = sources(case)
    heads = SOURCE_HEADS.get(case, HEADS)
    groups = 1 if heads == 6 else 3 if heads != 4 else 2
    plan = make_plan(open_checkpoint(source), groups, native=False)
    assert plan.route == "own file"
    assert not plan.loads_in
    summary = plan.summary()
    assert summary["modeling_file"] == f"{modeling.file}.py"
    assert summary["result_model_type"] == modeling.model_type
    model = load_stock(source, model_type)
    held = cached_heads(model)
    sizes = plan.cache_bytes()
    assert ("cross_kv_bytes_per_encoder_token" in sizes) == ("cross" in held)
    for both in sizes.values():
        assert both.before * groups == both.after * heads


@pytest.mark.parametrize(
    ("kind", "word"),
    [("grouped_query_attention", "grouped K/V heads"), ("multiquery_attention", "one K/V head already")],
)
def test_mpt_of_other_kinds_is_refused_for_what_it_is(kind: str, word: str, tmp_path: Path) -> None:
    source = make_source("mpt", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["attn_config"] |= {"attn_type": kind, "kv_n_heads": 4}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFamilyError, match=f"attn_type = .{kind}.*{word}.*llm-foundry"):
        make_plan(open_checkpoint(source), 3)
