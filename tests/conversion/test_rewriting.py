"""Sources that are rewritten before they are converted compute what they computed: GPT-NeoX and
GPT-2 against their own classes.

The tests of verify hold more: half precision, names and buffers of older releases, tokenizers, and
every tensor of a result.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa_convert import convert_checkpoint
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.rewriting.source import plan_rewriting, rewritten_folder
from gqa_convert.errors import ConfigError, NonFiniteError, OptionError, UnsupportedFormatError
from tests.helpers import elsewhere, native
from tests.helpers.checkpoints import read_weights
from tests.helpers.command_line import run
from tests.helpers.fitting import batches_for, calibrate_on
from tests.helpers.folding_cases import Case, pool
from tests.helpers.native import distance
from tests.helpers.own_files import SIZES, make_source_model
from tests.helpers.selection import slow_but
from tests.helpers.tiny import HEADS

WIDTH, HIDDEN = 8, 96
STOCK = ConversionOptions(method="mean", native=True)
FOLDED = 5e-5
"""How far logits may lie apart where norms are folded into projections, as a share of their
spread.
"""


def rewritten(source: Path, folder: Path, **options: Any) -> Checkpoint:
    """The rewritten source, whose files are those that the plan has announced."""
    announced = plan_rewriting(open_checkpoint(source), **options)
    with rewritten_folder(announced, folder.parent / "out") as written:
        shutil.copytree(written.local_folder, folder)
    described = [
        [(number, name, entry.dtype, entry.shape) for number, name, entry in each.tensors()]
        for each in (announced, written)
    ]
    assert described[0] == described[1]
    assert [shard.file for shard in written.shards] == [shard.file for shard in announced.shards]
    assert set(announced.carried) <= set(written.carried)
    assert (written.config, written.recipes) == (open_checkpoint(folder).config, {})
    return written


def _rope(part: float, /, **scaling: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": part,
        }
        | scaling
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2, 3],
    "long_factor": [2.0, 3, 4, 5],
}
ORIGINAL = {"original_max_position_embeddings": 16}
DYNAMIC = _rope(0.5, rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 4}
UNTIED = {
    "tie_word_embeddings": False,
    "reorder_and_upcast_attn": True,
    "n_inner": None,
    "activation_function": "gelu",
}

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "neox": ("gpt_neox", {"layer_norm_eps": 1e-3}, "phi"),
    "neox, tied": (
        "gpt_neox",
        {"tie_word_embeddings": True, "hidden_act": "gelu_new"} | _rope(1.0),
        "phi",
    ),
    "neox, dynamic": ("gpt_neox", DYNAMIC, "phi"),
    "neox, yarn": ("gpt_neox", _rope(0.5, **YARN), "phi"),
    "neox, longrope": ("gpt_neox", _rope(1.0, **LONGROPE, **ORIGINAL), "phi"),
    "gpt2": ("gpt2", {}, "gpt_bigcode"),
    "gpt2, untied": ("gpt2", UNTIED, "gpt_bigcode"),
}
"""Source type, config values, and the type of the result."""


def build(name: str) -> Case:
    model_type, changes, _ = CASES[name]
    return Case(model_type, make_source_model(model_type, **copy.deepcopy(changes)), HEADS)


@pytest.mark.parametrize("name", slow_but(("neox", "neox, yarn", "gpt2"), CASES))
def test_decoders(name: str, tmp_path: Path) -> None:
    """With all heads and with merged ones, which replace those of the source's own class in the
    reference.
    """
    case = build(name)
    source, out, groups = (
        case.save(tmp_path / "source"),
        tmp_path / "out",
        1 if case.model_type == "gpt2" else 3,
    )
    written = rewritten(source, tmp_path / "rewritten", kv_heads=groups)
    unmerged = case.logits()
    assert written.config["model_type"] == CASES[name][2]
    stated = written.config.get("rope_parameters") or {}
    assert stated.get("rope_theta") == written.config.get("rope_theta"), (
        "for new clients and for old ones"
    )
    assert distance(case.logits(native.load(tmp_path / "rewritten")), unmerged) < FOLDED
    converted = convert_checkpoint(source, out, groups, STOCK)
    assert converted.plan.parameters_after == sum(
        array.size for array in read_weights(out).values()
    )
    pool(case, groups)
    result = native.load(out)
    assert result.config.model_type == CASES[name][2]
    assert distance(case.logits(result), case.logits()) < FOLDED
    assert distance(unmerged, case.logits()) > 0.01
    assert elsewhere.generated(result) == elsewhere.generated(case.model)
    cache = getattr(result(input_ids=elsewhere.PADDED), elsewhere.cache_name(result))
    assert all(layer.keys.shape[-3] == groups for layer in cache.layers)
    changed = {
        change.name for change in converted.plan.changes if change.before != change.entry.shape
    }
    assert set(converted.merge_error) == changed
    filled = {name for name, error in converted.merge_error.items() if error == 0}
    assert all(name.endswith(".bias") for name in filled), "zeros, where the source has no bias"
    assert all(
        0.1 < error < 1 for name, error in converted.merge_error.items() if name not in filled
    )
    record = json.loads((out / "gqa_conversion.json").read_text())
    assert (record["source"]["id"], record["source"]["model_type"]) == (
        str(source),
        case.model_type,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rewritten", "source"]


def test_the_route_is_chosen(tmp_path: Path) -> None:
    neox, gpt2 = (open_checkpoint(build(name).save(tmp_path / name)) for name in ("neox", "gpt2"))
    for checkpoint, groups, chosen in ((neox, 3, None), (neox, HEADS, True), (gpt2, 1, None)):
        assert plan_rewriting(checkpoint, groups, native=chosen).recipes
    for checkpoint, groups, chosen in (
        (neox, 3, False),
        (neox, HEADS, None),
        (neox, [3, 12], None),
        (gpt2, 3, None),
    ):
        assert plan_rewriting(checkpoint, groups, native=chosen) is checkpoint
    with pytest.raises(
        OptionError,
        match="no stock class computes the same as this gpt2: gpt_bigcode, which is GPT-2",
    ):
        plan_rewriting(gpt2, 3, native=True)


def with_config(name: str, **fields: Any) -> dict[str, Any]:
    model_type, changes, _ = CASES[name]
    return {"model_type": model_type} | SIZES[model_type] | changes | fields


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (with_config("gpt2"), 3, "either one K/V head"),
        (with_config("gpt2", add_cross_attention=True), 1, "add_cross_attention"),
        (with_config("gpt2", scale_attn_weights=False), 1, "scale_attn_weights = False"),
        (
            with_config("gpt2", scale_attn_by_inverse_layer_idx=True),
            1,
            "scale_attn_by_inverse_layer_idx = True",
        ),
        (with_config("neox", use_parallel_residual=False), 3, "use_parallel_residual = False"),
        (with_config("neox", rope_scaling={"type": "ntk", "factor": 2.0}), 3, "'ntk'"),
        (with_config("neox", rotary_pct=0.4), 3, "no pairs"),
        (with_config("neox", rotary_pct=1.5), 3, "makes no sense"),
        (with_config("neox", rope_parameters={"full": {"rope_theta": 1.0}}), 3, "rope_parameters"),
        (with_config("neox", auto_map={"AutoModel": "x.Y"}), 3, "contains modelling code"),
        (
            with_config("neox", architectures=["GPTNeoXForTokenClassification"]),
            3,
            "GPTNeoXForTokenClassification",
        ),
        (with_config("neox", pad_token_id=64), 3, "pad_token_id = 64"),
        ({"model_type": "bloom"}, 3, "bloom"),
    ],
)
def test_no_stock_class(config: dict[str, Any], groups: int, reason: str) -> None:
    source = Checkpoint(
        "here", None, None, config, "safetensors", (), None, (), (), {}
    )  # refused before tensors matter
    with pytest.raises(OptionError, match=reason):
        plan_rewriting(source, groups, native=True)
    assert not plan_rewriting(source, groups).recipes


KEY = "gpt_neox.layers.1.attention.query_key_value.weight"
GAIN = "gpt_neox.layers.1.input_layernorm.weight"
UP = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
NAN = torch.ones(288, HIDDEN).index_fill(0, torch.tensor([WIDTH]), torch.nan)
LARGE = {GAIN: torch.full((HIDDEN,), 6e4).half(), KEY: torch.full((288, HIDDEN), 2.0).half()}


@pytest.mark.parametrize(
    ("changed", "missing", "error", "message"),
    [
        (
            {"gpt_neox.layers.3.attention.dense.weight": NAN},
            "",
            ConfigError,
            "does not belong to a gpt_neox",
        ),
        ({}, UP, ConfigError, "is missing"),
        ({}, "embed_out.weight", ConfigError, "embed_out.weight"),
        ({GAIN: torch.full((HIDDEN,), torch.inf)}, "", NonFiniteError, "holds NaN or Inf"),
        (
            {UP: torch.full((40, HIDDEN), torch.nan)},
            "",
            NonFiniteError,
            "mlp.dense_h_to_4h.weight holds NaN or Inf",
        ),
        (LARGE, "", NonFiniteError, "too large for F16"),
        ({KEY: torch.ones(287, HIDDEN)}, "", ConfigError, "has shape"),
        ({GAIN: torch.ones(HIDDEN + 1)}, "", ConfigError, "has shape"),
        (
            {KEY: torch.ones(288, HIDDEN, dtype=torch.int32)},
            "",
            UnsupportedFormatError,
            "has type I32",
        ),
    ],
)
def test_damaged_sources(
    changed: dict[str, Tensor], missing: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    source = build("neox").save(tmp_path / "source")
    tensors = load_file(source / "model.safetensors") | changed
    tensors.pop(missing, None)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / "out", 3, STOCK)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_fit_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are those of the source, although the rewritten source lies in another folder
    each time.
    """
    case = build("neox")
    source = case.save(tmp_path / "source")
    calibrate_on(batches_for(case.model), monkeypatch)
    options = CalibrationOptions("text", tokens=1000, steps=1, kl_steps=0)
    fit, made = ConversionOptions(calibration=options, native=True), set()

    def look(_: Any) -> None:
        layers = list((tmp_path / ".out.gqa-merging").glob("layer-00000*"))
        if layers and not made:
            made.add(layers[0].stat().st_mtime_ns)
            raise KeyboardInterrupt
        made.update(layer.stat().st_mtime_ns for layer in layers)

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", 3, fit, on_layer=look)
    convert_checkpoint(source, tmp_path / "out", 3, fit, on_layer=look)
    assert len(made) == 1


def test_the_commands_rewrite_a_source_and_leave_nothing_beside_the_result(tmp_path: Path) -> None:
    source, out = build("neox").save(tmp_path / "source"), tmp_path / "out"
    dry = run("convert", source, "--kv-heads", 3, "--dry-run", "--json")
    planned = json.loads(dry.stdout)
    assert (planned["rewritten_from"], planned["model_type"]) == ("gpt_neox", "phi")
    shown = run(
        "convert", source, "--kv-heads", 3, "--dry-run", "-m", "fit", "--calibration", __file__
    )
    assert "gpt_neox as phi" in shown.stdout, shown.stderr
    made = run("convert", source, out, "--kv-heads", 3, "-m", "mean", "--json")
    assert made.returncode == 0, made.stderr
    summary = json.loads(made.stdout)
    assert "a gpt_neox, is rewritten as a phi" in summary["warnings"][0]
    assert (summary["source"], summary["model_type"], summary["kv_heads"]) == (
        str(source),
        "phi",
        3,
    )
    verified = run("verify", out, "--source", source, "--json")
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["source"] == str(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    refused = run("convert", source, tmp_path / "new", "--kv-heads", 5)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--kv-heads 5" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
