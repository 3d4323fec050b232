"""What a conversion writes: identity, repetition, the writer's bytes, provenance, index and
refusals of weights.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import run, writing
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import (
    ConfigError,
    GroupsError,
    NonFiniteError,
    NoSpaceError,
    UnsupportedFormatError,
)
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import (
    CONFIG,
    HEADS,
    HIDDEN,
    WIDTH,
    llama_arrays,
    refused,
    same_weights,
    write_config,
    write_llama,
)
from tests.helpers.verification import failed

MEAN = ConversionOptions(method="mean")
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source", shards=3)


def test_at_the_sources_own_count_files_are_equal_byte_for_byte(
    source: Path, tmp_path: Path
) -> None:
    convert_checkpoint(source, tmp_path / "out", HEADS, MEAN)
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG | {"multi_query_attention": True, "multi_query_group_num": HEADS}
    assert list(config)[: len(CONFIG)] == list(CONFIG), "the source's own order is kept"


def test_tied_heads_merge_without_loss_and_repeat_back(tmp_path: Path) -> None:
    arrays = llama_arrays()
    for name, array in arrays.items():
        if "k_proj" in name or "v_proj" in name:
            heads = array.reshape(4, 3, WIDTH, HIDDEN)
            heads[:] = heads[:, :1]
    source = write_llama(tmp_path / "source", arrays=arrays)
    result = convert_checkpoint(source, tmp_path / "down", 4, MEAN)
    assert set(result.merge_error.values()) == {0.0}
    files = {path.name for path in source.iterdir()}  # a single file of weights among them
    assert {path.name for path in (tmp_path / "down").iterdir()} == files | {"gqa_conversion.json"}
    convert_checkpoint(tmp_path / "down", tmp_path / "up", 12, MEAN)
    assert same_weights(source, tmp_path / "up")
    record = json.loads((tmp_path / "up" / "gqa_conversion.json").read_text())
    assert (record["method"], record["previous"]["method"]) == ("repeat", "mean")
    assert "gqa_conversion.json" not in record["written"], (
        "the earlier record is no file of the result"
    )


def test_hashes(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "some", 4, MEAN)
    convert_checkpoint(
        source, tmp_path / "all", 4, ConversionOptions(hash_weights=True, method="mean")
    )
    some, every = (
        json.loads((tmp_path / name / "gqa_conversion.json").read_text())
        for name in ("some", "all")
    )
    assert "sha256" in some["source"]["files"]["config.json"]
    assert "sha256" not in some["source"]["files"]["model-00001-of-00003.safetensors"]
    for name, record in every["source"]["files"].items():
        assert record == {
            "bytes": (source / name).stat().st_size,
            "sha256": hashlib.sha256((source / name).read_bytes()).hexdigest(),
        }
    written = {path.name: path.read_bytes() for path in (tmp_path / "all").glob("*.safetensors")}
    expected = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in written.items()
    }
    assert not any("sha256" in some["written"][name] for name in expected)
    assert {name: every["written"][name] for name in expected} == expected
    assert verify_checkpoint(tmp_path / "all", source, logits=False).passed
    every["source"]["files"]["model-00001-of-00003.safetensors"]["sha256"] = "0" * 64
    (tmp_path / "all" / "gqa_conversion.json").write_text(json.dumps(every))
    assert not verify_checkpoint(tmp_path / "all", source, logits=False).passed


@pytest.mark.parametrize(
    ("method", "projection"), [("mean", "k"), ("first", "v"), ("factor", "q"), ("factor", "o")]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_are_refused_and_leave_nothing(
    tmp_path: Path, method: str, projection: str, bad: float
) -> None:
    arrays, name = llama_arrays(), KEY.replace("k_proj", f"{projection}_proj")
    arrays[name][-1, -1] = bad
    source = write_llama(tmp_path / "source", arrays=arrays)
    with refused(NonFiniteError, name):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method=method))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert_checkpoint(
        source, tmp_path / "out", HEADS, MEAN
    )  # nothing is merged, so that nothing spreads


@pytest.mark.parametrize(
    ("before", "refused", "choices"),
    [
        (HEADS, (-3, 0, 5, 7, 8, 9, 24, 36), "1, 2, 3, 4, 6, 12$"),
        (3, (2, 5, 8, 9, 24), "1, 3; or, to repeat heads for tensor parallelism, 6, 12$"),
    ],
)
def test_groups_that_do_not_fit(
    source: Path, tmp_path: Path, before: int, refused: tuple[int, ...], choices: str
) -> None:
    convert_checkpoint(source, tmp_path / "out", before, MEAN)
    for groups in refused:
        with pytest.raises(GroupsError, match=rf"choose one of {choices}"):
            make_plan(open_checkpoint(tmp_path / "out"), groups)


@pytest.mark.parametrize(
    "change",
    [
        *({"num_attention_heads": count} for count in (0, 10, 24, "12", True)),
        *({"num_key_value_heads": count} for count in (-1, 5, 6)),
        {"head_dim": WIDTH + 1},
    ],
    ids=str,
)
def test_shapes_that_contradict_the_config(source: Path, change: dict) -> None:
    write_config(source, **change)
    with pytest.raises(ConfigError, match="config"):
        make_plan(open_checkpoint(source), 1)


def test_tensors_of_a_type_that_cannot_be_merged(tmp_path: Path) -> None:
    arrays = llama_arrays() | {KEY: llama_arrays()[KEY].astype(np.int32)}
    source = write_llama(tmp_path / "integers", arrays=arrays)
    with pytest.raises(UnsupportedFormatError, match="I32"):
        make_plan(open_checkpoint(source), 4)


def test_code_beside_the_weights_is_carried_and_never_run(source: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    write_config(
        source, auto_map={"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.Y"}
    )
    (source / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    result = convert_checkpoint(source, tmp_path / "out", 3, MEAN)
    assert (tmp_path / "out" / "modeling_x.py").read_bytes() == (
        source / "modeling_x.py"
    ).read_bytes()
    assert any("never run" in warning for warning in result.plan.warnings)
    verify_checkpoint(tmp_path / "out", source)
    assert not canary.exists()


def test_a_full_disk_is_found_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(run, "prepare_layers", lambda *_: pytest.fail("layers were merged"))
    with pytest.raises(
        NoSpaceError, match=r"the result needs [\d,]+ bytes, and the disk of .* has 1,000 free"
    ):
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="factor"))


def test_which_further_files_are_kept(source: Path, tmp_path: Path) -> None:
    (source / "stray").mkdir()
    save_file(
        {"linear.weight": np.ones((2, 2), np.float32)}, source / "stray" / "model.safetensors"
    )
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "notes" / "deep").mkdir(parents=True)
    (source / "notes" / "deep" / "a.txt").write_text("kept")
    (source / "global_step.txt").write_text("100")
    result = convert_checkpoint(source, tmp_path / "out", 3, MEAN)
    assert result.as_json()["left_behind"] == ["optimizer.pt", "stray/model.safetensors"]
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    assert (tmp_path / "out" / "notes" / "deep" / "a.txt").read_text() == "kept"
    assert verify_checkpoint(tmp_path / "out", source, logits=False).passed
    (tmp_path / "out" / "notes" / "deep" / "a.txt").write_text("changed")
    assert "copied files" in failed(verify_checkpoint(tmp_path / "out", source, logits=False))
