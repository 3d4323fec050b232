"""Which files a report reads, and which of several accounts of one thing."""

import json
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.measuring.results import finding
from gqa_convert.measuring.results.finding import DEPTH, find
from gqa_convert.measuring.results.records import Material
from tests.helpers.result_files import write_json

SCORED = {"kind": "evaluate", "results": [{"model": "m", "loss": 2.0}]}
CONVERTED = {
    "groups": 3,
    "method": "mean",
    "merge_error": {"layers.0.k": 0.5},
    "kv_bytes_per_token": {"before": 1200, "after": 300},
}
TRAINED = {"kind": "uptrain", "steps": 1, "tokens": 64, "evaluation": {"start": 3.0, "final": 2.5, "source": 2.0}}


def names(material: Material, folder: Path) -> list[str]:
    return [origin.path.relative_to(folder).as_posix() for origin, _ in material.read]


def test_what_is_looked_into(tmp_path: Path) -> None:
    deep = "/".join("abcd"[:DEPTH])
    for name in (
        f"{deep}/in.json",
        f"{deep}/e/out.json",
        ".hidden/out.json",
        ".out.json",
        "out.txt",
        "model.safetensors.index.json",
    ):
        write_json(tmp_path / name, SCORED)
    for name in ("run/in.json", "run/checkpoints/out.json", "run/trackers/out.json", "other/checkpoints/in.json"):
        write_json(tmp_path / name, SCORED)
    (tmp_path / "run" / "resolved_recipe.yaml").touch()
    assert sorted(names(find([tmp_path]), tmp_path)) == sorted(
        [f"{deep}/in.json", "run/in.json", "other/checkpoints/in.json"]
    )


def test_large_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", SCORED)
    (tmp_path / "b.json").write_text(json.dumps(SCORED) + " " * 500)
    monkeypatch.setattr(finding, "_LARGEST", 499)
    material = find([tmp_path])
    assert names(material, tmp_path) == ["a.json"]
    assert [path.name for path, _ in material.ignored] == ["b.json"]


def test_a_checkpoints_own_record_says_more_than_what_was_printed(tmp_path: Path) -> None:
    """Whichever is read first; what contradicts it is named."""
    printed = CONVERTED | {"out": str(tmp_path / "gqa3"), "groups": 4, "method": "factor"}
    write_json(tmp_path / "a.json", printed)
    write_json(tmp_path / "gqa3" / "gqa_conversion.json", CONVERTED)
    write_json(tmp_path / "z.json", printed)
    material = find([tmp_path])
    (conversion,) = material.conversions
    assert (conversion.groups, conversion.method, conversion.kv_bytes) == (3, "mean", (1200, 300))
    assert len(material.conflicts) == 2
    assert all("N = 3" in each and "says 4" in each for each in material.conflicts)


def test_a_folder_that_was_moved_is_found_beside_what_names_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", CONVERTED | {"out": "/no/such/place/gqa3"})
    write_json(tmp_path / "gqa3" / "gqa_conversion.json", CONVERTED)
    (conversion,) = find([tmp_path]).conversions
    assert conversion.folder == tmp_path / "gqa3"


def test_two_accounts_of_a_run(tmp_path: Path) -> None:
    """A run's summary and what was printed are one, or the run's own counts; a curve begins at the start and ends with
    the summary.
    """

    def account(**more: Any) -> dict[str, Any]:
        return TRAINED | {"model": str(tmp_path / "run" / "model")} | more

    write_json(tmp_path / "run" / "summary.json", account())
    write_json(tmp_path / "run.json", account())
    material = find([tmp_path])
    (run,) = material.runs
    assert run.curve == ((0, 3.0), (64, 2.5))
    assert material.conflicts == []
    write_json(tmp_path / "run.json", account(tokens=128))
    for places in ([tmp_path], [tmp_path / "run", tmp_path / "run.json"]):
        material = find(places)
        (run,) = material.runs
        assert len(material.conflicts) == 1
        assert [path.name for path, _ in material.ignored] == ["run.json"]
        assert run.tokens == 64
