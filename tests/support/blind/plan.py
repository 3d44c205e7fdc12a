"""What happens in one blind drill: drawn from its seed, without looking at the run.

A drill runs a program and does harm to random processes of it at random times. The same seed draws the same drill.
"""

import json
import random
from collections.abc import Collection
from dataclasses import asdict, dataclass

PROCESSES = {  # process of a run -> how often it is chosen, relative to the others
    "program": 1,
    "driver": 3,
    "worker": 6,
    "reward process": 1,
    "snapshot store": 2,
    "master": 2,
    "cluster holder": 1,
    "raylet": 2,
    "agent": 1,
    "gcs": 2,
    "node": 1,  # all processes of the cluster's only node: raylet, agents, workers
}
UNSUPERVISED = {**PROCESSES, **dict.fromkeys(("driver", "reward process", "snapshot store", "cluster holder"), 0)}
WITHOUT_CLUSTER = dict.fromkeys(("cluster holder", "raylet", "agent", "gcs", "node"), 0)  # nobody restarts its head
OF_KIND = {  # kinds of runs that have other processes
    "nodes": PROCESSES | WITHOUT_CLUSTER,
    "sft": UNSUPERVISED,
    "job": UNSUPERVISED | {"job supervisor": 3},
}
HARMS = {
    "kill": 8,
    "freeze": 6,
    "pause": 6,
    "memory": 2,  # its next allocation of address space fails
    "oom": 2,  # the kernel kills it when it needs another page
    "reset": 3,  # its TCP connections are aborted
}
WITHOUT_CONNECTIONS = {how: share for how, share in HARMS.items() if how != "reset"}
OF_PROCESS = {  # who starts the run also ends a frozen program; a whole node freezes only in a data centre
    "reward process": WITHOUT_CONNECTIONS,
    "program": {"kill": 1, "pause": 1},
    "node": {"kill": 2, "pause": 1},
}
SURROUNDINGS = {"full disk": 2, "slow disk": 2, "network": 2, "clock": 2}  # harm that no process is chosen for
SURROUNDINGS_OF_KIND = {"nodes": {"link": 7, "machine": 3, "full disk": 1}}
SURROUNDING_SHARE, SURROUNDING_SHARE_OF_KIND = 0.2, {"nodes": 0.6}
PRIVILEGED = ("oom", "reset", "link", "machine", *SURROUNDINGS)  # see `surroundings.possible_harms`
CLOCK_STEP_S = 86400.0  # limit, in both directions
KINDS = ("ppo", "lag", "async", "sft", "megatron", "job", "nodes", "lag 4", "dynamic", "tail", "replay")
NUM_FAULTS = (1, 1, 1, 2, 2, 3)
PAUSE_S = (0.2, 15.0)  # limits: shorter and longer than what detectors call frozen
CUT_S = (1.0, 60.0)  # limits for a machine's link: also longer than Ray waits before it declares a node dead
FOR_EVER_S = 40.0  # a longer cut lasts until the run has ended
EARLIEST, LATEST = 0.02, 1.0
START_SHARE = 0.15  # of `Fault.at` that is the time before the first step is complete
TOGETHER_SHARE = 0.3  # of the drills with several faults: all at the same time


@dataclass(frozen=True)
class Fault:
    """One harm.

    Attributes:
        at: When, as a fraction of the run: below `START_SHARE` before its first step, then in proportion to its steps.
        process: Key of `PROCESSES`; "" for a harm to the surroundings.
        draw: Number in [0, 1) that chooses one of several processes of this name.
        how: Key of `HARMS` or `SURROUNDINGS`.
        seconds: How long a pause, a full or slow disk, a cut network or link lasts, or by how much the clock is set; 0
            for other harm, and for a link that is cut for ever.
    """

    at: float
    process: str
    draw: float
    how: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Drill:
    """A run and what happens to it, in the order in which it happens."""

    seed: int
    kind: str
    faults: tuple[Fault, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Drill":
        content = json.loads(text)
        return cls(content["seed"], content["kind"], tuple(Fault(**fault) for fault in content["faults"]))


def draw_drill(seed: int, *, kinds: Collection[str] = KINDS, possible: Collection[str] = PRIVILEGED) -> Drill:
    """Return the drill of this seed.

    Args:
        seed: Any integer.
        kinds: Kinds of runs to choose from.
        possible: Those of `PRIVILEGED` that this machine can do. Does not change the rest of the drill.
    """
    chance = random.Random(f"blind drill {seed}")
    kind = chance.choice(sorted(kinds))
    times = [chance.uniform(EARLIEST, LATEST) for _ in range(chance.choice(NUM_FAULTS))]
    if chance.random() < TOGETHER_SHARE:
        times = [times[0]] * len(times)
    faults = [_draw_fault(chance, kind, at, possible=possible) for at in sorted(times)]
    return Drill(seed, kind, tuple(faults))


def _draw_fault(chance: random.Random, kind: str, at: float, *, possible: Collection[str]) -> Fault:
    process = _weighted(chance, OF_KIND.get(kind, PROCESSES))
    how = _weighted(chance, OF_PROCESS.get(process, HARMS))
    draw, seconds = chance.random(), round(chance.uniform(*PAUSE_S), 2)
    around = _weighted(chance, SURROUNDINGS_OF_KIND.get(kind, SURROUNDINGS))
    is_around = chance.random() < SURROUNDING_SHARE_OF_KIND.get(kind, SURROUNDING_SHARE)
    step_s = round(chance.uniform(-CLOCK_STEP_S, CLOCK_STEP_S))
    cut_s = round(chance.uniform(*CUT_S), 2) if around == "link" else 0.0
    # Under the library that sets the clock Ray cannot start a supervisor, with and without a change of the clock.
    if is_around and around in possible and (around, kind) != ("clock", "job"):
        cut_s = cut_s if cut_s < FOR_EVER_S else 0.0
        lasts_s = {"clock": step_s, "link": cut_s, "machine": 0.0}.get(around, seconds)
        return Fault(round(at, 4), "", round(draw, 4), around, lasts_s)
    if how in PRIVILEGED and how not in possible:
        how = "kill"
    return Fault(round(at, 4), process, round(draw, 4), how, seconds if how == "pause" else 0.0)


def _weighted(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]
