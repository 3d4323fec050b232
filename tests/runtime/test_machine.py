"""How much memory a process may use."""

from pathlib import Path

import pytest
import torch

from gqa_convert.runtime import machine

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("group", "files", "free"),
    [
        ("0::/", {}, 8_192),
        ("0::/", {"memory.max": "max", "memory.current": "900"}, 8_192),
        ("0::/", {"memory.max": "5000", "memory.current": "900"}, 4_100),
        (
            "0::/",
            {
                "memory.max": "5000",
                "memory.current": "900",
                "memory.stat": "anon 1\ninactive_file 300",
            },
            4_400,
        ),
        (
            "0::/slurm/job/step",
            {"slurm/job/memory.max": "700", "slurm/job/memory.current": "900"},
            0,
        ),
        ("0::/outside/of/the/container", {"memory.max": "5000", "memory.current": "900"}, 4_100),
    ],
)
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], free: int
) -> None:
    named = {f"groups/{name}": text for name, text in files.items()}
    for name, text in {
        "self/cgroup": group,
        "meminfo": "MemFree: 1 kB\nMemAvailable: 8 kB",
        **named,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    assert machine.available_memory(CPU) == free
