"""The `hf` rollout against `model.generate` and a plain forward pass; its sampler; the versions of its weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, DataError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, fingerprint, make_rollout
from hybridrl.workers.rollout.hf import _new_cache, places_after_drop
from hybridrl.workers.rollout.sampling.sampler import default_seeds, draw_tokens, sequence_keys, uniforms
from hybridrl.workers.weight_transfer import OutgoingWeights, buckets
from hybridrl.workers.weight_transfer import fingerprint as hash_functions

VOCAB, PAD, PROMPT, RESPONSE = 64, 0, 12, 16

# Large initial weights, so that the next token depends on the prompt and greedy decoding does not repeat one token.
SMALL = {"vocab_size": VOCAB, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None}
ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, **ROTARY, tie_word_embeddings=True, max_position_embeddings=64),
    "llama": LlamaConfig(**SMALL, **ROTARY, tie_word_embeddings=False, max_position_embeddings=64),
    "gpt2": GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory) -> dict[str, str]:
    paths = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        paths[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config).save_pretrained(paths[name])
    return paths


@pytest.fixture
def start(model_paths):
    def start(name="qwen2", *, eos=(), load_format="auto", **config):
        setup = RolloutSetup(
            model_paths[name], RolloutConfig(**config), tuple(eos), PAD, PROMPT, RESPONSE, load_format=load_format
        )
        return make_rollout("hf", setup)

    return start


def plain_model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def prompts_of(num_rows: int, *, width: int = PROMPT, seed: int = 1) -> DataProto:
    """Prompts of 1 to PROMPT tokens, padded on the left to `width`; the tokens of a row do not depend on the width."""
    rng = np.random.default_rng(seed)
    ids = torch.full((num_rows, width), PAD)
    mask = torch.zeros(num_rows, width, dtype=torch.int64)
    for row in range(num_rows):
        length = int(rng.integers(1, PROMPT + 1))
        ids[row, width - length :] = torch.from_numpy(rng.integers(3, VOCAB, length))
        mask[row, width - length :] = 1
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(num_rows) + 100,
    }
    return DataProto.from_dict(
        tensors=columns, non_tensors={"uid": np.array([f"p{row}" for row in range(num_rows)], dtype=object)}
    )


def forward_log_probs(model: torch.nn.Module, batch: DataProto, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) of the responses (S, R), from one plain forward pass."""
    with torch.no_grad():
        logits = model(
            input_ids=batch.batch["input_ids"],
            attention_mask=batch.batch["attention_mask"],
            position_ids=batch.batch["position_ids"],
        ).logits
    width = batch.batch["responses"].shape[1]
    log_probs = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, batch.batch["responses"][..., None]).squeeze(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(start, model_paths, name):
    free = start(name).generate(prompts_of(6), SamplingParams(RESPONSE, do_sample=False)).batch["responses"]
    eos = (int(free[0, 3]), int(free[1, 6]))
    prompts = prompts_of(6)
    ours = start(name, eos=eos).generate(prompts, SamplingParams(RESPONSE, do_sample=False)).batch
    assert (ours["response_mask"].sum(-1) < RESPONSE).any()
    for row in range(6):
        ids = prompts.batch["input_ids"][row][prompts.batch["attention_mask"][row].bool()][None]
        theirs = plain_model(model_paths[name]).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=RESPONSE,
            eos_token_id=list(eos),
            pad_token_id=PAD,
        )
        assert ours["responses"][row][ours["response_mask"][row].bool()].tolist() == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_does_not_copy_the_head_for_every_prompt(start, name):
    rollout, num_prompts = start(name, dtype="bfloat16"), 128
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        rollout.generate(prompts_of(num_prompts), SamplingParams(1, do_sample=False))
    largest = max(event.cpu_memory_usage for event in profiled.events() if not event.cpu_children)
    assert largest < num_prompts * VOCAB * 32 * 2  # torch copied the head (64, 32) once per prompt


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_new_token_attends_without_copies_of_keys_for_every_query_head(start, name):
    rollout = start(name)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        rollout.generate(prompts_of(8), SamplingParams(4, do_sample=False))
    calls = [
        event.input_shapes[:2] for event in profiled.events() if event.name == "aten::scaled_dot_product_attention"
    ]
    heads = {key[1] for query, key in calls if query[2] < key[2]}  # fewer queries than keys: not the prefill
    assert heads == {CONFIGS[name].num_key_value_heads}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}], ids=str
)
def test_log_probs_are_those_of_a_plain_forward(start, model_paths, name, sampling, record_property):
    batch = start(name, eos=(5, 9)).generate(prompts_of(8), SamplingParams(RESPONSE, n=3, **sampling))
    expected = forward_log_probs(plain_model(model_paths[name]), batch, sampling.get("temperature", 1.0))
    mask = batch.batch["response_mask"].bool()
    difference = (batch.batch["rollout_log_probs"] - expected)[mask].abs().max().item()
    record_property("max_difference", difference)
    assert difference < 1e-4
    assert batch.batch["rollout_log_probs"][~mask].eq(0).all()


