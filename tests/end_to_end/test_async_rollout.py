"""`rollout.mode=async`: the same training as `sync` for one-turn responses, and multi-turn responses with tools."""

import json

import pytest
import torch

from tests.support.end_to_end.runs import largest_difference, metrics, train, weights

pytestmark = pytest.mark.timeout(300)

AGENTS = '''
from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop


@register_agent_loop("echo")
class Echo(AgentLoop):
    """An agent loop with an observation in the middle of its response."""

    async def run(self, sampling_params, **row):
        response = self.respond(row)
        first = await response.sample(type(sampling_params)(**{**vars(sampling_params), "max_new_tokens": 3}))
        assert row["raw_prompt"][0]["role"] == "user"
        if response.observe(self.tokenizer.encode("1 + 1")):
            await response.sample(sampling_params)
        return response.output()
'''


VALIDATION = {  # every way to sample in a validation
    "actor_rollout_ref__rollout__val_kwargs__do_sample": "true",
    "actor_rollout_ref__rollout__val_kwargs__n": 2,
    "actor_rollout_ref__rollout__val_kwargs__temperature": 0.9,
    "actor_rollout_ref__rollout__val_kwargs__top_k": 200,
    "actor_rollout_ref__rollout__val_kwargs__top_p": 0.95,
    "actor_rollout_ref__rollout__val_kwargs__min_p": 0.01,
    "actor_rollout_ref__rollout__repetition_penalty": 1.1,
    "actor_rollout_ref__rollout__presence_penalty": 0.2,
    "actor_rollout_ref__rollout__frequency_penalty": 0.1,
}


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_single_turn_async_trains_on_the_same_tokens_as_sync(tmp_path, tiny_qwen2, ray_cluster, backend):
    runs = {}
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        pool = (
            {"actor_rollout_ref__rollout__n_gpus_per_node": 2, "trainer__n_gpus_per_node": 1}
            if backend == "ray"
            else {}
        )
        changes = {
            "trainer__backend": backend,
            "actor_rollout_ref__rollout__mode": mode,
            "trainer__rollout_data_dir": folder / "r",
            "trainer__validation_data_dir": folder / "v",
        }
        train(folder, tiny_qwen2, **changes, **VALIDATION, **pool)
        runs[mode] = folder
    for step in (1, 2):
        rows = [
            [json.loads(line) for line in (runs[mode] / "r" / f"{step}.jsonl").read_text().splitlines()]
            for mode in ("sync", "async")
        ]
        assert [row["output"] for row in rows[0]] == [row["output"] for row in rows[1]] and len(rows[0]) == 12
    tests = [(runs[mode] / "v" / "2.jsonl").read_text().splitlines() for mode in ("sync", "async")]
    answers = [[json.loads(line)["output"] for line in lines] for lines in tests]
    assert answers[0] == answers[1] and len(answers[0]) == 10
    left, right = (weights(runs[mode] / "run/global_step_2", tmp_path / f"{mode}.hf") for mode in ("sync", "async"))
    assert largest_difference(left, right) < 1e-5
    last = metrics(runs["async"] / "run")[-1]
    assert last["rollout/num_turns/mean"] == 2 and last["rollout/replicas_lost"] == 0


LAG = {
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 4,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
}
SAME = (
    "critic/score/mean",
    "actor/grad_norm",
    "actor/pg_loss",
    "response_length/mean",
    "async/age_mean",
    "async/age_max",
)
LONG_RESPONSES = {"data__max_response_length": 15, "actor_rollout_ref__rollout__stop_token_ids": "[60,61,62,63,64,65]"}
SEPARATED = {"trainer__backend": "ray", "actor_rollout_ref__rollout__n_gpus_per_node": 2}


def numbers(rows: list[dict]) -> list[list]:
    return [[pytest.approx(row[name], rel=1e-4, abs=1e-6) if name in row else None for name in SAME] for row in rows]


