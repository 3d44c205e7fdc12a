"""Served requests get the tokens of a batch, whatever other requests are open; on `hf` and on in-process vLLM."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import DataError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, batched_request_engine, make_rollout
from hybridrl.workers.rollout.requests import Request

PROMPT, RESPONSE, N = 24, 40, 3
STOPS = tuple(range(20, 40))  # a twentieth of the vocabulary, so that many responses end
ENGINES = ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(240)])]


def prompts_of(num_rows: int) -> DataProto:
    rng = np.random.default_rng(3)
    ids, mask = torch.zeros((num_rows, PROMPT), dtype=torch.int64), torch.zeros((num_rows, PROMPT), dtype=torch.int64)
    for row in range(num_rows):
        length = int(rng.integers(1, PROMPT + 1))
        ids[row, -length:] = torch.from_numpy(rng.integers(40, 300, length))
        mask[row, -length:] = 1
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return DataProto.from_dict(columns | {"seeds": torch.arange(num_rows) * 7919 + 5})


def requests_of(prompts: DataProto, sampling: SamplingParams) -> list[Request]:
    one = SamplingParams(**{**vars(sampling), "n": 1})
    return [
        Request(f"{row}/{sample}", tuple(ids[mask.bool()].tolist()), one, seed, sample=sample)
        for row, (ids, mask, seed) in enumerate(
            zip(
                prompts.batch["input_ids"],
                prompts.batch["attention_mask"],
                prompts.batch["seeds"].tolist(),
                strict=True,
            )
        )
        for sample in range(sampling.n)
    ]


@pytest.fixture(scope="module")
def rollouts(tiny_qwen2):
    """Start each engine once, at its first use; only vLLM's tests start vLLM."""
    started: dict = {}

    def rollout(name: str):
        if name == "vllm" and find_spec("vllm") is None:
            pytest.skip("vLLM is not installed")
        if name not in started:
            config = RolloutConfig(name=name, dtype="float32", max_num_seqs=8, kv_cache_memory_mb=8)
            started[name] = make_rollout(name, RolloutSetup(str(tiny_qwen2), config, STOPS, 0, PROMPT, RESPONSE))
        return started[name]

    return rollout


def serve_all(server, arrivals: list[list[Request]]) -> dict:
    """Add requests in groups, one step apart, and serve until none is open."""
    outputs: dict = {}
    arrivals = list(arrivals)
    while arrivals or server.num_open():
        outputs |= {out.request_id: out for out in server.serve(arrivals.pop(0) if arrivals else [], [], slice_s=0)}
    return outputs


def assert_same_as_batch(batch: DataProto, outputs: dict, n: int) -> None:
    rows = zip(
        batch.batch["responses"], batch.batch["response_mask"].bool(), batch.batch["rollout_log_probs"], strict=True
    )
    for i, (tokens, mask, log_probs) in enumerate(rows):
        served = outputs[f"{i // n}/{i % n}"]
        assert served.token_ids == tokens[mask].tolist()
        assert served.log_probs == pytest.approx(log_probs[mask].tolist(), abs=1e-4)
        assert served.finish_reason == ("stop" if served.token_ids[-1] in STOPS else "length")


