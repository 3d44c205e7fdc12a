"""The timeline: recording, spans of killed processes, and valid trace events."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl import cli
from hybridrl.errors import DataError
from hybridrl.framework import OnlineRLContext, Task, stage
from hybridrl.framework.graph.stage_tracer import StageTracer
from hybridrl.framework.graph.timeline import (
    Span,
    assign_lanes,
    group_by_step,
    idle_intervals,
    newest_trace,
    read_spans,
    summarize,
    trace_events,
)
from hybridrl.single_controller.monitoring.tracing import (
    DIRECTORY_VARIABLE,
    call_span,
    is_recording,
    span,
    start_recording,
    stop_recording,
    wait_span,
)
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.end_to_end.runs import train
from tests.support.single_controller.sample_workers import Waiter


@pytest.fixture
def recording(tmp_path):
    """Record this process as the driver of a job; return the directory of its spans."""
    start_recording(str(tmp_path / "trace" / "job"), "driver")
    yield tmp_path / "trace" / "job"
    stop_recording()


def check_trace_format(timeline: dict) -> dict[str, list[dict]]:
    """Check the rules of the trace event format; return the complete events by "group/row"."""
    json.dumps(timeline, allow_nan=False)
    groups, rows, events = {}, {}, {}
    for event in timeline["traceEvents"]:
        assert (
            {"ph", "name", "pid", "tid"} <= event.keys()
            and isinstance(event["pid"], int)
            and isinstance(event["tid"], int)
        )
        if event["name"] == "process_name":
            groups[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert event["tid"] not in {tid for _, tid in rows}
            rows[event["pid"], event["tid"]] = f"{groups[event['pid']]}/{event['args']['name']}"
        elif event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            events.setdefault(rows[event["pid"], event["tid"]], []).append(event)
    for row in events.values():
        times = [(round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)) for event in row]
        assert times == sorted(times, key=lambda time: (time[0], -time[1]))
        for number, (_, end) in enumerate(times):
            assert all(other_begin >= end or other_end <= end for other_begin, other_end in times[number + 1 :])
    return events


# -- recording


def test_both_halves_of_a_stage_are_recorded_under_the_number_of_their_step(recording):
    @stage("outer", role="policy")
    def outer(ctx):
        time.sleep(0.01)
        yield
        time.sleep(0.02)

    @stage("inner")
    def inner(ctx):
        time.sleep(0.005)

    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(StageTracer(first_step=7))
        task.use(outer).use(inner)
        task.run(max_step=2)
    spans = read_spans(recording)
    assert [(s.name, s.step, s.of) for s in spans] == [
        (name, step, of)
        for step in (7, 8)
        for name, of in (("outer", "policy"), ("inner", "driver"), ("outer", "policy"))
    ]
    assert [s.duration >= least * 1e6 for s, least in zip(spans, [10, 5, 20] * 2, strict=True)] == [True] * 6
    assert all(earlier.end <= later.begin for earlier, later in pairwise(spans))


def test_a_stage_that_fails_is_recorded_too(recording):
    def fails(ctx):
        raise KeyError("planted")

    with Task(ctx=OnlineRLContext()) as task, pytest.raises(KeyError):
        task.use_wrapper(StageTracer()).use(fails).run(max_step=1)
    assert [s.name for s in read_spans(recording)] == ["fails"]


def test_nothing_is_recorded_unless_asked_for(tmp_path):
    with span("stage", "a"), call_span("policy", 0, "act"), wait_span("policy", "act"):
        assert not is_recording()
    assert list(tmp_path.iterdir()) == []


def test_a_wait_within_a_call_has_its_role_and_rank_and_one_outside_has_none(recording):
    with call_span("policy", 3, "act"), wait_span("scorer", "score"):
        pass
    with wait_span("scorer", "score"):
        pass
    inside, call, outside = sorted(read_spans(recording), key=lambda s: s.end)
    assert call.contains(inside) and (inside.role, inside.rank, call.role, call.rank) == ("policy", 3, "policy", 3)
    assert outside.role is None and outside.begin >= call.end


def test_completed_spans_of_a_killed_process_are_kept(tmp_path):
    code = (
        "import os, signal; from hybridrl.single_controller.monitoring.tracing import span, start_recording\n"
        f"start_recording({str(tmp_path)!r}, 'driver')\n"
        "with span('stage', 'done', step=1, of='driver'): pass\n"
        "with span('stage', 'cut short', step=1, of='driver'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    with open(tmp_path / "driver.jsonl", "a") as file:
        file.write('{"kind": "stage", "na')  # a partial line, as on a full disk
    assert [s.name for s in read_spans(tmp_path)] == ["done"]


def test_threads_write_whole_lines(recording):
    def work(number):
        for _ in range(200):
            with call_span("policy", number, "act"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s.rank for s in read_spans(recording)) == sorted([0, 1, 2, 3] * 200)


def test_processes_record_calls_and_what_they_wait_for_on_a_common_clock(ray_cluster, recording):
    with RayResourcePool([2], name_prefix="trace") as pool:
        environment = {DIRECTORY_VARIABLE: str(recording)}
        with RayWorkerGroup(
            pool, RayClassWithInitArgs(Waiter), role="pair", name_prefix="trace", worker_env=environment
        ) as pair:
            with span("stage", "gen", step=1, of="pair"):
                pair.sleep_async(0.05)
            with span("stage", "pass", step=1, of="pair"):
                pair.count_rows(pair.count_up(0))  # the whole of two shards, for each: they fetch it
            asleep = [pair.sleep_in_thread(0.05) for _ in range(3)]
            for answers in asleep:
                pair.fetch(answers)
    spans = read_spans(recording)
    assert {s.process for s in spans} == {"driver", "pair-0", "pair-1"}
    stages = {s.name: s for s in spans if s.kind == "stage"}
    slept = [s for s in spans if s.name == "sleep_async"]
    assert [(s.role, s.rank) for s in sorted(slept, key=lambda s: s.rank)] == [("pair", 0), ("pair", 1)]
    for call in slept:
        assert call.duration >= 50e6 and stages["gen"].begin - 1e6 < call.begin and call.end < stages["gen"].end + 1e6
    fetched = [s for s in spans if s.kind == "wait" and s.process != "driver"]
    assert fetched and all(
        any(s.kind == "call" and s.contains(wait) and s.rank == wait.rank for s in spans) for wait in fetched
    )
    events = check_trace_format(trace_events(spans))
    assert (
        sum(e["name"] == "sleep_in_thread" for row, own in events.items() if row.startswith("pair/rank 1") for e in own)
        == 3
    )


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory, tiny_qwen2):
    """Run two steps in this process; return the run's directory and its metrics."""
    folder = tmp_path_factory.mktemp("recorded")
    return folder / "run", train(folder, tiny_qwen2, trainer__trace="true")


