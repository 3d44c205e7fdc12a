"""The readers of `hybridrl view`: growing files, and memory."""

import json
import math
import os
import tracemalloc
from pathlib import Path

import fsspec
import pytest

from hybridrl.errors import ConfigError
from hybridrl.system.machine import machine_id
from hybridrl.trainer.run.tracking import Tracking
from hybridrl.view.readers.failures import FailureReader
from hybridrl.view.readers.ledger import LedgerReader
from hybridrl.view.readers.metrics import MetricHistory
from hybridrl.view.readers.samples import SampleQuery, SampleStore
from hybridrl.view.readers.settings import RunSettings
from hybridrl.view.readers.storage import Folder, LineTail
from hybridrl.view.readers.timeline import TimelineReader
from hybridrl.view.runs import open_runs
from tests.support.view.run_files import (
    ENDED,
    LOST,
    sample,
    write_journal,
    write_lines,
    write_metrics,
    write_samples,
    write_trace,
)

MB = 1 << 20


def texts(tail: LineTail) -> list[bytes]:
    return [line for _, line in tail.lines()]


def history_of(run: Path) -> MetricHistory:
    history = MetricHistory(Folder(str(run)))
    history.update()
    return history


# -- lines


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    file, tail = tmp_path / "a", LineTail(Folder(str(tmp_path)), "a")
    file.write_bytes(b"one\ntw")
    assert texts(tail) == [b"one"]
    file.write_bytes(b"one\ntwo\n")
    assert texts(tail) == [b"two"]
    assert texts(tail) == []


@pytest.mark.parametrize("text", [b"other\nlines\nfollow\n", b"x\n"])
def test_a_replaced_file_is_read_from_its_start(tmp_path, text):
    file, tail, replaced = tmp_path / "a", LineTail(Folder(str(tmp_path)), "a"), []
    file.write_bytes(b"one\ntwo\n")
    assert len(texts(tail)) == 2
    file.write_bytes(text)
    assert [line for _, line in tail.lines(on_replaced=lambda: replaced.append(1))] == text.splitlines()
    assert replaced == [1]


def test_a_line_longer_than_a_block_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (3 * MB) + b"\nshort\n")
    assert [len(line) for line in texts(LineTail(Folder(str(tmp_path)), "a"))] == [3 * MB, 5]


def test_a_missing_file_has_no_lines_until_it_is_there(tmp_path):
    tail = LineTail(Folder(str(tmp_path / "later")), "a")
    assert texts(tail) == []
    write_lines(tmp_path / "later" / "a", [1])
    assert texts(tail) == [b"1"]


# -- metrics


def test_a_step_that_was_logged_twice_counts_once_with_its_later_values(tmp_path):
    write_metrics(tmp_path, range(1, 6))
    history = history_of(tmp_path)
    revision = history.revision
    write_lines(tmp_path / "metrics.jsonl", [{"step": 4, "score": 40.0}, {"step": 5, "score": 50.0}])
    history.update()
    assert history.series("score") == ([1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 40.0, 50.0])
    assert history.revision != revision and len(history) == 5


def test_a_resumed_run_that_dropped_its_last_steps_is_read_again(tmp_path):
    write_metrics(tmp_path, range(1, 9))
    history = history_of(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    write_metrics(tmp_path, range(1, 4))
    history.update()
    assert history.series("score")[0] == [1, 2, 3] and history.last_step == 3


def test_later_rows_are_sent_alone(tmp_path):
    write_metrics(tmp_path, range(1, 4))
    history = history_of(tmp_path)
    rows, revision = len(history), history.revision
    write_metrics(tmp_path, [4])
    history.update()
    assert history.series("score", since=rows) == ([4], [0.4]) and history.revision == revision


def test_what_is_not_finite_or_no_number_has_no_point_and_is_counted(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "a": math.nan, "b": True, "c": "x"}, {"step": 2, "a": 1}])
    (tmp_path / "metrics.jsonl").open("a").write('[1]\nnot json\n{"a": 1}\n{"step": Infinity}\n')
    history = history_of(tmp_path)
    assert history.series("a") == ([2], [1.0]) and len(history) == 2
    assert history.names() == [{"name": "a", "last": 1.0, "not_finite": 1}]


def test_a_remote_evaluation_belongs_to_the_step_of_its_weights(tmp_path):
    write_metrics(tmp_path, [1, 2])
    write_lines(tmp_path / "metrics.jsonl", [{"step": 3, "score": 0.3, "val/version": 1, "val-core/acc": 0.5}])
    history = history_of(tmp_path)
    assert history.series("val-core/acc") == ([1], [0.5]) and history.series("score")[0] == [1, 2, 3]


