"""Results with the modelling files of an earlier release: they verify, and are renewed."""

import hashlib
import json
import tomllib
from pathlib import Path

import pytest

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.refreshing import refresh_modeling
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import OptionError, SourceNotFoundError
from gqa_convert.families import released
from gqa_convert.families.family import MODELING
from gqa_convert.families.released import TESTED, Release, releases
from gqa_convert.publishing.ownership import foreign_files
from gqa_convert.verify.report import VerificationReport
from gqa_convert.verify.run import verify_checkpoint
from tests.helpers.own_files import make_source
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import failed
from tools import release_modeling

OLD = ("gqa_opt.py", "gqa_common.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source("opt", tmp_path / "source")


@pytest.fixture
def result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result of an earlier release, whose files had other comments and whose configs stated no
    versions.
    """
    out = tmp_path / "out"
    convert_checkpoint(source, out, 3, ConversionOptions(method="mean"))
    files = {}
    for name in OLD:
        code = (out / name).read_bytes() + b"# as it was\n"
        (out / name).write_bytes(code)
        files[name] = hashlib.sha256(code).hexdigest()
    config = json.loads((out / "config.json").read_text())
    del config["transformers_tested"]
    (out / "config.json").write_text(json.dumps(config))
    record = json.loads((out / "gqa_conversion.json").read_text())
    record["source"]["fingerprint"] = "0" * 64  # of another scheme, which says nothing about SOURCE
    for name in (*OLD, "config.json"):
        raw = (out / name).read_bytes()
        record["written"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (out / "gqa_conversion.json").write_text(json.dumps(record))
    known = (Release("0.0.9", None, files), *releases())
    monkeypatch.setattr(released, "releases", lambda: known)
    return out


def detail(report: VerificationReport) -> str:
    return next(check.detail for check in report.checks if check.name == "modelling file")


def test_an_earlier_release_verifies_and_is_renewed(source: Path, result: Path) -> None:
    report = verify_checkpoint(result, source)
    assert failed(report) == {}
    assert "0.0.9: `gqa-convert verify OUT --refresh`" in detail(report)
    assert refresh_modeling(result) == list(OLD)
    report = verify_checkpoint(result, source)
    assert failed(report) == {}
    assert detail(report) == "gqa_opt.py and gqa_common.py of this release"
    for name in OLD:
        assert (result / name).read_bytes() == (MODELING / name).read_bytes()
    assert json.loads((result / "config.json").read_text())["transformers_tested"] == TESTED
    record = json.loads((result / "gqa_conversion.json").read_text())
    assert [step["files"] for step in record["refreshed"]] == [list(OLD)]
    assert foreign_files(result) == []
    assert refresh_modeling(result) == []


def test_files_of_two_releases_are_not_run_but_renewed(source: Path, result: Path) -> None:
    (result / "gqa_opt.py").write_bytes((MODELING / "gqa_opt.py").read_bytes())
    report = verify_checkpoint(result, source)
    assert failed(report).keys() == {"modelling file", "loads"}
    assert "of different releases" in detail(report)
    assert refresh_modeling(result) == ["gqa_common.py"]
    assert failed(verify_checkpoint(result, source)) == {}


def test_a_changed_config_stays_the_users(result: Path) -> None:
    config = json.loads((result / "config.json").read_text()) | {"mine": 1}
    (result / "config.json").write_text(json.dumps(config))
    refresh_modeling(result)
    assert json.loads((result / "config.json").read_text())["mine"] == 1
    assert foreign_files(result) == ["config.json"]


def test_an_unknown_file_is_left_alone(source: Path, result: Path) -> None:
    mine = (result / "gqa_opt.py").read_bytes() + b"# mine\n"
    (result / "gqa_opt.py").write_bytes(mine)
    before = (result / "gqa_common.py").read_bytes()
    with pytest.raises(OptionError, match="modelling file of no release"):
        refresh_modeling(result)
    assert ((result / "gqa_opt.py").read_bytes(), (result / "gqa_common.py").read_bytes()) == (
        mine,
        before,
    )
    assert (
        "differs from the file of every release"
        in failed(verify_checkpoint(result, source))["modelling file"]
    )


def test_other_folders(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"has no gqa_conversion\.json"):
        refresh_modeling(source)
    llama = make_checkpoint("llama", tmp_path / "llama")
    convert_checkpoint(llama, tmp_path / "native", 3, ConversionOptions(method="mean"))
    assert refresh_modeling(tmp_path / "native") == []


def test_the_list_has_the_files_as_they_are() -> None:
    assert json.loads(release_modeling.LIST.read_bytes())["0.1.0"] == release_modeling.current(), (
        "a modelling file or TESTED has changed: run `python tools/release_modeling.py`"
    )


def test_pyproject_states_the_versions_that_were_tested() -> None:
    project = tomllib.loads((MODELING.parents[2] / "pyproject.toml").read_text())["project"]
    assert f"transformers{TESTED}" in project["dependencies"]