def test_a_run_leaves_a_timeline_of_all_its_stages_and_calls_that_the_command_makes(recorded_run, capsys):
    run, _ = recorded_run
    assert not is_recording()
    assert cli.main(["trace", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "2 steps, step 1 to step 2" in shown and f"wrote {run / 'trace.json'}" in shown
    events = check_trace_format(json.loads((run / "trace.json").read_text()))
    assert [e["name"] for e in events["driver/steps"]] == ["step 1", "step 2"]
    names = [e["name"] for e in events["driver/MainThread"] if e["cat"] == "stage"]
    assert names == 2 * [
        "next_batch",
        "gen",
        "reward",
        *("old_log_prob", "old_log_prob"),  # submitted, and joined
        "adv",
        "update_actor",
        "update_weights",
        "testing",
        "log",
        "save_checkpoint",
    ]
    calls = [e["name"] for e in events["actor_rollout/rank 0"] if e["cat"] == "call"]
    assert calls[:2] == ["init_model", "update_weights"]
    assert (
        calls.count("generate_sequences") == 4 and calls.count("update_actor") == 2
    )  # two validations beside two steps


def test_recording_takes_less_than_half_a_percent_of_a_small_models_step(recorded_run, recording):
    run, metrics = recorded_run
    spans = read_spans(newest_trace(run))
    step = group_by_step(spans)[0]
    count = sum(step.contains(entry) for entry in spans)
    costs = []
    for _ in range(20):  # the shortest of several rounds, to exclude other load on the machine
        start = time.perf_counter()
        for _ in range(50):
            with call_span("policy", 0, "act"):
                pass
        costs.append((time.perf_counter() - start) / 50)
    assert count >= 14  # ten stages, four calls
    assert count * min(costs) < 0.005 * min(row["timing_s/step"] for row in metrics if "timing_s/step" in row)


def test_a_run_is_recorded_only_with_trainer_trace(tmp_path, tiny_qwen2, capsys):
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    assert not (tmp_path / "run" / "trace").exists()
    assert cli.main(["trace", str(tmp_path / "run")]) == 2
    assert (
        capsys.readouterr().err
        == f"{tmp_path / 'run'} has no trace; run with trainer.trace=true and give the run's directory\n"
    )


def test_the_newest_job_of_a_run_is_the_one_that_is_shown(tmp_path):
    for age, job in ((100, "old"), (0, "new")):
        start_recording(str(tmp_path / "trace" / job), "driver")
        stop_recording()
        os.utime(tmp_path / "trace" / job / "driver.jsonl", (time.time() - age,) * 2)
    assert newest_trace(tmp_path) == tmp_path / "trace" / "new"
    assert newest_trace(tmp_path / "trace" / "old") == tmp_path / "trace" / "old"
    with pytest.raises(DataError, match="has no trace"):
        newest_trace(tmp_path / "trace")


# -- the timeline. Numbers are microseconds: one step of 1000, in which rank 0 works 300 and rank 1 works 400.


def spans_of_one_step() -> list[Span]:
    def us(kind, name, begin, end, process="driver", **facts):
        return Span(kind, name, begin * 1000, end * 1000, "MainThread", process, **facts)

    return [
        us("stage", "gen", 0, 600, step=1, of="rollout"),
        us("wait", "rollout.generate", 100, 550),
        us("call", "generate", 200, 500, "rollout-0", role="rollout", rank=0),
        us("call", "generate", 150, 550, "rollout-1", role="rollout", rank=1),
        us("wait", "actor.old", 200, 250, "rollout-1", role="rollout", rank=1),
        us("stage", "adv", 600, 1000, step=1, of="driver"),
    ]


def test_a_role_is_a_group_a_rank_a_row_and_a_gap_is_a_wait_for_the_next_call():
    events = check_trace_format(trace_events(spans_of_one_step()))
    assert list(events) == ["driver/steps", "driver/MainThread", "rollout/rank 0", "rollout/rank 1"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events["driver/MainThread"]] == [
        ("gen", 0, 600),
        ("wait: rollout.generate", 100, 450),
        ("adv", 600, 400),
    ]
    # waits end 1 us before their neighbours
    assert [(e["name"], e["ts"], e["dur"]) for e in events["rollout/rank 1"]] == [
        ("wait: next call", 1, 148),
        ("generate", 150, 400),
        ("wait: actor.old", 200, 50),
        ("wait: next call", 551, 448),
    ]
    assert events["driver/MainThread"][0]["args"] == {"step": 1, "role": "rollout"}


def test_roles_that_share_a_process_do_not_wait_for_a_call_while_one_of_them_works():
    shared = [
        Span("stage", "s", 0, 1_000_000, "MainThread", "driver", step=1, of="driver"),
        Span("call", "act", 0, 400_000, "MainThread", "a+b-0", "a", 0),
        Span("call", "judge", 400_000, 800_000, "MainThread", "a+b-0", "b", 0),
    ]
    events = check_trace_format(trace_events(shared))
    assert [(e["name"], e["ts"]) for e in events["a/rank 0"]] == [("act", 0), ("wait: next call", 801)]
    assert [(e["name"], e["ts"]) for e in events["b/rank 0"]] == [("judge", 400), ("wait: next call", 801)]


def test_the_summary_adds_up():
    lines = [line.split() for line in summarize(spans_of_one_step()).splitlines()]
    assert summarize(spans_of_one_step()).startswith("1 steps, step 1 to step 1, in 0.001 s")
    assert ["gen", "0.001", "60.0%", "0.000"] in lines and ["adv", "0.000", "40.0%", "0.000"] in lines
    # rank 0 works 300 of 1000 us; rank 1 works 350 and waits 50 for data
    assert ["rollout", "0", "0.000", "0.000", "70.0%"] in lines and ["rollout", "1", "0.000", "0.000", "60.0%"] in lines


def test_a_call_that_began_before_the_first_step_counts_from_there():
    stage_span = Span("stage", "s", 1_000_000, 2_000_000, "MainThread", "driver", step=1, of="driver")
    ahead = Span("call", "generate", 0, 1_750_000, "MainThread", "rollout-0", "rollout", 0)
    assert ["rollout", "0", "0.001", "0.000", "25.0%"] in [
        line.split() for line in summarize([ahead, stage_span]).splitlines()
    ]


def test_ten_thousand_steps_are_summarized_in_seconds():
    def at(kind, name, begin, end, **facts):
        return Span(kind, name, begin, end, "MainThread", "driver", **facts)

    spans = []
    for step in range(10_000):
        begin = step * 1000
        spans += [at("stage", f"s{i}", begin + 100 * i, begin + 100 * i + 100, step=step, of="r") for i in range(10)]
        spans += [at("wait", "r.m", begin + 100 * i + 10, begin + 100 * i + 90) for i in range(10)]
    start = time.process_time()
    # 80 of each 100 ns are waited for: 0.8 of 10000 * 100 ns = 0.001 s, rounded
    lines = [line.split() for line in summarize(sorted(spans, key=lambda entry: entry.begin)).splitlines()]
    assert ["s9", "0.001", "10.0%", "0.001"] in lines
    assert time.process_time() - start < 10


def test_a_job_that_ended_before_its_first_step_has_a_timeline():
    early = [Span("call", "init_model", 5, 9, "MainThread", "actor-0", "actor", 0)]
    assert [e["name"] for e in check_trace_format(trace_events(early))["actor/rank 0"]] == ["init_model"]
    assert summarize(early) == "no stage was recorded\n"
    assert check_trace_format(trace_events([])) == {}


some_spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12).map(
    lambda rows: [
        Span("call", f"c{i}", begin, begin + length, "t", "p", "r", 0) for i, (begin, length) in enumerate(rows)
    ]
)


@given(some_spans, st.integers(0, 40), st.integers(0, 40))
def test_every_moment_is_idle_or_busy_and_never_both(spans, begin, length):
    between = (begin, begin + length)
    idle = {moment for start, stop in idle_intervals(spans, between=between) for moment in range(start, stop)}
    busy = {moment for entry in spans for moment in range(entry.begin, entry.end)}
    assert idle == set(range(*between)) - busy


@given(some_spans)
def test_in_a_lane_spans_lie_apart_or_inside_each_other_and_none_is_lost(spans):
    lanes = assign_lanes(spans)
    assert sorted(entry.name for lane in lanes for entry in lane) == sorted(entry.name for entry in spans)
    for lane in lanes:
        for number, first in enumerate(lane):
            for other in lane[number + 1 :]:
                assert first.contains(other) or other.begin >= first.end


@given(some_spans)
def test_any_calls_make_a_valid_timeline(spans):
    stage_span = Span("stage", "s", 0, 60, "MainThread", "driver", step=1, of="driver")
    check_trace_format(trace_events(sorted([stage_span, *spans], key=lambda entry: entry.begin)))


def test_a_step_is_as_long_as_its_stages():
    assert [(s.name, s.begin, s.end) for s in group_by_step(spans_of_one_step())] == [("step 1", 0, 1_000_000)]


def test_what_is_no_span_is_skipped(tmp_path):
    good = json.dumps({"name": "step 1", "begin": 1, "end": 2, "kind": "stage", "thread": "main"})
    (tmp_path / "driver.jsonl").write_bytes(b"\xff\n[1]\n{}\n5\n" + b"[" * 100_000 + b"\n" + good.encode() + b"\n{")
    assert [span.name for span in read_spans(tmp_path)] == ["step 1"]
