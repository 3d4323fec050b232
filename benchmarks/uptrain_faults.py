"""Rehearses faults of a job on two nodes: eight gloo processes, four on each "node", on this machine's CPU.

    python -m benchmarks.uptrain_faults --output docs/results/uptrain-faults.json

Both nodes are torchruns that find each other by a rendezvous, as on a cluster, and run `gqa-convert uptrain` on the
bundled model, each copy sharded over the processes of a node (`sharding: hybrid`), with checkpoints that are written in the
background. A node has a cache of its own, for tokens; the output is shared. The faults:

1. Nothing: the reference.
2. A node is killed, torchrun and processes, in the middle of the run.
3. Both are started again, and the killed node is a new one: its cache is empty, and its disk is slow, each file of a checkpoint
   taking as long as several steps.
4. The node with the slow disk gets TERM, as before preemption; then the job is started again.

Each outcome is compared with the reference: every step once, in its order, with the same text, loss and norm, and the
same weights bit for bit. It takes about four minutes of processor time, and a machine that is busy otherwise needs longer.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo.files import CHECKPOINT

NODES, PER_NODE, STEPS = 2, 4, 12
TIMES = ("tokens_per_second", "overall_tokens_per_second", "data_seconds", "peak_memory_gb")
"""What two equal runs measure differently."""
_SLOW = "GQA_REHEARSAL_SLOW"
_PATIENCE = 900
"""Seconds after which a job that does nothing fails the rehearsal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a fault.

    Attributes:
        fault: what was done.
        exit_codes: those of the two torchruns.
        resumed_from: the step of the checkpoint that the run then resumed from; None where it did not resume.
        last_step: of the log afterwards.
        equal: whether all steps so far are those of the reference; with a trained model, also its weights.
    """

    fault: str
    exit_codes: list[int]
    resumed_from: int | None
    last_step: int
    equal: bool


class Node:
    """A torchrun and its processes."""

    def __init__(self, rank: int, place: Path, output: Path, port: int, *, cache: str, slow: bool = False) -> None:
        self.log = place / f"{output.name}-node-{rank}.log"
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        launcher = ["--nnodes", str(NODES), "--nproc_per_node", str(PER_NODE)]
        launcher += ["--rdzv_id", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launcher,
            "-m",
            "benchmarks.uptrain_faults",
            "--rank",
        ]
        environment = os.environ | {
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(place / cache),
            _SLOW: "0.3" if slow else "0",
        }
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [*command, str(place / "recipe.yaml"), f"output={output}"],
                env=environment,
                stdout=file,
                stderr=file,
            )

    def said(self) -> list[str]:
        """The lines that its processes have printed. The main process of the run may be on either node."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace").splitlines()

    def die(self) -> None:
        """Kill torchrun and its processes, which torchrun starts in sessions of their own, all at once."""
        everything = [self.process.pid, *children(self.process.pid)]
        for pid in everything:
            os.kill(pid, signal.SIGSTOP)
        for pid in everything:
            os.kill(pid, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """The ids of the processes that a process has started."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
    return [int(pid) for pid in found]


def rank(arguments: list[str]) -> None:
    """One process of a node; with a slow disk, every file of a checkpoint takes a while."""
    from gqa_convert.cli import main as command_line

    if (seconds := float(os.environ[_SLOW])) > 0:
        from gqa_convert.training import checkpoints
        from gqa_convert.training.digests import digests

        def slowly(folder: Path, names: Any) -> dict[str, str]:
            names = list(names)
            time.sleep(seconds * len(names))
            return digests(folder, names)

        vars(checkpoints)["digests"] = slowly
    sys.argv = ["gqa-convert", "uptrain", *arguments]
    command_line()


def started(place: Path, output: Path, port: int, *, new: bool = False) -> list[Node]:
    """Both nodes; the second may be a new one."""
    second = {"cache": "cache-new", "slow": True} if new else {"cache": "cache-1", "slow": False}
    return [
        Node(0, place, output, port, cache="cache-0"),
        Node(1, place, output, port, **second),  # type: ignore[arg-type]
    ]


def wait_for_step(nodes: list[Node], output: Path, step: int) -> None:
    """Until a checkpoint is complete and a step after it is logged.

    Raises:
        RuntimeError: the job has ended before, or takes too long.
    """
    until = time.monotonic() + _PATIENCE
    while not (steps_of(output) and steps_of(output)[-1]["step"] >= step and list(output.glob("checkpoints/step-*"))):
        if time.monotonic() > until or any(node.process.poll() is not None for node in nodes):
            for node in nodes:
                if node.process.poll() is None:
                    node.die()
            raise RuntimeError(f"step {step} was not reached:\n{[node.said()[-5:] for node in nodes]}")
        time.sleep(0.05)


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The log without its times."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def outcome(fault: str, nodes: list[Node], output: Path, reference: Path) -> Outcome:
    """What came of a fault, once both nodes have ended."""
    codes = [node.process.wait(_PATIENCE) for node in nodes]
    found, expected = steps_of(output), steps_of(reference)
    said = [line for node in nodes for line in node.said() if line.startswith("resuming from ")]
    equal = found == expected[: len(found)]
    model = output / "model" / "model.safetensors"
    if model.is_file():
        equal &= len(found) == STEPS and model.read_bytes() == (reference / "model" / "model.safetensors").read_bytes()
    resumed = int(said[-1].rsplit("-", 1)[1]) if said else None
    return Outcome(fault=fault, exit_codes=codes, resumed_from=resumed, last_step=found[-1]["step"], equal=equal)


def rehearse(place: Path) -> list[Outcome]:
    """Run all faults in a folder."""
    from socket import socket

    def port() -> int:
        with socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    prepare(place)
    reference, output = place / "reference", place / "run"
    nodes = started(place, reference, port())
    found = [outcome("none (the reference)", nodes, reference, reference)]

    nodes = started(place, output, port())
    wait_for_step(nodes, output, 4)
    nodes[1].die()
    found.append(outcome("a node is killed", nodes, output, reference))

    nodes = started(place, output, port(), new=True)
    wait_for_step(nodes, output, 8)
    nodes[1].process.send_signal(signal.SIGTERM)
    fault = "a new node with an empty, slow disk replaces it, and gets TERM"
    found.append(outcome(fault, nodes, output, reference))

    nodes = started(place, output, port(), new=True)
    found.append(outcome("the job is started again", nodes, output, reference))
    return found


def prepare(place: Path) -> None:
    """A converted model, text and a recipe."""
    convert_checkpoint(CHECKPOINT, place / "model", 3, method="mean")
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    (place / "text.txt").write_text(text[:60_000], encoding="utf-8")
    recipe = {
        "model": str(place / "model"),
        "teacher": str(CHECKPOINT),
        "data": str(place / "text.txt"),
        "output": "o",
        "tokens": STEPS * 512,
        "tokens_per_step": 512,
        "sequence_length": 32,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "precision": "no",
        "sharding": "hybrid",
        "shard_size": PER_NODE,
        "save_every": 2,
        "async_checkpoints": True,
    }
    (place / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    rows = [
        f"| {each.fault} | {' and '.join(map(str, each.exit_codes))} | {each.resumed_from or ''} | {each.last_step} | {'yes' if each.equal else 'NO'} |"
        for each in outcomes
    ]
    head = ["| fault | exit codes | resumed from step | last step | equal to the reference |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the outcomes to this JSON file")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    before = os.times()
    try:
        outcomes = rehearse(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    after = os.times()
    seconds = round(after.children_user + after.children_system - before.children_user - before.children_system)
    print(table(outcomes))
    print(f"\n{seconds} seconds of processor time")
    if asked.output is not None:
        content = {"processor_seconds": seconds, "outcomes": [asdict(each) for each in outcomes]}
        asked.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.equal for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
