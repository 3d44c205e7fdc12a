import time

import pytest

from hybridrl.master.health.low_resources import LowResourceDetector, low_memory_note
from hybridrl.master.health.process_record import ProcessRecord
from hybridrl.master.state.events import WarningRaised
from hybridrl.single_controller.monitoring.capacity import disk_capacity
from hybridrl.single_controller.monitoring.heartbeat_client import MEMORY, RAY_DISK, SHARED_MEMORY

GIB = 2**30


def process(slot, gib=1.0, *, machine="m", grown=0.0, **room):
    """Return the record of a process that held `gib` a minute ago, and holds `grown` more now."""
    process = ProcessRecord(slot, slot, 1, "node", machine, time.monotonic() - 60, host=f"host-{machine}")
    process.update({"private": int(gib * GIB)})
    process.last_message_at += 60
    process.update(
        {
            "private": int((gib + grown) * GIB),
            "capacity": {name: [int(one * GIB) for one in both] for name, both in room.items()},
        }
    )
    return process


def test_a_warning_about_memory_names_the_largest_processes_and_their_growth():
    processes = [
        process("actor-0", 5, grown=3, memory=(1.0, 16.0)),
        process("rollout-0", 2),
        process("trainer", 0.5),
        process("actor-1", 4),
    ]
    [warning] = LowResourceDetector().check(processes)
    assert warning.slot == "machine host-m"
    assert warning.text.startswith(
        "memory is nearly full: 1.00 GiB of 16.00 GiB are left; actor-0 holds 8.00 GiB (+3.00 GiB in 60 s); "
        "actor-1 holds 4.00 GiB (+0.00 GiB in 60 s); rollout-0 holds 2.00 GiB (+0.00 GiB in 60 s); "
        "the 4 processes of the job hold together 14.50 GiB. Ray kills processes when 5% are left"
    )
    assert "*.ppo_micro_batch_size_per_gpu" in warning.text


def test_a_shortage_is_reported_once_and_again_only_if_it_was_resolved_in_between():
    """Low is less than 8% of 100 GiB, resolved is more than 12%."""
    detector, reported = LowResourceDetector(), []
    for left in (9.0, 7.0, 6.0, 11.0, 7.0, 13.0, 7.0):
        reported.append(len(detector.check([process("actor-0", memory=(left, 100.0))])))
    assert reported == [0, 1, 0, 0, 0, 0, 1]


def test_machines_are_checked_separately_by_their_last_heartbeat():
    detector = LowResourceDetector()
    a, b = process("actor-0", memory=(1.0, 100.0)), process("actor-1", machine="n", memory=(50.0, 100.0))
    assert [warning.slot for warning in detector.check([a, b])] == ["machine host-m"]
    b.update({"capacity": {MEMORY: [GIB, 100 * GIB]}})
    assert [warning.slot for warning in detector.check([a, b])] == ["machine host-n"]


@pytest.mark.parametrize(
    "what, left, is_low",
    [(RAY_DISK, 7.9, True), (RAY_DISK, 8.1, False), (SHARED_MEMORY, 4.9, True), (SHARED_MEMORY, 5.1, False)],
)
def test_disks_are_reported_before_they_are_full(what, left, is_low):
    found = LowResourceDetector().check([process("actor-0", **{what: (left, 100.0)})])
    assert [type(one) for one in found] == [WarningRaised] * is_low
    assert not is_low or found[0].text.startswith(f"{what} is nearly full: {left:.2f} GiB of 100.00 GiB are left. ")


def test_the_disk_of_the_run_is_checked_on_the_masters_machine(tmp_path, monkeypatch):
    disk = disk_capacity(str(tmp_path))
    monkeypatch.setattr("hybridrl.master.health.low_resources.LOW_BYTES", {})
    monkeypatch.setattr(
        "hybridrl.master.health.low_resources.LOW",
        {"the disk of the run's directory": 0.5 * (1 + disk.left / disk.total)},
    )
    [warning] = LowResourceDetector(str(tmp_path)).check([])
    assert warning.slot == str(tmp_path) and "the next checkpoint may not fit" in warning.text
    assert LowResourceDetector("s3://somewhere").check([]) == []


def test_an_exit_reason_mentions_low_memory():
    note = low_memory_note(process("actor-0", memory=(1.0, 16.0)))
    assert note == "; its machine had 1.00 GiB of 16.00 GiB of memory left, and Ray kills processes when 5% are left"
    assert low_memory_note(process("actor-0", memory=(2.0, 16.0))) == low_memory_note(process("actor-0")) == ""
