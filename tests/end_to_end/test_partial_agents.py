"""`trainer.partial_rollout` with agents: weights are pushed in the middle of their answers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from hybridrl import main_ppo
from hybridrl.cli import export_checkpoint
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from tests.support.end_to_end.ports import free_port
from tests.support.end_to_end.runs import metrics, settings, write_prompts

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
pytestmark = pytest.mark.timeout(300)

AGENT = """
import openai


async def agent(task):
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [*task.row["raw_prompt"]]
    for max_tokens in (36, 6):
        answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=max_tokens)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    side = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it right?"}]
    await client.chat.completions.create(model=task.model, messages=side, max_tokens=24)
    return float(len(messages[1]["content"]) % 3)
"""
ENVIRONMENT = """
from hybridrl.serving.environments import Answer, TextEnvironment


class Count(TextEnvironment):
    def reset(self, row):
        self.num_steps = 0
        return None

    def step(self, action):
        self.num_steps += 1
        return Answer(f"{self.num_steps}?", float(len(action) % 3), self.num_steps == 20)
"""
PROGRAM = """
import sys, time
import httpx, openai

server, has_begun, num_played = sys.argv[1], False, 0
with httpx.Client(timeout=60) as client:
    while True:
        try:
            answer = client.post(f"{server}/v1/episodes", json={"wait_s": 1})
        except httpx.TransportError:
            if has_begun:
                break
            time.sleep(0.1)
            continue
        has_begun = True
        if answer.status_code == 204:
            continue
        episode = answer.json()
        policy = openai.OpenAI(base_url=episode["base_url"], api_key="none")
        messages = [dict(message) for message in episode["row"]["raw_prompt"]]
        try:
            for turn in range(2):
                # The first push waits for the end of the second batch: from here on, episodes of the third are open.
                time.sleep(1.5 if turn and num_played >= 8 else 0.0)
                said = policy.chat.completions.create(model=episode["model"], messages=messages, max_tokens=20)
                messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
            num_played += 1
            reward = len(messages[1]["content"]) % 3
            client.post(f"{server}/v1/episodes/{episode['session']}/end", json={"reward": reward})
        except (openai.APIError, httpx.TransportError):  # the run has ended, or a trainer has recovered
            continue
"""
ROLLOUT = "actor_rollout_ref__rollout__"
PARTIAL = {
    "trainer__lag": 2,
    "trainer__partial_rollout": "true",
    "trainer__total_training_steps": 4,
    "trainer__val_before_train": "false",
    "trainer__test_freq": -1,
    "data__train_batch_size": 2,
    "data__max_prompt_length": 96,
    "data__max_response_length": 64,
    f"{ROLLOUT}n": 2,
    f"{ROLLOUT}mode": "async",
    f"{ROLLOUT}ignore_eos": True,
    f"{ROLLOUT}agent__timeout_s": 120,
}
SEPARATED = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 1, f"{ROLLOUT}n_gpus_per_node": 2}


def run(folder: Path, model: Path, *, kills_at: int | None = None, slower_s: float = 0.0, **changes: object) -> list:
    """Train, and return the batches of all steps as the policy was trained on them.

    kills_at: step in which the second rollout process is killed while it generates.
    slower_s: seconds by which each update of the actor takes longer.
    """
    batches = []

    class Watching(RayPPOTrainer):
        def generate(self, ctx):
            if self.global_steps == kills_at:
                threading.Thread(target=self.kill_when_loaded, daemon=True).start()
            super().generate(ctx)

        def kill_when_loaded(self):
            while not self.generator._service.router.table.load(1):
                time.sleep(0.002)
            os.kill(self.groups["rollout"].process_ids[1], signal.SIGKILL)

        def update_actor(self, ctx):
            super().update_actor(ctx)
            time.sleep(slower_s)
            batches.append(ctx.batch)

    folder.mkdir(exist_ok=True)
    changes = PARTIAL | {f"{ROLLOUT}endpoint_port": free_port()} | changes
    assert main_ppo.main(settings(folder, model, **changes), trainer_cls=Watching) == 0
    return batches


def assert_same_samples(found: list, wanted: list) -> None:
    for left, right in zip(found, wanted, strict=True):
        for name in ("input_ids", "response_mask", "token_versions"):
            assert torch.equal(left.batch[name], right.batch[name]), name
        for name in ("rollout_log_probs", "advantages"):  # the engine's rounding depends on who asks at the same time
            torch.testing.assert_close(left.batch[name], right.batch[name], rtol=1e-4, atol=1e-5)


def http_agent(folder: Path) -> dict[str, object]:
    (folder / "agent.py").write_text(AGENT)
    return {
        f"{ROLLOUT}agent__default_agent_loop": "http_agent",
        f"{ROLLOUT}agent__program": f"{folder / 'agent.py'}:agent",
    }


def log_probs_under(path: Path, batch) -> torch.Tensor:
    """Return the log-prob of each response token (rows, width) under the weights of a model."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    columns, start = batch.batch, batch.batch["prompts"].shape[1]
    found = torch.zeros_like(columns["rollout_log_probs"])
    for row in range(len(batch)):
        there = columns["attention_mask"][row].bool()
        ids, length = columns["input_ids"][row][there], int(there[start:].sum())
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, :-1]
        found[row, :length] = logits.log_softmax(-1).gather(1, ids[1:, None])[-length:, 0]
    return found