def test_of_many_points_the_extremes_of_each_interval_stay(tmp_path):
    values = [0.0] * 1000
    values[417], values[503] = 9.0, -7.0
    write_lines(tmp_path / "metrics.jsonl", ({"step": i, "a": value} for i, value in enumerate(values)))
    steps, found = history_of(tmp_path).series("a", max_points=100)
    assert len(steps) <= 101 and steps == sorted(steps) and steps[-1] == 999
    assert (max(found), steps[found.index(9.0)], min(found)) == (9.0, 417, -7.0)


def test_ten_thousand_steps_take_little_more_than_their_numbers(tmp_path):
    text = json.dumps({f"group/metric_{i}": i + 0.5 for i in range(20)})[1:]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}, {text}\n' for step in range(1, 10_001))
    tracemalloc.start()
    try:
        history = history_of(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history) == 10_000 and len(history.names()) == 20
    assert (tmp_path / "metrics.jsonl").stat().st_size > 4.5 * MB
    # The numbers take 1.6 MB, and the rows by step as much; columns grow by an eighth; a block of 1 MB is in memory
    # twice, as bytes and as lines.
    assert peak < 4.5 * MB * 1.5


# -- samples


def store_of(run: Path) -> SampleStore:
    return SampleStore(Folder(str(run / "rollouts")))


def all_pages(store: SampleStore, query: SampleQuery, *, limit: int) -> list[tuple[int, str]]:
    found, after = [], None
    for _ in range(100):
        page = store.page(query, after=after, limit=limit)
        found += [(one["step"], one["output"]) for one in page["samples"]]
        after = page["next"]
        if after is None:
            return found
    raise AssertionError("the pages do not end")


@pytest.fixture
def sampled(tmp_path) -> Path:
    for step in range(1, 5):
        rows = (
            sample(step, i, score=float(i == step), prompt=f"prompt {i}", answer=f"answer {i} of {step}")
            for i in range(5)
        )
        write_samples(tmp_path, step, rows)
    return tmp_path


@pytest.mark.parametrize("limit", [1, 3, 5, 7, 100])
def test_pages_of_any_size_have_every_sample_once(sampled, limit):
    newest = [(step, f"answer {i} of {step}") for step in (4, 3, 2, 1) for i in range(5)]
    assert all_pages(store_of(sampled), SampleQuery(), limit=limit) == newest
    oldest = [(step, f"answer {i} of {step}") for step in (1, 2, 3, 4) for i in range(5)]
    assert all_pages(store_of(sampled), SampleQuery(ascending=True), limit=limit) == oldest


def test_samples_are_found_by_reward_text_and_step(sampled):
    store = store_of(sampled)
    assert all_pages(store, SampleQuery(lowest=0.5), limit=2) == [(s, f"answer {s} of {s}") for s in (4, 3, 2, 1)]
    assert all_pages(store, SampleQuery(text="ANSWER 3 of"), limit=9) == [(s, f"answer 3 of {s}") for s in (4, 3, 2, 1)]
    assert all_pages(store, SampleQuery(first=2, last=3, highest=0.5, text="4 of"), limit=9) == [
        (3, "answer 4 of 3"),
        (2, "answer 4 of 2"),
    ]


def test_a_prompt_is_followed_through_the_steps(sampled):
    store = store_of(sampled)
    prompt = store.page(SampleQuery(text="prompt 2"), limit=1)["samples"][0]["prompt_id"]
    assert all_pages(store, SampleQuery(prompt=prompt, ascending=True), limit=3) == [
        (step, f"answer 2 of {step}") for step in (1, 2, 3, 4)
    ]


def test_a_step_that_a_resumed_run_wrote_again_is_read_again(sampled):
    store = store_of(sampled)
    assert len(all_pages(store, SampleQuery(first=4), limit=9)) == 5
    write_samples(sampled, 4, [sample(4, 0, answer="another")])
    assert all_pages(store, SampleQuery(first=4), limit=9) == [(4, "another")]


def test_what_is_no_sample_is_left_out(tmp_path):
    path = write_samples(tmp_path, 1, [sample(1, 0), 7, sample(1, 1)])
    path.open("a").write('not json\n{"step": 1, "outp')
    for name in ("x.jsonl", "-1.jsonl", "1.txt", "../1.jsonl"):
        (path.parent / Path(name).name).touch()
    assert [step for step, _ in all_pages(store_of(tmp_path), SampleQuery(), limit=9)] == [1, 1]


def test_the_index_of_samples_takes_a_few_bytes_each(tmp_path):
    for step in range(1, 6):
        write_samples(tmp_path, step, (sample(step, i, answer="long answer " * 100) for i in range(1000)))
    size = sum(path.stat().st_size for path in (tmp_path / "rollouts").iterdir())
    store = store_of(tmp_path)
    tracemalloc.start()
    try:
        page = store.page(SampleQuery(lowest=5.0, ascending=True))
        while page["next"] is not None:
            page = store.page(SampleQuery(lowest=5.0, ascending=True), after=page["next"])
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 6 * MB
    assert kept < 5_000 * 32 + 0.2 * MB  # 24 bytes of 3 arrays, which grow by an eighth
    assert peak < 4 * MB  # a block of 1 MB as bytes and as lines


