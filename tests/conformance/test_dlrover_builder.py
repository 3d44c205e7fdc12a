"""DLRover's own tests of its builder, asked of this builder.

One test per test of DLRover: of the unified generation `api/test_builder` and `common/test_workload_desc`, of the first
one `api/test_api`. What a user has to change, besides the import:

| in DLRover | here |
|---|---|
| 16 devices on 2 x 4 build (`test_basic`, `test_to_rl_config`), and on 2 x 6 (`test_to_dl_config`) | 2 x 8 are needed |
| names of roles are upper case | lower case; `workloads`, `get_workload` and `in collocations[0]` ignore the case |
| `stream_type`, `isinstance(job, DLConfig)`, `_to_rl_config()`, `_env`, `_sub_stage` | `job.spec`, `job.workloads` |
| `job.actor.total`, `job.trainer.module_class` | `job.workloads["actor"].total`, `.entry_point` |
| ValidationError | ConfigError, which is a ValueError |
| "not defined", "already been assigned" | "there is no role", "is named twice" |
| a role on shared devices gets 0.33 of one | 0.3333 |
| `total(5).per_group(3)` is refused | 3 and 2 |
| a job has no name: `dlrover-HEX` | `job-HEX` |
| `SimpleWorkloadDesc`, `ElasticWorkloadDesc` | `run()`, `train()` |
"""

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.errors import ConfigError, PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder, RLJob, RLJobBuilder
from hybridrl.master.plan.submit_options import read_options

PROGRAM = str(Path(__file__).parents[1] / "support" / "master" / "spmd_program.py")
ROLES = ("actor", "rollout", "reward", "reference", "critic")


def unified(*roles, nodes=2, devices=8, total=4, per_group=2):
    """A builder of the unified generation's tests: a trainer, and roles with their number in class and variable."""
    builder = RLJobBuilder().node_num(nodes).device_per_node(devices).config(OmegaConf.create({"k1": "v1"}))
    builder.global_env({"e0": "v0"}).trainer("m0.c0").end()
    for number, role in enumerate(roles, start=1):
        described = getattr(builder, role)(f"m{number}.c{number}").total(total).per_group(per_group)
        described.env({f"e{number}": f"v{number}"}).end()
    return builder


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.endswith("without_effect")]


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level(logging.WARNING)


# -- unified: api/test_builder


def test_basic():
    job = unified(*ROLES).with_collocation("ACTOR", "ROLLOUT").build()
    assert isinstance(job, RLJob)
    assert (job.node_num, job.device_per_node, job.device_type) == (2, 8, "GPU")
    assert (job.config, job.env) == ({"k1": "v1"}, {"e0": "v0"})
    assert len(job.workloads) == 6 and job.get_workload("TRAINER").entry_point == "m0.c0"
    for number, role in enumerate(ROLES, start=1):
        workload = job.get_workload(role.upper())
        assert (workload.entry_point, workload.total, workload.per_group) == (f"m{number}.c{number}", 4, 2)
        assert workload.envs == {f"e{number}": f"v{number}"}
    [shared] = job.collocations
    assert "ACTOR" in shared and "rollout" in shared and "CRITIC" not in shared
    with pytest.raises(PlacementError, match=r"raise node_num\(\) or device_per_node\(\)"):
        unified(*ROLES, devices=4).with_collocation("ACTOR", "ROLLOUT").build()


def test_by_dlrover_run_cmd():
    job = (
        DLJobBuilder()
        .by_dlrover_run_cmd(f"dlrover-run --nnodes=2 --nproc_per_node=2 --node_check {PROGRAM} -x 0")
        .build()
    )
    assert (job.node_num, job.device_per_node) == (2, 2)
    workload = job.workloads["ELASTIC"]
    assert (workload.backend, workload.comm_pre_check) == ("elastic", True)
    assert (workload.entry_point, workload.total) == (f"{PROGRAM} -x 0", 4)
    with pytest.raises(ValueError, match="does not start with torchrun or dlrover-run"):
        DLJobBuilder().by_dlrover_run_cmd("unsupported-run --nnodes=1 train.py")


