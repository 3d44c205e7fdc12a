"""Reactions to the failure of an agent loop: another try, a missing sample, or the end.

`AgentBatch` asks `sort_failure` about every exception of a loop. `leave_out_groups` then decides which groups of a
batch are left. An infrastructure failure is never scored: the sample is left out of its group's statistics.
Pure: nothing here waits or sends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from hybridrl.errors import AgentFailed, ConfigError, DataError, HybridRLError, RequestFailed
from hybridrl.serving.agent_loop.base import AgentLoopOutput
from hybridrl.workers.rollout.requests import Request

BACK_OFF_S = 0.5  # before the second try of a loop; twice as long before each further one
LEFT_OUT, FAILURE = "samples_left_out", "failures/"
MIN_SHARE_KEY = "actor_rollout_ref.rollout.agent.min_group_share"


class FailureSort(Enum):
    """What an exception of a loop says."""

    INFRASTRUCTURE = "tried again: what the loop uses was not there, or it did not end in time"
    DATA = "left out at once: the row cannot be answered, and another try would say so again"
    BUG = "ends the run: the code is wrong, or the policy itself is lost"


BUGS = (
    SyntaxError,
    NameError,
    ImportError,
    AttributeError,
    TypeError,
    AssertionError,
    NotImplementedError,
    MemoryError,
)
BAD_DATA = (DataError, RequestFailed, ArithmeticError, LookupError, ValueError)


def sort_failure(error: BaseException) -> FailureSort:
    """Return the sort of an exception. Own errors that no row caused, such as `WorkerLost`, are for the trainer."""
    if isinstance(error, AgentFailed):
        return FailureSort.INFRASTRUCTURE
    if not isinstance(error, Exception) or isinstance(error, (ConfigError, *BUGS)):
        return FailureSort.BUG
    if isinstance(error, BAD_DATA) and not isinstance(error, OSError):
        return FailureSort.DATA
    return FailureSort.BUG if isinstance(error, HybridRLError) else FailureSort.INFRASTRUCTURE


def cause_of(error: BaseException) -> str:
    """Return the name under which a failure is counted."""
    return error.cause if isinstance(error, AgentFailed) else type(error).__name__


def left_out_output(request: Request) -> AgentLoopOutput:
    """Return the response of a sample that is left out: no tokens."""
    prompt, images = list(request.prompt_ids), request.images
    return AgentLoopOutput(prompt, [], [], [], num_turns=0, is_left_out=True, counts={LEFT_OUT: 1.0}, images=images)


def leave_out_groups(outputs: Sequence[AgentLoopOutput], *, n: int, min_share: float) -> list[AgentLoopOutput]:
    """Return the responses; groups with too few samples are left out as a whole.

    A group of several samples needs two, because its advantages compare them.

    Args:
        outputs: n adjacent ones are a group.
        n: Samples of a group.
        min_share: Groups that a batch needs, as a share.

    Raises:
        AgentFailed: Fewer groups are left. Names the most frequent failure.
    """
    groups = [outputs[start : start + n] for start in range(0, len(outputs), n)]
    kept = [sum(not out.is_left_out for out in group) >= min(n, 2) for group in groups]
    if sum(kept) < min_share * len(groups):
        raise AgentFailed(_too_few_text(outputs, sum(kept), len(groups), min_share), cause="too few groups")
    result: list[AgentLoopOutput] = []
    for group, is_kept in zip(groups, kept, strict=True):
        result += group if is_kept else [_left_out_with_group(out, is_first=out is group[0]) for out in group]
    return result


def _left_out_with_group(output: AgentLoopOutput, *, is_first: bool) -> AgentLoopOutput:
    counts = output.counts | {LEFT_OUT: 1.0} | ({"groups_left_out": 1.0} if is_first else {})
    return replace(output, is_left_out=True, counts=counts)


def _too_few_text(outputs: Sequence[AgentLoopOutput], num_kept: int, num_groups: int, min_share: float) -> str:
    causes: Counter[str] = Counter()
    for out in outputs:
        for name, number in out.counts.items():
            if name.startswith(FAILURE):
                causes[name.removeprefix(FAILURE)] += int(number)
    most = f"{causes.most_common(1)[0][0]} ({causes.most_common(1)[0][1]} times)" if causes else "unknown"
    return (
        f"only {num_kept} of {num_groups} groups have enough responses ({MIN_SHARE_KEY}={min_share:g}); the most "
        f"frequent failure of their agent loops: {most}. The log has an example of each failure. Repair what the loops "
        f"use, raise actor_rollout_ref.rollout.agent.timeout_s if they are slow, or lower {MIN_SHARE_KEY}"
    )