def test_tokens_are_found_by_the_sample_they_belong_to(tmp_path):
    wanted = sample(3, 1)
    record = {"step": 3, "id": wanted["id"], "tokens": ["2"], "old": [-0.1], "rollout": [-0.2]}
    write_lines(tmp_path / "rollouts" / "tokens" / "3.jsonl", [{"id": "other", "tokens": []}, record])
    assert store_of(tmp_path).tokens(3, wanted["id"]) == record
    assert store_of(tmp_path).tokens(3, "?") is None and store_of(tmp_path).tokens(4, wanted["id"]) is None


# -- settings


def test_settings_that_differ_from_their_defaults_are_marked(tmp_path):
    nested = {"actor_rollout_ref": {"rollout": {"n": 4, "name": "vllm"}}, "algorithm": {"adv_estimator": "grpo"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    rows = {row["name"]: row for row in RunSettings(Folder(str(tmp_path))).table()["settings"]}
    assert (rows["actor_rollout_ref.rollout.n"]["default"], rows["actor_rollout_ref.rollout.n"]["differs"]) == (
        "1",
        True,
    )
    assert not rows["actor_rollout_ref.rollout.name"]["differs"]


def test_an_older_run_has_the_settings_of_its_newest_checkpoint_or_its_command_line(tmp_path):
    words = ["python", "-m", "hybridrl.main_ppo", "trainer.total_training_steps=7", "+data.x=[1,2]"]
    (tmp_path / "command.json").write_text(json.dumps({"command": words, "directory": "/"}))
    settings = RunSettings(Folder(str(tmp_path)))
    assert settings.values() == {"trainer.total_training_steps": 7, "data.x": [1, 2]} and settings.total_steps() == 7
    for step in (2, 10):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / "config.yaml").write_text(f"trainer: {{total_training_steps: {step}}}")
    assert RunSettings(Folder(str(tmp_path))).total_steps() == 10


def test_samples_are_looked_for_where_the_settings_say_or_beside_a_moved_run(tmp_path):
    elsewhere, run = tmp_path / "elsewhere" / "mine", tmp_path / "run"
    elsewhere.mkdir(parents=True)
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"trainer": {"rollout_data_dir": "elsewhere/mine"}}))
    (run / "command.json").write_text(json.dumps({"command": ["x"], "directory": str(tmp_path)}))
    assert RunSettings(Folder(str(run))).sample_folder("rollout").url == str(elsewhere)
    (run / "mine").mkdir()
    assert RunSettings(Folder(str(run))).sample_folder("rollout").url == str(run / "mine")


# -- timeline, failures, ledger


def test_a_window_of_the_timeline_has_its_steps_and_their_idle_shares(tmp_path):
    write_trace(tmp_path, 1000)
    reader = TimelineReader(Folder(str(tmp_path)))
    window = reader.window(first=500, last=501)
    names = [event["name"] for event in window["events"] if event["ph"] == "X" and event["cat"] == "step"]
    assert names == ["step 500", "step 501"] and window["steps"] == [1, 1000]
    assert window["seconds"] == pytest.approx(0.020)
    assert window["stages"] == {"prepare": pytest.approx((0.004, 0)), "update": pytest.approx((0.016, 0.014))}
    (rank,) = window["ranks"]
    assert (rank["role"], rank["working_s"], rank["idle_share"]) == ("actor", pytest.approx(0.012), pytest.approx(0.4))
    assert reader.window()["first"] == 998


def test_the_timeline_follows_a_trace_that_grows_and_skips_a_torn_line(tmp_path):
    write_trace(tmp_path, 3)
    reader = TimelineReader(Folder(str(tmp_path)))
    assert reader.window()["last"] == 3
    (tmp_path / "trace" / "job" / "driver.jsonl").open("a").write('{"kind": "stage", "na')
    assert reader.window()["last"] == 3
    assert reader.window(first=7, last=9)["events"] == []


def test_a_run_without_a_trace_has_an_empty_timeline(tmp_path):
    assert TimelineReader(Folder(str(tmp_path))).window()["steps"] is None


def test_failures_are_what_the_journal_says_and_are_followed_as_it_grows(tmp_path):
    reader = FailureReader(Folder(str(tmp_path)))
    assert reader.read() == {"journals": [], "recoveries": []}
    write_journal(tmp_path, LOST)
    (journal,) = reader.read()["journals"]
    assert [event["event"] for event in journal["events"]][2:4] == ["WorkerFailed", "RecoveryDecided"]
    (worker,) = journal["workers"]
    assert (worker["slot"], worker["pid"], worker["restarts"]) == ("actor-0", 12, 1)
    write_journal(tmp_path, [ENDED])
    write_lines(tmp_path / "failures.jsonl", [{"step": 3, "lost": ["actor-0"], "seconds": 1.5}])
    later = reader.read()
    assert later["journals"][0]["state"] == "succeeded" and later["recoveries"][0]["lost"] == ["actor-0"]


