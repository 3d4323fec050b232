"""How long CTranslate2 takes for a decoding step, and how much memory, by the number of K/V heads.

    python -m benchmarks.ctranslate2_speed [--output docs/results/ctranslate2.json]

Random weights, of the decoders of Whisper large-v3-turbo (four layers, 20 heads) and of T5 large
(16 heads, here four layers), behind an encoder of one layer. The numbers of heads take turns, so
that a machine whose speed drifts favours none of them: only ratios within a row are reported.
Memory is what a process needs at most to decode, beside the weights. The output grows by cases, and
what it holds is not measured again. The table goes into docs/results/README.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ctranslate2
import numpy as np
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from benchmarks.pages import filled, table
from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.serving.ctranslate2 import make_folder

OUTPUT, PAGE = Path("docs/results/ctranslate2.json"), Path("docs/results/README.md")
KV_HEADS = {"whisper": (20, 5, 1), "t5": (16, 4, 1)}
SHORT, LONG = 4, 20
"""Numbers of tokens: a step is timed by the difference, without the encoder and the prompt."""
SPECIAL = {
    "whisper": ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"),
    "t5": ("<pad>", "</s>", "<unk>"),
}


class Case(NamedTuple):
    """What is decoded: `source` is the number of the encoder's positions."""

    kind: str
    batch: int
    beam: int
    source: int


CASES = (
    Case("t5", 8, 1, 1024),
    Case("whisper", 8, 1, 1500),
    Case("whisper", 1, 5, 1500),
    Case("t5", 1, 1, 1024),
    Case("whisper", 1, 1, 1500),
    Case("t5", 8, 1, 128),
)


