"""The FSDP2 engine on one rank, against plain Hugging Face models and against itself with other splits."""

import logging
from dataclasses import replace

import pytest
import torch

from hybridrl.errors import CheckpointError, ConfigError, DataError
from hybridrl.workers.engine.base import MicroBatching
from tests.support.workers.engine_cases import (
    OPTIM,
    VOCAB,
    WHOLE,
    assert_same_weights,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    plain_outputs,
    policy_loss,
    save_scorer,
    save_tiny_qwen2,
    train,
    whole_weights,
)

pytestmark = pytest.mark.usefixtures("process_group")

POLICY = ("log_probs", "entropy")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def families(tmp_path_factory, qwen2) -> dict[str, str]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("families")
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=False)).save_pretrained(
        folder / "llama"
    )
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        folder / "gpt2"
    )
    window = dict(
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    save_tiny_qwen2(folder / "sliding", **window)
    save_tiny_qwen2(folder / "untied", tied=False)
    return {name: str(folder / name) for name in ("llama", "gpt2", "sliding", "untied")} | {"tied": qwen2}


def plain_model(path: str, kind: str = "AutoModelForCausalLM", **settings):
    import transformers

    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32, **settings).eval()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["tied", "untied", "llama", "gpt2", "sliding"])
def test_log_probs_and_entropy_are_those_of_the_plain_model(families, family, packed):
    batch = make_batch()
    engine = make_engine(families[family], packed=packed, temperature=0.7)
    found = engine.forward(batch, MicroBatching(max_rows=5), outputs=POLICY)
    with torch.no_grad():
        expected = plain_outputs(plain_model(families[family]), batch, temperature=0.7)
    for name in POLICY:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_eager_attention_gives_the_same_log_probs(qwen2, packed):
    batch = make_batch()
    eager = make_engine(qwen2, packed=packed, override_config={"attn_implementation": "eager"})
    found = eager.forward(batch, MicroBatching(max_rows=7), outputs=("log_probs",))["log_probs"]
    expected = make_engine(qwen2).forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_two_clipped_steps_are_those_of_a_plain_training_loop(qwen2):
    batch, num_tokens = make_batch(), 80.0
    model = plain_model(qwen2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)
    engine = make_engine(qwen2, grad_clip=0.3)
    for _ in range(2):
        policy_loss(num_tokens)(plain_outputs(model, batch), batch)[0].backward()
        engine.forward_backward(batch, MicroBatching(max_rows=5), policy_loss(num_tokens), outputs=POLICY)
        for name, gradient in gradients(engine).items():
            torch.testing.assert_close(gradient, dict(model.named_parameters())[name].grad, atol=1e-6, rtol=0)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert norm > 0.3
        assert engine.optimizer_step()["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(whole_weights(engine), dict(model.named_parameters()), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "micro"),
    [
        ({}, MicroBatching(max_rows=1)),
        ({}, MicroBatching(max_rows=7)),
        ({}, MicroBatching(max_tokens=40)),
        ({"packed": True}, MicroBatching(max_tokens=40)),
        ({"packed": True}, WHOLE),
        ({"reshard_after_forward": False}, MicroBatching(max_rows=7)),
        ({"gradient_checkpointing": True, "packed": True}, MicroBatching(max_rows=7)),
        ({"param_offload": True, "optimizer_offload": True}, WHOLE),
    ],
    ids=str,
)
def test_any_split_and_layout_gives_the_same_two_steps(qwen2, settings, micro):
    batch = make_batch()
    reference, engine = make_engine(qwen2), make_engine(qwen2, **settings)
    num_tokens = num_response_tokens(batch)
    expected = train(reference, batch, WHOLE, num_tokens=num_tokens)
    reports = train(engine, batch, micro, num_tokens=num_tokens)
    assert [step["grad_norm"] for step in reports] == pytest.approx([step["grad_norm"] for step in expected], rel=1e-5)
    assert_same_weights(whole_weights(engine), whole_weights(reference), atol=1e-6)


def test_gradients_add_up_over_calls(qwen2):
    batch, loss = make_batch(), policy_loss(80.0)
    whole, halves = make_engine(qwen2), make_engine(qwen2)
    whole.forward_backward(batch, WHOLE, loss, outputs=POLICY)
    for half in batch.chunk(2):
        halves.forward_backward(half, WHOLE, loss, outputs=POLICY)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(halves)[name], gradient, atol=1e-6, rtol=0)


