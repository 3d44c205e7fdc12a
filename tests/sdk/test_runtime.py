"""Submitted jobs in both styles: real processes, real calls between all of them, real kills."""

import json

import pytest

from hybridrl.sdk import RLJobBuilder
from tests.master.jobs.test_submit import SMALL, left_of, wait_until
from tests.support.sdk import first_generation, rl_mock

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def mock_result(tmp_path_factory, ray_cluster):
    """What the trainer of `rl_mock` wrote."""
    out = tmp_path_factory.mktemp("rl_mock") / "out"
    builder = RLJobBuilder().device_type("CPU").config({"out": str(out), "nested": {"value": 5}})
    builder.trainer(rl_mock.Trainer).resource(**SMALL)
    builder.actor(rl_mock.Actor).total(2).resource(**SMALL)
    builder.rollout(rl_mock.Rollout).total(2).resource(**SMALL)
    builder.reference(rl_mock.Reference).resource(**SMALL)
    builder.reward(rl_mock.Reward).resource(**SMALL)
    builder.critic(rl_mock.Critic).resource(**SMALL)
    assert builder.build().submit("mock") == 0
    wait_until(lambda: not left_of("mock-"))
    return json.loads(out.read_text())


def test_six_roles_run_three_episodes(mock_result):
    for version, (ranks, rows, updates) in enumerate(mock_result["episodes"]):
        assert ranks == [[0, 1], [0, 1], [0], [0], [0]]  # in the order of RLRoleType
        samples = [f"{prompt}!v{version}" for prompt in rl_mock.PROMPTS]  # the rollouts have the actor's weights
        assert rows == [[s, len(s), len(s) + version, -len(s)] for s in samples]
        assert updates == [[3, 2], [5]]  # five rows over two actors, and over one critic
    assert mock_result["ended"] == [[1, 1], [1, 1], [1], [1], [1]]


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        ("the_context", ["trainer-0", ["rollout-0", "ROLLOUT", 0, 2, 5], ["rollout-1", "ROLLOUT", 1, 2, 5]]),
        ("functions", [[7], [1, 2], 7]),
        ("an_exported_function", True),
        ("an_absent_role", [0, [], [None, None]]),
        ("threads", [[[[7]], [[7]]], [[[7]]]]),
        ("scatter", True),
        ("coroutines_run_side_by_side", True),
        ("an_idempotent_call_of_a_killed_process", True),
    ],
)
def test_what_the_trainer_asked_is_answered(mock_result, check, answer):
    assert mock_result[f"check_{check}"] == answer


def test_a_call_on_the_event_loop_is_refused_with_a_way_out_that_works(mock_result):
    message, answer = mock_result["check_the_event_loop"]
    assert "reward.version() was called on this process's event loop" in message and answer == [7]


def test_the_endpoints_deadline_is_kept(mock_result):
    assert "is_slow() did not answer within 0.3 s; still waiting" in mock_result["check_the_deadline"]


def test_a_cycle_is_named_within_seconds(mock_result):
    assert "actor-0.asks_rollout waits for rollout-" in mock_result["check_a_cycle"]
    assert (
        ".asks_actor waits for actor-0.weights" in mock_result["check_a_cycle"] and mock_result["check_a_cycle_s"] < 60
    )


def test_a_failure_keeps_the_tracebacks_of_all_hops(mock_result):
    text, notes, traceback = mock_result["check_a_failure_three_hops_away"]
    assert text == "in the reward" and notes[0] == "raised in reward-0, fail()"
    places = [traceback.index(name) for name in ("in fail", "in asks_failing_reward", "in asks_rollout")]
    assert places == sorted(places)


def test_an_unknown_endpoint_is_named_with_those_that_exist(mock_result):
    assert "reward-0 has no 'scoer'; it offers" in mock_result["check_an_unknown_endpoint"]
    assert "rewards" in mock_result["check_an_unknown_endpoint"]


