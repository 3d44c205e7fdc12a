"""Processes are lost in any call: the run continues, and ends bit-equal to the undisturbed one.

`pytest -m chaos -s tests/chaos/test_failover.py` prints a line per loss; `benchmarks/recovery.py` makes a table of the
same faults.
"""

import random
import re
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import read_ledger
from tests.support.end_to_end.failing_runs import SAME, events, fault, hits, losses, run_with
from tests.support.end_to_end.runs import largest_difference, metrics, weights

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
STEPS = 6
ALL_ROLES = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "trainer__colocate": "device",
    "trainer__n_gpus_per_node": 2,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 1,
    "trainer__max_ckpt_to_keep": 2,
}
# One run per entry: its first loss is in step 2, the second one in step 3, and so on.
# (stage, role, rank, the call it is in ("": none), and for how many seconds)
KILLED = {
    "idle": [
        ("next_batch", "actor", 0, "", 0.0),
        ("next_batch", "rollout", 0, "", 0.0),
        ("next_batch", "ref", 1, "", 0.0),
    ],
    "generation and log-probs": [
        ("gen", "rollout", 0, "generate_sequences", 0.02),
        ("gen", "actor", 1, "", 0.02),
        ("old_log_prob", "actor", 0, "compute_log_prob", 0.0),
        ("ref", "ref", 1, "compute_ref_log_prob", 0.0),
    ],
    "update": [
        ("update_critic", "critic", 1, "update_critic", 0.02),
        ("update_actor", "actor", 0, "update_actor", 0.02),
        ("update_actor", "actor", 1, "update_actor", 0.02),
    ],
    "push": [
        ("update_weights", "rollout", 0, "receive_weights", 0.0),
        ("update_weights", "actor", 0, "send_weights", 0.0),
    ],
    "snapshot and checkpoint": [
        ("save_checkpoint", "actor", 1, "take_snapshot", 0.0),  # takes milliseconds
        ("save_checkpoint", "critic", 0, "take_snapshot", 0.0),
        ("save_checkpoint", "actor", 1, "save_checkpoint", 0.005),
        ("save_checkpoint", "critic", 0, "save_checkpoint", 0.005),
    ],
}
OTHER_KINDS = {  # kind, then as above
    "exit and memory": [
        ("exit", "update_actor", "actor", 1, "update_actor"),
        ("exit", "gen", "rollout", 0, "generate_sequences"),
        ("memory", "update_critic", "critic", 0, "update_critic"),
        ("memory", "ref", "ref", 0, "compute_ref_log_prob"),
    ],
    "freeze": [
        ("freeze", "update_actor", "actor", 0, "update_actor"),
        ("freeze", "gen", "rollout", 0, "generate_sequences"),
        ("freeze", "next_batch", "critic", 1, ""),
    ],
}
SLEEPS = [
    ("update_actor", "update_actor"),
    ("old_log_prob", "compute_log_prob"),
    ("update_weights", "update_weights"),
    ("save_checkpoint", "save_checkpoint"),
]
PIPELINE = {  # rank 0 has the first half of the layers, rank 1 the second
    "actor_rollout_ref__actor__strategy": "megatron",
    "actor_rollout_ref__actor__megatron__pipeline_model_parallel_size": 2,
}
NAMED_S = 15.0  # for the held-back errors, the question to the master, and the stacks that it collects
CHAOS = Path(__file__).parents[1] / "support/chaos"
PARTS = ["disconnect", "kill", "start", "import", "group", "model", "snapshot", "push"]
MISTAKES = [
    ("gen", "generate_sequences", "actor_rollout", 0),
    ("update_critic", "update_critic", "critic", 1),
    ("update_actor", "update_actor", "actor_rollout", 1),
    ("save_checkpoint", "save_checkpoint", "actor_rollout", 0),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_qwen2):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_with(folder, tiny_qwen2, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    return folder


def check_ended_the_same(folder, undisturbed, *, step):
    found, wanted = (
        weights(f / f"run/global_step_{step}", f / f"compared_with_{folder.name}") for f in (folder, undisturbed)
    )
    assert largest_difference(found, wanted) == 0
    rows, expected = ([[row.get(name) for name in SAME] for row in metrics(f / "run")] for f in (folder, undisturbed))
    assert rows == expected
    ledger = audit(read_ledger(str(folder / "run/ledger.jsonl")))
    assert not ledger.problems() and len(ledger.steps) == step


def print_seconds(folder, what):
    for failure in losses(folder):
        hit = max((h for h in hits(folder) if h["at"] < failure["detected_at"]), key=lambda h: h["at"])
        delay, lost = failure["detected_at"] - hit["at"], ", ".join(failure["lost"])
        print(
            f"\n{what}: {lost} in {hit['method']}: reported after {delay:.2f} s, "
            f"recovered after {failure['seconds']:.1f} s more",
            end="",
        )


@pytest.mark.parametrize("state", KILLED)
def test_a_killed_process_costs_time_and_nothing_else(tmp_path, tiny_qwen2, undisturbed, state):
    faults = [
        fault(step, *where, method=method, after_s=s) for step, (*where, method, s) in enumerate(KILLED[state], 2)
    ]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path, state)
    assert [hit["doing"] for hit in hits(tmp_path)] == [[one["method"]] if one["method"] else [] for one in faults]
    assert [failure["lost"] for failure in losses(tmp_path)] == [[f"{one['role']}-{one['rank']}"] for one in faults]
    assert all(list(failure["parts"]) == PARTS for failure in losses(tmp_path))
    check_ended_the_same(tmp_path, undisturbed, step=STEPS)


