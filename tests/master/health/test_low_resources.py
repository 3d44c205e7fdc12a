import time

import pytest

from hybridrl.master.health.low_resources import Shortages, memory_in_words
from hybridrl.master.health.monitor import Presence
from hybridrl.master.state.events import Noticed
from hybridrl.single_controller.monitoring.capacity import disk_room
from hybridrl.single_controller.monitoring.heartbeat_client import MEMORY, RAY_DISK, SHARED_MEMORY

GIB = 2**30


def process(slot, gib=1.0, *, machine="m", grown=0.0, **room):
    """A process that held so much a minute ago, and holds `grown` more now."""
    presence = Presence(slot, slot, 1, "node", machine, time.monotonic() - 60, host=f"host-{machine}")
    presence.take_beat({"private": int(gib * GIB)})
    presence.heard += 60
    presence.take_beat(
        {
            "private": int((gib + grown) * GIB),
            "room": {name: [int(one * GIB) for one in both] for name, both in room.items()},
        }
    )
    return presence


def test_little_memory_is_told_with_those_who_hold_most_of_it_and_how_they_grew():
    there = [
        process("actor-0", 5, grown=3, memory=(1.0, 16.0)),
        process("rollout-0", 2),
        process("trainer", 0.5),
        process("actor-1", 4),
    ]
    [notice] = Shortages().look(there)
    assert notice.slot == "machine host-m"
    assert notice.text.startswith(
        "memory is nearly full: 1.00 GiB of 16.00 GiB are left; actor-0 holds 8.00 GiB (+3.00 GiB in 60 s); "
        "actor-1 holds 4.00 GiB (+0.00 GiB in 60 s); rollout-0 holds 2.00 GiB (+0.00 GiB in 60 s); "
        "the 4 processes of the job hold together 14.50 GiB. Ray ends processes when 5% are left"
    )
    assert "*.ppo_micro_batch_size_per_gpu" in notice.text


def test_a_shortage_is_told_once_and_again_only_if_it_was_well_in_between():
    """Low is less than 8% of 100 GiB, well again is more than 12%."""
    watch, told = Shortages(), []
    for left in (9.0, 7.0, 6.0, 11.0, 7.0, 13.0, 7.0):
        told.append(len(watch.look([process("actor-0", memory=(left, 100.0))])))
    assert told == [0, 1, 0, 0, 0, 0, 1]


def test_machines_run_out_each_for_itself_and_the_last_word_of_each_counts():
    watch = Shortages()
    a, b = process("actor-0", memory=(1.0, 100.0)), process("actor-1", machine="n", memory=(50.0, 100.0))
    assert [notice.slot for notice in watch.look([a, b])] == ["machine host-m"]
    b.take_beat({"room": {MEMORY: [GIB, 100 * GIB]}})
    assert [notice.slot for notice in watch.look([a, b])] == ["machine host-n"]


@pytest.mark.parametrize(
    "what, left, is_low",
    [(RAY_DISK, 7.9, True), (RAY_DISK, 8.1, False), (SHARED_MEMORY, 4.9, True), (SHARED_MEMORY, 5.1, False)],
)
def test_disks_are_told_before_they_are_full(what, left, is_low):
    found = Shortages().look([process("actor-0", **{what: (left, 100.0)})])
    assert [type(one) for one in found] == [Noticed] * is_low
    assert not is_low or found[0].text.startswith(f"{what} is nearly full: {left:.2f} GiB of 100.00 GiB are left. ")


def test_the_disk_of_the_run_is_looked_at_where_the_master_is(tmp_path, monkeypatch):
    room = disk_room(str(tmp_path))
    monkeypatch.setattr("hybridrl.master.health.low_resources.LOW_BYTES", {})
    monkeypatch.setattr(
        "hybridrl.master.health.low_resources.LOW",
        {"the disk of the run's directory": 0.5 * (1 + room.left / room.total)},
    )
    [notice] = Shortages(str(tmp_path)).look([])
    assert notice.slot == str(tmp_path) and "the next checkpoint may not fit" in notice.text
    assert Shortages("s3://somewhere").look([]) == []


def test_the_account_of_an_end_says_that_memory_was_short():
    words = memory_in_words(process("actor-0", memory=(1.0, 16.0)))
    assert words == "; its machine had 1.00 GiB of 16.00 GiB of memory left, and Ray ends processes when it is 5%"
    assert memory_in_words(process("actor-0", memory=(2.0, 16.0))) == memory_in_words(process("actor-0")) == ""
