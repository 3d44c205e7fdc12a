"""Slots of an event loop are limited per kind of work, and do not keep the loop alive."""

import asyncio
import gc
import weakref

import pytest

from hybridrl.serving.concurrency_limit import slots

LIMIT = 2


@pytest.mark.parametrize("cancelled", [False, True])
def test_tasks_wait_for_a_slot_of_their_kind_and_an_ended_event_loop_is_freed(cancelled):
    most = {"a": 0, "b": 0}

    async def work(kind: str, open_now: dict[str, int]) -> None:
        async with slots(LIMIT, of=kind):
            open_now[kind] += 1
            most[kind] = max(most[kind], open_now[kind])
            await asyncio.sleep(0.01)
            open_now[kind] -= 1

    async def run() -> weakref.ref:
        open_now = {"a": 0, "b": 0}
        tasks = [asyncio.create_task(work(kind, open_now)) for kind in "aaaaab"]
        if cancelled:
            await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()  # two have a slot of their kind, three wait for one
        await asyncio.gather(*tasks, return_exceptions=True)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(run())
    gc.collect()
    assert loop() is None
    assert most == {"a": LIMIT, "b": 1}
