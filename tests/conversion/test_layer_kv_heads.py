"""Different numbers of K/V heads in different layers: what is merged where, what is refused, and
what verify proves.
"""

from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.engines import LOADERS, computes_otherwise
from gqa_convert.families.records import DECILM as MODEL_TYPE
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import read_weights
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.tiny import HEADS, make_checkpoint
from tests.helpers.verification import failed

pytestmark = pytest.mark.usefixtures("modeling_files_registered")

COUNTS = [12, 4, 3, 1]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers that can become a DeciLM, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("layers") / "source"
    make_checkpoint(
        "llama",
        folder,
        head_dim=8,
        intermediate_size=256,
        num_hidden_layers=4,
        vocab_size=2048,
        shards="1MB",
    )
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def factored(source: Path) -> Path:
    out = source.parent / "factored"
    convert_checkpoint(source, out, COUNTS, ConversionOptions(method="factor"))
    return out


def test_the_plan(source: Path) -> None:
    plan = make_plan(open_checkpoint(source), COUNTS, method="mean")
    per_head = 2 * 8 * 4  # keys and values, head_dim, float32
    sizes = plan.cache_bytes()["kv_bytes_per_token"]
    assert (sizes.before, sizes.after) == (4 * HEADS * per_head, sum(COUNTS) * per_head)
    assert plan.config["multi_query_group_num"] == plan.summary()["kv_heads"] == COUNTS
    assert plan.config["num_key_value_heads"] is None
    assert {change.method for change in plan.changes if ".layers.0." in change.name} == {"copy"}
    assert plan.loads_in == {"vLLM", "llama.cpp"}
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    assert [computes_otherwise(engine, plan.config | scaled) for engine in LOADERS] == [
        False,
        False,
        True,
    ]


def test_fit_on_text(source: Path, text: Path, tmp_path: Path) -> None:
    """Layers with the source's number are copies, and the others are fitted."""
    seen: list[tuple[int, int]] = []
    fitting = CalibrationOptions(
        text, tokens=512, sequence_length=64, steps=2, kl_steps=2, mix=False, device="cpu"
    )

    def look(progress: Any) -> None:
        seen.append((progress.layer and progress.done, progress.total))

    convert_checkpoint(
        source, tmp_path / "out", COUNTS, ConversionOptions(calibration=fitting), on_layer=look
    )
    assert (3, 3) in seen
    report = verify_checkpoint(tmp_path / "out", source)
    assert report.passed, failed(report)
    assert "module outputs" in {check.name for check in report.checks}
    ours, theirs = read_weights(tmp_path / "out"), read_weights(source)
    for projection in PROJECTIONS:
        name = f"model.layers.{{}}.self_attn.{projection}.weight"
        assert ours[name.format(0)].tobytes() == theirs[name.format(0)].tobytes()
        assert ours[name.format(1)].tobytes() != theirs[name.format(1)].tobytes()


def test_a_result_is_a_source_again(factored: Path, tmp_path: Path) -> None:
    """Each number divides that of its layer; one for all layers is stated for each."""
    convert_checkpoint(factored, tmp_path / "again", [4, 2, 3, 1], ConversionOptions(method="mean"))
    assert verify_checkpoint(tmp_path / "again", factored).passed
    assert make_plan(open_checkpoint(factored), 1).config["multi_query_group_num"] == [1, 1, 1, 1]
    assert make_plan(open_checkpoint(factored), 1).config["model_type"] == MODEL_TYPE
    shown = run("convert", factored, "--kv-heads", "1", "-m", "mean", "--dry-run").stdout
    assert "12 query heads, 1 to 12 -> 1 K/V heads in 4 attention layers" in shown
    with pytest.raises(
        GroupsError,
        match=r"--kv-heads 2 does not fit .* 3 K/V heads .* in layer 2: choose one of 1, 3$",
    ):
        make_plan(open_checkpoint(factored), 2)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("12,4,3", ("lists 3 numbers", "4 attention layers")),
        ("12,5,3,1", ("--kv-heads 5", "in layer 1", "12 K/V heads", "1, 2, 3, 4, 6, 12")),
        ("12,24,3,1", ("--kv-heads 24", "in layer 1")),
        ("12,,3,1", ("--kv-heads", "''", "is not a whole number above 0")),
    ],
)
def test_a_bad_list_writes_nothing(
    listed: str, words: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    assert_mistake(
        run("convert", source, tmp_path / "out", "--kv-heads", listed, "-m", "mean"), *words
    )
    assert list(tmp_path.iterdir()) == []


def test_what_has_no_form_for_a_list(tmp_path: Path) -> None:
    mixtral = make_checkpoint("mixtral", tmp_path / "mixtral")
    with pytest.raises(
        GroupsError, match=r"all layers of a mixtral have one number of K/V heads: give one"
    ):
        make_plan(open_checkpoint(mixtral), [12, 3])
    odd = make_checkpoint("llama", tmp_path / "odd", head_dim=8)
    assert make_plan(open_checkpoint(odd), [3, 3]).stated_kv_heads == 3
    with pytest.raises(OptionError, match="--no-native"):
        make_plan(open_checkpoint(odd), 3, native=False)
