"""Whole runs of a mixture of experts whose choice of experts is replayed."""

import pytest

from hybridrl import main_ppo
from hybridrl.view.readers.failures import recoveries
from tests.support.end_to_end.failing_runs import SAME, fault, hits, run_with
from tests.support.end_to_end.runs import metrics, settings, train
from tests.support.workers.routing_cases import FAMILIES, save_mixture

SHORT = {"trainer__save_freq": -1, "trainer__test_freq": -1, "trainer__val_before_train": "false"}
MODE, RETURNS = (
    "actor_rollout_ref__actor__router_replay__mode",
    "actor_rollout_ref__rollout__enable_rollout_routing_replay",
)
R3 = {MODE: "R3", RETURNS: True}


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_tokenizer):
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {family: save_mixture(folder, family, tokenizer=tiny_tokenizer) for family, folder in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollouts_experts_are_replayed_until_updates_have_changed_what_the_routers_would_choose(
    tmp_path, models, family
):
    rows = train(tmp_path, models[family], **SHORT, **R3, actor_rollout_ref__actor__optim__lr=1e-2)
    assert all(row["actor/routing/missing"] == 0 and row["actor/routing/load_max"] > 1 for row in rows)
    assert 0 < max(row["actor/routing/differ"] for row in rows) < 0.5
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vllms_experts_are_replayed(tmp_path, tiny_tokenizer, mode):
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    (tmp_path / "model").mkdir()
    model = save_mixture(tmp_path / "model", "Qwen3Moe", tokenizer=tiny_tokenizer, **sizes)
    more = {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__mode": mode}
    rows = train(tmp_path, model, **SHORT, **R3, **more)
    assert all(row["actor/routing/missing"] == 0 for row in rows)
    assert rows[0]["actor/routing/differ"] < 0.5 and rows[0]["training/rollout_probs_diff_max"] < 1e-4


def test_the_pass_for_old_log_probs_records_and_one_update_of_its_weights_changes_nothing(tmp_path, models):
    one = {"actor_rollout_ref__actor__ppo_mini_batch_size": 4, "trainer__total_training_steps": 1}
    plain = train(tmp_path / "plain", models["Qwen3Moe"], **SHORT, **one, trainer__num_threads=1)
    [rows] = train(tmp_path / "r2", models["Qwen3Moe"], **SHORT, **one, **{MODE: "R2"})
    assert rows["actor/routing/differ"] == 0 and rows["actor/grad_norm"] == plain[0]["actor/grad_norm"]


def test_agents_return_the_routes_of_their_whole_conversation(tmp_path, models):
    more = {"actor_rollout_ref__rollout__mode": "async", "data__max_response_length": 70}  # two chunks of a request
    rows = train(tmp_path, models["Qwen3Moe"], **SHORT, **R3, **more, trainer__total_training_steps=1)
    assert rows[0]["actor/routing/missing"] == 0 and rows[0]["actor/routing/differ"] < 0.5


STEPS = {"trainer__test_freq": -1, "trainer__val_before_train": "false", "trainer__lag": 2}


def numbers(rows: list[dict]) -> list[tuple]:
    """Return what the update of each step gave."""
    return [tuple(row[f"actor/{name}"] for name in ("grad_norm", "routing/differ", "routing/missing")) for row in rows]


def test_pending_parts_of_responses_keep_their_routes_in_a_checkpoint(tmp_path, models):
    changes = STEPS | R3 | {"trainer__partial_rollout": True, "actor_rollout_ref__rollout__mode": "async"}
    changes |= {"trainer__total_training_steps": 4, "trainer__save_freq": 2}
    whole = train(tmp_path / "whole", models["Qwen3Moe"], **changes)
    assert [row["actor/routing/missing"] for row in whole] == [0] * 4 and whole[3]["actor/routing/differ"] > 0
    again = f"{tmp_path / 'whole/run/global_step_2'}"
    resumed = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": again}
    rows = train(tmp_path / "again", models["Qwen3Moe"], **changes, **resumed)
    assert numbers(rows) == numbers(whole[2:])


def test_a_resumed_run_replays_samples_with_the_routes_of_their_rollout(tmp_path, models):
    changes = STEPS | R3 | {"trainer__total_training_steps": 4, "trainer__save_freq": 2, "trainer__lag": 0}
    changes |= {"trainer__replay__groups": 2, "trainer__staleness": 3}
    changes |= {
        "actor_rollout_ref__rollout__calculate_log_probs": "true",
        "algorithm__rollout_correction__rollout_is": "token",
    }
    whole = train(tmp_path / "whole", models["Qwen3Moe"], **changes)
    assert [row["actor/routing/missing"] for row in whole] == [0] * 4
    assert [row.get("replay/rows") for row in whole] == [0, 6, 6, 6]
    again = f"{tmp_path / 'whole/run/global_step_2'}"
    resumed = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": again}
    rows = train(tmp_path / "again", models["Qwen3Moe"], **changes, **resumed)
    assert numbers(rows) == numbers(whole[2:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routes_of_agents_reach_the_actor_from_a_separate_rollout_as_in_one_process(tmp_path, tiny_tokenizer):
    (tmp_path / "model").mkdir()
    sizes = {
        "num_hidden_layers": 24,
        "num_experts": 16,
        "num_experts_per_tok": 8,
    }  # a request's routes are large enough to be stored
    model = save_mixture(tmp_path / "model", "Qwen3Moe", tokenizer=tiny_tokenizer, **sizes)
    common = SHORT | R3 | {"actor_rollout_ref__rollout__mode": "async", "data__max_response_length": 60}
    common |= {"trainer__total_training_steps": 2}
    wanted = train(tmp_path / "local", model, **common)
    separate = {"trainer__n_gpus_per_node": 1, "actor_rollout_ref__rollout__n_gpus_per_node": 1}
    done = run_with(tmp_path / "ray", model, **common, **separate, actor_rollout_ref__actor__shuffle=False)
    assert done.returncode == 0, done.stderr[-3000:]
    names = (*SAME[:3], "actor/routing/missing", "actor/routing/load_max")
    for found, row in zip(metrics(tmp_path / "ray" / "run"), wanted, strict=True):
        assert [found[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-4, abs=1e-6)
        assert found["actor/routing/missing"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lag", [0, 1])
def test_routes_that_are_lost_with_their_rollout_are_sampled_again(tmp_path, tiny_tokenizer, lag):
    """The rollout dies while rewards are computed; the actor then needs the routes that it had stored.

    With a lag those of the next batch are in the snapshot.
    """
    (tmp_path / "model").mkdir()
    sizes = {"num_hidden_layers": 12, "num_experts_per_tok": 4}  # a batch's routes are large enough to be stored
    model = save_mixture(tmp_path / "model", "Qwen3Moe", tokenizer=tiny_tokenizer, **sizes)
    separate = {"trainer__n_gpus_per_node": 1, "actor_rollout_ref__rollout__n_gpus_per_node": 1}
    (tmp_path / "reward.py").write_text(
        "import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0.5)\n    return sum(map(ord, solution_str)) % 7\n"
    )
    common = SHORT | R3 | separate | {"trainer__lag": lag} | {"custom_reward_function__path": tmp_path / "reward.py"}
    found = {}
    for name, faults in (("well", []), ("hit", [fault(2, "reward", "rollout")])):
        done = run_with(tmp_path / name, model, *faults, **common)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(hits(tmp_path / name)) == len(faults)
        found[name] = metrics(tmp_path / name / "run")
    [recovery] = recoveries(str(tmp_path / "hit" / "run"))
    assert recovery["lost"] == ["actor-0", "rollout-0"] and recovery["back_at_step"] == 1
    names = (*SAME[:3], "actor/routing/differ")
    assert [[row.get(one) for one in names] for row in found["hit"]] == [
        [row.get(one) for one in names] for row in found["well"]
    ]
    assert all(row["actor/routing/missing"] == 0 for row in found["hit"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({MODE: "R4"}, "actor_rollout_ref.actor.router_replay.mode=R4: must be one of disabled, R2, R3"),
        ({MODE: "R3"}, "set actor_rollout_ref.rollout.enable_rollout_routing_replay=true"),
        ({RETURNS: True}, "nothing reads the experts with actor_rollout_ref.actor.router_replay.mode=disabled"),
        ({MODE: "R2", "algorithm__rollout_correction__bypass_mode": True}, "bypass_mode leaves that pass out"),
        (
            R3 | {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__enforce_eager": False},
            "set actor_rollout_ref.rollout.enforce_eager=true",
        ),
        ({MODE: "R2"}, "router_replay.mode=R2: qwen2 has no experts whose choice could be replayed"),
    ],
    ids=["unknown", "no_routes", "unread", "no_pass", "vllm", "no_experts"],
)
def test_a_replay_that_cannot_work_is_refused_before_the_models_load(tmp_path, tiny_qwen2, capsys, changes, message):
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **SHORT, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error and "into the workers" not in error
