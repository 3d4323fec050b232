"""Test the modelling files on other releases of transformers than the installed one.

    python tools/on_other_transformers.py               # the oldest and the newest that are allowed
    python tools/on_other_transformers.py 5.18.0 ...    # these

pyproject.toml says which are allowed. Each release is installed into a folder of its own beside the
environment, which stays as it is, and is reached through PYTHONPATH.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from gqa_convert.families.family import TESTED

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/families/test_modelling_files.py", "-k", "merged_heads")


def wanted() -> list[str]:
    """What pip is asked for: the oldest release of the tested range, and the newest in it."""
    oldest, end = re.findall(r"[0-9.]+", TESTED)
    return [f"transformers=={oldest}.0", f"transformers<{end}"]


def test_on(requirement: str) -> None:
    """Install a release, and run the tests with it.

    Raises:
        CalledProcessError: it can't be installed, or a test fails.
    """
    place = Path(sys.prefix) / "other" / re.sub(r"[^\w.]+", "-", requirement)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--upgrade",
        "--no-deps",
        "--target",
        place,
        requirement,
    ]
    subprocess.run(install, check=True)
    environment = os.environ | {"PYTHONPATH": str(place)}
    show = (
        "import transformers as t; "
        "print('modelling files on transformers', t.__version__, 'of', t.__file__)"
    )
    subprocess.run([sys.executable, "-c", show], check=True, env=environment)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *TESTS],
        check=True,
        env=environment,
        cwd=ROOT,
    )


if __name__ == "__main__":
    for each in [f"transformers=={release}" for release in sys.argv[1:]] or wanted():
        test_on(each)
