"""Every sampling parameter means what it means in vLLM and Hugging Face, in both the `hf` and the `vllm` rollout."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl import main_ppo
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.responses import token_lists
from hybridrl.workers.rollout.sampling import sampler
from hybridrl.workers.rollout.sampling.logits import StopStrings, TokenHistory
from hybridrl.workers.rollout.sampling.sampler import StopCondition, draw_tokens, uniforms
from tests.support.end_to_end.runs import settings, train

PROMPT, RESPONSE = 20, 24
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed")
ENGINES = ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm, pytest.mark.timeout(240)])]
GREEDY = SamplingParams(RESPONSE, do_sample=False)
# Strong penalties, so that a greedy response of the small model without them repeats itself and with them does not.
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 0.7}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tiny_tokenizer) -> str:
    """Return the path of a model with a tokenizer, whose next token depends on the previous ones."""
    path = str(tmp_path_factory.mktemp("talker"))
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def start(model_path, tiny_tokenizer):
    """Return the engine of that name, started once for this module."""
    engines = {}

    def start(name):
        if name not in engines:
            config = RolloutConfig(dtype="float32", max_num_seqs=20, kv_cache_memory_mb=4)
            eos = (tiny_tokenizer.eos_token_id,)
            engines[name] = make_rollout(name, RolloutSetup(model_path, config, eos, 0, PROMPT, RESPONSE))
        return engines[name]

    return start


def prompts_of(num_rows: int) -> DataProto:
    ids = torch.randint(3, 300, (num_rows, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(PROMPT) >= (torch.arange(num_rows) % 9)[:, None]).long()
    columns = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(num_rows) + 7,
    }
    return DataProto.from_dict(tensors=columns)


def responses(batch: DataProto) -> list[list[int]]:
    masks = batch.batch["response_mask"].bool()
    return [row[mask].tolist() for row, mask in zip(batch.batch["responses"], masks, strict=True)]


# -- by hand


def test_penalties_are_vllms_formulas():
    """Token 0 is in the prompt, 1 twice in the response, 2 once and in the prompt, 3 nowhere."""
    sampling = SamplingParams(4, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    history = TokenHistory([[0, 2]], sampling, StopCondition(()), device="cpu")
    rows = torch.tensor([0])
    for step, token in enumerate([1, 1, 2]):
        history.record(rows, torch.tensor([step]), torch.tensor([token]))
    processed_logits = history.process_logits(torch.tensor([[4.0, -1.0, 2.0, 3.0]]), rows, torch.tensor([3]))
    # 4 / 2; -1 * 2 - 2 * 0.25 - 0.5; 2 / 2 - 0.25 - 0.5; 3
    assert processed_logits.tolist() == [[2.0, -3.0, 0.25, 3.0]]
    earlier = history.process_logits(
        torch.tensor([[4.0, -1.0, 2.0, 3.0]]), rows, torch.tensor([1])
    )  # a token that is drawn again
    assert earlier.tolist() == [[2.0, -2.75, 1.0, 3.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalties_of_a_real_vocabulary_are_those_of_every_token_bit_for_bit(dtype):
    sampling = SamplingParams(9, n=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3)
    dice, vocab = torch.Generator().manual_seed(1), 49_152
    prompts = [torch.randint(vocab, (size,), generator=dice).tolist() for size in (7, 1, 12)]
    history, rows = TokenHistory(prompts, sampling, StopCondition(()), device="cpu"), torch.arange(6)
    for step in range(9):
        history.record(rows, torch.full((6,), step), torch.randint(40, (6,), generator=dice))  # some of them twice
    logits = (3 * torch.randn(6, vocab, generator=dice)).to(dtype)
    expected = logits.float().clone()
    for row in range(6):
        prompt = prompts[row // 2]
        response = history._responses[row, :8].tolist()
        for token in {*prompt, *response}:
            value = expected[row, token]
            expected[row, token] = value / 1.3 if value > 0 else value * 1.3
        for token in {*response}:
            expected[row, token] = expected[row, token] - 0.3 * torch.tensor(response.count(token)) - 0.5
    assert torch.equal(history.process_logits(logits, rows, torch.full((6,), 8)), expected)


def test_min_p_keeps_tokens_above_its_share_of_the_largest_probability():
    """Of 0.5, 0.3, 0.15, 0.05 the share 0.31 of the likeliest keeps the first two: 0.155 is more than the third."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1000, -1)
    uniform = (torch.arange(1000).double() + 0.5) / 1000
    tokens, log_probs = draw_tokens(logits, uniform, SamplingParams(1, min_p=0.31))
    assert torch.bincount(tokens, minlength=4).tolist() == [625, 375, 0, 0]  # 0.5 / 0.8 and 0.3 / 0.8
    assert log_probs.exp().unique().tolist() == pytest.approx([0.3, 0.5])


