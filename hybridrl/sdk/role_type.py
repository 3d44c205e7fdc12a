"""`RLRoleType`: the names of the roles of reinforcement learning, as DLRover writes them."""

from enum import StrEnum


class RLRoleType(StrEnum):
    """A role. Its value is its name in upper case; a job's own roles are plain text of the same form."""

    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"
    TRAINER = "TRAINER"


def role_key(role: str) -> "RLRoleType | str":
    """Return a role in upper case: the member of `RLRoleType` if there is one, else text.

    Both compare equal.
    """
    name = role.upper()
    return RLRoleType.__members__.get(name, name)


def role_name(role: str) -> str:
    """Return a role in lower case, as jobs and worker groups name it."""
    return str(role).lower()
