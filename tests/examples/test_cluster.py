"""The launchers of examples/cluster: their syntax, the settings that they name, and the lock that they install."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler._private.util import validate_config as check_ray_up

from hybridrl.config import PPOConfig
from hybridrl.config.introspection import keys

CLUSTER = Path(__file__).parents[2] / "examples/cluster"
LOCK = CLUSTER.parents[1] / "requirements/cuda.txt"
SCRIPTS = ["functions.sh", "slurm.sbatch", "ssh.sh"]
GPUS = "nvidia.com/gpu"


def read(name: str) -> dict:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_valid_syntax(name):
    done = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*SCRIPTS, "kuberay.yaml", "sky.yaml", "ray_up.yaml"])
def test_a_launcher_names_only_settings_that_exist(name):
    named = re.findall(r"\b((?:trainer|data|actor_rollout_ref|algorithm)(?:\.\w+)+)=", (CLUSTER / name).read_text())
    assert set(named) <= keys(PPOConfig).keys()


def test_the_pods_of_kuberay_fit_the_schema_of_kubernetes():
    kubernetes = pytest.importorskip("kubernetes_validate")
    cluster = read("kuberay.yaml")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def test_skypilot_reads_its_manifest():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(CLUSTER / "sky.yaml"))
    assert task.num_nodes == 2


def test_functions_forward_sigterm_and_return_the_programs_own_exit_code():
    code = f"""
        . {CLUSTER / "functions.sh"}
        (sleep 0.5; kill -TERM $$) &
        run_program bash -c 'trap "sleep 0.3; exit 143" TERM; while :; do sleep 0.05; done'
        echo "code $?"
        run_program bash -c 'exit 7'
        echo "code $?"
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["code", "143", "code", "7"], done.stderr


def test_the_manifest_of_kuberay_has_the_machines_and_gpus_that_its_command_asks_for():
    job = read("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster, entry = job["spec"]["rayClusterSpec"], job["spec"]["entrypoint"]
    [workers] = cluster["workerGroupSpecs"]
    assert f"trainer.nnodes={workers['replicas']} " in entry
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no worker may run on the head"
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["terminationGracePeriodSeconds"] > keys(PPOConfig)["trainer.grace_s"].default
        assert container["resources"]["limits"] == container["resources"]["requests"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"][GPUS]
    assert f"trainer.n_gpus_per_node={gpus} " in entry
    assert f"ray=={cluster['rayVersion']}\n" in LOCK.read_text()


def test_the_other_manifests_have_what_their_launchers_read():
    sky, up = read("sky.yaml"), read("ray_up.yaml")
    check_ray_up(prepare_config(up))  # against Ray's own schema
    assert {"num_nodes", "resources", "setup", "run", "file_mounts"} <= sky.keys()
    for script in (sky["setup"], sky["run"]):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
    assert len(up["provider"]["worker_ips"]) == up["min_workers"] == up["max_workers"]


def test_the_lock_has_one_exact_version_of_every_required_package():
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.partition(";")[0].strip().split("==") for line in lines)
    assert {"torch", "ray", "vllm", "transformers", "tensordict", "hydra-core", "omegaconf"} <= pinned.keys()
    assert "nvidia-nccl-cu13" in pinned
