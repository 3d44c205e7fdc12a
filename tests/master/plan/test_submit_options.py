"""What `submit` takes besides the job: DLRover's keywords, and the check of the entries before anything starts."""

import logging
import os
import subprocess
import sys
import time

import pytest
import ray

from hybridrl.errors import ConfigError, PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder, RLJobBuilder
from hybridrl.master.jobs.entrypoint import check_entries
from hybridrl.master.plan.submit_options import MasterOptions, read_options
from hybridrl.system.process_stat import read_process_stat
from tests.support.master.sample_job import works_until_file

A = "tests.support.master.sample_job:Adder"


def job_of(entry):
    return (
        DLJobBuilder()
        .device_type("CPU")
        .trainer("tests.support.master.sample_job:Trainer")
        .workload("a", entry)
        .build()
    )


def test_keywords_of_the_master_say_what_its_process_takes():
    options = read_options(
        {"master_cpu": 2, "master_memory": 4096, "timeout": 30, "master_max_restart": 7},
        {"DLROVER_UNIFIED_MASTER_CPU": "8", "DLROVER_UNIFIED_MASTER_ISOLATION_SCHEDULE_RESOURCE": "MR"},
    )
    assert options.master == MasterOptions(2.0, 4096.0, "MR", 30.0, 7)
    [reservation] = options.master.reservations("run")
    assert reservation.resources == {"CPU": 2.0, "memory": 4096 * 2**20, "MR": 1.0}
    assert read_options({}, {}).master == MasterOptions() and MasterOptions().reservations("run") == []


def test_keywords_of_restarts_change_the_spec():
    spec = RLJobBuilder().trainer(A).actor(A).max_restart(5).rollout(A).build().spec

    def limits(**keywords):
        changed = read_options(keywords, {}).change_spec(spec)
        return {**{role.name: role.max_restart for role in changed.roles}, "trainer": changed.trainer.max_restart}

    assert limits() == {"actor": 5, "rollout": 10, "trainer": 10}
    assert limits(trainer_max_restart=1, workload_max_restart={"ROLLOUT": 2}) == {
        "actor": 5,
        "rollout": 2,
        "trainer": 1,
    }
    for nothing in ({"failover_exec_strategy": 0}, {"failover_trigger_strategy": 0}):
        assert limits(**nothing) == {"actor": 0, "rollout": 0, "trainer": 0}
    with pytest.raises(ConfigError, match="role 'rolout' is unknown; did you mean rollout"):
        limits(workload_max_restart={"rolout": 2})


def test_an_isolation_resource_is_taken_by_every_process():
    spec = RLJobBuilder().trainer(A).actor(A).resource(cpu=1, slow=2).build().spec
    changed = read_options({"worker_isolation_schedule_resource": "WR"}, {}).change_spec(spec)
    assert changed.role("actor").resource.more == {"slow": 2, "WR": 1.0} and changed.trainer.resource.more == {
        "WR": 1.0
    }


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"master_cpus": 2}, r"submit\(master_cpus=2\): this keyword is unknown; did you mean master_cpu"),
        ({"dryrun": True}, r"submit\(dryrun=True\): this keyword is unknown; known are master_cpu, "),
        ({"master_cpu": -1}, r"submit\(master_cpu=-1\) must be a number, 0 or more"),
        ({"master_mem": "4 GB"}, r"submit\(master_mem='4 GB'\) must be a number"),
        ({"master_max_restart": 1.5}, "must be a whole number, 0 or more"),
        ({"failover_exec_strategy": 3}, "must be 0, 1 or 2"),
        ({"workload_max_restart": 3}, "must be a mapping of roles to whole numbers"),
    ],
)
def test_a_wrong_keyword_is_refused_with_what_is_near(keywords, message):
    with pytest.raises(ConfigError, match=message):
        job_of(A).submit("x", dry_run=True, **keywords)