def test_a_response_ends_with_its_first_eos_and_is_padded_after_it(start):
    eos = (5, 9, 11)
    free = start().generate(prompts_of(8), SamplingParams(RESPONSE, n=4))
    stopped = start(eos=eos).generate(prompts_of(8), SamplingParams(RESPONSE, n=4))
    assert stopped.batch["response_mask"].sum() < free.batch["response_mask"].sum() == 8 * 4 * RESPONSE
    for tokens, reference, mask in zip(
        stopped.batch["responses"].tolist(),
        free.batch["responses"].tolist(),
        stopped.batch["response_mask"].tolist(),
        strict=True,
    ):
        length = next((index + 1 for index, token in enumerate(reference) if token in eos), RESPONSE)
        assert tokens == reference[:length] + [PAD] * (RESPONSE - length)
        assert mask == [1] * length + [0] * (RESPONSE - length)


def test_ignore_eos_continues_after_an_eos(start):
    batch = start(eos=range(VOCAB)).generate(prompts_of(3), SamplingParams(RESPONSE, ignore_eos=True))
    assert batch.batch["response_mask"].all()


def test_samples_do_not_depend_on_the_rest_of_the_batch(start):
    """Order, subset, padding, number of sequences decoded together and number of samples change nothing.

    In float32, with responses of different lengths.
    """
    rollout, sampling = start(eos=(5, 9, 11)), SamplingParams(RESPONSE, n=4)
    whole = rollout.generate(prompts_of(10), sampling).batch["responses"].reshape(10, 4, RESPONSE)
    order = [7, 2, 9, 0, 4]
    others = {
        "subset in another order": (rollout.generate(prompts_of(10).select_idxs(order), sampling), whole[order]),
        "one row alone": (rollout.generate(prompts_of(10).slice(3, 4), sampling), whole[3:4]),
        "3 at a time": (start(eos=(5, 9, 11), max_num_seqs=3).generate(prompts_of(10), sampling), whole),
        "two of four samples": (rollout.generate(prompts_of(10), SamplingParams(RESPONSE, n=2)), whole[:, :2]),
    }
    for what, (batch, expected) in others.items():
        assert torch.equal(batch.batch["responses"].reshape(expected.shape), expected), what
    wide = make_rollout(
        "hf", RolloutSetup(rollout.setup.model_path, RolloutConfig(), (5, 9, 11), PAD, PROMPT + 9, RESPONSE)
    )
    padded = wide.generate(prompts_of(10, width=PROMPT + 9), sampling).batch["responses"]
    assert torch.equal(padded.reshape(whole.shape), whole), "more padding"


def test_samples_and_seeds_differ(start):
    prompts = prompts_of(1)
    samples = start().generate(prompts, SamplingParams(RESPONSE, n=8)).batch["responses"]
    assert len({tuple(row) for row in samples.tolist()}) == 8
    prompts.batch["seeds"] += 1
    assert not torch.equal(samples, start().generate(prompts, SamplingParams(RESPONSE, n=8)).batch["responses"])


def test_without_a_seeds_column_the_samples_depend_on_the_seed_of_the_call(start):
    prompts = prompts_of(4).select(batch_keys=["input_ids", "attention_mask", "position_ids"])
    first, repeated, other = (
        start().generate(prompts, SamplingParams(RESPONSE, seed=seed)).batch["responses"] for seed in (3, 3, 4)
    )
    assert torch.equal(first, repeated) and not torch.equal(first, other)


