import os
import threading

import pytest

from hybridrl import cli
from hybridrl.master.service.client import JobWatch
from tests.support.master.monitored_process import wait_for, wait_until_left, watched_adders

pytestmark = pytest.mark.usefixtures("ray_cluster")


def say(capsys, *words):
    capsys.readouterr()
    code = cli.main(["job", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_running_job_is_listed_described_and_read_back_from_its_journal(tmp_path, capsys):
    journal = tmp_path / "run" / "master"
    with watched_adders(journal) as (watch, _):
        watch.begin_step(1)
        watch.committed(1, "global_step_1")
        wait_for(watch, lambda seen: seen["commit"])
        code, out, _ = say(capsys, "ls")
        row = next(line.split() for line in out.splitlines() if line.startswith(watch.run))
        job = watch.run.removesuffix("-1")
        assert (code, row[1:6]) == (0, [job, "running", "1", "2/2", "alive"])
        code, out, _ = say(capsys, "status", job)  # by the job's name
        assert (code, out.splitlines()[:2]) == (
            0,
            [f"{watch.run} ({job}) is running, at step 1", "last commit: global_step_1"],
        )
        assert [line.split()[:3] for line in out.splitlines()[3:]][0] == ["trainer", "alive", str(os.getpid())]
        code, out, _ = say(capsys, "logs", watch.run)
        assert (code, [line.split()[2] for line in out.splitlines()]) == (
            0,
            ["Begun", "Joined", "Joined", "Stepped", "Committed"],
        )
    wait_until_left(watch.run)
    code, out, _ = say(capsys, "status", str(tmp_path / "run"))
    assert (code, out.splitlines()[0]) == (0, f"{watch.run} ({job}) is succeeded, at step 1: done")
    assert say(capsys, "logs", str(tmp_path / "run"))[1].splitlines()[-1].split()[2] == "Ended"


def test_a_job_that_is_stopped_is_waited_for(tmp_path, capsys):
    asked = threading.Event()
    watch = JobWatch(job="stopped", run="stopped-1", journal=str(tmp_path), on_stop=lambda reason: asked.set())
    wait_for(watch, lambda seen: "trainer" in seen["beats"])

    def leave():
        assert asked.wait(60)
        watch.end(succeeded=False, reason="stopped")
        watch.close()

    threading.Thread(target=leave).start()
    assert say(capsys, "stop", "stopped", "--timeout", "60")[:2] == (0, "stopped-1 has ended\n")
    assert say(capsys, "status", str(tmp_path))[1].startswith("stopped-1 (stopped) is stopped, at step 0: stopped")


def test_what_is_not_there_is_said_with_what_is(tmp_path, capsys):
    code, _, err = say(capsys, "status", "nothing-of-this-name")
    assert code == 2 and "nothing-of-this-name: no such job runs on this cluster; there are" in err
    code, _, err = say(capsys, "logs", str(tmp_path))
    assert (code, err) == (2, f"{tmp_path}: no master has kept a journal there\n")