@pytest.mark.parametrize("how", OTHER_KINDS)
def test_a_process_lost_in_another_way_costs_time_and_nothing_else(tmp_path, tiny_qwen2, undisturbed, how):
    faults = [
        fault(step, *where, kind=kind, method=method, after_s=0.01)
        for step, (kind, *where, method) in enumerate(OTHER_KINDS[how], 2)
    ]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, **ALL_ROLES, trainer__master=how == "freeze")
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path, how)
    assert [failure["lost"] for failure in losses(tmp_path)] == [[f"{one['role']}-{one['rank']}"] for one in faults]
    check_ended_the_same(tmp_path, undisturbed, step=STEPS)


def test_a_process_killed_during_a_recovery_is_recovered_too(tmp_path, tiny_qwen2, undisturbed):
    faults, during = [], [("actor", "load_snapshot"), ("rollout", "receive_weights"), ("actor", "send_weights")]
    for step, (role, method) in enumerate(during, 2):
        faults += [
            fault(step, "update_critic", "critic", 0, method="update_critic"),
            fault(step, "update_critic", role, method=method),
        ]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, **ALL_ROLES)
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path, "during a recovery")
    assert [failure["lost"] for failure in losses(tmp_path)] == [["critic-0", f"{role}-0"] for role, _ in during]
    check_ended_the_same(tmp_path, undisturbed, step=STEPS)


def test_a_process_that_hangs_is_killed_at_its_call_timeout_and_a_second_timeout_ends_the_run(tmp_path, tiny_qwen2):
    for name, count in (("once", 1), ("twice", 2)):
        faults = [
            fault(3, "update_actor", "actor_rollout", 1, kind="hang", method="update_actor") for _ in range(count)
        ]
        done = run_with(tmp_path / name, tiny_qwen2, *faults, trainer__save_freq=2, trainer__call_timeout_s=30)
        text = "actor_rollout.update_actor() did not answer within 30 s; still waiting for rank"
        assert text in done.stderr
        assert done.returncode == count - 1, done.stderr
    assert [row["training/global_step"] for row in metrics(tmp_path / "once/run") if "actor/grad_norm" in row] == [
        1,
        2,
        3,
    ]
    assert [path.name for path in (tmp_path / "twice/run").glob("global_step_*")] == ["global_step_2"]


@pytest.mark.parametrize(
    ("stage", "method", "lost"),
    [
        ("update_actor", "update_actor", ["actor-1"]),  # actor-0 waits for it, and does not answer either
        ("update_weights", "send_weights", ["rollout-0", "actor-1"]),  # the call that is overdue is the rollout's
    ],
)
def test_the_rank_that_sleeps_in_a_collective_is_the_one_that_is_replaced(tmp_path, tiny_qwen2, stage, method, lost):
    one = fault(2, stage, "actor", 1, kind="hang", method=method)
    changes = {"trainer__master": True, "actor_rollout_ref__rollout__n_gpus_per_node": 1, "trainer__call_timeout_s": 30}
    done = run_with(tmp_path, tiny_qwen2, one, timeout_s=900, **changes)
    assert done.returncode == 0, done.stderr
    assert re.search(r"actor-1 blocks it: it is at \S*victim.py", done.stderr), done.stderr
    [hit], [back] = hits(tmp_path), losses(tmp_path)
    assert back["lost"] == lost
    after = [stage["pids"] for stage in events(tmp_path, "stage") if stage["at"] > back["detected_at"]]
    assert after and not any(hit["pid"] in pids for pids in after)
    assert not audit(read_ledger(str(tmp_path / "run/ledger.jsonl"))).problems()


