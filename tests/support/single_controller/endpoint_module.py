"""A module with endpoints, and with a marked function that another module defines."""

from hybridrl.single_controller.invocation import register
from tests.support.single_controller.other_endpoints import imported

__all__ = ["imported"]


@register()
def ping() -> str:
    return "pong"


@register(name="renamed")
def original() -> str:
    return "original"


def unmarked() -> None: ...
