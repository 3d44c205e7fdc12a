import os
import re
import signal
import threading

import pytest
import ray

from hybridrl import cli
from hybridrl.errors import ConfigError
from hybridrl.master.service.client import MasterClient
from hybridrl.master.service.journal import JournaledState
from hybridrl.master.service.process_output import printed_by
from hybridrl.master.state.events import CheckpointCommitted, JobEnded, JobStarted, WorkerJoined
from tests.support.master.monitored_process import monitored_adders, wait_for, wait_until_gone

pytestmark = pytest.mark.usefixtures("ray_cluster")


def run_command(capsys, *words):
    capsys.readouterr()
    code = cli.main(["job", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_running_job_is_listed_and_described_and_its_journal_is_readable(tmp_path, capsys):
    journal = tmp_path / "run" / "master"
    with monitored_adders(journal) as (client, _):
        client.report_step(1, {"score": 0.5, "kl": 2})
        client.report_commit(1, "global_step_1")
        wait_for(client, lambda seen: seen["commit"])
        code, out, _ = run_command(capsys, "ls")
        row = next(line.split() for line in out.splitlines() if line.startswith(client.run))
        job = client.run.removesuffix("-1")
        assert (code, row[1:6]) == (0, [job, "running", "1", "2/2", "alive"])
        code, out, _ = run_command(capsys, "status", job)  # by the job's name
        assert (code, out.splitlines()[:3]) == (
            0,
            [
                f"{client.run} ({job}) is running, at step 1",
                "last commit: global_step_1 (step 1)",
                "metrics: score 0.5, kl 2",
            ],
        )
        assert [line.split()[:3] for line in out.splitlines()[4:]][0] == ["trainer", "alive", str(os.getpid())]
        code, out, _ = run_command(capsys, "logs", client.run)
        names = [line.split()[2] for line in out.splitlines()]
        assert (
            code,
            [name for name in names if name != "WarningRaised"],
        ) == (  # a warning: this machine's disk is nearly full
            0,
            ["JobStarted", "WorkerJoined", "WorkerJoined", "StepCompleted", "CheckpointCommitted"],
        )
    wait_until_gone(client.run)
    code, out, _ = run_command(capsys, "status", str(tmp_path / "run"))
    assert (code, out.splitlines()[0]) == (0, f"{client.run} ({job}) is succeeded, at step 1: done")
    assert run_command(capsys, "logs", str(tmp_path / "run"))[1].splitlines()[-1].split()[2] == "JobEnded"


def test_stop_waits_for_the_end_of_the_job(tmp_path, capsys):
    stop_requested = threading.Event()
    client = MasterClient(
        job="stopped", run="stopped-1", journal=str(tmp_path), on_stop=lambda reason: stop_requested.set()
    )
    wait_for(client, lambda seen: "trainer" in seen["beats"])

    def leave():
        assert stop_requested.wait(60)
        client.finish_job(succeeded=False, reason="stopped")
        client.close()

    threading.Thread(target=leave).start()
    assert run_command(capsys, "stop", "stopped", "--timeout", "60")[:2] == (0, "stopped-1 has ended\n")
    assert run_command(capsys, "status", str(tmp_path))[1].startswith(
        "stopped-1 (stopped) is stopped, at step 0: stopped"
    )


def test_ls_says_which_cluster_it_asked(capsys):
    address = ray.get_runtime_context().gcs_address
    assert run_command(capsys, "ls")[1].splitlines()[0].endswith(f"Ray cluster at {address}")


def test_what_a_process_printed_is_shown_also_after_its_end(tmp_path, capsys):
    with monitored_adders(tmp_path) as (client, group):
        group.say("first words")
        [first] = group.processes.process_ids
        code, out, _ = run_command(capsys, "logs", client.run, "--process", "adder-0")
        assert code == 0 and len(re.findall(rf"==> adder-0 \(pid {first}\): /.*\.(?:out|err) <==", out)) == 2
        assert "\nout: first words\n" in out and "\nerr: first words\n" in out and ":actor_name:" not in out
        os.kill(first, signal.SIGKILL)
        wait_for(client, lambda seen: seen["workers"]["adder-0"]["state"] == "lost")
        assert "out: first words" in run_command(capsys, "logs", client.run, "--process", "adder-0")[1]
        group.processes.rebuild()
        group.say("second words")
        wait_for(client, lambda seen: seen["workers"]["adder-0"]["incarnation"] == 2)
        for process, words in (("adder-0", "second"), ("adder-0.2", "second"), ("adder-0.1", "first")):
            assert f"out: {words} words\n" in run_command(capsys, "logs", client.run, "--process", process)[1]
    wait_until_gone(client.run)
    said = run_command(capsys, "logs", str(tmp_path / client.run), "--process", "adder-0", "--lines", "1")[1]
    assert said.splitlines()[1] == "out: second words"  # from the journal and the files alone


def test_a_process_on_another_machine_is_read_through_the_cluster(tmp_path):
    printed = tmp_path / "worker.out"
    printed.write_text(":job_id:01000000\none\ntwo\nthree\n")
    node = ray.get_runtime_context().get_node_id()
    process = WorkerJoined("actor-0", "run/actor-0", 1, node, "another machine", stdout=str(printed))
    connected = []
    text = printed_by(process, lines=2, connect=lambda: connected.append(True))
    assert text == f"==> actor-0 (pid 1): {printed} <==\ntwo\nthree\n\n" and connected == [True]
    (tmp_path / "old").mkdir()
    printed.rename(tmp_path / "old" / "worker.out")  # as Ray's log monitor does with many files
    assert printed_by(process, lines=2, connect=lambda: None) == text
    with pytest.raises(ConfigError, match="--process actor-0: .*worker.out .*no longer exist"):
        (tmp_path / "old" / "worker.out").unlink()
        printed_by(process, lines=2, connect=lambda: None)
    gone = WorkerJoined("actor-0", "run/actor-0", 1, "0" * 56, "another machine", stdout=str(printed))
    with pytest.raises(ConfigError, match=r"--process actor-0: .*node 0000.* does not answer .*worker\.out"):
        printed_by(gone, lines=2, connect=lambda: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--process", "addr-0"], "--process addr-0: the job has no such process; did you mean adder-0?"),
        (["--process", "9"], "--process 9: the job has no such process; there are adder-0, trainer"),
        (["--process", "adder-0.3"], "--process adder-0.3: adder-0 had 1 processes"),
        (["--process", "adder-0", "--lines", "0"], "--lines 0: must be 1 or more"),
    ],
)
def test_a_process_that_was_not_there_is_refused_with_those_that_were(journal_of_adders, capsys, words, message):
    code, out, err = run_command(capsys, "logs", str(journal_of_adders), *words)
    assert (code, out) == (2, "") and err.startswith(message) and err.count("\n") == 1


@pytest.fixture(scope="module")
def journal_of_adders(tmp_path_factory, ray_cluster):
    folder = tmp_path_factory.mktemp("adders")
    with monitored_adders(folder) as (client, _):
        pass
    wait_until_gone(client.run)
    return folder / client.run


def write_journal(folder, *, job, run, commit=""):
    """Write the journal of a run that has succeeded."""
    journal = JournaledState(str(folder / run))
    journal.apply(JobStarted(job, run))
    if commit:
        journal.apply(CheckpointCommitted(3, commit))
    journal.apply(JobEnded(True, "done"))
    journal.close()
    return folder / run


def test_after_its_end_a_job_is_found_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hybridrl.master.service.run_journals.JOURNAL_ROOT", str(tmp_path))
    old = write_journal(tmp_path, job="short", run="short-aaaaaa", commit="global_step_3")
    os.utime(old, (1, 1))
    write_journal(tmp_path, job="short", run="short-bbbbbb")
    write_journal(tmp_path, job="short-sighted", run="short-sighted-cccccc")
    code, out, _ = run_command(capsys, "status", "short")
    assert (code, out.splitlines()[0]) == (0, "short-bbbbbb (short) is succeeded, at step 0: done")
    assert out.endswith(f"this is the newest run; earlier ones have journals here:\n  {old}\n")
    code, out, _ = run_command(capsys, "status", "short-aaaaaa")
    assert (code, out.splitlines()[1]) == (0, "last commit: global_step_3 (step 3)") and "newest" not in out
    assert run_command(capsys, "logs", "short-sighted")[1].splitlines()[-1].split()[2] == "JobEnded"
    code, _, err = run_command(capsys, "status", "sigh")
    assert code == 2 and "sigh: no such job runs on the Ray cluster at" in err and str(tmp_path) in err


def test_the_directory_that_was_given_to_submit_has_its_runs(tmp_path, capsys):
    run = write_journal(tmp_path, job="own", run="own-123456")
    assert run_command(capsys, "status", str(tmp_path))[1].startswith("own-123456 (own) is succeeded")
    assert run_command(capsys, "status", str(run))[1].startswith("own-123456 (own) is succeeded")


def test_an_unknown_job_is_refused_with_the_known_ones(tmp_path, capsys):
    code, _, err = run_command(capsys, "status", "nothing-of-this-name")
    assert code == 2 and "nothing-of-this-name: no such job runs on the Ray cluster at" in err and "there are" in err
    code, _, err = run_command(capsys, "logs", str(tmp_path))
    assert (code, err) == (2, f"{tmp_path}: there is no journal of a master below this directory\n")