def test_stats_come_per_micro_batch_and_add_up(qwen2):
    batch = make_batch()
    engine = make_engine(qwen2)
    pieces = engine.forward_backward(batch, MicroBatching(max_rows=10), policy_loss(80.0), outputs=POLICY)
    whole = engine.forward_backward(batch, WHOLE, policy_loss(80.0), outputs=POLICY)
    assert [piece["rows"] for piece in pieces] == [10.0, 10.0, 4.0]
    assert sum(piece["loss"] for piece in pieces) == pytest.approx(whole[0]["loss"], abs=1e-6)


def test_training_computes_with_the_log_probs_that_forward_returns_even_with_dropout_in_the_config(qwen2):
    batch = make_batch()
    engine = make_engine(qwen2, override_config={"attention_dropout": 0.5})
    before = engine.forward(batch, MicroBatching(max_rows=4), outputs=("log_probs",))["log_probs"]
    seen = torch.zeros_like(before)

    def loss_fn(outputs, rows):
        seen[rows.batch["number"]] = outputs["log_probs"].detach()
        return outputs["log_probs"].sum(), {}

    batch.batch["number"] = torch.arange(len(batch))
    engine.forward_backward(batch, MicroBatching(max_rows=4), loss_fn, outputs=("log_probs",))
    assert torch.equal(seen, before)


def test_forward_after_an_update_uses_the_new_weights(qwen2):
    batch = make_batch()
    engine = make_engine(qwen2, reshard_after_forward=False)
    engine.forward_backward(batch, WHOLE, policy_loss(80.0), outputs=POLICY)
    before = engine.forward(batch, WHOLE, outputs=("log_probs",))[
        "log_probs"
    ]  # gathers parameters between gradient and step
    engine.optimizer_step()
    assert not torch.equal(engine.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"], before)


@pytest.mark.parametrize("packed", [False, True])
def test_the_computed_tokens_never_exceed_the_token_budget(qwen2, packed):
    batch = make_batch(60)
    engine = make_engine(qwen2, packed=packed, whole_logits=True)
    computed, logits = [], []
    engine.model.model.embed_tokens.register_forward_hook(lambda module, args, out: computed.append(args[0].numel()))
    engine.model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.shape[:-1].numel()))
    engine.forward(batch, MicroBatching(max_tokens=50), outputs=("log_probs",))
    engine.forward_backward(batch, MicroBatching(max_tokens=50), policy_loss(80.0), outputs=POLICY)
    real = int(batch.batch["attention_mask"].sum())
    assert max(computed) <= 50
    assert sum(computed) == 2 * real if packed else 2 * real <= sum(computed) < 2.4 * real
    assert sum(logits) == 2 * num_response_tokens(batch)  # the head sees response tokens only


def test_a_row_longer_than_the_budget_is_refused(qwen2):
    with pytest.raises(DataError, match="tokens"):
        make_engine(qwen2).forward(make_batch(), MicroBatching(max_tokens=4), outputs=("log_probs",))


def test_recomputed_blocks_run_twice_and_give_the_same_gradients(qwen2):
    batch = make_batch()
    plain, saving = make_engine(qwen2), make_engine(qwen2, gradient_checkpointing=True)
    runs = []
    saving.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for engine in (plain, saving):
        engine.forward_backward(batch, WHOLE, policy_loss(80.0), outputs=POLICY)
    assert len(runs) == 2
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(saving)[name], gradient), name


def test_bfloat16_computes_in_bfloat16_and_updates_float32(qwen2):
    batch = make_batch()
    exact, engine = make_engine(qwen2), make_engine(qwen2, dtype="bfloat16")
    dtypes = []
    engine.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    found = engine.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    expected = exact.forward(batch, WHOLE, outputs=("log_probs",))["log_probs"]
    assert 0 < (found - expected).abs().max() < 0.1
    train(engine, batch, MicroBatching(max_rows=7), num_tokens=80.0)
    assert dtypes[0] == torch.bfloat16
    assert {tensor.dtype for tensor in whole_weights(engine).values()} == {torch.float32}
    assert {tensor.dtype for tensor in whole_weights(make_engine(qwen2, dtype="bfloat16", optim=None)).values()} == {
        torch.bfloat16
    }


@pytest.mark.parametrize(("kind", "optim"), [("value", OPTIM), ("value", None), ("score", None)])
def test_values_and_scores_of_a_bfloat16_model_have_float32s_digits(qwen2, tmp_path, kind, optim):
    engine = make_engine(save_scorer(qwen2, tmp_path), kind=kind, optim=optim, dtype="bfloat16")
    (name,) = ("values",) if kind == "value" else ("scores",)
    found = engine.forward(make_batch(), WHOLE, outputs=(name,))[name]
    found = found[found != 0]
    rounded = found.bfloat16().float()
    assert (found != rounded).float().mean() > 0.9
    exact = make_engine(str(tmp_path), kind=kind, optim=None).forward(make_batch(), WHOLE, outputs=(name,))[name]
    torch.testing.assert_close(found, exact[exact != 0], atol=0.05, rtol=0.05)


