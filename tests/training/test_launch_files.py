"""Templates of launches: their syntax, and the commands that they contain."""

import re
import subprocess

import pytest
import yaml

from gqa_convert.training.recipe import make_recipe
from tests.helpers.distributed_steps import BASE
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


def test_kubernetes_starts_one_torchrun_per_pod() -> None:
    text = (ROOT / "recipes" / "kubernetes" / "uptrain.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert f"--nnodes={job['spec']['parallelism']}" in container["args"]
    assert f"--nproc_per_node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--rdzv_endpoint={first}:29500" in container["args"]
    command = container["args"].index("uptrain")
    assert container["args"][command - 2 : command] == ["-m", "gqa_convert"]
    overrides = dict(each.split("=") for each in container["args"][command + 2 :])
    assert make_recipe(BASE | overrides).sharding == "hybrid"
    (claim,) = (volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume)
    assert claim in {mount["name"] for mount in container["volumeMounts"]}
    wait = {each["name"]: each["value"] for each in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(wait) < pod["terminationGracePeriodSeconds"]
