"""Soaks: what grows in a run of hours is found, and processes that start anew are no growth.

`make soak HOURS=1` runs one; `tests/support/soak` says what it is.
"""

import math
import mmap
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.soak.__main__ import make_scene, soak
from tests.support.soak.report import MIB, make_report
from tests.support.soak.sampling import Usage, read_usage, read_usages
from tests.support.soak.slope import Slope, fit_slope, median_step_s, steps_per_second
from tests.support.soak.stage import newest_step


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_soak_of_a_minute_survives_its_faults_and_leaves_nothing(tmp_path):
    scene = make_scene(tmp_path / "soak", seconds=60, fault_every_s=25, sample_every_s=1, seed=1)
    soak(scene)  # what grows in a minute says nothing
    report = (tmp_path / "soak/report.md").read_text()
    print(report)
    assert not any(problem in report for problem in ("ENDED EARLY", "HANGS", "LEFT"))
    assert "| actor | memory, MiB |" in report and "| raylet | threads |" in report
    assert (tmp_path / "soak/soak.png").stat().st_size > 10_000


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose a new folder"):
        make_scene(tmp_path, seconds=1, fault_every_s=0, sample_every_s=1, seed=1)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_incarnations_share_a_slope_and_have_intercepts_of_their_own():
    # one unit per second, from 0 and again from 100: a line through all values would rise far more
    slope = fit_slope([([0, 1, 2], [0, 1, 2]), ([10, 11, 12, 13], [100, 101, 102, 103])])
    assert slope == Slope(per_hour=3600.0, error=0.0, mean=409 / 7, num_incarnations=2, seconds=5.0)


def test_the_error_of_a_slope_is_that_of_least_squares():
    # deviations of t: -1.5, -.5, .5, 1.5; of y: -.5, .5, -.5, .5. b = 1.0 / 5 = 0.2
    # residuals -.2, .6, -.6, .2: squares .8, by 4 - 1 - 1 = 2 and by 5: error^2 = 0.08; neighbours differ in sign
    slope = fit_slope([([0, 1, 2, 3], [0, 1, 0, 1])])
    assert slope is not None
    assert slope.per_hour == pytest.approx(720.0)
    assert slope.error == pytest.approx(3600 * 0.08**0.5)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_the_error_covers_the_true_slope_also_if_neighbours_are_alike(correlation):
    random = np.random.default_rng(0)
    deviations = []
    for _ in range(200):
        series = []
        for start in (0.0, 500.0):
            noise = [0.0]
            for shock in random.normal(size=199):
                noise.append(correlation * noise[-1] + shock)
            times = start + np.arange(200.0)
            series.append((times, random.normal() * 50 + 0.01 * times + np.asarray(noise)))
        slope = fit_slope(series)
        assert slope is not None
        deviations.append((slope.per_hour - 36.0) / slope.error)
    assert np.mean(deviations) == pytest.approx(0.0, abs=0.25)
    assert 0.8 < np.std(deviations) < 1.25


@pytest.mark.parametrize("series", [[], [([1.0, 2.0], [1.0, 2.0])], [([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])]])
def test_too_few_values_have_no_slope(series):
    assert fit_slope(series) is None


@pytest.mark.parametrize(
    ("per_hour", "error", "verdict"),
    [(1.9, 0.1, "flat"), (50.0, 26.0, "flat"), (50.0, 24.0, "GROWS"), (-50.0, 24.0, "falls"), (2.1, 0.0, "GROWS")],
)
def test_a_slope_counts_beyond_a_bound_and_two_standard_errors(per_hour, error, verdict):
    assert Slope(per_hour, error, mean=1.0, num_incarnations=1, seconds=1.0).verdict(bound=2.0) == verdict


def test_throughput_counts_a_step_once_and_the_median_ignores_a_recovery():
    reached = [1.0, 2.0, 3.0, 13.0, 14.0]  # ten seconds of recovery
    assert steps_per_second(reached, start=1.0, end=14.0) == pytest.approx(4 / 13)
    assert median_step_s(reached, start=1.0, end=14.0) == 1.0
    assert np.isnan(median_step_s(reached, start=5.0, end=12.0))