def assert_sampled_by_its_versions(batch, checkpoints: Path, exports: Path) -> None:
    """Recompute the log-probs with the weights of each version; only a token's own weights give those of sampling."""
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    for version in columns["token_versions"][mask & (columns["token_versions"] > 0)].unique().tolist():
        path = exports / str(version)
        if not path.exists():
            export_checkpoint(str(checkpoints / f"global_step_{version}"), str(path), trust_remote_code=True)
        difference = (log_probs_under(path, batch) - columns["rollout_log_probs"]).abs()
        own = columns["token_versions"] == version
        assert difference[mask & own].max() < 1e-4
        assert not (mask & ~own).any() or difference[mask & ~own].mean() > 1e-3


def mixed_answers(batch) -> list[int]:
    """Return of each row how many answers have tokens of several versions."""
    numbers = []
    for versions, mask in zip(batch.batch["token_versions"], batch.batch["response_mask"].bool(), strict=True):
        is_next = (versions[1:] != versions[:-1]) & mask[1:] & mask[:-1]
        numbers.append(int(is_next.sum()))
    return numbers


def test_an_answer_goes_on_with_new_weights_and_a_resumed_run_repeats_it(tmp_path, tiny_qwen2):
    program = http_agent(tmp_path)
    batches = run(tmp_path / "whole", tiny_qwen2, **program)
    last = batches[-1]
    assert mixed_answers(last) == [1] * 4 + [0] * 4  # the first answer of each agent; its judge begins after that
    assert_sampled_by_its_versions(last, tmp_path / "whole/run", tmp_path / "hf")
    rows = metrics(tmp_path / "whole/run")
    assert not any(name.startswith("rollout/agent/failures") for row in rows for name in row)
    assert [row["async/age_max"] for row in rows if "async/age_max" in row] == [0, 1, 2, 2]
    again = run(
        tmp_path / "again",
        tiny_qwen2,
        **program,
        trainer__resume_mode="resume_path",
        trainer__resume_from_path=tmp_path / "whole/run/global_step_2",
    )
    assert_same_samples(again, batches[2:])


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_of_answers_changes_nothing(tmp_path, tiny_qwen2, ray_cluster):
    program = http_agent(tmp_path)
    wanted = run(tmp_path / "well", tiny_qwen2, **program, trainer__save_freq=-1)
    found = run(tmp_path / "hit", tiny_qwen2, kills_at=3, **program, **SEPARATED)
    assert max(row.get("rollout/replicas_lost", 0) for row in metrics(tmp_path / "hit/run")) == 1
    assert mixed_answers(found[-1]) == [1] * 4 + [0] * 4
    assert_same_samples(found, wanted)


