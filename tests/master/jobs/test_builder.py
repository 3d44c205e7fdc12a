"""Builders: what both generations of DLRover's users write becomes a job, or a refusal that names the role, the value
and the way out.
"""

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.errors import ConfigError, PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder, Job, RLJob, RLJobBuilder
from hybridrl.master.jobs.entrypoint import entry_of
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
    assert isinstance(job, RLJob) and job.spec.config == {"c1": "v1"} and job.spec.env == {"e0": "v0"}
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


def test_methods_of_a_role_are_said_of_the_one_they_are_called_on():
    builder = DLJobBuilder()
    first, second = builder.role("first").run(A), builder.workload("second", A)
    first.total(2)
    builder.total(3)  # of the last one
    second.env({"X": "1"})
    assert [(role.name, role.total, role.env) for role in builder.build().spec.roles] == [
        ("first", 2, {}),
        ("second", 3, {"X": "1"}),
    ]


def test_collocated_roles_are_on_one_pool_and_the_largest_says_how_many_devices():
    builder = (
        RLJobBuilder().trainer(Trainer).actor(A).nnodes(2).nproc_per_node(4).rollout(A).total(4).reward(A).total(1)
    )
    assert pools(builder.with_collocation("ACTOR", "Rollout", "reward").build()) == {"actor+rollout+reward": (4, 4)}
    assert {role.name: role.on_nodes for role in builder.build().spec.roles} == {
        "actor": (4, 4),
        "rollout": (2, 2),
        "reward": (1,),
    }


def test_collocating_all_leaves_out_the_trainer_and_whom_it_names():
    builder = RLJobBuilder().trainer(Trainer).actor(A).rollout(A).reward(A).with_collocation_all("reward")
    assert pools(builder.build()) == {"actor+rollout": (1,), "reward": (1,)}


def test_how_a_role_lies_is_said_in_words():
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


def test_a_job_is_the_same_again_from_its_json():
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
    again = RLJob.model_validate_json(job.model_dump_json(indent=2))
    assert again == job and again.spec.config == {"lr": 0.1, "layers": [1, 2]} and again.plan("x") == job.plan("x")
    with pytest.raises(ConfigError, match="not the JSON of a job"):
        Job.model_validate_json("{}")


def test_classes_are_given_by_themselves_also_those_of_the_program(tmp_path):
    assert entry_of("actor", Adder) == A
    program = tmp_path / "program.py"
    program.write_text(
        "from hybridrl.master.jobs.entrypoint import entry_of\nclass Mine: ...\nprint(entry_of('actor', Mine))"
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
            "role 'actor': resource.cpu=0, accelerator=0. takes nothing that could be reserved",
        ),
        (lambda b: b.actor("nothing"), "role 'actor': 'nothing' names no class"),
        (lambda b: b.actor(lambda: None), "role 'actor': .* is not at the top of a module"),
        (lambda b: b.role("actor"), "role 'actor': nothing says what it runs"),
        (lambda b: b.actor(A).actor(A), "role 'actor' is already defined"),
        (lambda b: b.rollout(A), "there is no actor"),
        (lambda b: b.trainer(A), "role 'trainer' is already defined"),
        (lambda b: b.total(2), "role 'trainer': total=2, but the trainer is one process"),
        (lambda b: DLJobBuilder().total(2), "no role was begun"),
        (lambda b: b.actor(A).with_collocation("actor", "critc"), "there is no role 'critc'; there are actor"),
        (
            lambda b: b.actor(A).critic(A).with_collocation("actor", "critic").with_collocation_all(),
            "role 'actor' is named twice",
        ),
        (
            lambda b: b.actor(A).anti_affinity("critic"),
            "role 'actor': anti_affinity.'critic'., but there are only actor",
        ),
        (
            lambda b: b.actor(A).feeds("actor", "rolout").rollout(A),
            "role 'rolout' is not known; did you mean 'rollout'",
        ),
        (lambda b: b.actor(A).total(3).nnodes(2).nproc_per_node(2), "total.3., but nnodes.2. with 2 each is 4"),
        (lambda b: b.actor(A).config({"a": {"b": object}}), "config.a.b=.*is nothing that JSON has"),
        (lambda b: b.actor(A).device_type("QPU"), "device_type 'QPU' is not known; did you mean 'TPU'"),
        (
            lambda b: b.actor(A).total(4).per_node(2).critic(A).total(4).per_node(4).with_collocation_all(),
            "different numbers of nodes: actor on 2, critic on 1",
        ),
        (
            lambda b: b.actor(A).spread().critic(A).pack().with_collocation_all(),
            "want to lie differently",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name_with_the_way_out(describe, message):
    with pytest.raises(ConfigError, match=message):
        describe(RLJobBuilder().trainer(Trainer)).build()


def test_more_than_the_declared_machines_is_refused_when_it_is_built():
    with pytest.raises(
        PlacementError,
        match=r"'actor' .2 GPU.*machine 0 of node_num=1: 1 GPU left, 1 GPU missing.*total\(\), per_node\(\)",
    ):
        RLJobBuilder().node_num(1).device_per_node(1).actor(A).total(2).per_node(2).build()


def test_the_page_shows_what_its_job_prints(capsys):
    page = (Path(__file__).parents[3] / "docs" / "master.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dry_run" in block]
    exec(compile(block, "docs/master.md", "exec"), {})
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_a_name_that_no_builder_has_is_no_method():
    with pytest.raises(AttributeError, match="no method 'totl'"):
        RLJobBuilder().actor(A).totl(2)