@pytest.mark.parametrize(
    ("first", "plugins", "call_timeout_s", "first_s"),
    [("the call", ["victim.py"], 40, 40), ("a collective", ["victim.py", "late_peers.py"], 300, 30)],
)
def test_a_rank_that_sleeps_anywhere_in_a_step_is_named_and_replaced_whichever_deadline_is_the_first(
    tmp_path, tiny_qwen2, first, plugins, call_timeout_s, first_s
):
    changes = {
        "trainer__master": True,
        "trainer__total_training_steps": STEPS,
        "trainer__save_freq": 1,
        "actor_rollout_ref__actor__calculate_old_log_probs": True,
    }
    done = run_with(tmp_path / "undisturbed", tiny_qwen2, timeout_s=900, **changes)
    assert done.returncode == 0, done.stderr
    faults = [
        fault(step, stage, "actor_rollout", 1, kind="hang", method=m) for step, (stage, m) in enumerate(SLEEPS, 2)
    ]
    changes["trainer__call_timeout_s"] = call_timeout_s
    changes["actor_rollout_ref__model__external_lib"] = "[" + ",".join(str(CHAOS / name) for name in plugins) + "]"
    done = run_with(tmp_path / "asleep", tiny_qwen2, *faults, timeout_s=1500, **changes)
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path / "asleep", f"{first} is the first")
    named = re.findall(r"^actor_rollout-1: it blocks the job: it .*?is at \S*victim.py", done.stderr, re.M)
    assert len(named) == len(SLEEPS), done.stderr
    for hit, back in zip(hits(tmp_path / "asleep"), losses(tmp_path / "asleep"), strict=True):
        assert back["lost"] == ["actor_rollout-1"]
        assert back["detected_at"] - hit["at"] < first_s + NAMED_S
    check_ended_the_same(tmp_path / "asleep", tmp_path / "undisturbed", step=STEPS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sleeps_in_megatrons_pipeline_is_named_and_replaced(tmp_path, tiny_qwen2, rank):
    one = fault(2, "update_actor", "actor_rollout", rank, kind="hang", method="update_actor")
    changes = PIPELINE | {"trainer__master": True, "trainer__call_timeout_s": 60}
    done = run_with(tmp_path, tiny_qwen2, one, timeout_s=900, **changes)
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path, f"rank {rank} of a pipeline")
    assert re.search(rf"^actor_rollout-{rank}: it blocks the job: it .*?is at \S*victim.py", done.stderr, re.M), (
        done.stderr
    )
    [hit], [back] = hits(tmp_path), losses(tmp_path)
    assert back["lost"] == [f"actor_rollout-{rank}"] and back["detected_at"] - hit["at"] < 60 + NAMED_S
    assert not audit(read_ledger(str(tmp_path / "run/ledger.jsonl"))).problems()


def test_when_all_ranks_sleep_and_every_process_lives_a_line_says_where_and_the_role_is_rebuilt(tmp_path, tiny_qwen2):
    both = [fault(2, "update_actor", "actor_rollout", rank, kind="hang", method="update_actor") for rank in (0, 1)]
    changes = {"trainer__master": True, "trainer__call_timeout_s": 40}
    done = run_with(tmp_path, tiny_qwen2, *both, timeout_s=900, **changes)
    assert done.returncode == 0, done.stderr
    print_seconds(tmp_path, "all ranks asleep")
    text = r"actor_rollout.update_actor is past its deadline: it is at \S*victim.py"
    assert re.search(text, done.stderr), done.stderr
    [back] = losses(tmp_path)
    assert back["detected_at"] - min(hit["at"] for hit in hits(tmp_path)) < 40 + NAMED_S
    assert not audit(read_ledger(str(tmp_path / "run/ledger.jsonl"))).problems()


