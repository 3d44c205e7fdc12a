"""Builders: chains in the style of both DLRover generations become a job, or an error with role, value and fix."""

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.errors import ConfigError, PlacementError
from hybridrl.master.jobs.builder import DLJob, DLJobBuilder, Job, RLJob, RLJobBuilder
from hybridrl.master.jobs.entrypoint import parse_entry
from tests.support.master.sample_job import Adder, Trainer

A = "tests.support.master.sample_job:Adder"


def pools(job):
    return {pool.name: pool.slots for pool in job.spec.pools}


def test_the_first_generations_chain():
    job = (
        RLJobBuilder()
        .node_num(3)
        .device_per_node(2)
        .device_type("GPU")
        .config({"c1": "v1"})
        .global_env({"e0": "v0"})
        .trainer("my.module", "Trainer")
        .actor("my.module", "Actor")
        .total(2)
        .per_node(1)
        .env({"e1": "v1"})
        .rollout("my.module", "Rollout")
        .total(2)
        .per_node(1)
        .reference("my.module", "Reference")
        .total(2)
        .per_node(1)
        .build()
    )
    assert (
        isinstance(job, RLJob)
        and isinstance(job, DLJob)
        and job.spec.config == {"c1": "v1"}
        and job.spec.env == {"e0": "v0"}
    )
    assert [(role.name, role.entry, role.on_nodes, role.env) for role in job.spec.roles] == [
        ("actor", "my.module:Actor", (1, 1), {"e1": "v1"}),
        ("rollout", "my.module:Rollout", (1, 1), {}),
        ("reference", "my.module:Reference", (1, 1), {}),
    ]
    assert job.spec.trainer.entry == "my.module:Trainer" and pools(job) == {
        "actor": (1, 1),
        "rollout": (1, 1),
        "reference": (1, 1),
    }


def test_the_unified_generations_builder():
    builder = RLJobBuilder().config(OmegaConf.create({"a": {"b": 1}, "c": "${a.b}"}))
    builder.trainer("p.ppo_trainer.Trainer").resource(cpu=4)
    (builder.actor("p.ppo_actor.Actor").resource(accelerator=1).nnodes(2).nproc_per_node(4))
    builder.rollout("p.vllm::VLLMActor").resource(accelerator=1).total(3).end()
    builder.role("REFERENCE").train("p.ref.Ref").resource(gpu=0.4, mem=2048).nnodes(1).nproc_per_node(2)
    job = builder.build()
    assert job.spec.config == {"a": {"b": 1}, "c": 1}
    assert {role.name: role.on_nodes for role in job.spec.roles} == {
        "actor": (4, 4),
        "rollout": (1, 1, 1),
        "reference": (2,),
    }
    reference = job.spec.roles[2]
    assert (reference.entry, reference.resource.accelerator, reference.resource.memory_mb) == ("p.ref:Ref", 0.4, 2048)
    assert job.spec.roles[1].entry == "p.vllm:VLLMActor"


def test_role_methods_describe_the_role_they_are_called_on_and_on_the_job_the_last_one():
    builder = DLJobBuilder()
    first, second = builder.role("first").run(A), builder.workload("second", A)
    first.total(2)
    builder.total(3)  # the last role
    second.env({"X": "1"})
    assert [(role.name, role.total, role.env) for role in builder.build().spec.roles] == [
        ("first", 2, {}),
        ("second", 3, {"X": "1"}),
    ]


def test_collocated_roles_are_on_one_pool_and_the_largest_determines_the_number_of_devices():
    builder = (
        RLJobBuilder().trainer(Trainer).actor(A).nnodes(2).nproc_per_node(4).rollout(A).total(4).reward(A).total(1)
    )
    assert pools(builder.with_collocation("ACTOR", "Rollout", "reward").build()) == {"actor+rollout+reward": (4, 4)}
    assert {role.name: role.on_nodes for role in builder.build().spec.roles} == {
        "actor": (4, 4),
        "rollout": (2, 2),
        "reward": (1,),
    }


def test_collocating_all_leaves_out_the_trainer_and_the_named_roles():
    builder = RLJobBuilder().trainer(Trainer).actor(A).rollout(A).reward(A).with_collocation_all("reward")
    assert pools(builder.build()) == {"actor+rollout": (1,), "reward": (1,)}


def test_placement_of_roles_is_described_by_name():
    job = (
        DLJobBuilder()
        .workload("a", A)
        .total(4)
        .per_node(2)
        .spread(strict=True)
        .node_labels({"zone": "!b"})
        .workload("b", A)
        .total(4)
        .per_group(3)
        .pack(strict=True)
        .anti_affinity("A")
        .resource(cpu=1)
        .feeds("a", "b")
        .weights("B", "A")
        .build()
    )
    a, b = job.spec.pools
    assert (a.strategy, a.labels, a.slots) == ("strict_spread", {"zone": "!b"}, (2, 2))
    assert (b.strategy, b.apart_from, b.slots, job.spec.roles[1].resource.accelerator) == (
        "strict_pack",
        ("a",),
        (4,),
        0.0,
    )
    assert [(edge.kind, edge.source, edge.target) for edge in job.spec.edges] == [
        ("feeds", "a", "b"),
        ("weights", "b", "a"),
    ]


