"""The check on the files that OUT takes over from SOURCE: tokenizer, generation config, templates and code."""

from pathlib import Path

from gqa_convert.verify.checkpoint_reader import CONFIG, read_object
from gqa_convert.verify.files.links import leads_out
from gqa_convert.verify.files.provenance import PROVENANCE
from gqa_convert.verify.files.weight_files import is_weights, list_files, matches, module_folders
from gqa_convert.verify.json_values import same_json
from gqa_convert.verify.report import Failure, Finding

_PROSE = ("*.md", "README.md.old*", "LICENSE*", "NOTICE*", "*.png", "*.svg", "*.jpg", "*.pdf")
"""Files that no software reads. A model card may be rewritten after the conversion."""


def check_carried(out: Path, source: Path, checked_elsewhere: frozenset[str]) -> Finding:
    """OUT has every other file of SOURCE, byte for byte, and no new file that software reads.

    Links that lead out of SOURCE do not count as files of it.

    Args:
        out: OUT's folder.
        source: SOURCE's folder.
        checked_elsewhere: names of files that other checks compare.
    """
    own = {CONFIG, PROVENANCE} | checked_elsewhere
    modules = module_folders(source)

    def belongs(name: str) -> bool:
        return name not in own and (not is_weights(name) or name.rpartition("/")[0] in modules)

    theirs = [name for name in list_files(source) if belongs(name) and not leads_out(source / name, source)]
    ours = [name for name in list_files(out) if belongs(name)]
    compared = [name for name in theirs if not matches(name, _PROSE)]
    for name in compared:
        if not (out / name).is_file():
            raise Failure(f"{name} of SOURCE is missing")
        if not _same_file(out / name, source / name) and not _is_renamed_tokenizer(out / name, source / name):
            raise Failure(f"{name} differs from SOURCE's")
    extra = [name for name in ours if name not in theirs and not matches(name, _PROSE)]
    if extra:
        raise Failure(f"{extra[0]} is not in SOURCE ({len(extra)} extra files)")
    return Finding(f"{len(compared)} file(s), byte for byte", {"files": len(compared)})


def _is_renamed_tokenizer(ours: Path, theirs: Path) -> bool:
    """Whether a tokenizer_config.json differs only in the class, for which earlier releases of transformers have another
    name.
    """
    if ours.name != "tokenizer_config.json":
        return False
    try:
        stated, original = read_object(ours), read_object(theirs)
    except (OSError, ValueError):
        return False
    return original.get("tokenizer_class") == "TokenizersBackend" and same_json(
        stated, original | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )


def _same_file(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as one, b.open("rb") as other:
        while block := one.read(1 << 20):
            if block != other.read(1 << 20):
                return False
    return True
