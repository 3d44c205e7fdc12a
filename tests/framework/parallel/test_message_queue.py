"""Waiting messages: order, replacement and limits; the inbox, which hands them to one thread."""

import threading

import pytest

from hybridrl.framework.parallel import message_queue
from hybridrl.framework.parallel.inbox import Inbox
from hybridrl.framework.parallel.message import SerializedMessage, serialize
from hybridrl.framework.parallel.message_queue import Message, MessageQueue
from hybridrl.framework.parallel.peer_router import PeerRouter


def message(event, value=None, *, newest_only=False, num_bytes=1):
    contents = SerializedMessage(num_bytes) if value is None else serialize(((value,), {}))
    return Message("task.event", contents, event, newest_only)


def emptied(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_messages_and_functions_leave_in_order_and_the_newest_replaces_an_older_one_of_its_stream():
    queue = MessageQueue("test")
    old, new, other = (message("weights", newest_only=True) for _ in range(3))
    event = message("count")
    for entry, stream in ((old, "a"), (event, "a"), (other, "b"), (new, "a")):
        queue.put(entry, stream=stream)
    queue.put_call(print)
    assert queue.first() is event
    assert [entry is expected for entry, expected in zip(emptied(queue), [event, other, new, print], strict=True)] == [
        True
    ] * 4
    queue.put(old, stream="a")
    assert emptied(queue) == [old], "one that has left is not replaced"


def test_thousands_of_replaced_messages_hold_no_memory():
    queue = MessageQueue("test")
    for _ in range(5000):
        queue.put(message("weights", newest_only=True))
    assert len(queue) == 1


@pytest.mark.parametrize(("limit", "value", "num_bytes"), [("MAX_WAITING_EVENTS", 2, 1), ("MAX_WAITING_BYTES", 20, 10)])
def test_at_the_limits_the_oldest_events_are_dropped_with_few_lines(limit, value, num_bytes, monkeypatch, caplog):
    monkeypatch.setattr(message_queue, limit, value)
    queue = MessageQueue("node-1 is stopped")
    kept = message("weights", newest_only=True, num_bytes=1000)
    queue.put(kept)
    events = [message(f"e{i}", num_bytes=num_bytes) for i in range(15)]
    for event in events:
        queue.put(event)
    assert emptied(queue) == [kept, *events[-2:]], "what has only one place is not counted"
    assert (
        len(caplog.records) == 2 and "node-1 is stopped: the oldest of 3 waiting events is dropped ('e0'" in caplog.text
    )


def test_a_slow_listener_gets_the_newest_and_every_message_that_is_not_replaced():
    received, started, go = [], threading.Event(), threading.Event()

    def handle(entry, args, kwargs):
        started.set()
        go.wait(60)
        received.append((entry.event, *args))

    inbox = Inbox(handle, on_error=received.append)
    inbox.deliver("a", 0, message("first", 0))
    assert started.wait(60)
    for number in (2, 1, 3, 4):  # out of order
        inbox.deliver("a", number, message("weights", number, newest_only=True))
    inbox.deliver("a", 5, message("count", 5))
    go.set()
    inbox.flush(60)
    assert received == [("first", 0), ("weights", 4), ("count", 5)]


def test_before_the_first_listener_a_newest_event_replaces_those_of_its_own_name_alone():
    router, received = PeerRouter(), []
    router.activate(0, name="test/node-0", labels=(), attached_to=())
    entries = [("batch", 0, False), ("weights", 1, True), ("batch", 2, False), ("weights", 3, True)]
    for number, (event, value, newest_only) in enumerate(entries):
        router.deliver("a", number, message(event, (event, value), newest_only=newest_only))
    router.flush()
    router.on("task.event", received.append)
    router.flush()
    assert received == [("batch", 0), ("batch", 2), ("weights", 3)]
