"""A client's GRPO loop and `main_ppo` on the same prompts and seeds: the same samples, rewards and updates."""

import json

import numpy as np
import pyarrow.parquet as pq

from hybridrl.trainer.data.seeds import Purpose, row_seeds
from hybridrl.training_service.client import datum, training_client
from tests.support.end_to_end.runs import train, write_prompts

STEPS, PROMPTS, SAMPLES, RESPONSE = 6, 4, 3, 12
ADAMW = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}


def share_of_digits(text):  # the reward of `train`
    return sum(c.isdigit() for c in text) / max(1, len(text))


def client_step(model, prompts, tokenizer, seeds):
    """Sample groups, update once; return the mean reward, the loss, the gradient's norm and the texts."""
    sampler, rows = model.sampler(), []
    for prompt, seed in zip(prompts, seeds, strict=True):
        group = sampler.sample(prompt, num_samples=SAMPLES, max_tokens=RESPONSE, seed=seed).sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in group]
        rewards = np.array([share_of_digits(text) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        rows += zip([prompt] * SAMPLES, group, advantages, rewards, texts, strict=True)
    num_tokens, data = sum(len(one.tokens) for _, one, *_ in rows), []
    for prompt, one, advantage, *_ in rows:
        tokens, num = [*prompt, *one.tokens], len(one.tokens)
        before = [0.0] * (len(prompt) - 1)
        columns = {"logprobs": [*before, *one.log_probs], "advantages": [*before, *[advantage / num_tokens] * num]}
        data.append(datum(tokens[:-1], tokens[1:], **columns))
    loss = model.forward_backward(data, "importance_sampling").loss
    norm = model.optim_step(**ADAMW)["metrics"]["grad_norm:mean"]
    return [float(np.mean([row[3] for row in rows])), loss, norm], [row[4] for row in rows]


def test_a_clients_loop_and_main_ppo_give_the_same_grpo_curve(tmp_path, tiny_qwen2, tiny_tokenizer):
    steps = train(
        tmp_path / "main",
        tiny_qwen2,
        data__shuffle=False,
        data__train_batch_size=PROMPTS,
        data__train_files=write_prompts(tmp_path / "prompts.parquet", 2 * PROMPTS),
        actor_rollout_ref__actor__ppo_mini_batch_size=PROMPTS,
        actor_rollout_ref__actor__optim__lr=ADAMW["learning_rate"],
        actor_rollout_ref__rollout__n=SAMPLES,
        trainer__seed=5,
        trainer__total_training_steps=STEPS,
        trainer__total_epochs=STEPS,
        trainer__save_freq=-1,
        trainer__test_freq=-1,
        trainer__rollout_data_dir=tmp_path / "samples",
    )
    names = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm")
    expected = [[row[name] for name in names] for row in steps if names[0] in row]
    messages = pq.read_table(tmp_path / "prompts.parquet")["prompt"].to_pylist()
    prompts = [
        tiny_tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in messages
    ]
    options = {"device": "cpu", "num_threads": 1, "max_rank": 0, "max_length": 64}
    with training_client(str(tiny_qwen2), store=str(tmp_path / "store"), **options) as client:
        model, found = client.create_model(rank=0), []
        for step in range(STEPS):
            batch = prompts[step % 2 * PROMPTS :][:PROMPTS]
            seeds = row_seeds(PROMPTS, seed=5, purpose=Purpose.TRAIN_ROLLOUT, step=step + 1).tolist()
            numbers, texts = client_step(model, batch, tiny_tokenizer, seeds)
            found.append(numbers)
            lines = (tmp_path / "samples" / f"{step + 1}.jsonl").read_text().splitlines()
            assert texts == [json.loads(line)["output"] for line in lines]
    assert len(expected) == STEPS
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
