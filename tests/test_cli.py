"""The `hybridrl` command: the graph of a PPO job, exports, and the arguments that are rejected."""

import subprocess
import sys
from pathlib import Path

import pytest

import hybridrl
from hybridrl import cli
from hybridrl.cli import job_graph
from hybridrl.config import PPOConfig, from_dict
from hybridrl.main_ppo import main as run_ppo
from hybridrl.trainer.checkpoint.store import CheckpointStore, write_run_state

SEPARATED = ("actor_rollout_ref.rollout.n_gpus_per_node=3", "trainer.n_gpus_per_node=2", "trainer.nnodes=2")


def graph_of(**nested) -> set[tuple[str, str, bool]]:
    """Return the edges without columns of a job's graph: (source, target, whether to the next step)."""
    return {(e.source, e.target, e.next_step) for e in job_graph(from_dict(PPOConfig, nested)).edges if not e.columns}


def test_a_graph_needs_only_settings_and_does_not_import_ray():
    code = (
        "import sys; sys.modules['ray'] = None; sys.modules['transformers'] = None; from hybridrl.cli import main\n"
        "sys.exit(main(['job', 'graph', 'algorithm.adv_estimator=gae', 'trainer.n_gpus_per_node=512']))"
    )
    out = subprocess.run([sys.executable, "-c", code], timeout=100, check=True, capture_output=True, text=True).stdout
    assert ["values", "critic", "global_pool", "x512", "pure"] in [line.split()[:5] for line in out.splitlines()]


def test_the_graph_has_the_stages_roles_columns_and_pools_of_the_job(capsys):
    assert cli.main(["job", "graph", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", *SEPARATED]) == 0
    out = capsys.readouterr().out
    stages = [line.split()[0] for line in out.split("\n\n")[0].splitlines()[2:] if line[0] != " "]
    assert stages == [
        "next_batch",
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "adv",
        "update_critic",
        "update_actor",
        "update_weights",
        "testing",
        "log",
        "save_checkpoint",
    ]
    assert "global_pool: 4 of actor+critic+ref (roles joined by + share a process)\nrollout_pool: 3 of rollout" in out
    assert "old_log_prob: old_log_probs" in out and "ref: ref_log_prob" in out


def test_roles_that_share_only_the_device_have_processes_of_their_own():
    config = from_dict(
        PPOConfig, {"trainer": {"colocate": "device", "n_gpus_per_node": 2}, "algorithm": {"adv_estimator": "gae"}}
    )
    assert job_graph(config).pools() == {"global_pool": {"actor_rollout": 2, "critic": 2}}


def test_new_weights_go_from_the_update_to_the_push_to_the_next_steps_generation():
    hybrid = graph_of()
    assert ("update_actor", "update_weights", False) in hybrid and ("update_weights", "gen", True) in hybrid
    separated = graph_of(actor_rollout_ref={"rollout": {"n_gpus_per_node": 1}})
    assert ("update_actor", "update_weights", False) in separated and ("update_weights", "gen", True) in separated
    assert ("update_actor", "old_log_prob", True) in separated  # the actor's own weights, not the rollout's


@pytest.mark.parametrize("kind", ["svg", "txt"])
def test_the_suffix_of_the_file_decides_the_format(tmp_path, capsys, kind):
    path = tmp_path / f"graph.{kind}"
    assert cli.main(["job", "graph", "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    begins = {"svg": b"<svg", "txt": b"stage "}[kind]
    assert path.read_bytes().startswith(begins)


def test_an_unknown_key_is_the_same_line_as_from_main_ppo(capsys):
    assert cli.main(["job", "graph", "data.train_fils=x"]) == 2
    shown = capsys.readouterr().err
    assert run_ppo(["data.train_fils=x"]) == 2
    assert shown == capsys.readouterr().err == "data.train_fils: there is no such key; did you mean data.train_files?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "graph.png"], "add --format text or svg"),
        (["--output", "no/such/directory/graph.svg"], "cannot be written (No such file or directory)"),
        (["algorithm.adv_estimator=best"], "algorithm.adv_estimator=best: there is no such estimator"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_with_a_hint(capsys, arguments, message):
    assert cli.main(["job", "graph", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_settings_are_rejected_by_commands_without_settings(capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "checkpoint", "model", "trainer.lag=1"])
    assert "unrecognized arguments: trainer.lag=1" in capsys.readouterr().err


def commit(run, step, *parts):
    """Commit a checkpoint that has these parts, named as an engine does, and return its path."""

    def write(directory):
        for part in parts:
            (Path(directory) / part).mkdir()
            for file in (".metadata", "__0_0.distcp"):
                (Path(directory) / part / file).write_text("1234")
        write_run_state(directory, {"global_steps": step}, config_yaml="{}\n")

    return Path(CheckpointStore(str(run)).commit(step, write))


@pytest.mark.parametrize("given", [".", "global_step_99", "global_step_7.partial"])
def test_an_export_of_what_is_no_checkpoint_names_the_newest_one_of_the_run(tmp_path, capsys, given):
    commit(tmp_path, 4, "actor")
    commit(tmp_path, 12, "actor")
    assert cli.main(["export", str(tmp_path / given), str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "is not a checkpoint" in error and error.endswith(f"is {tmp_path}/global_step_12\n")
    )


def test_an_export_to_where_nothing_can_be_written_is_refused_first(tmp_path, capsys):
    commit(tmp_path, 4, "actor")
    assert cli.main(["export", str(tmp_path / "global_step_4"), "/proc/model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("/proc/model cannot be written (") and error.count("\n") == 1


def test_an_export_without_any_checkpoint_near_says_what_makes_one(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 1
    assert "run is not a checkpoint; give the global_step_N" in capsys.readouterr().err


def test_an_export_of_another_kind_of_checkpoint_says_where_its_model_is(tmp_path, capsys):
    path = commit(tmp_path, 5, "model", "huggingface")
    assert cli.main(["export", str(path), str(tmp_path / "model")]) == 1
    assert capsys.readouterr().err.endswith(f"which exports with every checkpoint: use {path}/huggingface\n")


def test_an_export_of_a_damaged_checkpoint_is_one_line_and_leaves_nothing(tmp_path, capsys):
    path = commit(tmp_path, 5, "actor")
    (path / "actor" / "__0_0.distcp").write_text("12")
    assert cli.main(["export", str(path), str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert "actor/__0_0.distcp" in error and "is damaged" in error and error.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_a_command_that_moved_says_where_it_is(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["simulate", "--gpus", "8"])
    assert error.value.code == 2
    assert "simulate is now python -m benchmarks.simulation" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from hybridrl.cli import main; main(['export', '--help'])"
    out = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True).stdout
    assert "a global_step_N directory" in out


@pytest.mark.parametrize("program", [["hybridrl.cli"], ["hybridrl.main_ppo"], ["hybridrl.main_sft"]])
def test_the_version_is_printed(program):
    done = subprocess.run([sys.executable, "-m", *program, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hybridrl {hybridrl.__version__}\n", "")
