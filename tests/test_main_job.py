"""`hybridrl job submit FILE`, `python -m hybridrl.main_job FILE` and `hybridrl job graph FILE`."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl import cli, main_job
from tests.cli.test_graph import texts_of
from tests.support.driver.one_process import run_in_one_process
from tests.support.driver.ray_head import own, ray_head
from tests.support.end_to_end.runs import processes_with

FILE = """
device_type: CPU
collocations: [[actor, rollout]]
feeds: [[rollout, reward, 2.5]]
weights: [[actor, rollout]]
workloads:
  trainer: {run: "project.train:Trainer", resource: {cpu: 0.5}}
  actor: {run: "project.workers:Actor", total: 2}
  rollout: {run: "project.workers:Rollout", total: 2}
  reward: {run: "project.workers:Reward", resource: {cpu: 0.5}}
"""
NEIGHBOUR = """
from hybridrl.single_controller.dispatch import Dispatch, register

class Adder:
    @register(Dispatch.ONE_TO_ALL)
    def add(self, number):
        print(f"adding to {number}")
        return number + 20
"""
JOB = """
import os
from pathlib import Path
from hybridrl.master.jobs.builder import DLJobBuilder
from neighbour import Adder

class Summing:
    def __init__(self, job):
        self.job = job

    def run(self):
        total = sum(self.job.groups["adder"].add(1))
        print(f"the sum is {total}")
        Path(self.job.config["out"]).write_text(str(total))

def build():
    job = DLJobBuilder().device_type("CPU").config({"out": os.environ["OUT"]})
    return job.trainer(Summing).resource(cpu=0.2).role("adder").run(Adder).total(2).resource(cpu=0.2)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(FILE)
    return path


def test_a_dry_run_prints_the_plan_and_needs_neither_ray_nor_torch(file, tmp_path):
    code = (
        "import sys; sys.modules['ray'] = sys.modules['torch'] = None; from hybridrl.main_job import main\n"
        f"sys.exit(main([{str(file)!r}, '--dry-run']))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "grpo: 3 placement groups, 6 processes"
    assert lines[-2:] == ["rollout feeds reward", "actor gives its weights to rollout"]


def test_both_programs_have_the_same_arguments(capsys):
    shown = []
    for run, words in ((main_job.main, []), (cli.main, ["job", "submit"])):
        with pytest.raises(SystemExit):
            run([*words, "--help"])
        shown.append(capsys.readouterr().out.partition("positional arguments")[2])
    assert shown[0] == shown[1]
    for word in ("FILE", "--name", "--dry-run", "--check", "--no-wait", "--journal", "--address"):
        assert word in shown[0]


@pytest.mark.parametrize(
    ("words", "name"), [([], "grpo"), (["--name", "mine"], "mine"), (["--dry-run", "--name", "a.b-c"], "a.b-c")]
)
def test_a_job_has_the_name_of_its_file_or_the_given_one(file, capsys, monkeypatch, words, name):
    monkeypatch.delenv("DLROVER_UNIFIED_JOB_NAME", raising=False)
    assert cli.main(["job", "submit", str(file), "--dry-run", *words]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: 3 placement groups")


def test_a_job_that_cannot_start_is_refused_in_one_line(file, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    refusals = {
        ("--name", "a/b"): "--name='a/b': a job's name has letters",
        ("--no-wait",): "blocking=False (--no-wait): a local cluster ends with this process",
        ("--check", "--dry-run"): "no module named 'project'",
        ("--address", "127.0.0.1:1"): "--address=127.0.0.1:1: no Ray cluster answers there (",
    }
    program = "import sys; from hybridrl.main_job import main; sys.exit(main({}))"
    codes = [program.format([str(file), *words]) for words in refusals]
    ends = run_in_one_process(codes, environment=environment, cwd=tmp_path)
    for message, done in zip(refusals.values(), ends, strict=True):
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.timeout(300)
def test_a_python_file_is_submitted_and_its_processes_and_end_are_found(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "job" / "summing.py").write_text(JOB)
    journals, out = tmp_path / "journals", tmp_path / "sum.txt"
    with ray_head() as (folder, address):
        environment = os.environ | own(folder) | {"RAY_ADDRESS": address, "OUT": str(out)}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])

        def job(*words):
            command = [sys.executable, "-m", "hybridrl.cli", "job", *map(str, words)]
            done = subprocess.run(command, timeout=200, capture_output=True, text=True, cwd=tmp_path, env=environment)
            assert done.returncode == 0, done.stderr
            return done.stdout

        printed = job("submit", "job/summing.py", "--no-wait", "--check", "--name", "sums", "--journal", journals)
        run = re.match(r"(sums-\w{6}) has started; its journal: (.*)\n", printed)
        assert run is not None and run[2] == str(journals / run[1])
        deadline = time.monotonic() + 120
        while not journals.is_dir():  # the master makes it
            assert time.monotonic() < deadline
            time.sleep(0.1)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_with(folder)}
        [master] = [pid for pid, command in commands.items() if command.startswith(b"ray::JobMaster")]
        assert "libtorch" not in Path(f"/proc/{master}/maps").read_text()  # a master is light
        while not out.exists() or "is succeeded" not in job("status", journals):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert out.read_text() == "42"
        while job("ls").partition(" at ")[0] != "no job runs on the Ray cluster":  # its master ends a moment later
            assert time.monotonic() < deadline
        said = job("logs", journals, "--process", "trainer-0").splitlines()
        assert said[0].startswith("==> trainer-0 (pid ") and said[1] == "the sum is 42"
        assert "\nadding to 1\n" in job("logs", journals, "--process", "adder-1")
        # The whole way in the foreground, by the other program. It returns when the job has ended.
        out.unlink()
        command = [sys.executable, "-m", "hybridrl.main_job", "job/summing.py", "--journal", str(journals)]
        assert subprocess.run(command, timeout=200, cwd=tmp_path, env=environment).returncode == 0
        assert out.read_text() == "42"