def test_the_newest_step_is_that_of_the_last_whole_line_of_the_metrics(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert newest_step(metrics) == 0
    lines = [f'{{"step": {step}, "training/global_step": {step}.0, "text": "{"x" * 1000}"}}' for step in range(1, 200)]
    metrics.write_text("\n".join(lines) + "\n")
    assert newest_step(metrics) == 199
    metrics.write_text("\n".join(lines))  # the last line is being written
    assert newest_step(metrics) == 198


def samples_of(leak_per_hour, *, seconds=3600, cpu_of_late_steps=1.0):
    """Return samples of a raylet that never ends and a worker that starts anew every 300 s.

    The worker's memory grows by `leak_per_hour`, in MiB.
    """
    samples, cpu_s = [], 0.0
    for at in range(0, seconds, 10):
        age = at % 300
        cpu_s += 10 * (cpu_of_late_steps if at > seconds / 2 else 1.0)
        wiggle = (at // 10 % 3) * MIB // 10
        worker = Usage(
            "actor", 100 + at // 300, at - age, int((500 + leak_per_hour * age / 3600) * MIB), 0, 40, 20, 1.0
        )
        raylet = Usage("raylet", 7, 0, 50 * MIB + wiggle, 0, 60 + at // 10 % 2, 30, cpu_s)
        samples.append({"at": float(at), "step": at, "shm": 10 * MIB, "load": 1.0, "usages": [worker, raylet]})
    return samples


RESULT = {"code": 0, "ended_early": "", "left": [], "shared_memory": [], "hits": [], "seconds": 3600.0}
RESULT["reached"] = [float(step) for step in range(1, 3600)]


def test_a_leak_in_a_process_that_is_restarted_is_found_and_named():
    report = make_report(RESULT, samples_of(100.0))
    assert report.problems == ["GROWS: memory of actor"]
    row = next(row for row in report.rows if (row.kind, row.quantity) == ("actor", "memory"))
    assert row.slope is not None and row.slope.per_hour == pytest.approx(100.0)
    assert row.slope.num_incarnations == 12


def test_what_a_process_needs_to_start_is_no_growth():
    samples = samples_of(0.0)
    for sample in samples:
        worker, raylet = sample["usages"]
        age = sample["at"] % 300
        starting = replace(worker, memory=int(age / 60 * 500 * MIB)) if age < 60 else worker
        sample["usages"] = [starting, raylet]
    assert make_report(RESULT, samples).problems == []


def test_caches_that_fill_and_level_off_are_no_growth_and_a_leak_behind_them_is():
    for leak_per_hour, problems in ((0.0, []), (100.0, ["GROWS: memory of raylet", "GROWS: memory of all processes"])):
        samples = samples_of(0.0)
        for sample in samples:
            worker, raylet = sample["usages"]
            filled = 200 * (1 - math.exp(-sample["at"] / 300)) + leak_per_hour * sample["at"] / 3600
            sample["usages"] = [worker, replace(raylet, memory=raylet.memory + int(filled * MIB))]
        assert sorted(make_report(RESULT, samples).problems) == sorted(problems)


@pytest.mark.parametrize(("height", "every_s", "problems"), [(2, 9999, []), (3, 600, ["GROWS: threads of raylet"])])
def test_two_threads_that_come_once_are_no_growth_and_more_and_more_are(height, every_s, problems):
    samples = samples_of(0.0)
    for sample in samples:
        worker, raylet = sample["usages"]
        jumps = int(sample["at"] > 2700) if every_s > 3600 else sample["at"] // every_s
        sample["usages"] = [worker, replace(raylet, threads=int(raylet.threads + height * jumps))]
    assert make_report(RESULT, samples).problems == problems


def test_a_process_that_comes_and_stays_is_growth():
    samples = samples_of(0.0)
    for sample in samples:
        more = [Usage("ray", 1000 + i, 0, MIB, 0, 1, 1, 0.0) for i in range(int(sample["at"] // 1000))]
        sample["usages"] = [*sample["usages"], *more]
    assert "GROWS: processes of all processes" in make_report(RESULT, samples).problems


def test_what_is_measured_before_the_first_step_does_not_count():
    samples = samples_of(0.0)
    for sample in samples[:60]:
        sample["step"] = 0
        sample["usages"] = [replace(usage, files=usage.files + int(sample["at"])) for usage in sample["usages"]]
    assert make_report(RESULT, samples).problems == []


def test_a_run_without_a_leak_passes_and_a_slower_one_does_not():
    report = make_report(RESULT, samples_of(0.0))
    assert report.problems == []
    assert "3599 steps in 3600 s, 1.000 per second; 0 faults; effective training time ratio 1.00" in report.text()
    assert make_report(RESULT, samples_of(0.0, cpu_of_late_steps=1.5)).problems == [
        "SLOWER: a step takes 1.50 times the CPU of the first tenth"
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ended_early": "the program ended after 9 s"}, "ENDED EARLY: the program ended after 9 s; see run.log"),
        ({"code": None}, "HANGS after SIGTERM"),
        ({"left": ["7 S raylet"]}, "LEFT after the end: 7 S raylet"),
        ({"shared_memory": ["psm_1"]}, "LEFT in /dev/shm: psm_1"),
    ],
)
def test_what_else_fails_a_soak_is_said(change, problem):
    assert make_report(RESULT | change, samples_of(0.0)).problems == [problem]


def test_what_a_process_uses_is_read_from_the_kernel(tmp_path):
    before = read_usage("driver", os.getpid())
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    files = [os.open(tmp_path, os.O_RDONLY) for _ in range(5)]
    memory = mmap.mmap(
        -1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # not of the allocator, which may have it already
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
    try:
        after = read_usage("driver", os.getpid())
    finally:
        leave.set()
        thread.join()
        for file in files:
            os.close(file)
    assert before is not None and after is not None
    assert (after.pid, after.started, after.threads - before.threads) == (os.getpid(), before.started, 1)
    assert after.files - before.files == 5
    assert 0.9 * len(memory) < after.memory - before.memory < 1.5 * len(memory)


def test_a_process_that_has_ended_uses_nothing():
    assert read_usage("worker", 2**22 + 1) is None  # above the kernel's largest process id
    assert read_usages(2**22 + 1, 2**22 + 1) == []