def test_by_torchrun_cmd():
    job = DLJobBuilder().by_dlrover_run_cmd(f"torchrun --nnodes=2 --nproc_per_node=2  {PROGRAM} -x 0").build()
    assert (job.node_num, job.device_per_node) == (2, 2)
    assert (job.workloads["ELASTIC"].entry_point, job.workloads["ELASTIC"].total) == (f"{PROGRAM} -x 0", 4)
    assert job.workloads["ELASTIC"].comm_pre_check is False


def test_extra_flag():
    builder = DLJobBuilder().train("a.b").end().role("r2").run("a.b").end()
    job = builder.no_setup_process_group().skip_node_check().build()
    assert {name: workload.backend for name, workload in job.workloads.items()} == {
        "elastic": "elastic",
        "r2": "simple",
    }
    assert job.workloads["elastic"].comm_pre_check is job.workloads["elastic"].comm_auto_setup_process_group is False
    with pytest.raises(AttributeError, match=r"role 'r2' \(simple\) has no attribute 'comm_pre_check'"):
        _ = job.workloads["r2"].comm_pre_check


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (lambda: DLJobBuilder().build(), "the job has no role"),
        (lambda: DLJobBuilder().node_num(1).build(), "the job has no role"),
        (
            lambda: DLJobBuilder().node_num(1).device_per_node(1).device_type("mem").build(),
            "device_type 'MEM' is unknown",
        ),
        (lambda: DLJobBuilder().node_num(1).device_per_node(1).build(), "the job has no role"),
        (lambda: RLJobBuilder().node_num(1).device_per_node(1).config({"k1": "v1"}).build(), "there is no actor"),
        (lambda: RLJobBuilder().config({"k1": "v1"}).trainer("m0.c0").end().build(), "there is no actor"),
        (lambda: RLJobBuilder().config({"k1": "v1"}).trainer("").end().build(), "entry='' names no class"),
    ],
)
def test_validation(describe, message):
    with pytest.raises(ConfigError, match=message):
        describe()


def test_a_minimum_valid_rl_job():
    assert len(unified("actor", nodes=1, devices=1, total=1, per_group=1).build().workloads) == 2


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([("ACTOR", "ROLLOUT"), ("ROLLOUT", "REWARD")], "role 'rollout' is named twice"),
        ([("ACTOR", "CRITIC")], "there is no role 'critic'"),
        ([("ACTOR", "ROLLOUT"), ("ACTOR", "REWARD")], "role 'actor' is named twice"),
    ],
)
def test_invalid_collocation(sets, message):
    builder = unified("actor", "rollout", "reward")
    for roles in sets:
        builder.with_collocation(*roles)
    with pytest.raises(ConfigError, match=message):
        builder.build()


def test_collocation_all():
    job = unified("actor", "rollout", nodes=1, devices=2, total=1, per_group=1).with_collocation_all().build()
    assert job.collocations == [{"actor", "rollout"}]


@pytest.mark.parametrize(("roles", "share"), [(("actor", "rollout"), 0.5), (("actor", "rollout", "reference"), 0.3333)])
def test_to_dl_config(roles, share):
    job = unified(*roles, devices=4, per_group=4).with_collocation(*map(str.upper, roles)).build()
    assert len(job.workloads) == len(roles) + 1
    for role in roles:
        workload = job.workloads[role.upper()]
        assert (workload.total, workload.per_group, workload.resource.accelerator) == (4, 4, share)
        assert workload.group == "+".join(roles)
    assert job.workloads["trainer"].group is None


def test_to_dl_config_with_two_groups():
    builder = unified("actor", "rollout", "reward", devices=8).reference("m5.c5").total(12).per_group(6).end()
    job = builder.with_collocation("ACTOR", "ROLLOUT").with_collocation("REWARD", "REFERENCE").build()
    assert job.workloads["actor"].group == job.workloads["rollout"].group != job.workloads["reward"].group
    assert job.workloads["reward"].group == job.workloads["reference"].group
    assert {name: (one.total, one.per_group) for name, one in job.workloads.items()} == {
        "trainer": (1, 1),
        "actor": (4, 2),
        "rollout": (4, 2),
        "reward": (4, 2),
        "reference": (12, 6),
    }
    assert {job.workloads[role].resource.accelerator for role in ("actor", "rollout", "reward", "reference")} == {0.5}