def make_source(kind: str, folder: Path) -> None:
    """Write a random checkpoint with a tokenizer."""
    if kind == "whisper":
        config = WhisperConfig(
            d_model=1280,
            encoder_layers=1,
            decoder_layers=4,
            encoder_attention_heads=20,
            decoder_attention_heads=20,
            encoder_ffn_dim=5120,
            decoder_ffn_dim=5120,
            num_mel_bins=128,
            decoder_start_token_id=1,
            eos_token_id=0,
        )
        model = WhisperForConditionalGeneration(config)
    else:
        config = T5Config(
            d_model=1024, d_kv=64, d_ff=4096, num_layers=1, num_decoder_layers=4, num_heads=16
        )
        model = T5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    names = [*SPECIAL[kind], *(f"w{number}" for number in range(config.vocab_size - 3))]
    words = models.WordLevel({name: number for number, name in enumerate(names)}, names[-1])
    end, start = ("</s>", "<pad>") if kind == "t5" else SPECIAL[kind][:2]
    special = {"eos_token": end, "bos_token": start, "pad_token": "<pad>", "unk_token": names[-1]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
    tokenizer.save_pretrained(folder)


def make_folders(kind: str, work: Path, quantization: str) -> None:
    """Write CTranslate2's folder for each number of K/V heads, named by kind and number."""
    make_source(kind, work / kind)
    for kv_heads in KV_HEADS[kind]:
        result = work / f"{kind}-{kv_heads}-result"
        convert_checkpoint(work / kind, result, kv_heads, ConversionOptions(method="mean"))
        make_folder(result, work / f"{kind}-{kv_heads}", quantization)


class Decoding:
    """A model that decodes one case again and again.

    Args:
        folder: of CTranslate2.
        case: what is decoded.
    """

    def __init__(self, folder: Path, case: Case) -> None:
        self.case = case
        if case.kind == "whisper":
            self.model = ctranslate2.models.Whisper(str(folder), intra_threads=1)
            noise = np.random.default_rng(0).standard_normal((case.batch, 128, 2 * case.source))
            sound = ctranslate2.StorageView.from_array(noise.astype(np.float32))
            self.heard = self.model.encode(sound)
        else:
            self.model = ctranslate2.Translator(str(folder), intra_threads=1)
            random = np.random.default_rng(0).integers(0, 32000, (case.batch, case.source))
            self.texts = [[f"w{number}" for number in row] for row in random]

    def run(self, tokens: int) -> float:
        """Decode this many tokens; returns the seconds of processor time."""
        began = time.process_time()
        if self.case.kind == "whisper":
            self.model.generate(
                self.heard,
                [[1, 2]] * self.case.batch,
                beam_size=self.case.beam,
                max_length=2 * tokens,
                suppress_tokens=[0],
            )
        else:
            self.model.translate_batch(
                self.texts,
                beam_size=self.case.beam,
                max_decoding_length=tokens,
                min_decoding_length=tokens,
                max_input_length=0,
            )
        return time.process_time() - began


def decoding_seconds(work: Path, case: Case, repetitions: int) -> dict[int, float]:
    """The median time of LONG - SHORT steps by the number of K/V heads, in turns."""
    decodings = {
        kv_heads: Decoding(work / f"{case.kind}-{kv_heads}", case)
        for kv_heads in KV_HEADS[case.kind]
    }
    times: dict[int, list[float]] = {kv_heads: [] for kv_heads in decodings}
    for decoding in decodings.values():
        decoding.run(SHORT)
    for _ in range(repetitions):
        for kv_heads, decoding in decodings.items():
            times[kv_heads].append(decoding.run(LONG) - decoding.run(SHORT))
    return {kv_heads: statistics.median(found) for kv_heads, found in times.items()}


def resident(peak: bool) -> int:
    """Bytes of memory that this process has, or the most that it had since the peak was reset."""
    name = "VmHWM" if peak else "VmRSS"
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def peak_growth(folder: Path, case: Case) -> int:
    """Bytes by which this process's memory grows at most while it decodes."""
    decoding = Decoding(folder, case)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident(peak=False)
    decoding.run(SHORT)
    return resident(peak=True) - before


def measure(work: Path, case: Case, repetitions: int) -> dict[str, Any]:
    """The cell of a case: times as shares of the first number's, and memory."""
    seconds = decoding_seconds(work, case, repetitions)
    all_heads = next(iter(seconds.values()))
    grown = {}
    for kv_heads in seconds:
        command = [sys.executable, "-m", "benchmarks.ctranslate2_speed", "--memory-of"]
        given = [json.dumps([str(work / f"{case.kind}-{kv_heads}"), *case])]
        grown[kv_heads] = int(subprocess.check_output(command + given))
    shares = {kv_heads: round(found / all_heads, 3) for kv_heads, found in seconds.items()}
    return {**case._asdict(), "step": shares, "peak_bytes": grown}


def report(cells: list[dict[str, Any]]) -> str:
    """Ratios of a step, and megabytes."""
    header = ["decoder", "batch", "beam", "encoder positions", "K/V heads", "step", "peak, MB"]
    rows = []
    for cell in cells:
        shares = [f"{share:.2f}" for share in cell["step"].values()]
        megabytes = [f"{grown / 1e6:.0f}" for grown in cell["peak_bytes"].values()]
        row = [cell["kind"], *(str(cell[key]) for key in ("batch", "beam", "source"))]
        rows.append([*row, *map(", ".join, (map(str, cell["step"]), shares, megabytes))])
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--quantization", default="int8", help="of the weights (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        folder, *case = json.loads(options.memory_of)
        print(peak_growth(Path(folder), Case(*case)))
        return
    cells = []
    if options.output.is_file():
        cells = json.loads(options.output.read_text(encoding="utf-8"))["cells"]
    done = [Case(cell["kind"], cell["batch"], cell["beam"], cell["source"]) for cell in cells]
    with TemporaryDirectory(prefix="gqa-convert-") as made:
        for kind in KV_HEADS:
            make_folders(kind, Path(made), options.quantization)
        for case in CASES:
            if case not in done:
                cells.append(measure(Path(made), case, options.repetitions))
                write_json(options.output, {"version": ctranslate2.__version__, "cells": cells})
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, "ctranslate2", report(cells)), encoding="utf-8")


if __name__ == "__main__":
    main()