def test_a_gradient_that_is_not_finite_is_reported_and_changes_nothing(qwen2, caplog):
    batch = make_batch()
    engine = make_engine(qwen2)
    train(engine, batch, WHOLE, num_tokens=80.0, steps=1)
    before = whole_weights(engine)
    engine.forward_backward(
        batch, WHOLE, lambda outputs, rows: (outputs["log_probs"].sum() * torch.nan, {}), outputs=POLICY
    )
    reports = engine.optimizer_step()
    assert reports["skipped"] == 1.0
    assert "Skipped the optimizer step" in caplog.text
    assert_same_weights(whole_weights(engine), before, atol=0.0)
    assert train(engine, batch, WHOLE, num_tokens=80.0, steps=1)[0]["skipped"] == 0.0


def test_weights_have_hugging_face_names_and_values_tied_ones_once(families):
    for family in ("tied", "untied", "gpt2"):
        expected = plain_model(families[family]).state_dict()
        if family != "untied":
            expected.pop("lm_head.weight")
        found = whole_weights(make_engine(families[family]))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_values_are_the_value_models_at_the_state_before_each_response_token(qwen2, caplog):
    batch, micro = make_batch(), MicroBatching(max_rows=5)
    with caplog.at_level(logging.INFO):
        engine = make_engine(qwen2, kind="value", packed=True)
    assert caplog.text.count("has no value head") == 1
    model = plain_model(qwen2, "AutoModelForTokenClassification", num_labels=1)
    model.load_state_dict(whole_weights(engine))
    found = engine.forward(batch, micro, outputs=("values",))["values"]
    for i in range(len(batch)):
        real = batch.batch["attention_mask"][i].bool()
        first = int(real[:-7].sum())
        states = model(input_ids=batch.batch["input_ids"][i][real][None]).logits[0, first - 1 : -1, 0]
        expected = torch.zeros(7)
        expected[: len(states)] = states
        torch.testing.assert_close(found[i], expected * batch.batch["response_mask"][i], atol=1e-5, rtol=0)
    head = [whole_weights(make_engine(qwen2, kind="value", seed=seed))["score.weight"] for seed in (0, 0, 1)]
    assert torch.equal(head[0], head[1])
    assert not torch.equal(head[0], head[2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pad_token_id", [None, 5])
def test_a_score_is_read_at_a_rows_last_token_whatever_the_pad_token_is(tmp_path, packed, pad_token_id):
    path = save_scorer(save_tiny_qwen2(tmp_path / "policy", pad_token_id=pad_token_id), tmp_path / "scorer")
    batch = make_batch()
    batch.batch["input_ids"][:, -7] = 5  # a real token that is also the pad token ends many rows
    engine = make_engine(path, kind="score", optim=None, packed=packed)
    model = plain_model(path, "AutoModelForSequenceClassification", num_labels=1)
    model.load_state_dict(whole_weights(engine))
    found = engine.forward(batch, MicroBatching(max_rows=5), outputs=("scores",))["scores"]
    for i in range(len(batch)):
        ids = batch.batch["input_ids"][i][batch.batch["attention_mask"][i].bool()]
        state = model.model(input_ids=ids[None]).last_hidden_state[0, -1]
        torch.testing.assert_close(found[i], model.score(state)[0], atol=1e-5, rtol=0)


def test_a_reward_model_without_a_head_is_refused(qwen2):
    with pytest.raises(
        CheckpointError, match="score.weight; it is not a trained reward model.*reward_model.model.path"
    ):
        make_engine(qwen2, kind="score", optim=None)


def test_an_empty_batch_gives_empty_outputs(qwen2, tmp_path):
    empty = make_batch().select_idxs([])
    assert make_engine(qwen2).forward(empty, WHOLE, outputs=POLICY)["entropy"].shape == (0, 7)
    engine = make_engine(qwen2)
    assert engine.forward_backward(empty, WHOLE, policy_loss(1.0), outputs=POLICY) == []
    assert engine.optimizer_step()["grad_norm"] == 0.0
    scorer = save_scorer(qwen2, tmp_path)
    assert make_engine(scorer, kind="score", optim=None).forward(empty, WHOLE, outputs=("scores",))["scores"].shape == (
        0,
    )


@pytest.mark.parametrize("offload", [False, True])
def test_a_loaded_engine_continues_bit_by_bit_as_the_saved_one(qwen2, tmp_path, offload):
    batch, num_tokens = make_batch(), 80.0
    saved = make_engine(qwen2, param_offload=offload, optimizer_offload=offload)
    train(saved, batch, WHOLE, num_tokens=num_tokens)
    saved.save(str(tmp_path))
    drawn = torch.rand(3)
    reports = train(saved, batch, WHOLE, num_tokens=num_tokens)
    loaded = make_engine(qwen2, param_offload=offload, optimizer_offload=offload)
    loaded.load(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    assert train(loaded, batch, WHOLE, num_tokens=num_tokens) == reports
    expected = whole_weights(saved)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_weights(loaded).items())


def test_an_engine_saved_or_loaded_before_its_first_step_trains_as_one_that_was_not(qwen2, tmp_path):
    batch = make_batch()
    untouched, saved, loaded = (make_engine(qwen2) for _ in range(3))
    saved.save(str(tmp_path))
    loaded.load(str(tmp_path))
    for engine in (untouched, saved, loaded):
        train(engine, batch, WHOLE, num_tokens=80.0, steps=2)
    expected = whole_weights(untouched)
    for engine in (saved, loaded):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_weights(engine).items())


def test_a_loaded_engine_trains_with_its_own_settings(qwen2, tmp_path):
    batch = make_batch()
    saved, other = make_engine(qwen2), make_engine(qwen2, optim=replace(OPTIM, weight_decay=0.5))
    train(saved, batch, WHOLE, num_tokens=80.0)
    saved.save(str(tmp_path))
    other.load(str(tmp_path))
    before = whole_weights(saved)
    for engine in (saved, other):
        train(engine, batch, WHOLE, num_tokens=80.0, steps=1)
    # AdamW takes lr * weight_decay * weight off, apart from the gradient: 1e-4 * (0.5 - 0.1) more
    for name, tensor in whole_weights(other).items():
        torch.testing.assert_close(whole_weights(saved)[name] - tensor, 4e-5 * before[name], atol=1e-6, rtol=0)


def test_loading_an_empty_directory_is_an_error(qwen2, tmp_path):
    with pytest.raises(CheckpointError, match="holds no engine state"):
        make_engine(qwen2).load(str(tmp_path))


def test_loading_the_checkpoint_of_another_model_is_an_error(qwen2, families, tmp_path):
    make_engine(qwen2).save(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be read into this model"):
        make_engine(families["llama"]).load(str(tmp_path))


def test_overrides_are_applied_and_an_unknown_one_names_the_nearest(qwen2):
    engine = make_engine(qwen2, override_config={"rms_norm_eps": 0.5})
    assert engine.model.config.rms_norm_eps == 0.5
    with pytest.raises(ConfigError, match="model.override_config.rms_norm_esp=0.5.*nearest is rms_norm_eps"):
        make_engine(qwen2, override_config={"rms_norm_esp": 0.5})
    with pytest.raises(ConfigError, match="atn_implementation='eager'.*nearest is attn_implementation"):
        make_engine(qwen2, override_config={"atn_implementation": "eager"})


def test_a_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model.path="):
        make_engine(str(tmp_path / "nothing"))


def test_a_checkpoint_without_some_of_its_body_is_refused(qwen2, tmp_path):
    plain = plain_model(qwen2)
    state = {
        name: tensor
        for name, tensor in plain.state_dict().items()
        if name not in ("model.norm.weight", "lm_head.weight")
    }
    plain.save_pretrained(tmp_path, state_dict=state)
    for kind in ("causal_lm", "value"):
        with pytest.raises(CheckpointError, match="lacks 1 weights .*model.norm.weight"):
            make_engine(str(tmp_path), kind=kind)


def test_a_model_with_layers_that_may_mix_sequences_cannot_be_packed(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="use_remove_padding=True: BloomForCausalLM has attention that does not go"):
        make_engine(str(tmp_path), packed=True)


def test_an_output_of_another_kind_of_model_is_refused(qwen2):
    with pytest.raises(ValueError, match="'causal_lm' computes log_probs, entropy"):
        make_engine(qwen2).forward(make_batch(), WHOLE, outputs=("values",))


def test_the_learning_rate_of_a_step_is_the_schedules(qwen2):
    engine = make_engine(
        qwen2, optim=replace(OPTIM, lr=1.0e-3, lr_scheduler_type="linear", lr_warmup_steps=1), total_steps=3
    )
    rates = [step["lr"] for step in train(engine, make_batch(), WHOLE, num_tokens=80.0, steps=4)]
    assert rates == pytest.approx([1e-3, 1e-3, 5e-4, 0.0])