def test_the_batch_has_the_columns_that_training_reads(start):
    prompts = prompts_of(3)
    prompts.batch["extra"] = torch.arange(3)
    batch = start(eos=(5, 9)).generate(prompts, SamplingParams(RESPONSE, n=2))
    columns = batch.batch
    assert len(batch) == 6 and batch.non_tensor_batch["uid"].tolist() == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert columns["extra"].tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(columns["input_ids"], torch.cat([columns["prompts"], columns["responses"]], 1))
    assert torch.equal(columns["prompts"], prompts.batch["input_ids"].repeat_interleave(2, 0))
    assert torch.equal(columns["attention_mask"][:, PROMPT:], columns["response_mask"])
    lengths = prompts.batch["attention_mask"].sum(-1).repeat_interleave(2)
    assert torch.equal(columns["position_ids"][:, PROMPT:], lengths[:, None] + torch.arange(RESPONSE))
    assert columns["weights_version"].tolist() == [0] * 6
    assert prompts.batch["input_ids"].shape == (3, PROMPT)


def test_no_prompts_give_no_rows_with_the_same_columns(start):
    rollout = start()
    some, none = (rollout.generate(prompts_of(2).slice(0, rows), SamplingParams(RESPONSE, n=2)) for rows in (2, 0))
    assert len(none) == 0
    assert {key: (column.shape[1:], column.dtype) for key, column in none.batch.items()} == {
        key: (column.shape[1:], column.dtype) for key, column in some.batch.items()
    }


def test_generating_preserves_the_global_random_state(start):
    state = torch.get_rng_state()
    start(load_format="dummy").load_weights(1, start()._model.state_dict().items())
    start().generate(prompts_of(2), SamplingParams(4))
    assert torch.equal(state, torch.get_rng_state())


def test_invalid_calls_and_setups_raise_errors_that_name_the_setting(start, model_paths):
    with pytest.raises(ValueError, match="max_new_tokens=17"):
        start().generate(prompts_of(1), SamplingParams(RESPONSE + 1))
    with pytest.raises(DataError, match="max_prompt_length"):
        start().generate(prompts_of(1, width=PROMPT + 1), SamplingParams(1))
    empty = prompts_of(2)
    empty.batch["attention_mask"] = torch.zeros_like(empty.batch["attention_mask"])
    with pytest.raises(DataError, match="no token"):
        start().generate(empty, SamplingParams(1))
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        make_rollout("hf", RolloutSetup(model_paths["qwen2"], RolloutConfig(), (), PAD, 60, 5))
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        make_rollout("vlm", RolloutSetup(model_paths["qwen2"], RolloutConfig(), (), PAD, 1, 1))
    with pytest.raises(ValueError, match="do_sample=False"):
        SamplingParams(4, temperature=0.0)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("axis", ["step", "sample", "seed"])
def test_uniform_numbers_are_uniform_and_independent_along_every_axis(axis):
    """Pairs of neighbours on a 16 x 16 grid: 255 degrees of freedom, chi-square below 347 with probability 0.9999."""
    count = 100_000
    if axis == "step":
        numbers = uniforms(sequence_keys(torch.tensor([0]), 1).expand(count), torch.arange(count))
    elif axis == "sample":
        numbers = uniforms(sequence_keys(torch.tensor([0]), count), 0)
    else:
        numbers = uniforms(sequence_keys(torch.arange(count), 1), 0)
    assert numbers.min() >= 0 and numbers.max() < 1
    cells = (numbers[:-1] * 16).long() * 16 + (numbers[1:] * 16).long()
    assert chi_square(cells.bincount(minlength=256).double(), torch.full((256,), (count - 1) / 256).double()) < 347


def test_row_seeds_of_neighbouring_seeds_do_not_collide():
    assert len(torch.cat([default_seeds(seed, 1000) for seed in range(20)]).unique()) == 20_000