def test_a_damaged_journal_is_shown_as_far_as_it_is_whole(tmp_path):
    path = write_journal(tmp_path, LOST)
    (file,) = path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], b"00000000 {}\n", *lines[2:]]))
    (journal,) = FailureReader(Folder(str(tmp_path))).read()["journals"]
    assert len(journal["events"]) == 2 and "damaged" in journal["problem"]


def test_the_ledger_counts_a_repeated_step_once(tmp_path):
    def step(number: int) -> dict:
        return {"step": number, "prompts": [1, 2], "stages": {"adv": 1 + (number == 2)}, "updates": {"actor": number}}

    begin = {"begin": 0, "rows": 10, "from": None}
    write_lines(tmp_path / "ledger.jsonl", [begin, step(1), step(2), {"begin": 1, "rows": 10, "from": None}, step(2)])
    found = LedgerReader(Folder(str(tmp_path))).read()
    assert (found["steps"], found["repeated"], found["prompts"], found["updates"]) == (2, 1, 4, {"actor": 2})
    assert found["more_than_once"] == ["step 2: adv ran 2 times"] * 2


# -- which runs


def test_a_directory_of_runs_is_all_of_them_and_equal_names_are_told_apart(tmp_path):
    for changed, name in enumerate(("a/run", "b/run", "b/other"), 1):
        write_metrics(tmp_path / name, [1])
        os.utime(tmp_path / name / "metrics.jsonl", (changed, changed))
    assert [*open_runs([str(tmp_path / "b"), str(tmp_path / "a" / "run")])] == ["other", "run", "a-run"]


@pytest.mark.parametrize(("name", "says"), [("nothing", "there is no such directory"), ("empty", "no run has written")])
def test_a_path_without_a_run_is_rejected_with_the_way_out(tmp_path, name, says):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says) as caught:
        open_runs([str(tmp_path / name)])
    assert "--demo" in str(caught.value)


def test_an_unknown_protocol_is_rejected():
    with pytest.raises(ConfigError, match="nosuch://x"):
        open_runs(["nosuch://x"])


def test_a_run_on_other_storage_is_read(tmp_path):
    write_metrics(tmp_path, [1, 2])
    write_samples(tmp_path, 1, [sample(1, 0)])
    write_trace(tmp_path, 2)
    write_journal(tmp_path, LOST)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path) + "/", "/view-test", recursive=True)
    try:
        (run,) = open_runs(["memory://view-test"]).values()
        assert run.summary()["step"] == 2
        assert len(run.samples("rollout").page(SampleQuery())["samples"]) == 1
        assert run.timeline.window()["last"] == 2 and run.failures.read()["journals"][0]["run"] == "run-1"
    finally:
        memory.rm("/view-test", recursive=True)


def test_the_newest_run_is_the_first(tmp_path):
    for name, changed in {"a": 100, "b": 300, "c": 200}.items():
        write_metrics(tmp_path / name, [1])
        os.utime(tmp_path / name / "metrics.jsonl", (changed, changed))
    assert [*open_runs([str(tmp_path)])] == ["b", "c", "a"]


NO_PID = 2**22 + 1  # the kernel gives none above 2**22


@pytest.mark.parametrize(
    ("steps", "lives", "state"), [(3, False, "complete"), (2, True, "running"), (2, False, "interrupted")]
)
def test_a_run_is_complete_running_or_interrupted(tmp_path, steps, lives, state):
    write_metrics(tmp_path, range(1, steps + 1))
    (tmp_path / "config.json").write_text('{"trainer": {"total_training_steps": 3}}')
    (tmp_path / ".lock").write_text(
        json.dumps({"pid": os.getpid() if lives else NO_PID, "host": "here", "machine": machine_id()})
    )
    (run,) = open_runs([str(tmp_path)]).values()
    assert run.summary()["state"] == state


def test_a_run_of_epochs_is_complete_after_the_last_step_of_its_data(tmp_path):
    settings = {"trainer": {"total_training_steps": None, "total_epochs": 2}}
    with Tracking("project", "run", ["jsonl"], tmp_path, settings, total_steps=4) as tracking:
        tracking.log({"x": 1}, 4)
    (run,) = open_runs([str(tmp_path)]).values()
    assert (run.summary()["state"], run.summary()["total_steps"]) == ("complete", 4)
    assert run.settings.values()["trainer.total_epochs"] == 2
