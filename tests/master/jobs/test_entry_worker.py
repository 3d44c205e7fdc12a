"""Programs and functions that run once in each process of their role, as by torchrun: no trainer, no worker class."""

from pathlib import Path

import pytest

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.jobs.entrypoint import parse_torchrun
from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from tests.master.jobs.test_submit import SMALL, A, left_of, wait_until
from tests.support.master.sample_job import count_ranks, write_a_line

pytestmark = pytest.mark.timeout(300)
PROGRAM = str(Path(__file__).parents[2] / "support/master/spmd_program.py")


def of_program(folder, *what, **config):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(folder), **config})
    builder.role("sft").run(" ".join([PROGRAM, str(folder), *what])).nnodes(1).nproc_per_node(2).resource(**SMALL)
    return builder


@pytest.mark.usefixtures("ray_cluster")
def test_a_program_runs_in_every_process_and_the_job_ends_when_all_have_finished(tmp_path):
    assert of_program(tmp_path).build().submit("program", journal=str(tmp_path / "journals")) == 0
    assert (tmp_path / "rank-0").read_text() == "0 2 0 2 0 sft: 3, restarts 0"  # 1 + 2
    assert (tmp_path / "rank-1").read_text() == "1 2 1 2 0 sft: 3, restarts 0"
    [journal] = (tmp_path / "journals").iterdir()
    state, _ = replay(str(journal))
    assert (state.state, state.job, state.run) == (JobPhase.SUCCEEDED, "program", journal.name) and set(
        state.roles
    ) == {"sft"}
    wait_until(lambda: not left_of("program-"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_first_exception_ends_the_group_with_its_traceback(tmp_path):
    with pytest.raises(ArithmeticError, match="an error in the program") as caught:
        of_program(tmp_path, "fail").build().submit("fails", journal=str(tmp_path / "journals"))
    notes = "\n".join(caught.value.__notes__)
    assert (
        "raised in sft-1, run()" in notes and "spmd_program.py" in notes and 'raise ArithmeticError("an error' in notes
    )
    with pytest.raises(RuntimeError, match=r"spmd_program.py of role 'sft' exited with code 3"):
        of_program(tmp_path, "exit").build().submit("fails", journal=str(tmp_path / "journals"))
    with pytest.raises(ConfigError, match="role 'sft'.* /nowhere/program.py .*every machine"):
        DLJobBuilder().device_type("CPU").workload("sft", "/nowhere/program.py").resource(**SMALL).build().submit(
            "fails"
        )
    wait_until(lambda: not left_of("fails-"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_program_that_lost_a_process_runs_again_in_all_of_them_up_to_max_restart(tmp_path):
    assert of_program(tmp_path, "die").build().submit("dies", journal=str(tmp_path / "journals")) == 0
    assert (tmp_path / "rank-1").read_text() == "1 2 1 2 0 sft: 3, restarts 1"
    with pytest.raises(WorkerLost, match="sft-1 was lost .*run.*killed by SIGKILL") as caught:
        of_program(tmp_path, "die").max_restart(0).build().submit("dies", journal=str(tmp_path / "journals"))
    assert any("the limit of max_restart(0)" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_functions_run_beside_a_trainer_and_the_job_waits_for_both(tmp_path):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path)}).trainer(write_a_line).resource(**SMALL)
    builder.role("counts").run(count_ranks).total(2).per_node(2).resource(**SMALL)
    assert builder.workload("a", A).resource(**SMALL).build().submit("both") == 0
    assert (tmp_path / "trainer").read_text() == "['a']"  # standalone roles have no group
    assert [(tmp_path / f"counts-{rank}").read_text() for rank in range(2)] == ["3 of 2"] * 2


def test_a_program_is_an_entry_with_its_arguments_and_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(PROGRAM).parent)
    [role] = DLJobBuilder().workload("sft", "spmd_program.py --lr 0.1 'a b'").build().spec.roles
    assert role.entry == f"{PROGRAM} --lr 0.1 'a b'"
    with pytest.raises(ConfigError, match="role 'trainer': entry='train.py' .*worker groups"):
        DLJobBuilder().trainer("train.py").build()


def test_a_command_of_torchrun_is_a_role():
    builder = DLJobBuilder().by_dlrover_run_cmd(
        "torchrun --nnodes=2 --nproc-per-node 4 --max-restarts 3 /x/train.py --nnodes 7"
    )
    [role] = builder.env({"A": "1"}).build().spec.roles
    assert (role.name, role.entry, role.on_nodes, role.max_restart, role.env) == (
        "elastic",
        "/x/train.py --nnodes 7",
        (4, 4),
        3,
        {"A": "1"},
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python train.py", "does not start with torchrun or dlrover-run"),
        (
            "torchrun --rdzv_backend=c10d train.py",
            "unrecognized arguments: --rdzv_backend=c10d; supported are",
        ),
        ("torchrun --nnodes 1:4 train.py", "--nnodes 1:4 must be a whole number"),
        ("dlrover-run --nnodes 2", "'nothing' is no program"),
    ],
)
def test_a_command_with_unsupported_options_is_refused(command, message):
    with pytest.raises(ConfigError, match=message):
        parse_torchrun(command)