def test_tokens_are_drawn_with_their_probability():
    """8 tokens, 40 000 draws: 7 degrees of freedom, chi-square below 30 with probability 0.9999."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    count = 40_000
    numbers = uniforms(sequence_keys(torch.arange(count // 8), 8), 3)
    for temperature in (1.0, 0.5):
        tokens, _ = draw_tokens(logits.expand(count, -1), numbers, SamplingParams(1, temperature=temperature))
        expected = (logits / temperature).softmax(-1).double() * count
        assert chi_square(tokens.bincount(minlength=8).double(), expected) < 30


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ({"top_k": 2}, {3: 1 / 2, 0: 1 / 4}),
        ({"top_k": 99}, {3: 1 / 2, 0: 1 / 4, 1: 3 / 16, 2: 1 / 16}),
        ({"top_p": 0.5}, {3: 1 / 2}),  # exactly one half is reached by the first token alone
        ({"top_p": 0.51}, {3: 1 / 2, 0: 1 / 4}),
        ({"top_k": 3, "top_p": 0.8}, {3: 1 / 2, 0: 1 / 4}),  # of the three: 8/15, 4/15, 3/15; the first two reach 0.8
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_likeliest_and_log_probs_stay_untruncated(truncation, kept):
    probs = torch.tensor([1 / 4, 3 / 16, 1 / 16, 1 / 2])
    count = 20_000
    tokens, log_probs = draw_tokens(
        probs.log().expand(count, -1),
        uniforms(sequence_keys(torch.arange(count), 1), 0),
        SamplingParams(1, **truncation),
    )
    assert set(tokens.tolist()) == set(kept)
    total = sum(kept.values())
    for token, prob in kept.items():
        assert (tokens == token).float().mean().item() == pytest.approx(prob / total, abs=0.015)
    assert torch.allclose(log_probs, probs.log()[tokens], atol=1e-6)


def changed(path: str, scale: float = 0.5) -> torch.nn.Module:
    model = plain_model(path)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_uses_the_pushed_weights(start, model_paths, name):
    rollout, model = start(name, load_format="dummy"), changed(model_paths[name])
    with pytest.raises(StaleWeightsError, match="load_weights"):
        rollout.generate(prompts_of(2), SamplingParams(4))
    tied_and_all = list(model.state_dict().items())  # a tied lm_head has both names
    rollout.load_weights(5, iter(tied_and_all))
    assert rollout.health().version == 5
    assert rollout.health().fingerprint == fingerprint(model.named_parameters(), torch.float32)
    batch = rollout.generate(prompts_of(4), SamplingParams(RESPONSE, n=2))
    assert batch.batch["weights_version"].tolist() == [5] * 8
    assert (batch.batch["rollout_log_probs"] - forward_log_probs(model, batch, 1.0)).abs().max() < 1e-4


def test_an_incomplete_push_is_stale_until_a_complete_one(start, model_paths):
    rollout, model = start(), changed(model_paths["qwen2"])
    weights = list(model.named_parameters())
    with pytest.raises(StaleWeightsError, match=r"1 of its weights .*down_proj.* \(version 0 before"):
        rollout.load_weights(2, weights[:10] + weights[11:])
    with pytest.raises(StaleWeightsError):
        rollout.generate(prompts_of(1), SamplingParams(1))
    assert rollout.health().version is None
    rollout.load_weights(3, weights)
    assert rollout.generate(prompts_of(1), SamplingParams(1)).batch["weights_version"].tolist() == [3]


def test_a_push_with_a_wrong_name_or_shape_fails_after_the_iterator_is_exhausted(start, model_paths):
    weights = list(changed(model_paths["qwen2"]).named_parameters())
    for wrong, error in ((("nonsense", torch.ones(1)), KeyError), ((weights[0][0], torch.ones(1)), ValueError)):
        rollout, iterator = start(), iter([wrong, *weights])
        with pytest.raises(error, match=wrong[0]):
            rollout.load_weights(1, iterator)
        assert next(iterator, None) is None
        assert rollout.health().version is None


def test_health_detects_weights_damaged_after_the_push(start):
    rollout = start()
    with torch.no_grad():
        rollout._model.model.layers[1].mlp.down_proj.weight[3, 4] += 1e-6
    assert rollout.health().version is None
    with pytest.raises(StaleWeightsError, match="damage"):
        rollout.generate(prompts_of(1), SamplingParams(1))


def test_fingerprint_is_independent_of_layout_and_depends_on_every_element():
    torch.manual_seed(0)
    q, k, v, norm = torch.randn(64, 32), torch.randn(32, 32), torch.randn(32, 32), torch.ones(32)
    weights = {"q": q, "k": k, "v": v, "norm": norm}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        reference = fingerprint(weights.items(), dtype)
        fused = {"norm": norm, "qkv": torch.cat([q, k, v]), "norm2": norm}
        assert fingerprint(fused.items(), dtype) == reference, "order, names, fusing, shared memory"
        halves = {
            "a": q[:, :16].clone(),
            "b": q[:, 16:].clone(),
            "k": k,
            "v": v.t(),
            "norm": torch.cat([norm, torch.zeros(96)]),
        }
        assert fingerprint(halves.items(), dtype) == reference, "shards, transposed, zero rows"
        assert fingerprint({**weights, "norm": norm.clone(), "copy": norm.clone()}.items(), dtype) != reference, (
            "a second copy"
        )
        assert fingerprint({"q": q, "k": k, "v": v}.items(), dtype) != reference, "one missing"


def test_fingerprint_of_chunks_is_the_sum_of_murmurs_finalizer_over_the_elements():
    def finalizer(bits: int) -> int:
        """As signed 32-bit number: Murmur's mix without its first shift and its last."""
        for multiplier, shift in ((0x85EBCA6B, 15), (0xC2B2AE35, 13)):
            bits = bits * multiplier % (1 << 32)
            bits ^= bits >> shift
        return bits - (bits >> 31 << 32)

    weights = torch.randn(70, 1000, generator=torch.Generator().manual_seed(1))  # more than one chunk
    for dtype, signed in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        numbers = weights.to(dtype).view(signed).flatten().tolist()
        expected = sum(finalizer(number % (1 << 32)) for number in numbers) % (1 << 64)
        assert fingerprint([("w", weights)], dtype) == expected
        assert fingerprint([("w", weights.t())], dtype) == expected, "not contiguous"


