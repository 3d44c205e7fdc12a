"""`hybridrl doctor`: seventeen planted faults are named, and a healthy run has none."""

import json
import math

import pytest

from hybridrl import cli, doctor

STEPS = 40


def curve(begin: float, end: float):
    return lambda step: begin + (end - begin) * step / (STEPS - 1)


HEALTHY = {
    "critic/score/mean": curve(0.2, 0.8),
    "critic/advantages/max": curve(1.5, 1.2),
    "critic/advantages/min": curve(-1.5, -1.2),
    "actor/entropy": curve(0.5, 0.3),
    "actor/grad_norm": lambda step: 0.3 + 0.05 * math.sin(step),
    "actor/skipped": lambda step: 0.0,
    "actor/empty": lambda step: 0.0,
    "actor/ppo_kl": lambda step: 0.01,
    "actor/pg_clipfrac": lambda step: 0.02,
    "training/rollout_probs_diff_mean": lambda step: 0.003,
    "rollout_corr/kl": lambda step: 0.0005,
    "reward/timeout_ratio": lambda step: 0.0,
    "reward/error_ratio": lambda step: 0.0,
    "response_length/mean": curve(80.0, 100.0),
    "response_length/clip_ratio": lambda step: 0.02,
    "timing_s/step": lambda step: 10.0,
    "timing_s/gen": lambda step: 6.0,
    "timing_s/reward": lambda step: 0.5,
    "timing_s/testing": lambda step: 5.0 if step % 4 == 3 or step > 36 else 1e-5,
    "val-core/openai/gsm8k/acc/mean@1": curve(0.2, 0.7),
}
FAULTS = {
    "reward that does not move": (
        {"critic/score/mean": lambda step: 0.25},
        "the reward does not move",
        "reward function",
    ),
    "groups of equal scores": (
        {
            "critic/score/mean": lambda step: 0.0,
            "critic/advantages/max": lambda step: 0.0,
            "critic/advantages/min": lambda step: 0.0,
        },
        "the reward does not move",
        "algorithm.filter_groups.enable",
    ),
    "learning rate too high": (
        {
            "critic/score/mean": lambda step: 0.4 if step < 2 else 0.0,
            "actor/entropy": lambda step: 0.1 if step < 2 else 4.0,
        },
        "the policy was destroyed",
        "optim.lr down",
    ),
    "entropy that collapses": (
        {"actor/entropy": lambda step: 0.5 * 0.8**step},
        "the policy no longer explores",
        "clip_ratio_high",
    ),
    "mismatch": (
        {"training/rollout_probs_diff_mean": curve(0.003, 0.1)},
        "trainer and rollout disagree about probabilities",
        "rollout_is=token",
    ),
    "stale weights": ({"async/age_mean": lambda step: 3.0}, "trained tokens are old", "trainer.staleness"),
    "rewards out of time": (
        {"reward/timeout_ratio": lambda step: 0.1 * (step % 4 == 0)},
        "reward calls run out of time",
        "reward_model.timeout_s",
    ),
    "cut responses": ({"response_length/clip_ratio": curve(0.0, 0.6)}, "responses are cut", "data.max_response_length"),
    "NaN": ({"actor/skipped": lambda step: float(step > 30)}, "updates were skipped", "trainer.nonfinite=rollback"),
    "exploding gradient": (
        {"actor/grad_norm": lambda step: 0.3 if step < STEPS - 1 else 30.0},
        "the gradient has jumped",
        "optim.lr down",
    ),
    "slow stage": (
        {"timing_s/reward": curve(0.5, 8.0)},
        "a stage has become slower",
        "reward_model.num_processes",
    ),
    "overfitting": (
        {"val-core/openai/gsm8k/acc/mean@1": lambda step: 0.7 - 0.6 * abs(step / STEPS - 0.5)},
        "the gain does not generalise",
        "samples",
    ),
    "overfitting that two validations show": (
        {"val-core/openai/gsm8k/acc/mean@1": lambda step: {0: 0.2, STEPS - 1: 0.0}.get(step, math.nan)},
        "the gain does not generalise",
        "samples",
    ),
    "length that collapses within five steps": (
        {
            "response_length/mean": lambda step: max(5.0, 27.0 - 4.4 * step),
            "val-core/openai/gsm8k/acc/mean@1": lambda step: 0.2,
        },
        "responses have collapsed",
        "pay for right ones only",
    ),
    "entropy that falls to a third while nothing is learned": (
        {"actor/entropy": curve(2.9, 0.8), "val-core/openai/gsm8k/acc/mean@1": lambda step: 0.2},
        "the policy no longer explores",
        "clip_ratio_high",
    ),
    "format that is paid for": (
        {"reward_extra/acc/mean": curve(0.2, 0.1)},
        "the reward rises without right answers",
        "pay the bonus for right answers only",
    ),
    "steps too large": ({"actor/ppo_kl": curve(0.01, 0.5)}, "a step moves the policy too far", "optim.lr down"),
}


