"""Writes a quantised source as an ordinary checkpoint, into a folder that appears whole or not at all."""

import shutil
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.checkpoint.files import LocalFiles, links_note
from gqa_convert.checkpoint.formats import is_weight_file
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.quantised import described_quantisation, without_quantisation
from gqa_convert.checkpoint.source import CONFIG
from gqa_convert.conversion.restating.fp8 import write_dequantised
from gqa_convert.conversion.sidecar_files import name_tokenizer_for_all, write_json
from gqa_convert.families.loading import read_config


def write_dequantised_checkpoint(source: Path, source_id: str, method: str, folder: Path) -> tuple[str, ...]:
    """Write the weights of a quantised checkpoint dequantised, and copy its sidecar files.

    Args:
        source: its folder.
        source_id: the checkpoint, as the user named it.
        method: how it is quantised.
        folder: an empty folder.

    Returns:
        Sentences on what differs.
    """
    if method == "fp8":
        config = read_config(source)
        write_dequantised(source, described_quantisation(config), folder)
        write_json(folder / CONFIG, without_quantisation(config))
    else:
        from gqa_convert.families.dequantising import write_restored

        write_restored(source, folder, source_id)
    files = LocalFiles(source)
    for name in files.links_out:
        (folder / name).unlink(missing_ok=True)  # transformers follows such a link to a generation config
    for name in files.sizes:
        if name not in (CONFIG, PROVENANCE) and not is_weight_file(name):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
    _finish(folder)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return (
        f"the weights were quantised ({method}) and are written in bfloat16 ({size(written)}): what {method} lost stays lost",
        *links_note(files.links_out),
    )


def _finish(folder: Path) -> None:
    """Make the folder readable for other programs and safe on the disk."""
    name_tokenizer_for_all(folder / "tokenizer_config.json")
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            sync(path)
