"""The server as a program of its own.

The SDK is its client, and it is killed at random moments.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from hybridrl.errors import ConfigError
from hybridrl.training_service.program import ServiceOptions, open_service
from tests.support.end_to_end.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "support" / "training_service"
SDK_PYTHON = "HYBRIDRL_TINKER_PYTHON"  # environment variable: an interpreter with the SDK and the cookbook
MARK = "HYBRIDRL_TEST_SERVER"  # environment variable of a server and of all that it starts
NUM_KILLS = int(os.environ.get("HYBRIDRL_NUM_KILLS", "10"))


@pytest.fixture
def sdk_python():
    """An interpreter that has the SDK."""
    if (found := os.environ.get(SDK_PYTHON)) is None:
        pytest.skip(f"{SDK_PYTHON} is not set: make environments")
    return found


class Server:
    """A `hybridrl serve-training` that can be killed and started again."""

    def __init__(self, model, store, *options, name="tiny"):
        self.port, self.name, self.mark = free_port(), name, uuid.uuid4().hex
        self.command = [sys.executable, "-m", "hybridrl.cli", "serve-training", str(model), "--store", str(store)]
        self.command += ["--port", str(self.port), "--max-rank", "8", "--device", "cpu", "--name", name, *options]

    def start(self):
        environment = os.environ | {MARK: self.mark}
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert self.process.stdout.readline().startswith(f"training {self.name} at http://")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.process.stdout.close()

    def left(self):
        """The commands of all processes that it has started, as long as they are there."""
        found = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in place.read_bytes():
                    command = (place.parent / "cmdline").read_text().replace("\0", " ")
                    found.append(f"{place.parent.name} {command}")
        return found


@contextlib.contextmanager
def running(server):
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(tiny_qwen2, tmp_path):
    with running(Server(tiny_qwen2, tmp_path / "store")) as found:
        yield found


def start_loop(server, python, *arguments, program="sdk_loop.py"):
    command = [python, str(PROGRAMS / program), f"http://127.0.0.1:{server.port}", server.name, *map(str, arguments)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def output_of(loop):
    out, err = loop.communicate(timeout=400)
    assert loop.returncode == 0, err
    return out


def test_a_client_with_the_sdk_trains_samples_and_loads(sdk_python, server):
    assert output_of(start_loop(server, sdk_python)).startswith("done: ")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed")
def test_a_client_with_the_sdk_trains_samples_and_loads_with_vllm(sdk_python, tiny_qwen2, tmp_path):
    with running(Server(tiny_qwen2, tmp_path / "store", "--engine", "vllm")) as server:
        assert output_of(start_loop(server, sdk_python)).startswith("done: ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dpo_and_off_policy_distillation_of_the_cookbook_train(sdk_python, tiny_qwen2, tmp_path):
    with running(Server(tiny_qwen2, tmp_path / "store", name=str(tiny_qwen2))) as server:
        loop = start_loop(server, sdk_python, tmp_path / "out", program="cookbook_losses.py")
        found = [json.loads(line) for line in output_of(loop).splitlines() if line.startswith("{")]
    assert [(row["loss"], row["steps"]) for row in found] == [("dpo", 6), ("distillation", 6)]
    assert found[0]["last"] < found[0]["first"] / 2


def kill_in_loops(server, python, *, num_kills):
    """Kill a server at random moments of a loop, and check it.

    The loop is repeated until all kills were made.
    """
    started = time.monotonic()
    undisturbed = output_of(start_loop(server, python))
    longest_s, rng, kills, loops = time.monotonic() - started, random.Random(0), 0, 0
    while kills < num_kills:
        loop = start_loop(server, python)
        while loop.poll() is None and kills < num_kills:
            with contextlib.suppress(subprocess.TimeoutExpired):
                loop.wait(rng.uniform(0, longest_s))
            if loop.poll() is None:
                server.kill()
                server.start()
                kills += 1
        assert output_of(loop) == undisturbed
        loops += 1
    print(f"{kills} kills of a server in {loops} loops: losses are equal, and each update ran once")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_loop_of_the_sdk_survives_kills_of_the_server_with_the_same_losses(sdk_python, server):
    kill_in_loops(server, sdk_python, num_kills=NUM_KILLS)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_killed_server_on_ray_goes_on_with_the_same_losses_and_leaves_no_process(sdk_python, tiny_qwen2, tmp_path):
    server = Server(tiny_qwen2, tmp_path / "store", "--backend", "ray")
    with running(server):
        kill_in_loops(server, sdk_python, num_kills=-(-NUM_KILLS // 5))
    until = time.monotonic() + 120
    while (left := server.left()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_client_that_is_killed_goes_on_from_its_last_checkpoint_with_the_same_losses(sdk_python, server, tmp_path):
    """Each kill leaves a model in an open session.

    Together they are more than a key may have in memory.
    """

    def start(name, *, steps):
        return start_loop(server, sdk_python, tmp_path / name, steps, program="sdk_resume.py")

    def num_steps():
        progress = tmp_path / "killed"
        return len(json.loads(progress.read_text())["losses"]) if progress.exists() else 0

    rng = random.Random(1)
    for _ in range(NUM_KILLS):
        before, loop = num_steps(), start("killed", steps=100_000)
        while num_steps() == before:
            assert loop.poll() is None, output_of(loop)
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        loop.kill()
        loop.communicate()
    print(f"{NUM_KILLS} kills of a client in {num_steps()} steps")
    last = num_steps() + 2
    assert output_of(start("killed", steps=last)) == output_of(start("undisturbed", steps=last))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_rank": -1}, "--max-rank"),
        ({"max_rank": 1000}, "^--max-rank=1000: no adapted layer has a rank above .* --max-rank=0 to train all"),
        ({"strategy": "megatron"}, "--strategy megatron trains all weights; use --max-rank 0"),
        (
            {"strategy": "megatron", "max_rank": 0, "trainers": 2, "backend": "ray"},
            "--trainers=2: does not divide the model's num_key_value_heads=1",
        ),
        ({"max_length": 10_000}, "--max-length=10000"),
        ({"keys": "/none"}, "--keys=/none: cannot be read"),
        ({"store": "/proc/none"}, "--store=/proc/none"),
    ],
)
def test_options_that_cannot_be_used_are_refused(tiny_qwen2, tmp_path, options, words):
    with (
        pytest.raises(ConfigError, match=words),
        open_service(ServiceOptions(str(tiny_qwen2), **{"store": str(tmp_path / "store"), **options})),
    ):
        pass


def test_experts_are_refused_with_megatron_before_anything_starts(tmp_path):
    Qwen3MoeConfig(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    options = {"strategy": "megatron", "max_rank": 0, "store": str(tmp_path / "store")}
    with (
        pytest.raises(ConfigError, match="no mixtures of experts here; use --strategy fsdp"),
        open_service(ServiceOptions(str(tmp_path / "model"), **options)),
    ):
        pass


def test_a_store_belongs_to_one_model_and_one_server(tiny_qwen2, tmp_path):
    options = ServiceOptions(str(tiny_qwen2), store=str(tmp_path / "store"), device="cpu", num_threads=1)
    with open_service(options):
        started = time.monotonic()
        with pytest.raises(ConfigError, match="store"), open_service(options):
            pass
        assert time.monotonic() - started < 30
    other = ServiceOptions(str(tiny_qwen2), store=str(tmp_path / "store"), max_rank=4)
    with pytest.raises(ConfigError, match="belongs to a server of"), open_service(other):
        pass
