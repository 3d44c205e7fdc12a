"""Every call between the roles, as typed functions: the trainer and the experience maker import only this module.

A role implements a function by `@rpc(remote_call.NAME)`. Calls that return a Future run at the same time until somebody
asks for the result. A batch call cuts its lists over the processes of the role and returns one list.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hybridrl.sdk import Future, FutureSequence, RLRoleType, RoleGroup
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

ALL_ROLES = (RLRoleType.ROLLOUT, RLRoleType.REFERENCE, RLRoleType.REWARD, RLRoleType.ACTOR, RLRoleType.CRITIC)


@dataclass(frozen=True)
class RequestOutput:
    """A generated response. token_ids and log_probs have one entry per generated token."""

    token_ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Experience:
    """One row of training data: tokens (T,), and what PPO needs for the response tokens (R,)."""

    sequence: torch.Tensor
    attention_mask: torch.Tensor
    action_mask: torch.Tensor
    log_probs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


@cache
def group(role: RLRoleType) -> RoleGroup:
    """Return the processes of a role. An optional role may be absent: its calls do nothing."""
    return RoleGroup(role.name, optional=role is RLRoleType.REFERENCE)


# -- start and end of the roles; calling one again changes nothing


def rollout_init() -> Future:
    return group(RLRoleType.ROLLOUT).call(rollout_init)


def reference_init() -> Future:
    return group(RLRoleType.REFERENCE).call(reference_init)


def reward_init() -> Future:
    return group(RLRoleType.REWARD).call(reward_init)


def critic_init() -> Future:
    return group(RLRoleType.CRITIC).call(critic_init)


def actor_init() -> Future:
    return group(RLRoleType.ACTOR).call(actor_init)


def init_all() -> None:
    """Build the models of all roles, at the same time."""
    wait_for(rollout_init(), reference_init(), reward_init(), critic_init(), actor_init())


def end_job() -> None:
    """Let every role release what it holds."""
    wait_for(*(group(role).call(end_job) for role in ALL_ROLES))


# -- rollout


def vllm_wakeup() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_wakeup).result()


def vllm_sleep() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_sleep).result()


def vllm_generate(
    prompt_token_ids: Sequence[list[int]], seeds: Sequence[int], params: SamplingParams, weights_version: int
) -> Sequence[RequestOutput]:
    """Return one response per prompt, drawn by its seed with exactly these weights."""
    return group(RLRoleType.ROLLOUT).call_batch(
        vllm_generate, len(prompt_token_ids), prompt_token_ids, seeds, params, weights_version
    )


@contextmanager
def vllm_running(enable_sleep: bool) -> Iterator[None]:
    """Keep the rollout awake for the block. enable_sleep: it sleeps outside of it."""
    if enable_sleep:
        vllm_wakeup()
    try:
        yield
    finally:
        if enable_sleep:
            vllm_sleep()


# -- one forward pass: a row for a row


def actor_forward(
    sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor], attention_mask: Sequence[torch.Tensor]
) -> FutureSequence[torch.Tensor]:
    """Return the log-probs (R,) of each row under the policy."""
    return group(RLRoleType.ACTOR).call_batch(actor_forward, len(sequences), sequences, action_mask, attention_mask)


def reference_forward(
    sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor], attention_mask: Sequence[torch.Tensor]
) -> FutureSequence[torch.Tensor]:
    """Return the log-probs (R,) of each row under the reference."""
    return group(RLRoleType.REFERENCE).call_batch(
        reference_forward, len(sequences), sequences, action_mask, attention_mask
    )


def critic_forward(
    sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor], attention_mask: Sequence[torch.Tensor]
) -> FutureSequence[torch.Tensor]:
    """Return the values (R,) of each row: before each response token."""
    return group(RLRoleType.CRITIC).call_batch(critic_forward, len(sequences), sequences, action_mask, attention_mask)


def reward_forward(
    sequences: Sequence[torch.Tensor], action_mask: Sequence[torch.Tensor]
) -> FutureSequence[torch.Tensor]:
    """Return the token scores (R,) of each row, which add up to the score of the response."""
    return group(RLRoleType.REWARD).call_batch(reward_forward, len(sequences), sequences, action_mask)


# -- training


def append_experience(experiences: Sequence[Experience]) -> None:
    """Give every actor process its rows, and every critic process its rows."""
    wait_for(
        *(
            group(role).call_batch(append_experience, len(experiences), experiences)
            for role in (RLRoleType.ACTOR, RLRoleType.CRITIC)
        )
    )


def actor_update() -> Future[list[Mapping[str, float]]]:
    """Train on the rows of `append_experience`; return the metrics of each process."""
    return group(RLRoleType.ACTOR).call(actor_update)


def critic_update() -> Future[list[Mapping[str, float]]]:
    """Train on the rows of `append_experience`; return the metrics of each process."""
    return group(RLRoleType.CRITIC).call(critic_update)


def save_checkpoint(directory: str) -> None:
    """Let actor and critic write their state below a directory."""
    wait_for(*(group(role).call(save_checkpoint, directory) for role in (RLRoleType.ACTOR, RLRoleType.CRITIC)))


def load_checkpoint(directory: str) -> None:
    """Let actor and critic continue from `save_checkpoint`. Rows that they have not trained on are dropped."""
    wait_for(*(group(role).call(load_checkpoint, directory) for role in (RLRoleType.ACTOR, RLRoleType.CRITIC)))


def wait_for(*futures: Future | FutureSequence) -> list[Any]:
    """Return all results. If a call failed, raise its error after the other calls have ended, too."""
    results: list[Any] = []
    errors: list[Exception] = []
    for future in futures:
        try:
            results.append(future.wait() if isinstance(future, FutureSequence) else future.result())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