def test_a_killed_process_ends_its_calls_with_the_loss_and_the_next_call_works(mock_result):
    loss, others_went_on, is_new, greeting, caches_are_renewed = mock_result["check_a_killed_process"]
    assert "worker rollout-1 was lost while running naps_for(): killed by SIGKILL" in loss
    assert others_went_on and is_new and caches_are_renewed and greeting == [7]  # asked by its constructor


# -- the first generation


@pytest.fixture(scope="module")
def seen(tmp_path_factory, ray_cluster):
    """What the trainer of `first_generation` wrote."""
    out = tmp_path_factory.mktemp("first_generation") / "out"
    builder = RLJobBuilder().device_type("CPU").config({"out": str(out), "optim": {"lr": 0.5}})
    builder.trainer(first_generation.UserTrainer).resource(**SMALL)
    builder.actor(first_generation.UserActor).total(2).per_node(2).resource(**SMALL)
    builder.rollout(first_generation.UserActor).resource(**SMALL)
    builder.workload("search-tool", first_generation.UserActor).resource(**SMALL)
    assert builder.with_collocation("actor", "rollout").build().submit("first") == 0
    wait_until(lambda: not left_of("first-"))
    return json.loads(out.read_text())


def test_every_property_and_method_of_a_workload_is_that_of_its_process(seen):
    first, second, rollout, tool = seen["described"]
    ranks = {"word_size": 2, "world_size": 2, "local_world_size": 2}
    assert first | {"role": "ACTOR", "rank": 0, "local_rank": 0, "name": "actor-0"} | ranks == first
    assert second | {"role": "ACTOR", "rank": 1, "local_rank": 1, "name": "actor-1"} | ranks == second
    assert [one["is_actor_role"] for one in seen["described"]] == [True, True, False, False]
    assert [one["is_rollout_role"] for one in seen["described"]] == [False, False, True, False]
    assert not any(
        one[f"is_{role}_role"] for one in seen["described"] for role in ("reference", "ref", "reward", "critic")
    )
    assert first["get_device_collocation"] == rollout["get_device_collocation"] == "ACTOR,ROLLOUT"
    assert first["is_actor_or_rollout_device_collocation"] and not tool["is_actor_or_rollout_device_collocation"]
    assert tool["role"] == "SEARCH-TOOL" and tool["get_device_collocation"] == "" and not tool["has_device_collocation"]
    assert first["rendezvous"] == second["rendezvous"] != rollout["rendezvous"] and first["rendezvous"][1] > 0
    assert first["lr"] == 0.5 and first["master"] == "ActorHandle"


def test_the_trainer_has_handles_groups_and_resources_of_its_roles(seen):
    assert seen["order"] == ["constructed", "init", "fit"]
    assert seen["groups"] == ["RG_ACTOR", "RG_ROLLOUT", "RG_SEARCH_TOOL"] and seen["counts"] == [2, 0, 1, 0, 0]
    assert seen["handles"] == {"ACTOR": 2, "ROLLOUT": 1, "SEARCH-TOOL": 1}
    assert set(seen["classes"].values()) == {"UserActor"} and seen["config"] == [0.5, "DictConfig"]
    assert seen["resource"] == [{"cpu": 0.5}, {"cpu": 0.25}]  # half of a core that two roles share, and its own part


def test_role_groups_and_handles_call_real_processes(seen):
    assert seen["sharded"] == [["x"], ["y"]] and seen["shared"] == ["z", "z"] and seen["handle"] == ["h", "h"]
    assert seen["later"] == [["ObjectRef", "ObjectRef"], [[0, 5], [1, 5]]]
    assert seen["first"] == ["actor", [["a", 2]]] and seen["filtered"] == 2
    assert seen["all"] == [0, 1] and "naps() did not answer within 2 s; still" in seen["timeout"]


def test_a_lost_workload_is_replaced_under_the_same_handles(seen):
    assert "worker rollout-0 was lost while running process_id()" in seen["loss"] and "SIGKILL" in seen["loss"]
    assert seen["recovered"] == {"rollout": [0]} and seen["is_new"]
