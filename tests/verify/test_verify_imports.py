"""verify shares with the converter only what its docstring and docs/verification.md say."""

import re
from pathlib import Path

import gqa_convert.verify

SHARED = {
    "errors": "exceptions",
    "checkpoint.dtypes": "the names of types",
    "checkpoint.files": "which links lead out of a folder",
    "checkpoint.fingerprint": "whether SOURCE is the one that OUT was made from",
    "publishing.ownership": "hashes of files",
    "runtime.paths": "paths that a user names",
    "checkpoint.source": "the download of a source from the Hub",
    "conversion.rewriting.source": "whether a source is rewritten first, and rewriting it again",
    "families.family": "the families' records",
    "families.layerwise": "the forms of configs whose layers differ",
    "families.legacy_config_keys": "the config keys of transformers 4",
    "families.table": "finding a family",
    "families.records": "the norm of keys of a type on no list",
    "families.composite": "the config of the decoder inside a composite model",
    "families": "loading models and tokenizers with transformers",
    "families.loading": "the same",
}
"""Modules outside the package that verify may import, and what for."""


def test_verify_imports_only_the_shared_modules() -> None:
    code = "\n".join(
        path.read_text() for path in Path(gqa_convert.verify.__file__).parent.glob("*.py")
    )
    imports = re.findall(r"^\s*from gqa_convert\.([\w.]+) import (.*)", code, re.MULTILINE)
    assert not re.search(
        r"^\s*(import gqa_convert|from gqa_convert import|from \.\.)", code, re.MULTILINE
    )
    assert {module for module, _ in imports} == SHARED.keys()
    assert {names for module, names in imports if module == "families"} == {"loading"}
