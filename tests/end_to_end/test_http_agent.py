"""A chat agent that knows nothing of training: it sends all messages again in every turn, and is trained."""

import sys

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from tests.support.end_to_end.ports import free_port
from tests.support.end_to_end.runs import metrics, settings

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
pytestmark = pytest.mark.timeout(300)

FUNCTION = """
import openai


async def agent(task):
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "system", "content": "Be brief."}, *task.row["raw_prompt"]]
    for _ in range(2):
        answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=6)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    side = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it right?"}]
    await client.chat.completions.create(model=task.model, messages=side, max_tokens=3)
    return float(len(messages[2]["content"]) % 3)
"""
COMMAND = """
import json, os, openai

client = openai.OpenAI()
row = json.loads(os.environ["HYBRIDRL_ROW"])
messages = [dict(message) for message in row["raw_prompt"]]
for _ in range(2):
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=6)
    messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
client.post("/reward", body={"reward": row["extra_info"]["index"] % 2}, cast_to=str)
"""


def run(tmp_path, tiny_qwen2, program: str, **changes: object) -> list:
    """Train two steps with a program, and return the batches of both steps as the policy was trained on them."""
    batches = []

    class Watching(RayPPOTrainer):
        def update_actor(self, ctx):
            super().update_actor(ctx)
            batches.append(ctx.batch)

    arguments = settings(
        tmp_path,
        tiny_qwen2,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__endpoint_port=free_port(),
        actor_rollout_ref__rollout__agent__default_agent_loop="http_agent",
        actor_rollout_ref__rollout__agent__program=program,
        data__max_prompt_length=96,
        data__max_response_length=40,
        trainer__val_before_train="false",
        trainer__test_freq=-1,
        trainer__save_freq=-1,
        **changes,
    )
    assert main_ppo.main(arguments, trainer_cls=Watching) == 0
    return batches


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_an_async_function_is_trained(tmp_path, tiny_qwen2, tiny_tokenizer, request, backend):
    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    (tmp_path / "agent.py").write_text(FUNCTION)
    batches = run(tmp_path, tiny_qwen2, f"{tmp_path / 'agent.py'}:agent", trainer__backend=backend)
    assert [len(batch) for batch in batches] == [24, 24]
    for version, batch in enumerate(batches):
        columns = batch.batch
        assert columns["weights_version"].tolist() == [version] * 24
        assert columns["num_turns"].tolist() == [4] * 12 + [2] * 12
        assert_judges_are_trained(batch, tiny_tokenizer)
        for row in range(12):
            prompt = columns["prompts"][row][columns["attention_mask"][row, : columns["prompts"].shape[1]].bool()]
            response, mask = columns["responses"][row], columns["response_mask"][row].bool()
            question = batch.non_tensor_batch["raw_prompt"][row][0]["content"]
            turns = ["system\nBe brief.", f"user\n{question}"]
            asked = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
            assert tiny_tokenizer.decode(prompt) == f"{asked}<|im_start|>assistant\n"
            assert 1 <= mask.sum() <= 12
            between = tiny_tokenizer.decode(
                response[: int(mask.nonzero().max()) + 1][~mask[: int(mask.nonzero().max()) + 1]]
            )
            assert between.endswith("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    scores = {score for batch in batches for score in batch.batch["token_level_scores"].sum(-1).tolist()}
    assert scores <= {0.0, 1.0, 2.0} and len(scores) > 1
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row]
    assert len(rows) == 2
    for row in rows:  # what was trained is what was sampled
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["rollout/agent/requests/first"] == row["rollout/agent/requests/continued"] == 12
        assert row["rollout/agent/requests/separate"] == 12 and row["training/rows_per_episode"] == 2


def assert_judges_are_trained(batch, tokenizer) -> None:
    """The conversation with the judge is a row of the same sample, with the same score and advantage."""
    columns, uids = batch.batch, batch.non_tensor_batch["uid"]
    for row in range(12, 24):
        sample = int(columns["episode"][row])
        mask = columns["response_mask"].bool()
        assert sample == row - 12 and uids[row] == uids[sample]
        prompt = columns["prompts"][row][columns["attention_mask"][row, : columns["prompts"].shape[1]].bool()]
        assert "You judge." in tokenizer.decode(prompt) and 1 <= mask[row].sum() <= 3
        assert columns["token_level_scores"][row].sum() == columns["token_level_scores"][sample].sum()
        [advantage] = columns["advantages"][row][mask[row]].unique()
        assert (columns["advantages"][sample][mask[sample]] == advantage).all()


@pytest.mark.slow
def test_a_command_is_trained_on_the_reward_that_it_posts(tmp_path, tiny_qwen2):
    (tmp_path / "agent.py").write_text(COMMAND)
    [batch] = run(
        tmp_path,
        tiny_qwen2,
        f"{sys.executable} {tmp_path / 'agent.py'}",
        trainer__total_training_steps=1,
        data__train_batch_size=2,
        actor_rollout_ref__rollout__n=2,
    )
    indices = [info["index"] % 2 for info in batch.non_tensor_batch["extra_info"]]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == indices
    assert batch.batch["num_turns"].tolist() == [4] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent.program": "null"}, "there is no agent to start; set actor_rollout_ref.rollout.agent.program"),
        ({"agent.program": "absent.py:agent"}, "agent.program=absent.py:agent: no file absent.py"),
        ({"mode": "sync"}, "agent.program=python x.py: has no effect without actor_rollout_ref.rollout.mode=async"),
        ({"adv_estimator": "optimal_token_baseline"}, "set actor_rollout_ref.rollout.agent.train_branches=false"),
    ],
)
def test_settings_of_agents_that_cannot_be_started_are_refused(tmp_path, tiny_qwen2, capsys, changes, message):
    given = {"mode": "async", "endpoint_port": 8000, "agent.default_agent_loop": "http_agent"}
    given |= {"agent.program": "python x.py"} | changes
    algorithm = {key: given.pop(key) for key in [*given] if key == "adv_estimator"}
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in given.items()]
    words += [f"algorithm.{key}={value}" for key, value in algorithm.items()]
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *words]) == 2
    assert message in capsys.readouterr().err
