"""The builder as DLRover's users write it: the blocks of its guides, and what they set beyond them.

Corrections of the pages:

| as written | here |
|---|---|
| `from dlrover.python.rl.api.api import` | `from hybridrl.master.jobs.builder import` |
| `RLRoleType.REFERENCE.name` | its value, "REFERENCE" |
| `.train("{P}.ppo_reference.PPOReferenceActor")`, and of the reward | refused: the f is missing |
| `args_2_omega_conf(args)` | `OmegaConf.create(vars(args))` |
"""

import json
import logging
from argparse import Namespace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.builder import DLJobBuilder, Job, RLJob, RLJobBuilder
from hybridrl.master.plan.without_effect import REASONS

PROGRAM = str(Path(__file__).parents[1] / "support" / "master" / "spmd_program.py")
P = "rl.openrlhf.ppo"


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("without_effect")]


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level(logging.WARNING)


# -- the builder's blocks of the guides


def test_the_block_of_the_design_page():
    job = (
        RLJobBuilder()
        .node_num(3)
        .device_per_node(2)
        .config({"c1": "v1"})
        .global_env({"e0": "v0"})
        .trainer("dlrover.python.rl.tests.test_class", "TestInteractiveTrainer")
        .actor("dlrover.python.rl.tests.test_class", "TestActor")
        .total(2)
        .per_node(1)
        .env({"e1": "v1"})
        .rollout("dlrover.python.rl.tests.test_class", "TestRollout")
        .total(2)
        .per_node(1)
        .reference("dlrover.python.rl.tests.test_class", "TestReference")
        .total(2)
        .per_node(1)
        .build()
    )
    assert [(name, one.total, one.per_group) for name, one in job.workloads.items()] == [
        ("trainer", 1, 1),
        ("actor", 2, 1),
        ("rollout", 2, 1),
        ("reference", 2, 1),
    ]
    assert len(job.plan("test").workers()) == 6


def openrlhf_job(args, prefix="f"):
    """The page's `submit`, up to its end. prefix "" leaves out the f of the page's reference and reward."""
    builder = RLJobBuilder().config(OmegaConf.create(vars(args)))
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=4)
    (
        builder.actor(f"{P}.ppo_actor.PolicyModelActor")
        .resource(accelerator=1)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_gpus_per_node)
    )
    (
        builder.critic(f"{P}.ppo_critic.CriticModelRayActor")
        .resource(accelerator=0.4)
        .nnodes(args.critic_num_nodes)
        .nproc_per_node(args.critic_num_gpus_per_node)
    )
    builder.rollout(f"{P}.ppo_rollout.VLLMActor").resource(accelerator=1).total(args.vllm_num_engines)
    page = P if prefix else "{P}"
    if args.init_kl_coef != 0:
        (
            builder.role("REFERENCE")
            .train(f"{page}.ppo_reference.PPOReferenceActor")
            .resource(accelerator=0.4)
            .nnodes(args.ref_num_nodes)
            .nproc_per_node(args.ref_num_gpus_per_node)
        )
    (
        builder.role("REWARD")
        .train(f"{page}.ppo_reward.RewardModelRayActor")
        .resource(accelerator=0.4)
        .nnodes(args.reward_num_nodes)
        .nproc_per_node(args.reward_num_gpus_per_node)
    )
    job = builder.build()
    if args.skip_node_check:
        for workload in job.workloads.values():
            if workload.backend == "elastic":
                workload.comm_pre_check = False
    return job


ARGS = Namespace(
    **{f"{role}_num_nodes": 1 for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}_num_gpus_per_node": 2 for role in ("actor", "critic", "ref", "reward")},
    vllm_num_engines=2,
    init_kl_coef=0.01,
    skip_node_check=True,
)


def test_the_block_of_the_openrlhf_page(caplog):
    job = openrlhf_job(ARGS)
    assert {name: (one.backend, one.total, one.is_driver) for name, one in job.workloads.items()} == {
        "trainer": ("simple", 1, True),
        "actor": ("elastic", 2, False),
        "critic": ("elastic", 2, False),
        "rollout": ("simple", 2, False),
        "reference": ("elastic", 2, False),
        "reward": ("elastic", 2, False),
    }
    assert json.loads(job.model_dump_json(indent=2))["config"]["vllm_num_engines"] == 2
    assert RLJob.model_validate_json(job.model_dump_json()) == job and lines_of(caplog) == []
    assert len(openrlhf_job(Namespace(**{**vars(ARGS), "init_kl_coef": 0})).workloads) == 5
    with pytest.raises(ConfigError, match="role 'reference'.*braces.*f-string"):
        openrlhf_job(ARGS, prefix="")


# -- what both generations have beyond their tests


