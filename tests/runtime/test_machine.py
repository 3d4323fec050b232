"""How much memory a process may use, and what is fast."""

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


@pytest.mark.parametrize(
    ("avx2", "amx", "supported", "fast"),
    [
        (True, True, True, True),
        (True, False, True, False),  # AVX-512, whose products of bfloat16 are slow
        (True, False, False, False),
        (False, False, True, True),  # an Arm
        (False, False, False, False),
    ],
)
def test_a_processor_is_faster_in_bfloat16_with_the_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, avx2: bool, amx: bool, supported: bool, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: avx2)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert machine.multiplies_bfloat16(CPU) == fast
