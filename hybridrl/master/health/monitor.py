"""`Monitor`: from what connections say and do not say to events. One thread uses it; nothing here decides.

A connection that ends is a death, once the kernel says that the process is gone: it also says how. A process that is
silent is looked at from outside: one that is stopped is frozen, one that works is only told about, for a long call may
hold Python's lock.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.master.health.hang_diagnosis import Doing
from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.kernel_process import STOPPED, Condition, ProcessWatch, condition
from hybridrl.master.health.low_resources import Shortages, memory_in_words
from hybridrl.master.health.process_record import Presence
from hybridrl.master.health.stragglers import Slowness
from hybridrl.master.state.events import TRAINER, Event, Failed, Joined, Kind, Left, Silenced, Spoke
from hybridrl.master.state.reducer import JobState
from hybridrl.master.state.tables import Worker

SILENT_S = 4.5  # with a look every quarter of a second, a freeze is told within 5 s
ACCOUNT_S = 0.3  # how a process ended is known once its parent has collected it
AWAY_S = 2.0  # a master that was not looking for so long was stopped itself, and blames nobody for it
RETURN_S = 15.0  # for a process of another machine whose connection ended, if nobody can say more
ROOM_EVERY_S, PACE_EVERY_S = 1.0, 5.0  # between looks at what is about to run out, and at who is slow


# Asks about a process of another machine and calls back with a `Condition`, or with None where nobody can say.
AskElsewhere = Callable[[Presence, Callable[[Condition | None], None]], None]


class Monitor:
    """here: the master's own machine. ask_elsewhere: looks at a process of another one. look_at_node: returns how a
    node is gone, in words, and "" if it is there. run_directory: whose disk is watched.
    """

    def __init__(
        self,
        here: str,
        ask_elsewhere: AskElsewhere,
        look_at_node: Callable[[str], str],
        *,
        silent_s: float = SILENT_S,
        run_directory: str = "",
    ) -> None:
        self.presences: dict[str, Presence] = {}
        self.longest_s: dict[str, float] = {}  # of each method, as far as heartbeats have seen it
        self._here, self._ask_elsewhere, self._silent_s = here, ask_elsewhere, silent_s
        self._look_at_node = look_at_node
        self._looked = time.monotonic()
        self._events: list[Event] = []
        self._shortages, self._slowness = Shortages(run_directory), Slowness()
        self._next_look = {self._shortages: 0.0, self._slowness: 0.0}

    def expect(self, state: JobState) -> None:
        """Wait for the processes that a master before this one knew."""
        for slot, worker in state.workers.items():
            if worker.state in (Worker.ALIVE, Worker.SILENT):
                presence = Presence(slot, worker.name, worker.pid, worker.node, worker.machine, time.monotonic())
                self._watch(presence)
                presence.closed = presence.heard
                self.presences[slot] = presence

    def _watch(self, presence: Presence) -> None:
        if presence.machine == self._here:
            presence.watch = ProcessWatch(presence.pid)

    # -- what is said

    def hear(self, connection: Connection, word: Mapping[str, Any] | None) -> list[Event]:
        """Take in a word, or the end of a connection (None), and return what it means."""
        slot = connection.introduction["slot"]
        presence = self.presences.get(slot)
        if word is not None and "hello" in word:
            return [self._welcome(connection)]
        if presence is None or presence.connection is not connection:
            return []
        if word is None:
            presence.connection, presence.closed = None, time.monotonic()
            return []
        presence.heard = time.monotonic()
        if "beat" in word:
            self._take_beat(presence, word["beat"])
        if "bye" in word:
            self.forget(slot)
            return [Left(slot, presence.pid)]
        if presence.is_silent:
            presence.is_silent = False
            return [Spoke(slot, presence.pid)]
        return []

    def _welcome(self, connection: Connection) -> Event:
        hello = connection.introduction
        self.forget(hello["slot"])
        presence = Presence(
            hello["slot"], hello["name"], hello["pid"], hello["node"], hello["machine"], time.monotonic(), connection
        )
        presence.idle_since, presence.host = presence.heard, hello.get("host", presence.node)
        self._watch(presence)
        self.presences[presence.slot] = presence
        size, rank = hello.get("group_size", 1), hello.get("rank", 0)
        return Joined(presence.slot, presence.name, presence.pid, presence.node, presence.machine, size, rank)

    def _take_beat(self, presence: Presence, beat: dict[str, Any]) -> None:
        before, doing = presence.beat, beat.get("doing")
        if doing is not None:
            self.longest_s.setdefault(doing, 0.0)
        if before.get("doing") is not None and (doing, beat.get("calls")) != (before["doing"], before.get("calls")):
            self.longest_s[before["doing"]] = max(self.longest_s[before["doing"]], before.get("for_s", 0.0))
        if doing is not None or beat.get("calls") != before.get("calls"):
            presence.idle_since = presence.heard
        presence.take_beat(beat)

    def forget(self, slot: str) -> None:
        """Look at this process no more."""
        presence = self.presences.pop(slot, None)
        if presence is not None and presence.watch is not None:
            presence.watch.close()

    # -- what is seen

    @property
    def is_waiting(self) -> bool:
        """Whether a death is being looked into, so that the next look should be soon."""
        since = time.monotonic() - 2 * ACCOUNT_S
        return any(presence.closed > since and presence.watch is not None for presence in self.presences.values())

    def look(self) -> list[Event]:
        """Look at every process that ended its connection or is silent; return what is new."""
        now = time.monotonic()
        if now - self._looked > AWAY_S:
            for presence in self.presences.values():
                presence.heard += now - self._looked
        self._looked = now
        for presence in list(self.presences.values()):
            if self.presences.get(presence.slot) is not presence:  # lost with its node a moment ago
                continue
            is_late = now - presence.heard > self._silent_s and now - presence.looked > 1.0
            if presence.watch is not None and (presence.closed or is_late):
                self._look_here(presence, is_late=is_late)
            elif is_late or (presence.closed and not presence.looked):
                presence.looked = now
                if not self._is_lost_with_its_node(presence):
                    self._ask_elsewhere(presence, lambda seen, presence=presence: self._judge(presence, seen))
        events, self._events = self._events, []
        return [*events, *self._look_ahead(now)]

    def _look_ahead(self, now: float) -> list[Event]:
        """Return what is no failure yet."""
        found: list[Event] = []
        for watch, every_s in ((self._shortages, ROOM_EVERY_S), (self._slowness, PACE_EVERY_S)):
            if now >= self._next_look[watch]:
                self._next_look[watch] = now + every_s
                found += watch.look(self.presences.values())
        return found

    def lose_node(self, node: str, evidence: str) -> None:
        """Count every process of a node as lost."""
        for presence in list(self.presences.values()):
            if presence.node == node:
                self._lose(presence, Kind.NODE, evidence)

    def _is_lost_with_its_node(self, presence: Presence) -> bool:
        """Whether it is gone because its node is; then all of that node's processes are counted as lost."""
        evidence = self._look_at_node(presence.node)
        if evidence:
            self.lose_node(presence.node, evidence)
        return bool(evidence)

    def _look_here(self, presence: Presence, *, is_late: bool) -> None:
        assert presence.watch is not None
        if presence.watch.is_dead:
            if self._is_lost_with_its_node(presence):
                return
            account = presence.watch.account()
            if account is not None or time.monotonic() - (presence.closed or presence.heard) > ACCOUNT_S:
                self._lose(presence, Kind.DIED, account or "its process is gone")
        elif is_late:
            presence.looked = time.monotonic()
            self._judge(presence, condition(presence.pid))

    def _judge(self, presence: Presence, seen: Condition | None) -> None:
        """Say what a silent process is. seen: None where nobody could look at it."""
        if self.presences.get(presence.slot) is not presence:
            return
        silence = time.monotonic() - presence.heard
        if seen is None and presence.closed and time.monotonic() - presence.closed > RETURN_S:
            self._lose(presence, Kind.DIED, f"its connection ended, and it did not come back within {RETURN_S:g} s")
        elif seen is not None and seen.state == "":
            self._lose(presence, Kind.DIED, "its process is gone")
        elif silence < self._silent_s:
            return
        elif seen is not None and seen.state == STOPPED and presence.slot != TRAINER and not self._trainer_is_stopped():
            text = f"frozen: its process is stopped (SIGSTOP), and silent for {silence:.1f} s{_last_words(presence)}"
            self._events.append(Failed(Kind.FROZEN, presence.slot, presence.pid, text))
        elif not presence.is_silent:
            presence.is_silent = True
            self._events.append(
                Silenced(presence.slot, presence.pid, f"silent for {silence:.1f} s, {_seen_in_words(seen, presence)}")
            )

    def _trainer_is_stopped(self) -> bool:
        """Ctrl-Z stops a terminal's job; its workers are then stopped by the same hand."""
        trainer = self.presences.get(TRAINER)
        return trainer is not None and trainer.watch is not None and condition(trainer.pid).state == STOPPED

    def _lose(self, presence: Presence, kind: Kind, evidence: str) -> None:
        self.forget(presence.slot)
        self._events.append(Failed(kind, presence.slot, presence.pid, evidence + _last_words(presence)))

    # -- what each does

    def doings(self) -> list[Doing]:
        """Return what every process does now, as far as its last word tells."""
        now = time.monotonic()
        found = []
        for presence in list(self.presences.values()):  # asked from other threads, too
            method = presence.beat.get("doing")
            seconds = presence.beat.get("for_s", 0.0) + now - presence.heard if method else now - presence.idle_since
            found.append(Doing(presence.slot, method, seconds, presence.beat.get("did"), presence.beat.get("turn", 0)))
        return found


def _last_words(presence: Presence) -> str:
    """What a process was last heard of, for an account of its end."""
    method, memory = presence.beat.get("doing"), presence.beat.get("memory")
    does = f"; in {method} for {presence.beat.get('for_s', 0.0):.1f} s when last heard" if method else ""
    holds = f"; resident memory {memory / 2**30:.2f} GiB" if memory else ""
    return does + holds + memory_in_words(presence)


def _seen_in_words(seen: Condition | None, presence: Presence) -> str:
    if seen is None:
        return "and nobody could look at its process"
    worked = seen.cpu_s - presence.beat.get("cpu_s", seen.cpu_s)
    if worked > 0.5:
        return f"but its process has worked {worked:.1f} s of CPU since: a long call may hold Python's lock"
    return f"its process is in state {seen.state} and has used no CPU since"