def test_a_push_reads_the_weights_once_at_each_end(start, model_paths, monkeypatch):
    rollout, model = start(), plain_model(model_paths["qwen2"])
    weights = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    hashed = []

    def counting(tensor, dtype, hash_of=hash_functions.tensor_hash):
        hashed.append(tensor.numel())
        return hash_of(tensor, dtype)

    for module in (hash_functions, buckets):
        monkeypatch.setattr(module, "tensor_hash", counting)
    once = sum(tensor.numel() for _, tensor in weights)
    health = rollout.load_weights(1, weights)  # in one process: the actor's weights, then the engine's own
    assert sum(hashed) == 2 * once
    sent = OutgoingWeights(weights, torch.float32)
    assert rollout.load_weights(2, sent, sent=lambda: sent.fingerprint) == replace(health, version=2)
    assert sum(hashed) == 4 * once  # the sender's, and the engine's own
    damaged = ((name, tensor + (name.endswith("norm.weight"))) for name, tensor in weights)
    with pytest.raises(StaleWeightsError, match="the engine holds"):
        rollout.load_weights(3, damaged, sent=lambda: sent.fingerprint)
    with pytest.raises(StaleWeightsError, match="without 1 of its weights"):
        rollout.load_weights(4, weights[1:], sent=lambda: sent.fingerprint)


def test_fingerprint_detects_one_bit_and_a_change_that_keeps_the_sum_of_the_bits():
    torch.manual_seed(0)
    weight = torch.randn(64, 32)
    one_bit, moved = weight.clone().view(torch.int32), weight.clone().view(torch.int32)
    one_bit[5, 7] ^= 1
    moved[0, 0] += 1
    moved[0, 1] -= 1
    all_bits = (weight.view(torch.int32), one_bit, moved)
    assert len({fingerprint([("w", bits.view(torch.float32))], torch.float32) for bits in all_bits}) == 3


def test_finished_rows_make_room_and_only_rows_behind_them_move():
    # places 1, 2 and 5 are finished; 3 of 6 rows are left: 0 stays, 3 and 4 move into the places of 1 and 2
    finished = torch.tensor([False, True, True, False, False, True])
    assert places_after_drop(finished).tolist() == [0, 3, 4]
    assert places_after_drop(torch.tensor([False, False, True])).tolist() == [0, 1]


def test_a_cache_keeps_the_tokens_of_the_rows_that_are_left_and_reserves_no_more_than_a_response_needs(model_paths):
    layer = _new_cache(AutoConfig.from_pretrained(next(iter(model_paths.values()))), max_tokens=7).layers[0]
    states = torch.arange(4 * 5, dtype=torch.float32).view(4, 1, 5, 1)
    layer.update(states, -states)
    layer.batch_select_indices(torch.tensor([0, 1, 2, 3]))
    layer.keep_rows(torch.tensor([0, 3]))
    keys, values = layer.update(torch.full((2, 1, 2, 1), 99.0), torch.full((2, 1, 2, 1), -99.0))
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3, 4, 99, 99], [15, 16, 17, 18, 19, 99, 99]]
    assert torch.equal(values, -keys) and layer._stores[0].shape[-2] == 7
