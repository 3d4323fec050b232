"""A link in a checkpoint's folder that leads out of it may show any file of the machine, and is not
followed.
"""

import shutil
from pathlib import Path

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import PublishError
from gqa_convert.hub.publishing import publish
from gqa_convert.hub.repository import PublishOptions
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import by_mean, write_llama
from tests.helpers.command_line import run

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


LINKS = {
    "absolute": ("notes.txt", {"notes.txt": "{outside}/key"}),
    "relative": ("notes.txt", {"notes.txt": "../outside/key"}),
    "to a link that leads out": (
        "more.txt, notes.txt",
        {"notes.txt": "more.txt", "more.txt": "{outside}/key"},
    ),
    "to a folder": ("notes/", {"notes": "{outside}"}),
    "through a link to a folder": (
        "notes.txt, notes/",
        {"notes": "{outside}", "notes.txt": "notes/key"},
    ),
    "to a hidden file": ("notes.txt", {"notes.txt": ".git/config"}),
}
"""The links that are named, and where each link of a case leads."""


def link(case: str, folder: Path, outside: Path) -> str:
    names, links = LINKS[case]
    for name, target in links.items():
        (folder / name).symlink_to(target.format(outside=outside.absolute()))
    return names


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "key").write_text(SECRET)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """With the address of a repository, and a password in it, as git keeps it."""
    folder = write_llama(tmp_path / "source")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text(SECRET)
    return folder


def holds_secret(folder: Path) -> list[str]:
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("case", LINKS)
def test_convert_leaves_the_link_out_and_names_it(
    case: str, source: Path, outside: Path, tmp_path: Path
) -> None:
    names = link(case, source, outside)
    done = run("convert", source, tmp_path / "out", "--kv-heads", "3", "--method", "mean")
    assert done.returncode == 0, done.stderr
    assert (
        f"links to folders and links that lead out of the folder are not copied: {names}"
        in " ".join(done.stdout.split())
    )
    assert holds_secret(tmp_path / "out") == []
    assert not {path.name for path in (tmp_path / "out").iterdir()} & {
        "notes.txt",
        "more.txt",
        "notes",
    }
    assert verify_checkpoint(tmp_path / "out", source).passed


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "gqa_extra.py"])
@pytest.mark.parametrize("case", ["absolute", "relative", "to a link that leads out"])
def test_publish_does_not_send_what_a_link_shows(
    case: str, name: str, source: Path, outside: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    by_mean(source, out, 3)
    link(case, out, outside)
    (out / name).unlink(missing_ok=True)
    (out / "notes.txt").rename(out / name)
    sent = publish(out, PublishOptions("me/gqa-3"), dry_run=True)
    assert name not in {each.path for each in sent.files}
    warning = next(
        each for each in sent.warnings if each.startswith("not sent, as links that lead out")
    )
    assert name in warning


@pytest.mark.parametrize("name", ["config.json", "gqa_conversion.json", "model.safetensors"])
def test_publish_refuses_weights_and_records_that_lie_elsewhere(
    name: str, source: Path, outside: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    by_mean(source, out, 3)
    shutil.move(out / name, outside / name)
    (out / name).symlink_to(outside / name)
    with pytest.raises(PublishError, match=f"{name} is a link that leads out of the folder"):
        publish(out, PublishOptions("me/gqa-3"), dry_run=True)


def test_links_to_files_within_the_folder_are_followed(source: Path, tmp_path: Path) -> None:
    (source / "texts").mkdir()
    (source / "texts" / "one.txt").write_text("one")
    (source / "two.txt").symlink_to("texts/one.txt")
    (source / "again").symlink_to("texts", target_is_directory=True)
    assert open_checkpoint(source).files.links_out == ("again/",)
    by_mean(source, tmp_path / "out", 3)
    for name in ("texts/one.txt", "two.txt"):
        assert (tmp_path / "out" / name).read_text() == "one"
        assert not (tmp_path / "out" / name).is_symlink()
    assert verify_checkpoint(tmp_path / "out", source).passed


def test_other_folders_beside_a_snapshot_are_not_the_cache(source: Path, tmp_path: Path) -> None:
    """Only the files of the same repository are."""
    cached = tmp_path / "models--org--model"
    snapshot = cached / "snapshots" / "4d7a"
    shutil.copytree(source, snapshot)
    for place in ("blobs", "refs", "blobs/deeper"):
        (cached / place).mkdir()
        (cached / place / "file").write_text(place)
        (snapshot / f"{place.replace('/', '-')}.txt").symlink_to(cached / place / "file")
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "file").write_text("other")
    (snapshot / "other.txt").symlink_to(other / "file")
    opened = open_checkpoint(snapshot)
    assert opened.files.links_out == ("blobs-deeper.txt", "other.txt", "refs.txt")
    assert "blobs.txt" in opened.carried