@pytest.mark.parametrize(("stage", "method", "role", "rank"), MISTAKES)
def test_a_mistake_in_a_worker_ends_the_run_at_once_with_its_text_and_keeps_the_checkpoints(
    tmp_path, tiny_qwen2, stage, method, role, rank
):
    one = fault(2, stage, role, rank, kind="exception", method=method)
    changes = {"algorithm__adv_estimator": "gae", "trainer__colocate": "device", "trainer__save_freq": 1}
    done = run_with(tmp_path, tiny_qwen2, one, timeout_s=900, **changes)
    assert done.returncode == 1
    assert "planted: a mistake in user code" in done.stderr and f"raised in {role}-{rank}, {method}()" in done.stderr
    assert not losses(tmp_path) and len(hits(tmp_path)) == 1
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_1"]


def test_four_losses_in_one_step_end_the_run_and_keep_its_checkpoints(tmp_path, tiny_qwen2):
    faults = [fault(3, "update_actor", "actor_rollout", method="update_actor") for _ in range(4)]
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, trainer__save_freq=2)
    assert done.returncode != 0 and "the limit is 3 losses" in done.stderr and "so the driver ends" in done.stderr
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_2"]


def test_a_killed_master_disturbs_no_step(tmp_path, tiny_qwen2):
    stages = ("next_batch", "gen", "update_critic", "update_actor", "update_weights", "save_checkpoint")
    faults = [fault(4 * number + 2, stage, "master", after_s=0.01) for number, stage in enumerate(stages)]
    changes = {
        "algorithm__adv_estimator": "gae",
        "trainer__master": True,
        "trainer__total_training_steps": 25,
        "trainer__save_freq": 5,
    }
    done = run_with(tmp_path, tiny_qwen2, *faults, timeout_s=900, **changes)
    assert done.returncode == 0, done.stderr
    assert not losses(tmp_path)
    assert len({hit["pid"] for hit in hits(tmp_path)}) == len(stages)  # a new master each time
    assert len({tuple(entry["pids"]) for entry in events(tmp_path, "stage")}) == 1
    seconds = [row["timing_s/step"] for row in metrics(tmp_path / "run") if row["step"]]
    struck = [seconds[fault["step"] - 1] for fault in faults]
    print(
        f"\nsteps in which the master was killed: at most {max(struck):.2f} s; others: "
        f"{max(set(seconds) - set(struck)):.2f} s",
        end="",
    )


def test_two_hundred_steps_with_twenty_faults_end_as_without(tmp_path, tiny_qwen2):
    changes = {
        "trainer__total_training_steps": 200,
        "trainer__save_freq": 40,
        "trainer__max_ckpt_to_keep": 1,
        "trainer__master": True,
        "trainer__colocate": "device",
        "algorithm__adv_estimator": "gae",
        "data__max_response_length": 6,
    }
    for name, planted in (("calm", []), ("stormy", storm(random.Random(0)))):
        done = run_with(tmp_path / name, tiny_qwen2, *planted, timeout_s=1700, **changes)
        assert done.returncode == 0, done.stderr
    assert len(hits(tmp_path / "stormy")) == 20
    print_seconds(tmp_path / "stormy", "random")
    check_ended_the_same(tmp_path / "stormy", tmp_path / "calm", step=200)


def storm(dice):
    """Return twenty recoverable faults of all kinds, at random steps."""
    policy = [("gen", "generate_sequences"), ("old_log_prob", "compute_log_prob"), ("update_actor", "update_actor")]
    policy += [("update_weights", "update_weights"), ("save_checkpoint", "take_snapshot"), ("next_batch", "")]
    critic = [
        ("values", "compute_values"),
        ("update_critic", "update_critic"),
        ("save_checkpoint", "take_snapshot"),
        ("gen", ""),
    ]
    faults = []
    for step in sorted(dice.sample(range(2, 200), 20)):
        role, moments = dice.choice((("actor_rollout", policy), ("critic", critic)))
        stage, method = dice.choice(moments)
        kind, after_s = (
            dice.choice(("kill", "kill", "exit", "memory", "freeze")),
            0.0 if method == "take_snapshot" else 0.005,
        )
        faults.append(fault(step, stage, role, dice.randrange(2), kind=kind, method=method, after_s=after_s))
    return faults