def test_disable_ray_auto_visible_device(caplog):
    builder = unified("actor", devices=4, per_group=4).rollout("m2.c2").total(4).disable_ray_auto_visible_device()
    job = builder.env({"e2": "v2"}).per_group(4).end().with_collocation("Actor", "ROLLOUT").build()
    assert job.workloads["ROLLOUT"].envs["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "true"
    assert job.workloads["ROLLOUT"].envs["e2"] == "v2" and "e2" not in job.workloads["ACTOR"].envs
    assert job.workloads["ROLLOUT"].rank_based_gpu_selection and not job.workloads["ACTOR"].rank_based_gpu_selection
    assert [process.sees_node_devices for process in job.plan().processes] == [False, True]
    assert lines_of(caplog) == []


def test_elastic():
    builder = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").config({"c1": "v1"})
    job = builder.global_env({"e0": "v0"}).train("test::main").nnodes(2).nproc_per_node(2).end().build()
    assert list(job.workloads) == ["elastic"] and "ELASTIC" in job.workloads
    workload = job.workloads["ELASTIC"]
    assert (workload.backend, workload.entry_point, workload.total) == ("elastic", "test.main", 4)
    assert workload.resource.accelerator == 1
    with pytest.raises(ConfigError, match="role 'elastic': entry='test' names no class"):
        DLJobBuilder().train("test")


def test_role_builder(caplog):
    builder = DLJobBuilder().role("test").run("m0.c0")
    assert builder.env(None).sub_stage(None).sub_stage([1]).end().build().workloads["test"].envs == {}
    assert lines_of(caplog) == [
        "role 'test': sub_stage() has no effect: a role has no stages; the trainer orders its calls"
    ]
    assert DLJobBuilder().workload("test", "m0.c0").end().build()
    assert DLJobBuilder().role("test").run("tset::main").end().build().workloads["test"].entry_point == "tset.main"
    assert DLJobBuilder().role("test").run("tset.main").total(1).build()
    with pytest.raises(ConfigError, match="entry='main' names no class"):
        DLJobBuilder().role("test").run("main").end().build()
    with pytest.raises(ConfigError, match="total=-1 must be a whole number"):
        DLJobBuilder().role("test").run("tset.main").total(-1).end().build()


def test_submit(monkeypatch, capsys):
    job = DLJobBuilder().node_num(1).device_per_node(1).train("test::main").nnodes(1).nproc_per_node(1).end().build()
    monkeypatch.delenv("DLROVER_UNIFIED_JOB_NAME", raising=False)
    assert job.submit(dry_run=True) == 0 and capsys.readouterr().out.startswith("job: 1 placement group")
    monkeypatch.setenv("DLROVER_UNIFIED_JOB_NAME", "test_env_name")
    job.submit(dry_run=True)
    assert capsys.readouterr().out.startswith("test_env_name: ")
    job.submit("set_name", dry_run=True, master_cpu=8)
    assert capsys.readouterr().out.startswith("set_name: ")
    assert read_options({"master_cpu": 8}, {}).master.reservations("run")[0].resources == {"CPU": 8}


# -- unified: common/test_workload_desc


def test_normal():
    assert DLJobBuilder().role("r").run("a.b.c").build().workloads["r"].backend == "simple"
    assert DLJobBuilder().role("r").train("a.b.c").build().workloads["r"].backend == "elastic"


def test_validate():
    described = DLJobBuilder().role("r").run
    assert described("a::b").build().workloads["r"].entry_point == "a.b"
    with pytest.raises(ConfigError, match="entry='a_b_c' names no class"):
        DLJobBuilder().role("r").run("a_b_c")
    with pytest.raises(ConfigError, match="leaves nothing to reserve"):
        DLJobBuilder().role("r").run("a.b").resource(cpu=0, accelerator=0).build()
    assert DLJobBuilder().role("r").run("a.b").resource().build().workloads["r"].resource.accelerator == 1
    assert DLJobBuilder().role("r").run("a.b").total(5).per_group(3).build().spec.roles[0].on_nodes == (3, 2)


def test_validate_rank_based_gpu_selection(caplog):
    job = DLJobBuilder().role("r").run("a.b").total(4).per_group(2).build()
    assert job.workloads["r"].rank_based_gpu_selection is False
    job.workloads["r"].rank_based_gpu_selection = True
    assert job.workloads["r"].rank_based_gpu_selection is True and lines_of(caplog) == []
    assert [process.sees_node_devices for process in job.plan().processes] == [True]
    for builder in (
        DLJobBuilder().role("r").run("a.b"),
        DLJobBuilder().role("r").run("a.b").total(4).per_group(2).resource(accelerator=2),
    ):
        with pytest.raises(ConfigError, match=r"role 'r': rank_based_gpu_selection needs per_group\(2\) or more"):
            builder.build().workloads["r"].rank_based_gpu_selection = True


@pytest.mark.parametrize("entry", ["test.test", "my.module.run"])
def test_get_entrypoint_type_of_a_function(entry):
    workload = DLJobBuilder().role("r").run(entry).build().workloads["r"]
    assert workload.entry_point == entry


@pytest.mark.parametrize("entry", ["test.py", "test.py --test1", "./test.py", "/path/test.py"])
def test_get_entrypoint_type_of_a_program(entry):
    assert DLJobBuilder().role("r").run(entry).build().workloads["r"].entry_point == entry


@pytest.mark.parametrize("entry", ["test", "{P}.x.Y", "a b.c", "a..b", ".b", "a.1b", "dir/x.Y"])
def test_get_entrypoint_type_of_nothing(entry):
    with pytest.raises(ConfigError, match="names no class|without its f"):
        DLJobBuilder().role("r").run(entry)


# -- first generation: api/test_api


def first_generation(*roles):
    """A builder of the first generation's tests; a role is (name, total, per_node)."""
    builder = RLJobBuilder().node_num(2).device_per_node(8).config({"k1": "v1"}).global_env({"e0": "v0"})
    builder.trainer("m0", "c0")
    for number, (role, total, per_node) in enumerate(roles, start=1):
        getattr(builder, role)(f"m{number}", f"c{number}").total(total).per_node(per_node).env({"e": str(number)})
    return builder


def test_first_generation_basic():
    job = first_generation(("actor", 4, 2), ("rollout", 4, 2)).with_collocation("Actor", "rollout").build()
    assert isinstance(job, RLJob) and (job.node_num, job.device_per_node, job.device_type) == (2, 8, "GPU")
    assert (job.config, job.env) == ({"k1": "v1"}, {"e0": "v0"})
    assert [(one.entry_point, one.total, one.per_group, one.envs) for one in job.workloads.values()] == [
        ("m0.c0", 1, 1, {}),
        ("m1.c1", 4, 2, {"e": "1"}),
        ("m2.c2", 4, 2, {"e": "2"}),
    ]
    assert len(job.collocations) == 1 and "actor" in job.collocations[0] and "rollout" in job.collocations[0]


def test_first_generation_to_rl_config():
    groups = [("actor", 4, 2), ("rollout", 4, 2), ("reference", 12, 6), ("reward", 4, 2)]
    builder = first_generation(*groups).with_collocation("actor", "rollout").with_collocation("reward", "reference")
    job = builder.build()
    assert [set(names) for names in job.collocations] == [{"actor", "rollout"}, {"reward", "reference"}]
    assert [one.resource.accelerator for one in job.workloads.values()] == [None, 0.5, 0.5, 0.5, 0.5]


def test_first_generation_enable_ray_auto_visible_device():
    builder = first_generation(("actor", 4, 4)).rollout("m2", "c2").total(4).enable_ray_auto_visible_device()
    job = builder.env({"e2": "v2"}).per_node(4).with_collocation("Actor", "rollout").build()
    assert job.workloads["rollout"].envs["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "false"
    assert not job.workloads["rollout"].rank_based_gpu_selection
