"""Base of all conformance suites: a check, its error, and the loop that runs the checks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Case = TypeVar("Case")


class ConformanceError(AssertionError):
    """A plug breaks its contract. The message has the check, what was found, and what the contract says."""


@dataclass(frozen=True)
class Check(Generic[Case]):
    """One sentence of a contract.

    name: the sentence. run: raises AssertionError where it does not hold. needs: capabilities without which it is left
        out.
    """

    name: str
    run: Callable[[Case], None]
    needs: tuple[str, ...] = ()


def run_checks(checks: Sequence[Check[Case]], case: Case, *, subject: str, capabilities: object = None) -> list[str]:
    """Run the checks that `capabilities` ask for and return their names.

    Raises:
        ConformanceError: A check failed. The cause is chained.
    """
    chosen = [check for check in checks if all(getattr(capabilities, name) for name in check.needs)]
    for check in chosen:
        try:
            check.run(case)
        except Exception as error:
            raise ConformanceError(
                f"{subject}: {check.name!r} does not hold: {type(error).__name__}: {error}"
            ) from error
    return [check.name for check in chosen]


def expect(holds: bool, message: str) -> None:
    """Raise AssertionError with this message unless `holds`."""
    if not holds:
        raise AssertionError(message)


@contextmanager
def refuses(*errors: type[Exception], call: str) -> Iterator[None]:
    """Run a block that must raise one of `errors`; `call` says in the message what was tried."""
    names = " or ".join(error.__name__ for error in errors)
    try:
        yield
    except errors:
        return
    raise AssertionError(f"{call} must raise {names}, and nothing was raised")