def test_a_stop_string_is_detected_at_its_last_token_only(tiny_tokenizer):
    stops = StopStrings(tiny_tokenizer, ("boxes of", "é"))
    tokens = tiny_tokenizer.encode("3 boxes of of 4é!")
    found = [
        length
        for length in range(1, len(tokens) + 1)
        if stops.completed_by_last(tokens[max(0, length - stops.window) : length])
    ]
    texts = [tiny_tokenizer.decode(tokens[:length]) for length in found]
    assert texts == ["3 boxes of", "3 boxes of of 4é"]


def test_invalid_parameters_raise_errors(model_path, tmp_path):
    for wrong in (
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"min_tokens": -1},
        {"stop": ("",)},
        {"stop": ("a",), "ignore_eos": True},
    ):
        with pytest.raises(
            ValueError, match=f"sampling {'ignore_eos' if 'ignore_eos' in wrong else next(iter(wrong))}="
        ):
            SamplingParams(4, **wrong)
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(tmp_path)
    rollout = make_rollout("hf", RolloutSetup(str(tmp_path), RolloutConfig(), (2,), 0, PROMPT, RESPONSE))
    with pytest.raises(ConfigError, match="stop=\\['a'\\].*stop_token_ids"):
        rollout.generate(prompts_of(1), SamplingParams(4, stop=("a",)))


# -- against Hugging Face and vLLM


@pytest.mark.parametrize("name", ENGINES)
def test_repetition_penalty_and_min_tokens_are_those_of_generate(start, model_path, name):
    model, prompts = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval(), prompts_of(6)
    eos = responses(start(name).generate(prompts, replace(GREEDY, repetition_penalty=1.2)))[0][3]
    ours = responses(
        start(name).generate(prompts, replace(GREEDY, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(eos,)))
    )
    for row, tokens in enumerate(ours):
        ids = prompts.batch["input_ids"][row : row + 1][:, prompts.batch["attention_mask"][row].bool()]
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=1.2,
            min_new_tokens=9,
            max_new_tokens=RESPONSE,
            eos_token_id=[*start(name).setup.eos_token_ids, eos],
            pad_token_id=0,
        )
        assert tokens == theirs[0, ids.shape[1] :].tolist()
        assert len(tokens) > 9


@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(240)
@pytest.mark.parametrize("sampling", [PENALTIES, {"min_tokens": 12}, PENALTIES | {"min_tokens": 5}], ids=str)
def test_greedy_tokens_are_those_of_plain_vllm(start, sampling):
    from vllm import SamplingParams as EngineParams

    rollout, prompts = start("vllm"), prompts_of(8)
    stop_ids = tuple({response[5] for response in responses(rollout.generate(prompts, GREEDY))})
    ours = responses(rollout.generate(prompts, replace(GREEDY, stop_token_ids=stop_ids, **sampling)))
    params = EngineParams(
        temperature=0.0,
        max_tokens=RESPONSE,
        stop_token_ids=[*rollout.setup.eos_token_ids, *stop_ids],
        ignore_eos=True,
        detokenize=False,
        extra_args={"row": 0},
        **sampling,
    )
    masks = prompts.batch["attention_mask"].bool()
    requests = [
        {"prompt_token_ids": ids[mask].tolist()} for ids, mask in zip(prompts.batch["input_ids"], masks, strict=True)
    ]
    outputs = rollout._llm.generate(requests, params, use_tqdm=False)
    assert ours == [list(output.outputs[0].token_ids) for output in outputs]
    assert ours != responses(rollout.generate(prompts, GREEDY))


@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.2},
        {**PENALTIES, "temperature": 0.8},
        {"stop": ("e", "1")},
        {"stop": ("bo", "st"), "min_tokens": 8, "top_k": 20},
    ],
    ids=str,
)
def test_samples_of_both_engines_are_the_same_from_the_same_seeds(start, sampling):
    """Up to rounding: a number within 1e-6 of a boundary may give another token, less than once in 1000 tokens."""
    params = SamplingParams(RESPONSE, n=4, **sampling)
    ours, theirs = (start(name).generate(prompts_of(10), params) for name in ("vllm", "hf"))
    same = [left == right for left, right in zip(responses(ours), responses(theirs), strict=True)]
    assert sum(same) / len(same) > 0.95
    assert responses(ours) != responses(start("vllm").generate(prompts_of(10), SamplingParams(RESPONSE, n=4)))


# -- stop