@pytest.mark.slow
def test_a_short_round_of_tail_batching_ends_agents_and_trains_each_prompt_once(tmp_path, tiny_qwen2):
    changes = {
        "trainer__lag": 0,
        "trainer__partial_rollout": "false",
        "trainer__total_training_steps": 5,  # an epoch of 10 prompts
        "algorithm__filter_groups__order": "tail_batching",
        "data__gen_batch_size": 4,
        f"{ROLLOUT}ignore_eos": False,
        f"{ROLLOUT}stop_token_ids": json.dumps([*range(60, 100)]).replace(" ", ""),
    }
    batches = run(tmp_path, tiny_qwen2, **http_agent(tmp_path), **changes)
    assert audit(read_ledger(str(tmp_path / "run" / FILE))).problems() == []
    trained = sorted(int(row["index"]) for batch in batches for row in batch.non_tensor_batch["extra_info"][:4:2])
    assert trained == [*range(10)]
    assert any(row.get("rollout/deferred") for row in metrics(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [2, 3])
def test_an_environment_waits_for_weights_and_a_resumed_run_plays_it_again(tmp_path, tiny_qwen2, lag):
    """One process at a time begins an episode: those that wait give way to the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(write_prompts(tmp_path / "rows.parquet", 10)).to_pylist()
    for row in table:
        row["extra_info"]["interaction_kwargs"] = {"name": "count"}
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    (tmp_path / "count.py").write_text(ENVIRONMENT)
    entry = {"name": "count", "class_name": "count.py:Count", "num_processes": 1}
    (tmp_path / "environments.json").write_text(json.dumps({"interaction": [entry]}))
    changes = {
        "trainer__lag": lag,
        "trainer__test_freq": 2,
        "data__train_files": tmp_path / "rows.parquet",
        "data__val_files": tmp_path / "rows.parquet",
        f"{ROLLOUT}agent__default_agent_loop": "environment_agent",
        f"{ROLLOUT}multi_turn__interaction_config_path": tmp_path / "environments.json",
        f"{ROLLOUT}ignore_eos": False,
        f"{ROLLOUT}stop_token_ids": json.dumps([*range(60, 70)]).replace(" ", ""),
    }
    whole = run(tmp_path / "whole", tiny_qwen2, **changes)
    assert sum(sum(mixed_answers(batch)) for batch in whole[-2:]) >= 2
    assert max(int(batch.batch["num_turns"].max()) for batch in whole[-2:]) > 2
    for batch in whole[-2:]:
        assert_sampled_by_its_versions(batch, tmp_path / "whole/run", tmp_path / "hf")
    assert not any(name.startswith("rollout/agent/failures") for row in metrics(tmp_path / "whole/run") for name in row)
    again = run(
        tmp_path / "again",
        tiny_qwen2,
        **changes,
        trainer__resume_mode="resume_path",
        trainer__resume_from_path=tmp_path / "whole/run/global_step_2",
    )
    assert_same_samples(again, whole[2:])


@pytest.mark.slow
def test_a_program_outside_goes_on_through_pushes_and_in_a_resumed_run(tmp_path, tiny_qwen2, ray_cluster):
    """One program plays all episodes, one after the other, so no episode may wait for others to be claimed."""
    port = free_port()
    changes = SEPARATED | {
        f"{ROLLOUT}endpoint_port": port,
        f"{ROLLOUT}agent__default_agent_loop": "outside_agent",
        "trainer__total_training_steps": 5,
    }
    program = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}"]
    with subprocess.Popen(program):
        batches = run(tmp_path / "whole", tiny_qwen2, slower_s=4.0, **changes)
    assert len(batches) == 5 and all(batch.batch["reward_valid"].all() for batch in batches)
    rows = [row["async/age_max"] for row in metrics(tmp_path / "whole/run") if "async/age_max" in row]
    assert max(rows) <= 2
    mixed = [batch for batch in batches if any(mixed_rows(batch))]
    assert mixed, "no push has met an episode"
    for batch in batches[2:]:
        assert_sampled_by_its_versions(batch, tmp_path / "whole/run", tmp_path / "hf")
    with subprocess.Popen(program):
        again = run(
            tmp_path / "again",
            tiny_qwen2,
            **changes,
            trainer__resume_mode="resume_path",
            trainer__resume_from_path=tmp_path / "whole/run/global_step_3",
        )
    assert len(again) == 2 and all(batch.batch["reward_valid"].all() for batch in again)


def mixed_rows(batch) -> list[bool]:
    versions, mask = batch.batch["token_versions"], batch.batch["response_mask"].bool()
    return [len(row[own].unique()) > 1 for row, own in zip(versions, mask, strict=True)]
