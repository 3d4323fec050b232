"""verify shares with the converter only what its docstring and docs/verification.md say."""

import ast
from pathlib import Path

import gqa_convert.verify

ROOM = Path(gqa_convert.verify.__file__).parent

SHARED = {
    "gqa_convert.errors": "exceptions",
    "gqa_convert.checkpoint.paths": "paths that a user names",
    "gqa_convert.checkpoint.source": "the download of a source from the Hub",
    "gqa_convert.checkpoint.quantised": "whether a config says that weights are quantised",
    "gqa_convert.conversion.rewriting.planning": "whether a source is rewritten first",
    "gqa_convert.conversion.rewriting.folder": "rewriting it again",
    "gqa_convert.families.family": "the families' records",
    "gqa_convert.families.layerwise": "the forms of configs whose layers differ",
    "gqa_convert.families.legacy_config_keys": "the config keys of transformers 4",
    "gqa_convert.families.rotary": "which rows of a key head rotate",
    "gqa_convert.families.table": "finding a family",
    "gqa_convert.families.records": "the norm of keys of a type on no list",
    "gqa_convert.families.wrappers": "the config of the decoder inside a wrapper",
    "gqa_convert.families.loading": "loading models and tokenizers with transformers",
}
"""Modules outside the package that verify may import, and what for."""


def imported(path: Path) -> set[str]:
    """The modules of this package outside verify that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: import by the full name"
            module = node.module or ""
            # `from gqa_convert.families import loading` imports a module, not a name in one
            found |= {
                f"{module}.{alias.name}" if _is_module(f"{module}.{alias.name}") else module for alias in node.names
            }
    return {module for module in found if f"{module}.".startswith("gqa_convert.") and not _in_room(module)}


def _in_room(module: str) -> bool:
    return f"{module}.".startswith("gqa_convert.verify.")


def _is_module(name: str) -> bool:
    path = ROOM.parents[1].joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_verify_imports_only_the_shared_modules() -> None:
    used = {path: imported(path) for path in sorted(ROOM.rglob("*.py"))}
    assert len(used) > 12, "the package moved: this test looks at the wrong folder"
    for path, modules in used.items():
        extra = modules - SHARED.keys()
        assert not extra, f"{path.relative_to(ROOM)} imports {', '.join(sorted(extra))}, which verify may not share"
    unused = SHARED.keys() - set().union(*used.values())
    assert not unused, f"verify no longer imports {', '.join(sorted(unused))}: take it off the list"


def test_a_module_of_the_converter_would_be_found(tmp_path: Path) -> None:
    """Every form of import is seen."""
    for line in (
        "from gqa_convert.merging.pooling import pool",
        "from gqa_convert.conversion import plan",
        "import gqa_convert.checkpoint.headers",
        "def f():\n    from gqa_convert.families.layouts import fused",
    ):
        file = tmp_path / "file.py"
        file.write_text(line)
        assert imported(file) - SHARED.keys(), line
