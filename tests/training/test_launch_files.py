"""Templates of launches: their syntax, and the commands that they contain."""

import re
import subprocess

import pytest

from tests.helpers.documents import ROOT

SCRIPTS = sorted((ROOT / "recipes" / "slurm").iterdir())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_slurm_scripts_are_valid_shell(path: object) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_slurm_starts_one_torchrun_per_node() -> None:
    (text,) = (path.read_text(encoding="utf-8") for path in SCRIPTS)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"
    assert {"requeue", "signal"} < options.keys()
    assert "--nproc_per_node 8" in text
    assert "-m gqa_convert uptrain" in text
