import os
import threading

import pytest

from hybridrl import cli
from hybridrl.master.service.client import MasterClient
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
        client.report_step(1)
        client.report_commit(1, "global_step_1")
        wait_for(client, lambda seen: seen["commit"])
        code, out, _ = run_command(capsys, "ls")
        row = next(line.split() for line in out.splitlines() if line.startswith(client.run))
        job = client.run.removesuffix("-1")
        assert (code, row[1:6]) == (0, [job, "running", "1", "2/2", "alive"])
        code, out, _ = run_command(capsys, "status", job)  # by the job's name
        assert (code, out.splitlines()[:2]) == (
            0,
            [f"{client.run} ({job}) is running, at step 1", "last commit: global_step_1"],
        )
        assert [line.split()[:3] for line in out.splitlines()[3:]][0] == ["trainer", "alive", str(os.getpid())]
        code, out, _ = run_command(capsys, "logs", client.run)
        assert (code, [line.split()[2] for line in out.splitlines()]) == (
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


def test_an_unknown_job_is_refused_with_the_known_ones(tmp_path, capsys):
    code, _, err = run_command(capsys, "status", "nothing-of-this-name")
    assert code == 2 and "nothing-of-this-name: no such job runs on this cluster; there are" in err
    code, _, err = run_command(capsys, "logs", str(tmp_path))
    assert (code, err) == (2, f"{tmp_path}: there is no journal of a master below this directory\n")