# -- job graph FILE


def test_the_graph_of_a_file_has_its_roles_edges_and_placement(file, capsys):
    assert cli.main(["job", "graph", str(file)]) == 0
    table, _, plan = capsys.readouterr().out.partition("\n\n")
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    assert rows[0] == ["role", "processes", "pool", "runs", "feeds", "gives its weights to"]
    assert rows[2] == ["trainer", "1", "-", "project.train:Trainer"]
    assert rows[3:] == [
        ["actor", "2", "actor+rollout", "project.workers:Actor", "rollout"],
        ["rollout", "2", "actor+rollout", "project.workers:Rollout", "reward (2.5)"],
        ["reward", "1", "reward", "project.workers:Reward"],
    ]
    assert plan.startswith("grpo: 3 placement groups, 6 processes\n")


def test_the_graph_of_a_file_is_drawn(file, tmp_path, capsys):
    path = tmp_path / "graph.svg"
    assert cli.main(["job", "graph", str(file), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    texts = texts_of(path)
    for text in ("grpo", "trainer x1", "actor x2", "project.workers:Reward", "feeds (2.5)", "weights"):
        assert text in texts


def test_a_job_file_takes_no_settings(file, capsys):
    assert cli.main(["job", "graph", str(file), "trainer.nnodes=2"]) == 2
    assert capsys.readouterr().err == f"trainer.nnodes=2: a job file takes no settings; change {file} itself\n"


# -- job resume


def test_a_journal_without_a_spec_is_no_submitted_job_to_resume(tmp_path, capsys):
    from tests.master.service.test_job_commands import write_journal

    run = write_journal(tmp_path, job="own", run="own-123456")
    assert cli.main(["job", "resume", str(run)]) == 2
    assert "this journal has no spec of a job" in capsys.readouterr().err


def test_settings_of_main_ppo_are_refused_for_a_submitted_job(tmp_path, capsys):
    from tests.master.service.test_job_commands import write_journal

    run = write_journal(tmp_path, job="own", run="own-123456")
    assert cli.main(["job", "resume", str(run), "trainer.nnodes=2"]) == 2
    assert capsys.readouterr().err.startswith(f"{run}: is a submitted job; key=value and --print are for main_ppo")