SAMPLINGS = {
    "sampled": SamplingParams(RESPONSE, n=N, temperature=0.9, top_k=100),
    "greedy": SamplingParams(RESPONSE, n=1, do_sample=False),
    "penalised": SamplingParams(RESPONSE, n=2, repetition_penalty=1.2, frequency_penalty=0.1, min_tokens=6),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("chunk", [7, 64])
def test_requests_that_arrive_one_after_another_get_the_tokens_of_a_batch(rollouts, engine, kind, chunk, monkeypatch):
    monkeypatch.setattr(batched_request_engine, "CHUNK_TOKENS", chunk)
    rollout, sampling, prompts = rollouts(engine), SAMPLINGS[kind], prompts_of(8)
    batch, requests = rollout.generate(prompts, sampling), requests_of(prompts, sampling)
    lengths = batch.batch["response_mask"].sum(-1)
    assert kind == "greedy" or ((lengths < RESPONSE).any() and (lengths > 8).any())  # greedy repeats itself
    order = np.random.default_rng(0).permutation(len(requests))
    arrivals = [[requests[i] for i in part] for part in np.array_split(order, 5)]
    assert_same_as_batch(batch, serve_all(rollout.request_engine(), arrivals), sampling.n)


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_with_different_sampling_are_served_together(rollouts, engine):
    rollout, prompts = rollouts(engine), prompts_of(4)
    requests, server = {}, rollout.request_engine()
    for kind, sampling in SAMPLINGS.items():
        requests[kind] = [
            Request(**{**vars(r), "request_id": f"{kind}:{r.request_id}"}) for r in requests_of(prompts, sampling)
        ]
    arrivals = [[r for kind in requests.values() for r in kind[start::3]] for start in range(3)]
    outputs = serve_all(server, arrivals)
    for kind, sampling in SAMPLINGS.items():
        served = {name.split(":")[1]: out for name, out in outputs.items() if name.startswith(kind)}
        batch = rollout.generate(prompts, sampling)
        rows = [int(name.split("/")[0]) * sampling.n + int(name.split("/")[1]) for name in served]
        assert len(rows) == 4 * sampling.n
        for row, out in zip(rows, served.values(), strict=True):
            assert out.token_ids == batch.batch["responses"][row][batch.batch["response_mask"][row].bool()].tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_aborted_response_continues_on_another_server_with_the_same_tokens(rollouts, engine, monkeypatch):
    monkeypatch.setattr(batched_request_engine, "CHUNK_TOKENS", 3)
    rollout, sampling = rollouts(engine), SamplingParams(RESPONSE, ignore_eos=True)
    [request] = requests_of(prompts_of(1), sampling)
    whole = serve_all(rollout.request_engine(), [[request]])["0/0"]
    server = rollout.request_engine()
    server.serve([request], [], slice_s=0)
    server.serve([], [], slice_s=0)
    [part] = server.serve([], ["0/0"], slice_s=0)
    assert (
        part.finish_reason == "abort"
        and 0 < len(part.token_ids) < RESPONSE
        and server.num_open() == 0
        and not server._open
    )
    rest = Request(
        "rest",
        (*request.prompt_ids, *part.token_ids),
        SamplingParams(RESPONSE - len(part.token_ids), ignore_eos=True),
        request.seed,
        num_done=len(part.token_ids),
    )
    ended = serve_all(rollout.request_engine(), [[rest]])["rest"]
    assert part.token_ids + ended.token_ids == whole.token_ids and ended.finish_reason == "length"
    assert server.serve([], ["unknown"], slice_s=0) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_are_generated_after_serving_and_outputs_have_the_weights_version(rollouts, engine):
    rollout, prompts, sampling = rollouts(engine), prompts_of(2), SAMPLINGS["sampled"]
    before = rollout.generate(prompts, sampling).batch["responses"]
    server = rollout.request_engine()
    serve_all(server, [requests_of(prompts, sampling)])
    assert torch.equal(rollout.generate(prompts, sampling).batch["responses"], before)
    assert {out.version for out in serve_all(server, [requests_of(prompts, sampling)]).values()} == {
        rollout.current_version()
    }


# Sampling that no engine can use; none of it is refused by `SamplingParams`.
POISON = {
    "min_tokens": {"min_tokens": 2**70},
    "penalty": {"frequency_penalty": 10**400},
    "stop": {"stop": ("\ud800",)},
    "stop token": {"stop_token_ids": (2**70,), "min_tokens": 1},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", POISON)
def test_an_error_is_the_answer_of_the_request_that_caused_it(rollouts, engine, kind):
    """Two requests of twelve raise, in another step or in the same batch as others; ten get their tokens."""
    rollout, sampling, prompts = rollouts(engine), SAMPLINGS["sampled"], prompts_of(4)
    batch, requests = rollout.generate(prompts, sampling), requests_of(prompts, sampling)
    bad = [SamplingParams(5, **POISON[kind]), SamplingParams(RESPONSE, temperature=0.9, top_k=100, **POISON[kind])]
    poisoned = [Request(f"bad/{number}", (50, 60), one, seed=1) for number, one in enumerate(bad)]
    server = rollout.request_engine()
    outputs = serve_all(server, [[*requests[:7], poisoned[0]], [poisoned[1], *requests[7:]]])
    failed = [name for name, output in outputs.items() if output.finish_reason == "error"]
    assert sorted(failed) == ["bad/0", "bad/1"] and all(outputs[name].error for name in failed)
    assert_same_as_batch(batch, {name: out for name, out in outputs.items() if name not in failed}, sampling.n)
    assert server.num_open() == 0 and not server._open


def test_an_error_within_a_batch_is_found_by_halves(rollouts, monkeypatch):
    """One prompt of a batch makes the model raise: the engine's own call, with real requests around it."""
    rollout, sampling, prompts = rollouts("hf"), SAMPLINGS["sampled"], prompts_of(5)
    batch, requests = rollout.generate(prompts, sampling), requests_of(prompts, sampling)
    beyond = Request("bad", (10**6, 50), requests[0].sampling, seed=1)  # no row of the embedding
    outputs = serve_all(rollout.request_engine(), [[*requests[:4], beyond, *requests[4:9]], requests[9:]])
    assert outputs.pop("bad").finish_reason == "error"
    assert_same_as_batch(batch, outputs, sampling.n)


def test_a_request_that_waits_beside_suspects_can_be_aborted(rollouts):
    requests = requests_of(prompts_of(2), SAMPLINGS["sampled"])
    beyond = Request("bad", (10**6, 50), requests[0].sampling, seed=1)
    server = rollouts("hf").request_engine()
    assert server.serve([beyond, *requests], [], slice_s=0) == []  # halved now
    [aborted] = [o for o in server.serve([], [requests[-1].request_id], slice_s=0) if o.request_id != "bad"]
    assert (aborted.request_id, aborted.finish_reason) == (requests[-1].request_id, "abort")


@pytest.mark.vllm
@pytest.mark.timeout(240)
def test_many_kinds_of_sampling_do_not_accumulate_batches_in_vllm(rollouts):
    rollout, server = rollouts("vllm"), rollouts("vllm").request_engine()
    [request] = requests_of(prompts_of(1), SamplingParams(4))
    for number in range(30):
        sampling = SamplingParams(4, temperature=1 + number / 10)
        [output] = serve_all(server, [[Request(**{**vars(request), "sampling": sampling})]]).values()
        batch = rollout.generate(prompts_of(1), sampling).batch
        assert output.token_ids == batch["responses"][0][batch["response_mask"][0].bool()].tolist()
        assert len(server._shared_batches) <= 8


def test_invalid_requests_raise_errors(rollouts, tiny_qwen2):
    with pytest.raises(ValueError, match="n=2; a request is one response"):
        Request("a", (1, 2), SamplingParams(4, n=2), 0)
    with pytest.raises(DataError, match="leave no prompt"):
        Request("a", (1, 2), SamplingParams(4), 0, num_done=2)
    [refused] = rollouts("hf").request_engine().serve([Request("a", (50,) * 40, SamplingParams(30), 0)], [], slice_s=0)
    assert refused.finish_reason == "error" and "request a: 40 tokens and up to 30" in refused.error
    twice = Request("a", (50,), SamplingParams(3), 0)
    with pytest.raises(ValueError, match="request a is open already"):
        rollouts("hf").request_engine().serve([twice, twice], [], slice_s=0)
    setup = RolloutSetup(str(tiny_qwen2), RolloutConfig(name="hf"), STOPS, 0, PROMPT, RESPONSE, load_format="dummy")
    with pytest.raises(StaleWeightsError, match="holds no weights that were pushed completely"):
        make_rollout("hf", setup).request_engine().serve([Request("a", (50,), SamplingParams(3), 0)], [], slice_s=0)
