"""The calls between the roles of `rl_mock.py`: plain functions, as in DLRover's guide."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache

from hybridrl.sdk import FutureSequence, RLRoleType, RoleGroup, rpc


@cache
def group(role: RLRoleType) -> RoleGroup:
    return RoleGroup(role.name)


def init(role: RLRoleType, path: str) -> Future:
    return group(role).call(init, path)


def generate(prompts: Sequence[str], params: dict) -> FutureSequence[str]:
    return group(RLRoleType.ROLLOUT).call_batch(generate, len(prompts), prompts, params)


def load_weights(version: int) -> list[int]:
    return group(RLRoleType.ROLLOUT).call(load_weights, version).result()


def rewards(samples: Sequence[str]) -> FutureSequence[float]:
    return group(RLRoleType.REWARD).call_batch(rewards, len(samples), samples)


def forward(role: RLRoleType, samples: Sequence[str]) -> FutureSequence[float]:
    return group(role).call_batch(forward, len(samples), samples)


def append_experience(role: RLRoleType, rows: Sequence[tuple]) -> FutureSequence[None]:
    return group(role).call_batch(append_experience, len(rows), rows)


def update(role: RLRoleType) -> Future:
    return group(role).call(update)


def end_job() -> list:
    roles = [role for role in RLRoleType if role is not RLRoleType.TRAINER]
    futures = [group(role).call(end_job) for role in roles]
    return [future.result() for future in futures]


@rpc(export=True)
def process_id() -> int:
    """A function of a module that is no entry."""
    return os.getpid()