def test_keywords_without_effect_are_logged_once_each(caplog):
    caplog.set_level(logging.WARNING)
    read_options(
        {"job_max_restart": 3, "failover_exec_strategy": 1, "failover_trigger_strategy": 2},
        {"DLROVER_UNIFIED_MASTER_STATE_BACKEND_TYPE": "RAY_INTERNAL"},
    )
    assert sorted(record.getMessage().split(" has no effect: ")[0] for record in caplog.records) == [
        "failover_exec_strategy=1",
        "job_max_restart",
        "master_state_backend_type",
    ]


# -- the check of the entries


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no_such_module.x:Y", "role 'a': entry='no_such_module.x:Y': no module named 'no_such_module'"),
        pytest.param(
            "tests.support.master.sample_job:Ader", "has no 'Ader'; did you mean Adder", marks=pytest.mark.slow
        ),
        ("/no/such/program.py -x", "role 'a': there is no file /no/such/program.py in "),
        pytest.param(
            "tests.support.master.sample_job:Trainer",
            "role 'a': Trainer requires the argument 'job'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checked_dry_run_refuses_what_cannot_be_loaded_before_it_prints(entry, message, capsys):
    with pytest.raises(ConfigError, match=message):
        job_of(entry).dry_run("x", check=True)
    assert capsys.readouterr().out == ""
    job_of(entry).dry_run("x")
    assert "a 0 of 1" in capsys.readouterr().out


def test_a_checked_dry_run_imports_in_another_process_with_this_ones_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_the_user.py").write_text("print('imported')\nclass Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    job_of("of_the_user:Own").dry_run("x", check=True)
    assert capsys.readouterr().out.startswith("x: 1 placement group") and "of_the_user" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time\ntime.sleep(60)\n", "did not end within 6 s; put the work of a module under if __name__"),
        ("import os\nos._exit(7)\n", "ended with exit code 7: it printed nothing"),
        ("1 / 0\n", "entry='.*own.py:Own': .*own.py cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_does_not_let_itself_be_imported_is_refused_in_time(tmp_path, code, message):
    (tmp_path / "own.py").write_text(code)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        check_entries(job_of(f"{tmp_path / 'own.py'}:Own").spec, timeout_s=6 if "sleep" in code else 100)
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_what_an_import_starts_ends_with_the_check(tmp_path):
    started = "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    (tmp_path / "own.py").write_text(
        f"{started}open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\nclass Own: ...\n"
    )
    check_entries(job_of(f"{tmp_path / 'own.py'}:Own").spec)
    assert read_process_stat(int((tmp_path / "pid").read_text())).state == ""


# -- on a cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_submit_imports_the_entries_before_it_places_anything():
    before = len(ray.util.placement_group_table())
    with pytest.raises(ConfigError, match="role 'a': entry='no_such_module.x:Y': no module named 'no_such_module'"):
        job_of("no_such_module.x.Y").submit("unloadable")
    assert len(ray.util.placement_group_table()) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_the_supervisor_takes_what_master_cpu_says(tmp_path):
    def taken():
        return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)

    builder = DLJobBuilder().device_type("CPU").trainer(works_until_file).resource(cpu=0.25)
    builder.config({"out": str(tmp_path / "out"), "until": str(tmp_path / "end")}).workload("actor", A).resource(
        cpu=0.25
    )
    with pytest.raises(PlacementError, match="missing.*Lower master_cpu or master_mem"):
        builder.build().submit("large", master_cpu=1000)
    running = builder.build().submit("small", blocking=False, master_cpu=0.75, master_mem=1)
    until = time.monotonic() + 150
    while not (tmp_path / "out").exists() or taken() != 1.25:
        assert time.monotonic() < until, taken()
        time.sleep(0.2)
    (tmp_path / "end").write_text("")
    assert running.wait(timeout_s=100) == 0


def test_a_cluster_that_does_not_start_is_one_error(tmp_path):
    folder = tmp_path / ("long" * 30)  # Ray's sockets are there, and a socket's path has at most 107 bytes
    folder.mkdir()
    code = "from hybridrl.master.jobs.submit import connect; connect(blocking=True)"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"RAY_TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hybridrl.errors.ConfigError: no Ray cluster could be started on this machine (")
    assert "AF_UNIX" in last and last.endswith("start the same command again, or set RAY_ADDRESS to a running cluster")
