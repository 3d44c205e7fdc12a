"""Order of a step's stages in which submitted work runs beside other stages.

    task.run(max_step=100, overlap={"actor": {0, 1}, "critic": {2, 3}, "ref": {0, 1}})  # role -> its device slots

`Task.run` uses this module when it is called with `overlap=`. A stage with `submits=True` has two halves: the first one
starts work elsewhere, and the second one takes the result. Here the first half runs as early, and the second half as
late as the stages' specs allow. Everything runs in the calling thread. Of two stages, the later one waits for the end
of the earlier one

* if one of them is a barrier: it names no column, so its effects are unknown, or it changes state of the driver;
* if one of them writes a column that the other one reads or writes;
* if their roles share a device slot: they would compete for the device and gain nothing. With `queued=True` work that
  both submit waits in line there: the roles of a slot share a process.

The result equals that of running the stages in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.framework.stage import DeviceSlots, StageSpec


class Half(NamedTuple):
    """One entry of a schedule: a whole stage, or a half of a stage that submits work.

    Attributes:
        stage: Index of the stage.
        is_end: Whether it is the second half.
    """

    stage: int
    is_end: bool = False


def is_barrier(spec: StageSpec) -> bool:
    """Return whether no other stage may be in progress while this one runs."""
    return not (spec.reads or spec.writes) or (spec.role is None and not spec.pure)


def conflict(first: StageSpec, second: StageSpec, slots: DeviceSlots, *, queued: bool = False) -> str | None:
    """Return why two stages may not overlap, as a phrase; None if they may."""
    for spec in (first, second):
        if is_barrier(spec):
            return f"{spec.name} is a barrier"
    written = (set(first.writes) & {*second.reads, *second.writes}) | (set(second.writes) & set(first.reads))
    if written:
        return f"columns {', '.join(sorted(written))}"
    if queued and first.submits and second.submits:
        return None
    shared = {*slots.get(first.role or "", ())} & {*slots.get(second.role or "", ())}
    return f"slots {', '.join(sorted(map(str, shared)))}" if shared else None


def schedule(specs: Sequence[StageSpec], slots: DeviceSlots, *, queued: bool = False) -> list[Half]:
    """Return the order in which work is submitted before the stages that do not need it, and joined after them.

    Args:
        specs: The stages of a step.
        slots: Role -> device slots.
        queued: Whether roles that share a slot share its process, which does submitted work in line.
    """
    halves: list[Half] = []
    waiting, open_ends = list(range(len(specs))), list[int]()

    def conflicts(index: int, others: Sequence[int]) -> list[int]:
        return [other for other in others if conflict(specs[other], specs[index], slots, queued=queued)]

    while waiting:
        index = waiting.pop(0)
        for early in [] if specs[index].submits else tuple(waiting):
            before = [index, *waiting[: waiting.index(early)], *open_ends]
            if specs[early].submits and not conflicts(early, before):
                waiting.remove(early)
                open_ends.append(early)
                halves.append(Half(early))
        ended = conflicts(index, open_ends)
        halves += [Half(other, is_end=True) for other in ended]
        open_ends = [other for other in open_ends if other not in ended]
        halves.append(Half(index))
        open_ends += [index] if specs[index].submits else []
    return halves + [Half(index, is_end=True) for index in open_ends]