@pytest.mark.parametrize("name", ENGINES)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(start, tiny_tokenizer, name):
    for min_tokens in (0, 6):
        free = responses(start(name).generate(prompts_of(8), SamplingParams(RESPONSE, n=3, min_tokens=min_tokens)))
        stopped = responses(
            start(name).generate(
                prompts_of(8), SamplingParams(RESPONSE, n=3, stop=("e", "ox", "1"), min_tokens=min_tokens)
            )
        )
        assert any(len(response) < len(whole) for response, whole in zip(stopped, free, strict=True))
        for response, whole in zip(stopped, free, strict=True):
            expected = next(
                (length for length in range(min_tokens + 1, len(whole)) if completes(whole, length, tiny_tokenizer)),
                len(whole),
            )
            assert response == whole[:expected]


def completes(tokens: list[int], length: int, tokenizer) -> bool:
    before, text = (tokenizer.decode(tokens[:end]) for end in (length - 1, length))
    return any(text.count(stop) > before.count(stop) for stop in ("e", "ox", "1"))


@pytest.mark.parametrize("name", ENGINES)
def test_chunks_equal_one_call_with_penalties_and_stop_strings(start, name):
    sampling = SamplingParams(RESPONSE, n=2, temperature=0.9, stop=("e", "1"), min_tokens=7, **PENALTIES)
    prompts = prompts_of(8)
    whole = responses(start(name).generate(prompts, sampling))
    ids, seeds = token_lists(prompts), prompts.batch["seeds"].tolist()
    served: dict[str, list[int]] = {f"{row}/{sample}": [] for row in range(len(ids)) for sample in range(sampling.n)}
    server, left = start(name).request_engine(), list(served)
    for size in (10, RESPONSE - 10):
        part = replace(sampling, n=1, max_new_tokens=size)
        outputs: list[TokenOutput] = server.serve(
            [
                Request(key, (*ids[row], *served[key]), part, seeds[row], sample=sample, num_done=len(served[key]))
                for key in left
                for row, sample in [map(int, key.split("/"))]
            ],
            [],
            slice_s=60,
        )
        for output in outputs:
            served[output.request_id] += output.token_ids
        left = [output.request_id for output in outputs if output.finish_reason == "length"]
    assert [*served.values()] == whole and not server.num_open()
    assert any(10 < len(response) < RESPONSE for response in whole)


# -- from the command line


def test_training_responses_stop_as_configured(tmp_path, tiny_qwen2, tiny_tokenizer):
    def lengths(name, **changes):
        rows = train(tmp_path / name, tiny_qwen2, trainer__total_training_steps=1, trainer__test_freq=-1, **changes)
        return [row["response_length/mean"] for row in rows if "response_length/mean" in row]

    prefix = "actor_rollout_ref__rollout__"
    free = lengths("free")
    assert lengths("text", **{prefix + "stop": "[e,a,i]"})[0] < free[0]
    assert lengths("min_tokens", **{prefix + "stop": "[e,a,i]", prefix + "min_tokens": 12}) == [12.0]
    every = list(range(len(tiny_tokenizer)))
    assert lengths("ids", **{prefix + "stop_token_ids": every, prefix + "ignore_eos": True}) == [1.0]


def test_contradicting_settings_are_rejected(tmp_path: Path, tiny_qwen2, capsys):
    rollout_settings = {
        "stop": "[a]",
        "ignore_eos": True,
        "min_tokens": 13,
        "name": "vllm",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 59,
    }
    changes = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout_settings.items()}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) != 0
    message = capsys.readouterr().err
    for key in (
        "rollout.ignore_eos=true: contradicts",
        "rollout.min_tokens=13: responses have at most",
        "rollout.max_num_batched_tokens=59",
    ):
        assert key in message


@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(240)
def test_a_cache_too_small_for_one_sequence_raises_an_error_with_the_keys(model_path):
    config = RolloutConfig(dtype="float32", kv_cache_memory_mb=1)  # 512 bytes per token and layer: about 1000 tokens
    setup = RolloutSetup(model_path, config, (2,), 0, 3000, 1000, override_config={"max_position_embeddings": 4096})
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_mb=1: vLLM's cache cannot hold.*max_prompt_length=3000 \+ .*=1000"
    ):
        make_rollout("vllm", setup)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"temperature": 0.6}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_draws_and_log_probs_of_some_rows_at_a_time_are_those_of_all_rows_bit_for_bit(monkeypatch, dtype, settings):
    logits = 3 * torch.randn(11, 3001, generator=torch.Generator().manual_seed(1)).to(dtype)
    uniform, params = uniforms(torch.arange(11), 0), SamplingParams(1, **settings)
    at_once = draw_tokens(logits, uniform, params)
    rolled = logits.float().roll(1, dims=1)
    processed = draw_tokens(logits, uniform, params, process=rolled.__getitem__)
    monkeypatch.setattr(sampler, "CPU_CHUNK_ELEMENTS", 3001 * 4)
    assert all(map(torch.equal, draw_tokens(logits, uniform, params), at_once))
    assert all(map(torch.equal, draw_tokens(logits, uniform, params, process=rolled.__getitem__), processed))
