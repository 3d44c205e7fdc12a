"""`PartTimes`: where the seconds of an operation went, by named part."""

import time
from collections.abc import Iterator, Mapping
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

    def split(self, name: str, inner: Mapping[str, float]) -> None:
        """Count the seconds of inner parts separately; the part that contains them keeps the rest."""
        rest = self.pop(name, 0.0)
        for inner_name, seconds in inner.items():
            counted = min(seconds, rest)
            self[inner_name] = self.get(inner_name, 0.0) + counted
            rest -= counted
        self[name] = rest

    def drain(self) -> dict[str, float]:
        """Return all parts and start again at zero."""
        found = dict(self)
        self.clear()
        return found
