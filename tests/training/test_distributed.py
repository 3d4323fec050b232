"""One process, several with a copy of the model each, several with a part of it each: the same
training.
"""

from typing import Any

import numpy as np
import pytest

from tests.helpers.distributed_steps import ADAPTED, CASES, KINDS, read, run_cases, small_model
from tests.helpers.ranks import Job


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    jobs = [
        Job(run_cases, (str(folder / "found"),), folder / str(number), number)
        for number in {*KINDS.values()}
    ]
    for job in jobs:
        assert set(job.wait(120)) == {0}, job.text()
    return {kind: read(folder / f"found-{kind}.npz") for kind in KINDS}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_processes_share_the_work_and_change_nothing(
    found: dict[str, dict[str, Any]], kind: str, case: str
) -> None:
    """Five samples with unequal numbers of labels on two processes: losses, gradients, their norm
    and the weights after two steps.
    """
    alone = {name: value for name, value in found["single"].items() if name.startswith(f"{case}/")}
    shared = {name: value for name, value in found[kind].items() if name.startswith(f"{case}/")}
    assert alone.keys() == shared.keys()
    assert sum("/gradient " in name for name in alone) >= 6
    assert not alone[f"{case}/skipped"].any()
    for name, value in alone.items():
        off = (
            np.abs(value - shared[name].astype(value.dtype)).max()
            if value.dtype != bool
            else np.any(value ^ shared[name])
        )
        if (
            "/weight " in name
        ):  # in their first steps AdamW divides gradients by their size, and makes much of little
            assert off <= (1e-2 if case == "bf16" else 1e-4), name
        else:  # sharding rounds activations between layers to bfloat16 as well
            assert off <= (5e-2 if case == "bf16" else 2e-6) * np.abs(value).max(), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_two_processes_are_merged_as_those_of_one(
    found: dict[str, dict[str, Any]], kind: str, name: str
) -> None:
    """After two steps from a checkpoint that one process reads, saving and restoring: losses,
    moments and the merged weights. Adapters are float32, beside fixed weights in bfloat16 where
    these are copied.
    """
    prefix = f"adapted {name}/"
    alone, shared = (
        {
            key.removeprefix(prefix): value
            for key, value in found[processes].items()
            if key.startswith(prefix)
        }
        for processes in ("single", kind)
    )
    assert alone.keys() == shared.keys()
    assert list(alone.pop("types")) == list(shared.pop("types")) == ["torch.float32"]
    assert abs(alone["moment"]) > 1e-4
    before = {key: value.numpy() for key, value in small_model("llama").state_dict().items()}
    changed = {
        key for key, value in before.items() if np.abs(value - alone[f"merged {key}"]).max() > 1e-5
    }
    assert changed == {key for key in before if "proj" in key}
    for key, value in alone.items():
        tolerance = 1e-6 if name == "exact" else 2e-2
        np.testing.assert_allclose(shared[key], value, rtol=tolerance, atol=tolerance, err_msg=key)


def test_micro_batches_change_nothing(found: dict[str, dict[str, Any]]) -> None:
    for kind in ("single", "ddp", "fsdp"):
        for case in ("micro batches of 2", "micro batches of 4"):
            for name, value in found[kind].items():
                if name.startswith("llama/"):
                    np.testing.assert_allclose(
                        found[kind][f"{case}/{name.removeprefix('llama/')}"],
                        value,
                        rtol=1e-4,
                        atol=3e-5,
                    )