@pytest.mark.parametrize("place", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_lag_trains_on_the_same_tokens_as_sync_and_a_resumed_run_continues_with_them(
    tmp_path, tiny_qwen2, request, place
):
    if place == "ray":
        request.getfixturevalue("ray_cluster")
    changes = LAG | LONG_RESPONSES | (SEPARATED if place == "ray" else {}) | {"trainer__lag": 2}
    sync = train(tmp_path / "sync", tiny_qwen2, **changes)
    changes |= {"actor_rollout_ref__rollout__mode": "async"}
    whole = train(tmp_path / "async", tiny_qwen2, **changes | {"trainer__save_freq": 2})
    assert numbers(whole) == [[row.get(name) for name in SAME] for row in sync]
    assert [row["async/age_max"] for row in whole if "async/age_max" in row] == [0, 1, 2, 2]
    again = train(
        tmp_path / "again",
        tiny_qwen2,
        **changes,
        trainer__resume_mode="resume_path",
        trainer__resume_from_path=tmp_path / "async/run/global_step_2",
    )
    assert numbers(again) == [[row.get(name) for name in SAME] for row in whole[-len(again) :]] and len(again) == 2


@pytest.mark.slow
def test_an_evaluator_generates_by_agent_loops_as_the_rollout_would(tmp_path, tiny_qwen2, ray_cluster):
    kept = {"trainer__save_freq": -1, "actor_rollout_ref__rollout__mode": "async"}
    local = train(tmp_path / "local", tiny_qwen2, **kept, trainer__validation_data_dir=tmp_path / "local/v")
    pools = {"actor_rollout_ref__rollout__n_gpus_per_node": 1, "trainer__eval_n_gpus": 1}
    apart = train(
        tmp_path / "ray",
        tiny_qwen2,
        trainer__backend="ray",
        **kept,
        **pools,
        trainer__validation_data_dir=tmp_path / "ray/v",
    )
    assert [row["val/version"] for row in apart if "val/version" in row] == [2]
    answers = [
        [json.loads(line)["output"] for line in (tmp_path / where / "v/2.jsonl").read_text().splitlines()]
        for where in ("local", "ray")
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 5
    scores = [
        [row["val-core/openai/gsm8k/reward/mean@1"] for row in rows if "val-core/openai/gsm8k/reward/mean@1" in row]
        for rows in (local, apart)
    ]
    assert scores[0][-1] == scores[1][-1]


def test_rows_choose_their_loop_and_tool_output_is_not_trained_on(tmp_path, tiny_qwen2):
    import pyarrow.parquet as pq

    from tests.support.end_to_end.runs import settings

    (tmp_path / "agents.py").write_text(AGENTS)
    arguments = settings(
        tmp_path,
        tiny_qwen2,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__agent__path=tmp_path / "agents.py",
        actor_rollout_ref__rollout__ignore_eos=True,
        trainer__total_training_steps=1,
    )
    table = pq.read_table(tmp_path / "train.parquet")
    pq.write_table(table.append_column("agent_name", [["echo", None] * 5]), tmp_path / "train.parquet")

    from hybridrl import main_ppo
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

    seen = []

    class RecordingTrainer(RayPPOTrainer):
        def generate(self, ctx):
            super().generate(ctx)
            seen.append(ctx.batch)

    assert main_ppo.main(arguments, trainer_cls=RecordingTrainer) == 0
    [batch] = seen
    is_echo_row = [name is not None for name in batch.non_tensor_batch["agent_name"]]
    assert 0 < sum(is_echo_row) < len(is_echo_row)
    mask, there = batch.batch["response_mask"], batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :]
    assert torch.equal(there, torch.ones_like(there))
    for row, is_echo in enumerate(is_echo_row):
        zeros = (mask[row] == 0).nonzero().squeeze(-1).tolist()
        assert zeros == ([3, 4, 5, 6, 7] if is_echo else [])
        assert (batch.batch["rollout_log_probs"][row][mask[row] == 0] == 0).all()
        assert (batch.batch["rollout_log_probs"][row][mask[row] == 1] < 0).all()
        assert int(batch.batch["num_turns"][row]) == (4 if is_echo else 2)
    last = next(row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row)
    assert last["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_killing_a_rollout_process_during_generation_does_not_change_the_result(tmp_path, tiny_qwen2, ray_cluster):
    import os
    import signal
    import threading
    import time

    from hybridrl import main_ppo
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer
    from tests.support.end_to_end.runs import settings

    class KillingTrainer(RayPPOTrainer):
        """Stop a replica before generation, so that it never responds, and kill it when it has open requests."""

        def generate(self, ctx):
            if self.global_steps == 1 and "killed" in self.config.trainer.default_local_dir:
                os.kill(self.groups["rollout"].process_ids[1], signal.SIGSTOP)
                threading.Thread(target=self._kill_when_loaded, daemon=True).start()
            super().generate(ctx)

        def _kill_when_loaded(self):
            while not self.generator._service.router.table.load(1):
                time.sleep(0.005)
            os.kill(self.groups["rollout"].process_ids[1], signal.SIGKILL)

    exported = {}
    for name in ("well", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        arguments = settings(
            folder,
            tiny_qwen2,
            data__max_response_length=48,
            actor_rollout_ref__rollout__ignore_eos=True,
            actor_rollout_ref__rollout__mode="async",
            actor_rollout_ref__rollout__n_gpus_per_node=2,
            trainer__backend="ray",
            trainer__n_gpus_per_node=1,
        )
        assert main_ppo.main(arguments, trainer_cls=KillingTrainer) == 0
        exported[name] = weights(folder / "run/global_step_2", tmp_path / f"{name}.hf")
        lost = max(row.get("rollout/replicas_lost", 0) for row in metrics(folder / "run"))
        assert lost == (1 if name == "killed" else 0)
    assert largest_difference(exported["well"], exported["killed"]) < 1e-5
