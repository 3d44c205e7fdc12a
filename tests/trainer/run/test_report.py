"""The closing lines of a run: outputs, first and last values, stages, answers."""

import json
import math

from hybridrl.trainer.run.report import merge_steps, report_run, series, stage_lines, value_lines
from hybridrl.trainer.run.samples import format_answer, read_examples, save_examples

ACC = "val-core/arithmetic/acc/mean@1"


def _history(steps=30):
    entries = [{"step": 0, ACC: 0.2}]
    for step in range(1, steps + 1):
        entry = {"step": step, "critic/score/mean": step / 100, "response_length/mean": 14.0, "actor/entropy": 0.3}
        entries.append(entry | {"perf/time_per_step": 2.0} | ({ACC: 0.2 + step / 50} if step % 10 == 0 else {}))
    return entries


def test_the_report_has_first_and_last_values():
    assert value_lines(_history()) == [
        # of 3 steps: 1, 2, 3 and 28, 29, 30
        "training reward, mean of the first and last tenth: 0.020 -> 0.290 (step 1 -> 30)",
        "validation arithmetic acc mean@1: 0.200 -> 0.800 (step 0 -> 30)",
    ]


def test_the_report_has_the_usual_seconds_of_each_stage_beside_its_share_of_the_machine():
    # medians without the first step, which warms up: 1.5 of 2 s, 0.4 s, and 0.01 s, under a hundredth
    generated, scored, moved = (9.0, 1.5, 1.7, 1.3), (0.1, 0.4, 0.5, 0.3), (0.01,) * 4
    history = [
        {"step": step, "perf/time_per_step": 2.0, "timing_s/step": 2.0, "timing_s/gen": gen, "timing_s/reward": reward}
        | {"timing_s/next_batch": moving, "perf/mfu/rollout": 0.03}
        for step, (gen, reward, moving) in enumerate(zip(generated, scored, moved, strict=True), start=1)
    ]
    assert stage_lines(history) == [
        "  stage                 s a step   share      MFU",
        "  gen                      1.500     75%    3.00%",
        "  reward                   0.400     20%",
    ]


def test_a_metric_measured_once_or_never_finite_is_reported_as_such():
    assert value_lines([{"step": 4, ACC: 0.5}]) == ["validation arithmetic acc mean@1: 0.500 (step 4)"]
    assert value_lines([{"step": 4, ACC: math.nan}]) == ["validation arithmetic acc mean@1: no finite value"]
    assert value_lines([]) == stage_lines([]) == []


def test_supervised_runs_report_their_losses():
    history = [{"step": step, "train/loss": 4.0 / step} for step in (1, 2, 4)] + [{"step": 4, "val/loss": 1.25}]
    assert value_lines(history) == [
        "training loss, mean of the first and last tenth: 4.000 -> 1.000 (step 1 -> 4)",
        "val/loss: 1.250 (step 4)",
    ]


def test_entries_of_one_step_are_merged_and_the_later_value_counts():
    merged = merge_steps([{"step": 2, "a": 1.0}, {"step": 1, "a": 0.0}, {"step": 2, "a": 3.0, "b": 4.0}])
    assert merged == [{"step": 1, "a": 0.0}, {"step": 2, "a": 3.0, "b": 4.0}]


def test_a_series_omits_gaps_and_values_that_are_not_finite():
    history = [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": math.nan}, {"step": 4, "a": 2.0}]
    assert series(history, "a") == ([1, 4], [1.0, 2.0])


def test_a_finished_run_is_reported_from_its_directory(tmp_path):
    lines = [json.dumps({"step": 0, ACC: 0.25}), json.dumps({"step": 5, ACC: 0.75}), '{"step": 6, ']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert report_run(
        tmp_path, checkpoint="/runs/global_step_5", written={"rollouts": "/r", "validation samples": None}
    ).splitlines() == [
        "last checkpoint: /runs/global_step_5",
        f"metrics: {tmp_path / 'metrics.jsonl'}",
        f"curves: hybridrl view {tmp_path}",
        "rollouts: /r",
        "validation arithmetic acc mean@1: 0.250 -> 0.750 (step 0 -> 5)",
    ]


def test_a_run_without_stored_metrics_says_how_to_store_them(tmp_path):
    assert report_run(tmp_path, checkpoint=None).splitlines() == [
        "last checkpoint: none: trainer.save_freq=N commits every N steps and at the end",
        "metrics: not stored: add jsonl to trainer.logger for metrics and curves",
    ]


def example(step, source, response, score):
    return {
        "step": step,
        "data_source": source,
        "question": "1 + 1?",
        "response": response,
        "ground_truth": "2",
        "score": score,
    }


def test_the_report_ends_with_the_first_and_the_last_answer_to_the_same_problem(tmp_path):
    lines = [json.dumps({"step": step, ACC: 0.25}) for step in (0, 5, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    for step, response, score in ((0, "1", 0.0), (5, "3", 0.0), (10, "2\n", 1.0)):
        save_examples(
            str(tmp_path), [example(step, "sums", response, score), example(step, "judged", "two", None)], step=step
        )
    assert report_run(tmp_path, checkpoint=None).splitlines()[-6:] == [
        "asked (sums): 1 + 1?  [2]",
        "  step 0 answered, score 0: 1",
        "  step 10 answered, score 1: 2",
        "asked (judged): 1 + 1?  [2]",
        "  step 0 answered, not scored: two",
        "  step 10 answered, not scored: two",
    ]


def test_examples_of_a_killed_process_and_of_an_older_run_are_not_shown(tmp_path):
    for step in (0, 3, 5, 10):  # of an older run, or of a process that was killed
        save_examples(str(tmp_path), [example(step, "sums", "old", 0.0)], step=step)
    save_examples(str(tmp_path), [example(5, "sums", "new", 1.0)], step=5)
    assert [(e["step"], e["response"]) for e in read_examples(tmp_path)] == [(0, "old"), (3, "old"), (5, "new")]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, ACC: 1.0}))
    assert report_run(tmp_path, checkpoint=None).splitlines()[-2:] == [
        "asked (sums): 1 + 1?  [2]",
        "  step 5 answered, score 1: new",
    ]


def test_damaged_lines_of_examples_are_left_out(tmp_path):
    save_examples(str(tmp_path), [example(0, "sums", "good", 0.0)], step=0)
    with open(tmp_path / "examples.jsonl", "ab") as file:
        file.write(b'\xff\n[1]\n{"step": "x"}\n{"step": 1}\n' + b"[" * 100_000 + b"\n{")
    save_examples(str(tmp_path), [example(2, "sums", "later", 0.0)], step=2)
    assert [found["response"] for found in read_examples(tmp_path)] == ["good", "later"]


def test_what_a_model_writes_does_not_command_the_terminal():
    shown = format_answer(example(1, "sums", "red \x1b[31m text \x9b0m \x00", 1.0))
    assert shown.endswith("red \ufffd[31m text \ufffd0m \ufffd")


def test_a_long_answer_is_shown_by_its_beginning_and_its_end():
    shown = format_answer(example(1, "sums", "first " + 1000 * "and then " + "#### 4", 1.0))
    assert (
        shown.startswith("step 1 answered, score 1: first and then")
        and shown.endswith("and then #### 4")
        and len(shown) < 300
    )