@pytest.mark.parametrize(
    ("describe", "on_nodes"),
    [
        (lambda role: role.nproc_per_node(3), (3,)),
        (lambda role: role.per_node(3), (3,)),
        (lambda role: role.nproc_per_node(3).nnodes(2), (3, 3)),
        (lambda role: role.nnodes(2).nproc_per_node(3), (3, 3)),
        (lambda role: role.nnodes(2), (1, 1)),
        (lambda role: role.total(1).per_node(3), (1,)),
        (lambda role: role, (1,)),
    ],
)
def test_processes_per_node_without_a_total_fill_their_nodes(describe, on_nodes):
    assert describe(DLJobBuilder().role("r").run("a.b")).build().spec.roles[0].on_nodes == on_nodes


def test_an_entry_belongs_to_the_role_that_waits_for_one():
    builder = DLJobBuilder()
    builder.role("first").run("a.b").total(2)
    assert list(builder.train("c.d").build().workloads) == ["first", "elastic"]
    with pytest.raises(ConfigError, match="role 'elastic'.* already runs 'c:d'.*role"):
        builder.run("e.f")
    with pytest.raises(ConfigError, match=r"run\(\): there is no role yet"):
        DLJobBuilder().run("a.b")
    with pytest.raises(ConfigError, match="role 'elastic' is already defined"):
        builder.train("e.f")


def test_roles_that_a_trainer_calls_are_no_drivers():
    builder = RLJobBuilder().actor("a.A").workload("own", "a.B").critic("a.C")
    drivers = {role.name: role.is_driver for role in builder.build().spec.roles}
    assert drivers == {"actor": True, "own": True, "critic": True}  # nothing calls them
    drivers = {role.name: role.is_driver for role in builder.trainer("a.T").build().spec.roles}
    assert drivers == {"actor": False, "own": True, "critic": False}
    assert DLJobBuilder().role("a").run("a.b").not_driver().build().spec.role("a").is_driver is False


def test_what_a_workload_is_can_be_changed_before_submit(caplog):
    job = openrlhf_job(ARGS)
    job.workloads["ROLLOUT"].max_restart = 3
    job.workloads["trainer"].max_restart = 2
    job.workloads["actor"].envs = {"A": "1"}
    job.workloads["actor"].comm_pre_check = True
    assert (job.spec.role("rollout").max_restart, job.spec.trainer.max_restart) == (3, 2)
    assert job.spec.role("actor").env == {"A": "1"} and job.workloads["actor"].comm_pre_check is True
    assert lines_of(caplog) == [f"role 'actor': comm_pre_check has no effect: {REASONS['comm_pre_check']}"]
    for name, value, message in (
        ("total", 3, "role 'actor': total=3 cannot be set on a job that is built"),
        ("max_restart", -1, "role 'actor': max_restart=-1 must be a whole number"),
        ("envs", {"RANK": "1"}, "is set for every process"),
    ):
        with pytest.raises(ConfigError, match=message):
            setattr(job.workloads["actor"], name, value)
    with pytest.raises(AttributeError, match="no attribute 'comm_precheck'"):
        job.workloads["actor"].comm_precheck = False
    with pytest.raises(KeyError, match="no role 'acter'.*trainer, actor"):
        job.get_workload("acter")
    assert Job.model_validate_json(job.model_dump_json()).workloads["actor"].comm_pre_check is True


def test_custom_resources_have_the_names_of_both_generations(caplog):
    builder = (
        DLJobBuilder().role("r").run("a.b").resource(cpu=2, mem=512, acc=1, disk=9, ud_resource={"fast": 1}, slow=2)
    )
    resource = builder.build().workloads["r"].resource
    assert (resource.cpu, resource.memory_mb, resource.accelerator) == (2, 512, 1)
    assert resource.more == {"fast": 1, "slow": 2}
    assert lines_of(caplog) == ["role 'r': resource(disk=...) has no effect: Ray reserves no disk"]


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ("--network-check --exclude-straggler", ["--network_check", "--exclude_straggler"]),
        ("--node_unit 2 --auto-tunning --numa-affinity", ["--auto_tunning", "--numa_affinity", "--node_unit"]),
        ("--max_restarts 3 --standalone", []),
    ],
)
def test_options_of_dlrover_run_that_have_no_effect_are_logged_once(caplog, options, logged):
    job = DLJobBuilder().by_dlrover_run_cmd(f"dlrover-run {options} --nproc_per_node 2 {PROGRAM} --node_unit 7").build()
    assert job.workloads["elastic"].entry_point == f"{PROGRAM} --node_unit 7" and job.workloads["elastic"].total == 2
    assert [line.split(" has no effect")[0] for line in lines_of(caplog)] == logged


def test_every_reason_is_one_sentence_part_without_its_setting():
    for setting, reason in REASONS.items():
        assert reason and setting not in reason and not reason.endswith(".")
