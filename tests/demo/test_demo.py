"""The demo on the bundled checkpoint, and the checkpoint itself."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from gqa_convert.conversion.plan import Plan
from gqa_convert.demo import run as demo_run
from gqa_convert.demo import uptraining as demo_uptraining
from gqa_convert.demo.files import CHECKPOINT, GROUPS, PLOT, RESULTS, check_folder
from gqa_convert.demo.run import run_demo
from gqa_convert.errors import OutputError
from gqa_convert.families.loading import load_causal_lm
from gqa_convert.text import calibration, sources, stdlib_text
from gqa_convert.text.scoring.text_loss import text_loss


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict, list[Plan]]]:
    """The demo with a few of the training files, and less text for every stage."""
    out = tmp_path_factory.mktemp("demo") / "out"
    plans: list[Plan] = []

    def some_files(held_out: bool) -> list[Path]:
        return stdlib_text.source_files(held_out=held_out)[:: 4 if held_out else 40]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(out.parent / "cache"))
        patch.setattr(demo_run, "_TOKENS", 2048)
        patch.setattr(demo_uptraining, "_EVALUATION_TOKENS", 2048)
        patch.setattr(sources, "source_files", some_files)
        patch.setattr(calibration, "LENGTH", 128)
        yield (
            out,
            run_demo(
                out, uptraining_tokens=3 * 4096, calibration_tokens=1024, fit_steps=5, on_plan=plans.append
            ).as_json(),
            plans,
        )


def test_the_bundled_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 6_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 12
    assert config["head_dim"] * 12 != config["hidden_size"]


@pytest.mark.slow
def test_the_demo_runs_the_whole_workflow(demo: tuple[Path, dict, list[Plan]]) -> None:
    out, summary, plans = demo
    assert len(plans) == 1
    assert summary["passed"]
    assert [result["groups"] for result in summary["results"]] == list(GROUPS)
    losses = [result["loss"] for result in summary["results"]]
    assert losses == sorted(losses), "fewer heads must not gain quality by pooling"
    assert 1.5 < losses[0] < 2.7, "the checkpoint was trained; a uniform guess would lose 7.6"
    assert losses[0] + 0.5 < losses[-1] < 9
    fitted = [result["fit"]["loss"] for result in summary["results"][1:]]
    assert fitted == sorted(fitted)
    for fit, mean in zip(fitted, losses[1:], strict=True):
        assert losses[0] < fit < losses[0] + 0.4 * (mean - losses[0])
    cache = [result["kv_bytes_per_token"] for result in summary["results"]]
    assert cache == [5 * 2 * 32 * 2 * groups for groups in GROUPS]
    assert json.loads((out / RESULTS).read_text()) == summary
    for groups in GROUPS:
        for name in (f"gqa-{groups}", f"gqa-{groups}-fit")[: 2 if groups < 12 else 1]:
            assert json.loads((out / name / "config.json").read_text())["multi_query_group_num"] == groups


@pytest.mark.slow
def test_uptraining_recovers(demo: tuple[Path, dict, list[Plan]]) -> None:
    out, summary, _ = demo
    uptraining = summary["uptraining"]
    assert uptraining["tokens"] == 3 * 4096
    assert uptraining["curve"][0]["tokens"] == 0
    assert uptraining["curve"][-1]["loss"] < uptraining["curve"][0]["loss"]
    assert uptraining["evaluation"]["source"] < uptraining["curve"][-1]["loss"]
    assert uptraining["alpha"] == pytest.approx(
        3 * 4096 / json.loads((CHECKPOINT / "training.json").read_text())["training_tokens"]
    )
    assert (Path(uptraining["model"]) / "model.safetensors").is_file()
    assert Path(uptraining["model"]).is_relative_to(out)


@pytest.mark.slow
def test_the_plot_is_a_picture_with_both_curves(demo: tuple[Path, dict, list[Plan]]) -> None:
    root = ET.parse(demo[0] / PLOT).getroot()
    assert root.tag.endswith("svg")
    assert len([node for node in root.iter() if node.get("id", "").startswith("line2d")]) >= 4


@pytest.mark.slow
def test_an_earlier_demo_is_replaced_only_when_asked(demo: tuple[Path, dict, list[Plan]], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        run_demo(demo[0])
    (tmp_path / "precious").write_text("x")
    with pytest.raises(OutputError, match="exists already"):
        run_demo(tmp_path, overwrite=True)


@pytest.mark.slow
def test_what_no_demo_wrote_is_neither_replaced_nor_deleted(
    demo: tuple[Path, dict, list[Plan]], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(demo[0], out)
    check_folder(out, overwrite=True)
    (out / "notes.txt").write_text("beside the results, where the demo writes nothing")
    check_folder(out, overwrite=True)
    for name in ("gqa-3/thesis.tex", "gqa-12/data", "uptraining/thesis.tex", "uptraining/model/thesis.tex"):
        (out / name).write_text("mine")
        with pytest.raises(OutputError, match=r"not w|changed since"):
            check_folder(out, overwrite=True)
        (out / name).unlink()
    for name in (RESULTS, PLOT, "uptraining.yaml"):
        kept = (out / name).read_bytes()
        (out / name).write_text((out / name).read_text().replace("gqa-convert", "me") if name == PLOT else "{}")
        with pytest.raises(OutputError, match=name):
            check_folder(out, overwrite=True)
        (out / name).write_bytes(kept)
    check_folder(out, overwrite=True)


def test_every_token_but_the_first_is_scored_once() -> None:
    """The blocks' loss, against one that is computed token by token."""
    model, _ = load_causal_lm(CHECKPOINT, torch.float32)
    context = model.config.max_position_embeddings
    ids = torch.randint(2, 2000, (2 * context + 77,), generator=torch.Generator().manual_seed(0)).tolist()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, context - 1):
            block = torch.tensor([ids[start : start + context]])
            scores = torch.log_softmax(model(input_ids=block).logits[0].double(), dim=-1)
            total -= sum(float(scores[at, block[0, at + 1]]) for at in range(block.shape[1] - 1))
    assert text_loss(model, ids, batch=2) == pytest.approx(total / (len(ids) - 1), rel=1e-6)
    with pytest.raises(ValueError, match="two tokens"):
        text_loss(model, ids[:1])


def test_held_out_files_are_never_training_files() -> None:
    training, held_out = set(stdlib_text.source_files(held_out=False)), set(stdlib_text.source_files(held_out=True))
    assert not training & held_out
    assert 0.02 < len(held_out) / len(training | held_out) < 0.1