def write_run(folder, *, curves=HEALTHY, steps=STEPS, **files: str) -> str:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step + 1} | {name: of(step) for name, of in curves.items()}) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / f"global_step_{steps}").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def problems(path: str) -> list[doctor.Finding]:
    return [finding for finding in doctor.examine_run(path) if finding.is_problem]


def test_a_healthy_run_has_no_problem(tmp_path):
    assert problems(write_run(tmp_path / "run")) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_only_one_that_is_named(fault, tmp_path):
    curves, name, setting = FAULTS[fault]
    [found] = problems(write_run(tmp_path / "run", curves=HEALTHY | curves))
    assert found.name.startswith(name) and setting in found.change and found.seen


def test_an_error_lost_processes_and_a_missing_checkpoint_are_named(tmp_path, capsys):
    lost = "".join(json.dumps({"step": step, "lost": ["rollout-1"], "seconds": 2.0}) + "\n" for step in range(5))
    error = "Traceback (most recent call last):\n  File x\nWorkerLost: rollout-1 was lost\n"
    path = write_run(tmp_path / "run", failures__jsonl=lost, error__log=error)
    (tmp_path / "run" / f"global_step_{STEPS}").rmdir()
    assert cli.main(["doctor", path]) == 1
    shown = capsys.readouterr().out
    assert "WorkerLost: rollout-1 was lost" in shown
    assert "rollout 5 times; 10 s of recovery" in shown and "trainer.save_freq=N" in shown


def test_a_length_and_an_entropy_that_fall_while_the_accuracy_rises_are_no_fault(tmp_path):
    curves = {"response_length/mean": curve(90.0, 20.0), "actor/entropy": curve(0.08, 0.012)}
    assert problems(write_run(tmp_path / "run", curves=HEALTHY | curves)) == []


def test_one_step_that_moves_the_policy_far_names_the_learning_rate(tmp_path):
    curves = HEALTHY | {"actor/ppo_kl": lambda step: 3.8 if step else 0.01}
    settings = json.dumps({"actor_rollout_ref": {"actor": {"optim": {"lr": 0.1}}}})
    [found] = problems(write_run(tmp_path / "run", curves=curves, steps=2, config__json=settings))
    assert found.name == "the learning rate is too high" and "optim.lr down" in found.change
    assert "actor/ppo_kl is 3.8 at step 2, with optim.lr=0.1" in found.seen


@pytest.mark.parametrize(("freq", "is_problem"), [(STEPS + 1, False), (STEPS - 1, True), (-1, True)])
def test_a_checkpoint_that_is_not_due_yet_is_no_fault(freq, is_problem, tmp_path):
    settings = json.dumps({"trainer": {"save_freq": freq, "total_training_steps": 99}})
    path = write_run(tmp_path / "run", config__json=settings)
    (tmp_path / "run" / f"global_step_{STEPS}").rmdir()
    assert [found.name for found in problems(path)] == ["no checkpoint"] * is_problem
    shown = "\n".join(map(str, doctor.examine_run(path)))
    assert (f"trainer.save_freq={freq} commits the first one after step {freq}" in shown) is not is_problem


def test_a_lag_that_is_set_is_no_fault(tmp_path):
    curves = HEALTHY | {"async/age_mean": lambda step: 2.0}
    settings = json.dumps({"trainer": {"lag": 2, "total_training_steps": 100}})
    assert problems(write_run(tmp_path / "run", curves=curves, config__json=settings)) == []


def test_failed_rewards_of_a_short_run_are_a_problem(tmp_path):
    curves = HEALTHY | {"reward/error_ratio": lambda step: 0.5}
    [found] = problems(write_run(tmp_path / "run", curves=curves, steps=2))
    assert found.name == "reward calls fail"


def test_the_error_of_an_earlier_attempt_is_none(tmp_path):
    settings = json.dumps({"trainer": {"total_training_steps": STEPS}})
    path = write_run(tmp_path / "run", config__json=settings, error__log="Traceback\nTypeError: wrong\n")
    assert problems(path) == []


def test_a_short_run_is_not_judged(tmp_path):
    found = [*doctor.examine_run(write_run(tmp_path / "run", curves=FAULTS["NaN"][0], steps=3))]
    assert "too few to judge" in found[-1].seen and not any(finding.is_problem for finding in found)


def test_an_evaluation_has_no_steps_to_count(tmp_path):
    settings = json.dumps({"trainer": {"val_only": True, "total_training_steps": 2}})
    path = write_run(tmp_path / "run", curves={}, steps=0, config__json=settings)
    assert [found.seen for found in doctor.examine_run(path)] == ["none: it only validates"]


def test_the_machine_is_examined(capsys):
    code = cli.main(["doctor"])
    shown = capsys.readouterr().out
    names = [line.split(": ")[0][9:] for line in shown.splitlines() if not line.startswith(" ")]
    assert names[:4] == ["Python", "packages", "memory", "/dev/shm"] and names[-2:] == ["GPU", "sandbox"]
    assert code == int("problem" in shown)


def test_wrong_input_is_one_error(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    for name in ("one", "two"):
        write_run(tmp_path / name)
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "has 2 runs; name one of them" in capsys.readouterr().err