def test_a_job_survives_a_round_trip_through_json():
    job = (
        RLJobBuilder()
        .config(Namespace(lr=0.1, layers=[1, 2]))
        .trainer(Trainer)
        .resource(cpu=0.5)
        .actor(A)
        .spread()
        .feeds("actor", "actor")
        .build()
    )
    restored = RLJob.model_validate_json(job.model_dump_json(indent=2))
    assert (
        restored == job
        and restored.spec.config == {"lr": 0.1, "layers": [1, 2]}
        and restored.plan("x") == job.plan("x")
    )
    with pytest.raises(ConfigError, match="not the JSON of a job"):
        Job.model_validate_json("{}")


def test_classes_are_valid_entries_also_those_of_the_program(tmp_path):
    assert parse_entry("actor", Adder) == A
    program = tmp_path / "program.py"
    program.write_text(
        "from hybridrl.master.jobs.entrypoint import parse_entry\nclass Mine: ...\nprint(parse_entry('actor', Mine))"
    )
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout == f"{program}:Mine\n"


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (lambda b: b.actor(A).total(0), "role 'actor': total=0 must be a whole number, 1 or more"),
        (lambda b: b.actor(A).env({"N": 1}), "role 'actor': env.'N': 1. must be text; write '1'"),
        (lambda b: b.actor(A).env({"RANK": "0"}), "role 'actor': env.'RANK'. is set for every process"),
        (
            lambda b: b.actor(A).resource(accelerator=1.5),
            "role 'actor': resource.accelerator=1.5. must be a whole number of devices, or",
        ),
        (lambda b: b.actor(A).resource(cpu=-1), "role 'actor': resource.cpu=-1. must be a number, 0 or more"),
        (
            lambda b: b.actor(A).resource(cpu=0),
            "role 'actor': resource.cpu=0, accelerator=0. leaves nothing to reserve",
        ),
        (lambda b: b.actor("nothing"), "role 'actor': entry='nothing' names no class"),
        (lambda b: b.actor(lambda: None), "role 'actor': .* is not at the top level of a module"),
        (lambda b: b.role("actor"), "role 'actor': it has nothing to run"),
        (lambda b: b.actor(A).actor(A), "role 'actor' is already defined"),
        (lambda b: b.rollout(A), "there is no actor"),
        (lambda b: b.trainer(A), "role 'trainer' is already defined"),
        (lambda b: b.total(2), "role 'trainer': total=2, but the trainer is one process"),
        (lambda b: DLJobBuilder().total(2), "there is no role yet"),
        (lambda b: b.actor(A).with_collocation("actor", "critc"), "there is no role 'critc'; known are actor"),
        (
            lambda b: b.actor(A).critic(A).with_collocation("actor", "critic").with_collocation_all(),
            "role 'actor' is named twice",
        ),
        (
            lambda b: b.actor(A).anti_affinity("critic"),
            "role 'actor': anti_affinity.'critic'., but the only roles are actor",
        ),
        (
            lambda b: b.actor(A).feeds("actor", "rolout").rollout(A),
            "role 'rolout' is unknown; did you mean 'rollout'",
        ),
        (lambda b: b.actor(A).total(3).nnodes(2).nproc_per_node(2), "total.3., but nnodes.2. with 2 each is 4"),
        (lambda b: b.actor(A).config({"a": {"b": object}}), "config.a.b=.*JSON cannot hold a type"),
        (lambda b: b.actor(A).device_type("QPU"), "device_type 'QPU' is unknown; did you mean 'TPU'"),
        (
            lambda b: b.actor(A).total(4).per_node(2).critic(A).total(4).per_node(4).with_collocation_all(),
            "different numbers of nodes: actor on 2, critic on 1",
        ),
        (
            lambda b: b.actor(A).spread().critic(A).pack().with_collocation_all(),
            "request different strategies",
        ),
    ],
)
def test_a_wrong_description_is_refused_with_role_value_and_fix(describe, message):
    with pytest.raises(ConfigError, match=message):
        describe(RLJobBuilder().trainer(Trainer)).build()


def test_build_refuses_a_job_that_needs_more_than_the_declared_machines():
    with pytest.raises(
        PlacementError,
        match=r"'actor' .2 GPU.*node_num=1: 1 GPU left.*1 GPU.*total\(\), per_node\(\)",
    ):
        RLJobBuilder().node_num(1).device_per_node(1).actor(A).total(2).per_node(2).build()


def test_the_docs_page_shows_the_output_of_its_job(capsys):
    page = (Path(__file__).parents[3] / "docs" / "master.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dry_run" in block]
    exec(compile(block, "docs/master.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_an_unknown_method_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'totl'"):
        RLJobBuilder().actor(A).totl(2)
    with pytest.raises(AttributeError, match="no attribute 'actor'"):
        DLJobBuilder().role("x").run(A).actor(A)


def test_methods_of_the_job_return_its_builder_and_methods_of_a_role_a_builder_of_that_role():
    builder = RLJobBuilder()
    actor = builder.actor(A)
    builder.critic(A)
    assert actor.feeds("actor", "critic") is actor.end() is builder.node_num(1) is builder
    assert actor.total(2) is actor and isinstance(actor, RLJobBuilder)
    assert {role.name: role.total for role in builder.build().spec.roles} == {"actor": 2, "critic": 1}
