"""`PartTimes`: where the seconds of an operation went, by named part."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PartTimes(dict[str, float]):
    """Name of a part -> seconds spent in it so far, in the order of their first end."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to a part, also if the block raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.monotonic() - start

    def drain(self) -> dict[str, float]:
        """Return all parts and start again at zero."""
        found = dict(self)
        self.clear()
        return found
