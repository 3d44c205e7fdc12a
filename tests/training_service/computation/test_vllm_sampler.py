"""Versions sampled by vLLM, against the `hf` sampler: adapters in vLLM's own layers, and merged ones."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.training_service.client import training_client
from hybridrl.training_service.computation import vllm_sampler
from hybridrl.training_service.computation.adapter_slots import TrainedLayers
from hybridrl.training_service.computation.snapshot_sampler import BASE, AdapterRollout, SnapshotSampler
from hybridrl.training_service.computation.vllm_sampler import AdapterSampler, MergedRollout, make_vllm_sampler
from hybridrl.workers.rollout.base import RolloutSetup
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.rollout.sampling.scores import ScoreRequest
from tests.training_service.conftest import sequence

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]
VERSIONS = {"a": 3, "b": 8, "c": 5, "d": 1, "e": 8, "f": 2}  # by their ranks


class Versions:
    """Adapters by name, as files would have them."""

    def __init__(self, layers):
        self.stored = {name: self.drawn(layers, name, rank) for name, rank in VERSIONS.items()}
        self.num_reads = 0

    def drawn(self, layers, name, rank):
        generator, tensors = torch.Generator().manual_seed(ord(name)), {}
        for layer, (num_in, num_out) in layers.items():
            tensors[f"{layer}.lora_A"] = torch.randn(rank, num_in, generator=generator) * 0.1
            tensors[f"{layer}.lora_B"] = torch.randn(num_out, rank, generator=generator) * 0.05
        return TrainedLayers(rank), tensors

    def read(self, name):
        self.num_reads += 1
        return self.stored[name]


@pytest.fixture(scope="module")
def setup(tiny_qwen2):
    config = RolloutConfig(name="vllm", max_num_seqs=8, dtype="float32", max_num_batched_tokens=32)
    return RolloutSetup(str(tiny_qwen2), config, (0,), 0, max_prompt_length=1, max_response_length=63)


@pytest.fixture(scope="module")
def by_hf(setup):
    rollout = AdapterRollout(replace(setup, config=replace(setup.config, name="hf")), max_rank=8)
    layers = {name: (layer.in_features, layer.out_features) for name, layer in rollout._layers.items()}
    versions = Versions(layers)
    return SnapshotSampler(rollout, read=versions.read), versions


@pytest.fixture(scope="module")
def by_vllm(setup, by_hf):
    sampler, reason = make_vllm_sampler(setup, max_rank=8, read=by_hf[1].read)
    assert reason is None
    assert isinstance(sampler, AdapterSampler)
    return sampler


def requests(version, num=3):
    rng = np.random.default_rng(sum(map(ord, version)))
    prompts = [tuple(map(int, rng.integers(10, 200, 4 + 3 * number))) for number in range(num)]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    return [Request(f"{version}/{number}", prompt, params, seed=number) for number, prompt in enumerate(prompts)]


def served(sampler, versions):
    """All outputs of requests of several versions that are open together, by their ids."""
    outputs = {}
    for version in versions:
        outputs |= {one.request_id: one for one in sampler.serve(version, requests(version), slice_s=0.0)}
    while len(outputs) < 3 * len(versions):
        for version in versions:
            outputs |= {one.request_id: one for one in sampler.serve(version, [], slice_s=0.1)}
    return outputs


def test_requests_of_six_versions_and_the_base_model_in_one_engine_are_those_of_hf(by_hf, by_vllm):
    versions = [*VERSIONS, BASE]  # of which four are computed in one step
    expected, found = served(by_hf[0], versions), served(by_vllm, versions)
    for name, output in expected.items():
        assert found[name].token_ids == output.token_ids
        assert np.allclose(found[name].log_probs, output.log_probs, atol=1e-5)


@pytest.mark.parametrize("version", ["b", BASE])
def test_scores_beside_open_requests_of_other_versions_are_those_of_hf(by_hf, by_vllm, version):
    rng = np.random.default_rng(3)
    tokens, targets = tuple(map(int, rng.integers(10, 200, 64))), rng.integers(-1, 200, (63, 2))
    wanted = ScoreRequest(tokens, temperature=0.7, num_top=3, targets=targets)
    started = by_vllm.serve("c", requests("c"), slice_s=0.0)
    expected, found = by_hf[0].scores(version, wanted), by_vllm.scores(version, wanted)
    assert np.allclose(found.log_probs, expected.log_probs, atol=1e-5)
    assert np.allclose(found.top[1], expected.top[1], atol=1e-5)
    assert np.allclose(found.targets, expected.targets, atol=1e-5)
    while len(started) < 3:
        started += by_vllm.serve("c", [], slice_s=1.0)
    assert {one.finish_reason for one in started} == {"length"}


def test_a_version_that_left_the_memory_and_came_back_is_the_same_to_the_last_bit(by_hf, by_vllm, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "MAX_VERSIONS", 2)
    for version in VERSIONS:
        by_vllm.forget(version)
    wanted = ScoreRequest(tuple(range(20, 50)))
    first = by_vllm.scores("a", wanted).log_probs
    for version in ("b", "c", "d", "e", "f"):
        assert not np.array_equal(by_vllm.scores(version, wanted).log_probs, first)
    num_reads = by_hf[1].num_reads
    assert np.array_equal(by_vllm.scores("a", wanted).log_probs, first)
    assert by_hf[1].num_reads == num_reads + 1
    assert len(by_vllm._held) == 2


def test_a_version_that_was_written_anew_is_read_anew(by_hf, by_vllm):
    versions, wanted = by_hf[1], ScoreRequest(tuple(range(20, 50)))
    before = by_vllm.scores("a", wanted).log_probs
    versions.stored["a"], original = versions.stored["f"], versions.stored["a"]
    by_vllm.forget("a")
    assert np.array_equal(by_vllm.scores("a", wanted).log_probs, by_vllm.scores("f", wanted).log_probs)
    versions.stored["a"] = original
    by_vllm.forget("a")
    assert np.array_equal(by_vllm.scores("a", wanted).log_probs, before)


def test_the_requests_of_a_version_that_is_dropped_end_and_others_go_on(by_vllm):
    found = [*by_vllm.serve("a", requests("a"), slice_s=0.0), *by_vllm.serve("b", requests("b"), slice_s=0.0)]
    by_vllm.drop("a")
    while len(found) < 3:
        found += by_vllm.serve("b", [], slice_s=1.0)
    assert {one.request_id for one in found} == {"b/0", "b/1", "b/2"}
    assert not by_vllm._open


def test_a_bit_that_changes_in_vllms_copy_is_found_when_it_enters_a_slot_and_the_version_is_read_anew(by_hf, by_vllm):
    expected = by_vllm.scores("a", wanted := ScoreRequest(tuple(range(20, 50)))).log_probs
    number, rollout = by_vllm._numbers["a"], by_vllm._rollout
    held = rollout._llm.llm_engine.model_executor.driver_worker.worker._adapters
    held._tensors[number]["model.layers.0.mlp.down_proj.lora_B"][0, 0] += 1e-3
    for version in ("b", "c", "d", "e"):  # it leaves its slot
        by_vllm.scores(version, wanted)
    outputs = by_vllm.serve("a", requests("a", num=1), slice_s=1.0)
    assert [one.finish_reason for one in outputs] == ["error"]
    assert "fingerprint" in outputs[0].error
    assert np.array_equal(by_vllm.scores("a", wanted).log_probs, expected)


def test_a_score_whose_step_fails_ends_with_its_error_and_open_requests_go_on(by_hf, by_vllm):
    expected = by_vllm.scores("a", wanted := ScoreRequest(tuple(range(20, 50)))).log_probs
    for version in ("c", "d", "e", "f"):  # "a" leaves its slot
        by_vllm.scores(version, wanted)
    held = by_vllm._rollout._llm.llm_engine.model_executor.driver_worker.worker._adapters
    held._tensors[by_vllm._numbers["a"]]["model.layers.0.mlp.down_proj.lora_B"][0, 0] += 1e-3
    found = by_vllm.serve("c", requests("c"), slice_s=0.0)
    with pytest.raises(StaleWeightsError, match="fingerprint"):
        by_vllm.scores("a", wanted)
    while len(found) < 3:
        found += by_vllm.serve("c", [], slice_s=1.0)
    assert {one.finish_reason for one in found} == {"length"}
    by_vllm.forget("a")
    assert np.array_equal(by_vllm.scores("a", wanted).log_probs, expected)


def test_an_adapter_of_a_layer_that_vllm_does_not_adapt_is_refused(by_hf, by_vllm):
    tensors = {"model.embed_tokens.lora_A": torch.ones(2, 64), "model.embed_tokens.lora_B": torch.ones(64, 2)}
    with pytest.raises(StaleWeightsError, match="does not compute all of these layers"):
        by_vllm._rollout.add_adapter(10**6, tensors, 1.0)


@pytest.mark.slow
def test_a_model_without_adapters_in_vllm_is_sampled_with_merged_ones(setup, by_hf, monkeypatch):
    def refuse(*_):
        raise ConfigError("this model has none")

    monkeypatch.setattr(vllm_sampler, "_rollout_with_slots", refuse)
    sampler, reason = make_vllm_sampler(setup, max_rank=8, read=by_hf[1].read)
    assert reason == "this model has none"
    wanted = ScoreRequest(tuple(range(20, 50)), num_top=2)
    with pytest.raises(ConfigError, match="train_unembed=false"):  # its embeddings are tied
        sampler.scores("a", wanted)
    blocks = {name: (adapter, without_head(tensors)) for name, (adapter, tensors) in by_hf[1].stored.items()}
    monkeypatch.setattr(by_hf[1], "stored", blocks)
    for name in VERSIONS:
        by_hf[0].forget(name)
        sampler.forget(name)
    expected, found = served(by_hf[0], ["a", "b", BASE]), served(sampler, ["a", "b", BASE])
    assert isinstance(sampler._rollout, MergedRollout)
    for name, output in expected.items():
        assert found[name].token_ids == output.token_ids
        assert np.allclose(found[name].log_probs, output.log_probs, atol=1e-5)
    assert np.allclose(sampler.scores("a", wanted).top[1], by_hf[0].scores("a", wanted).top[1], atol=1e-5)


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backend": "local"}, {"backend": "ray", "replicas": 2}, {"max_rank": 0}])
def test_older_snapshots_stay_sampleable_with_vllm(tiny_qwen2, tmp_path, options):
    options = {"device": "cpu", "num_threads": 1, "max_rank": 8, "max_length": 64, **options}
    rank, found = min(4, options["max_rank"]), {}
    for engine in ("hf", "vllm"):
        with training_client(str(tiny_qwen2), store=str(tmp_path / engine), engine=engine, **options) as client:
            model, samplers = client.create_model(rank=rank, seed=3), [client.sampler()]
            for step in range(3):
                model.forward_backward([sequence(step)], "cross_entropy")
                model.optim_step(learning_rate=1e-2)
                samplers.append(model.sampler())
            pending = [
                one.sample([20, 21, 22], num_samples=2, max_tokens=6, stop=[], seed=1, prompt_logprobs=True, wait=False)
                for one in samplers
            ]
            found[engine] = [one.result() for one in pending]
    for expected, other in zip(found["hf"], found["vllm"], strict=True):
        assert [one.tokens for one in other.sequences] == [one.tokens for one in expected.sequences]
        assert np.allclose(other.prompt_log_probs, expected.prompt_log_probs, atol=1e-5, equal_nan=True)
        for a, b in zip(other.sequences, expected.sequences, strict=True):
            assert np.allclose(a.log_probs, b.log_probs, atol=1e-5)
    assert len({tuple(one.sequences[0].log_probs) for one in found["vllm"]}) == 4
