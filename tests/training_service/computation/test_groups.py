"""A service on Ray, whose trainers and replicas are killed at random moments."""

import os
import random
import signal
import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridrl.training_service.client import ServiceClient, datum, training_client
from tests.training_service.conftest import sequence

NUM_KILLS = int(os.environ.get("HYBRIDRL_NUM_KILLS", "4"))  # of each test
STEPS = 4  # of a loop; loops follow one another until all kills were made
OPTIONS = {"backend": "ray", "device": "cpu", "num_threads": 1, "max_rank": 8, "max_length": 64}


def loop(service):
    """The numbers that a client sees of a loop that samples and trains."""
    client, found = ServiceClient(service), []
    model = client.create_model(rank=4, seed=3)
    for step in range(STEPS):
        samples = model.sampler().sample([20, 21, 22], num_samples=4, max_tokens=5, stop=[], seed=step).sequences
        data = []
        for number, one in enumerate(samples):
            tokens, advantage = [20, 21, 22, *one.tokens], number - 1.5
            columns = {"logprobs": [0, 0, *one.log_probs], "advantages": [0, 0, *[advantage] * 5]}
            data.append(datum(tokens[:-1], tokens[1:], **columns))
        passes = [
            model.forward_backward(data, "importance_sampling", wait=False),
            model.forward_backward(
                [sequence(10 * step + row, 6 + row) for row in range(3)], "cross_entropy", wait=False
            ),
        ]
        metrics = model.optim_step(learning_rate=3e-3, grad_clip_norm=1.0)["metrics"]
        assert metrics["num_updates:max"] == step + 1  # an update that ran twice would count twice
        found += [[one.tokens for one in samples], *(one.result().loss for one in passes), metrics["grad_norm:mean"]]
        found += [log_probs.tolist() for one in passes for log_probs in one.result().log_probs]
    client.finish()
    return found


class Killer:
    """Kills processes of a group at random moments, one at a time."""

    def __init__(self, group, *, seed):
        self.group, self.rng, self.count, self.longest_s = group, random.Random(seed), 0, 2.0
        self.is_done = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while self.count < NUM_KILLS and not self.is_done.wait(self.rng.uniform(0.0, self.longest_s)):
            process_id = self.rng.choice(self.group.process_ids)
            os.kill(process_id, signal.SIGKILL)
            self.count += 1
            until = time.monotonic() + 240
            while process_id in self.group.process_ids and time.monotonic() < until:
                time.sleep(0.02)  # until the service has noticed it

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_done.set()
        self.thread.join()


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("victim", "trainers", "replicas", "engine"),
    [("trainer", 1, 1, "hf"), ("trainer", 2, 1, "hf"), ("replica", 1, 2, "hf"), ("replica", 1, 2, "vllm")],
)
def test_kills_of_processes_leave_all_numbers_of_a_loop_as_they_are(
    ray_cluster, tiny_qwen2, tmp_path, victim, trainers, replicas, engine
):
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("the module vllm is not installed")
    options = OPTIONS | {"trainers": trainers, "replicas": replicas, "engine": engine}
    options["store"] = str(tmp_path / "store")
    with training_client(str(tiny_qwen2), **options) as client:
        started = time.monotonic()
        expected = loop(client.service)
        computation = client.service._computation
        group = {"trainer": computation._trainers, "replica": computation._replicas}[victim]
        killer, num_loops = Killer(group, seed=trainers), 0
        killer.longest_s = time.monotonic() - started
        with killer:
            while killer.count < NUM_KILLS or not num_loops:
                assert loop(client.service) == expected
                num_loops += 1
        assert killer.count == NUM_KILLS
    print(f"{killer.count} kills of a {victim} in {num_loops} loops: losses are equal, and each update ran once")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_trainers_compute_what_one_does(ray_cluster, tiny_qwen2, tmp_path):
    losses = []
    for trainers in (1, 2):
        options = OPTIONS | {"trainers": trainers, "store": str(tmp_path / str(trainers))}
        with training_client(str(tiny_qwen2), **options) as client:
            model = client.create_model(rank=3, seed=1)
            for step in range(3):
                data = [sequence(10 * step + row, 6 + row) for row in range(3 - step)]  # with one datum a rank has none
                losses.append(model.forward_backward(data, "cross_entropy").loss)
                losses.append(model.optim_step(learning_rate=3e-3)["metrics"]["grad_norm:mean"])
            require_trainers_log_probs(model)
            kept = client.load(model.save("three"))
            losses.append(kept.forward([sequence(5)]).loss)
    np.testing.assert_allclose(losses[:7], losses[7:], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_megatron_computes_what_fsdp_does(ray_cluster, tiny_qwen2, tmp_path):
    """With two groups of heads, which two tensor-parallel trainers share."""
    path = tmp_path / "model"
    config = AutoConfig.from_pretrained(tiny_qwen2, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_qwen2).save_pretrained(path)
    ways = {
        "fsdp": {"backend": "local"},
        "megatron": {"backend": "local", "strategy": "megatron"},
        "tensor-parallel": {"strategy": "megatron", "trainers": 2},
    }
    found = {}
    for name, way in ways.items():
        options = OPTIONS | {"max_rank": 0, "store": str(tmp_path / name)} | way
        with training_client(str(path), **options) as client:
            found[name] = steps_of_all_weights(client)
    for name in ("megatron", "tensor-parallel"):
        (numbers, gradients), norm = found[name], found["fsdp"][0][1]
        np.testing.assert_allclose(numbers, found["fsdp"][0], rtol=1e-6, atol=1e-6)
        difference = max(np.abs(gradients[key] - value).max() for key, value in found["fsdp"][1].items())
        print(f"{name}: gradients of norm {norm:.3f} differ by {difference:.1e} at most")
        assert gradients.keys() == found["fsdp"][1].keys() and difference < 1e-6 * norm


def require_trainers_log_probs(model):
    """The log-probs of a prompt are those of `forward` to the last bit: the trainers have computed them."""
    tokens, sampler = list(range(20, 50)), model.sampler()
    forward = model.forward([datum(tokens[:-1], tokens[1:])]).log_probs[0]
    np.testing.assert_array_equal(sampler.log_probs(tokens)[1:], forward)
    model.forward_backward([sequence(1)], "cross_entropy")
    model.optim_step(learning_rate=1e-2)  # with other weights in the trainers, a replica computes them
    np.testing.assert_allclose(sampler.log_probs(tokens)[1:], forward, atol=1e-5)


def steps_of_all_weights(client):
    """Return losses and norms of three steps, log-probs of a sampler, and the first step's gradients.

    The steps go on from saved weights.
    """
    model, numbers, gradients = client.create_model(rank=0), [], {}
    for step in range(3):
        data = [sequence(10 * step + row, 6 + row) for row in range(3)]
        numbers.append(model.forward_backward(data, "cross_entropy").loss)
        numbers.append(model.optim_step(learning_rate=3e-3, beta1=0.0, eps=1e-6)["metrics"]["grad_norm:mean"])
        path = model.save(f"step-{step}")
        if not step:
            tensors = load_file(client.service.store.find(path, owner="local")[0] / "tensors.safetensors")
            gradients = {key: value for key, value in tensors.items() if key.endswith(".exp_avg")}
        model.forward_backward([sequence(step)], "cross_entropy")  # of no effect: what was saved goes on
        model = client.load(path)
    require_trainers_log_probs(model)
    return [*numbers, *model.sampler().log_probs([20, 21, 22, 23])[1:]], gradients
