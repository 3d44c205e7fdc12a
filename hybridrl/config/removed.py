"""Settings of earlier versions that are gone, each with the way out.

A command line or a YAML file that still sets one is refused with this text.
"""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "trainer.standby": "was removed: it kept a second copy of all libraries in memory on every node to save seconds of "
    "a recovery; leave it out, a lost worker is started again without it",
}
"""Dotted key to "was removed: REASON; WAY OUT". A key stands for those below it, too. Nothing else has the same key."""


def removal(name: str) -> str | None:
    """Return why the setting `name`, or the group that it was in, is gone; None if no version had it."""
    above = (name[:dot] for dot, letter in enumerate(f"{name}.") if letter == ".")
    return next((REMOVED[key] for key in above if key in REMOVED), None)
