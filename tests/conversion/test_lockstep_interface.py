"""The lockstep runner is used through its door alone."""

import ast
from pathlib import Path

import gqa_convert
from gqa_convert.conversion.fit import lockstep

PACKAGE = Path(gqa_convert.__file__).parent
DOOR = "gqa_convert.conversion.fit.lockstep"
FOLDER = PACKAGE / "conversion" / "fit" / "lockstep"


def test_nothing_reaches_behind_the_door() -> None:
    for path in PACKAGE.rglob("*.py"):
        if FOLDER in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DOOR):
                assert node.module == DOOR, f"{path.relative_to(PACKAGE)}: import from {DOOR}, not from {node.module}"


def test_the_interface_is_small() -> None:
    public = {name for name in vars(lockstep.LockstepRunner) if not name.startswith("_")}
    assert public == {"logits", "close"}, "docs/lockstep-runner.md describes the interface: iterate, logits, close"
    public = {name for name in vars(lockstep.CapturedModule) if not name.startswith("_")}
    assert public == {"parameters", "run", "residual", "commit", "first"}
