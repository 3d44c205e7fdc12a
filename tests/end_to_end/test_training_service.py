"""GRPO by `main_ppo` and by a client's loop over the service give the same numbers."""

import functools

import numpy as np
import pytest

from hybridrl import training_client
from hybridrl.config import PPOConfig, load_config
from hybridrl.trainer.data.prompt_dataset import collate_fn, load_prompt_data
from hybridrl.trainer.data.prompt_loader import StepPrompts
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.training_service.client import datum
from tests.support.end_to_end.runs import settings, train

STEPS, SAMPLES, MAX_TOKENS, LR = 4, 3, 12, 1e-3
ADAM = {"learning_rate": LR, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
OPTIONS = {"max_rank": 0, "max_length": 64, "device": "cpu", "num_threads": 1}


def reward(text):
    """That of `main_ppo` in this test, see `write_reward`: the share of digits."""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def advantages(rewards):
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def client_loop(client, prompts, tokenizer):
    """Steps of GRPO, each as (mean reward, loss, norm of the gradient)."""
    model, found = client.create_model(rank=0), []
    for _ in range(STEPS):
        batch, sampler = prompts.next_batch(), model.sampler()
        rows = zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), batch.batch["seeds"], strict=True)
        prompt_ids = [(ids[mask].tolist(), int(seed)) for ids, mask, seed in rows]
        sampling = {"num_samples": SAMPLES, "max_tokens": MAX_TOKENS}
        pending = [sampler.sample(ids, seed=seed, wait=False, **sampling) for ids, seed in prompt_ids]
        groups = [[sequence.tokens for sequence in one.result().sequences] for one in pending]
        num_tokens = sum(len(tokens) for group in groups for tokens in group)
        texts = [tokenizer.batch_decode(group, skip_special_tokens=True) for group in groups]
        rewards = np.array([[reward(text) for text in group] for group in texts])
        sequences = [
            (len(ids) - 1, [*ids, *tokens])
            for (ids, _), group in zip(prompt_ids, groups, strict=True)
            for tokens in group
        ]
        shifted = [(tokens[:-1], tokens[1:]) for _, tokens in sequences]
        old = model.forward([datum(*one) for one in shifted]).log_probs
        weights = np.concatenate([advantages(group) for group in rewards]) / num_tokens
        data = []
        for (start, _), one, q, weight in zip(sequences, shifted, old, weights, strict=True):
            is_response = np.arange(len(q)) >= start
            data.append(datum(*one, logprobs=q * is_response, advantages=weight * is_response))
        loss = model.forward_backward(data, "ppo").loss
        stepped = model.optim_step(**ADAM)["metrics"]
        found.append((rewards.mean(), loss, stepped["grad_norm:mean"]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_main_ppo_and_a_clients_loop_take_the_same_steps_of_grpo(tmp_path, tiny_qwen2):
    changes = {
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "actor_rollout_ref__actor__optim__lr": LR,
        "trainer__total_training_steps": STEPS,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    rows = train(tmp_path, tiny_qwen2, **changes)[-STEPS:]
    expected = [(row["critic/score/mean"], row["actor/pg_loss"], row["actor/grad_norm"]) for row in rows]

    argv = settings(tmp_path, tiny_qwen2, **changes)
    config = load_config(PPOConfig, argv, program="test", config_name="ppo_trainer")
    tokenizer = load_tokenizer(str(tiny_qwen2), key="model", trust_remote_code=False)
    collate = functools.partial(collate_fn, pad_token_id=tokenizer.pad_token_id)
    loader, _ = load_prompt_data(config.data, tokenizer, None, None, collate, None)
    prompts = StepPrompts(loader, seed=config.trainer.seed)
    with training_client(str(tiny_qwen2), store=str(tmp_path / "store"), **OPTIONS) as client:
        found = client_loop(client, prompts, tokenizer)
    assert len({score for score, _, _ in found}) > 1
    np.testing.assert_allclose(found, expected, rtol=5e-5, atol=2e-6)
