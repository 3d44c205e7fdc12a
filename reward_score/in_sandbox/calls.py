"""Call functions of the program `solution.py`, as `calls.json` lists them, and print what each returns.

`preamble.py` runs before the program, in its namespace.

Runs in a sandbox together with the program, which may do to this file what it likes. So nothing here judges: the
expected values are elsewhere, and a line that the program prints itself is only another answer of the program.

Prints one JSON object per line: {"load": error or null}, then {"call": number, "value": ..., or "error": [type, text]}.
What the program prints is dropped.
"""

import json
import os
import signal
import sys

import prelude  # noqa: F401
from wire import Reference, decode, encode

MAX_TEXT = 300  # characters of an error


class TimeUp(BaseException):
    """A call was not done in time."""


def stop(number, frame):
    """Raise TimeUp in the running call."""
    raise TimeUp


def describe(error):
    """Return type and text of an exception."""
    if isinstance(error, TimeUp):
        return ["TimeUp", "it was not done in time"]
    return [type(error).__name__, str(error)[:MAX_TEXT]]


class Callee:
    """The program's names, and what its calls have returned."""

    def __init__(self):
        self.names = {"__name__": "solution", "__builtins__": __builtins__}
        self.returned = {}

    def load(self):
        for name in ("preamble.py", "solution.py"):
            with open(name, "rb") as file:
                exec(compile(file.read(), name, "exec"), self.names)

    def find(self, target):
        """Return a function: a name of the program, a method of its class Solution, or an attribute of a result."""
        if isinstance(target, list):
            return getattr(self.returned[target[0]], target[1])
        if target in self.names:
            return self.names[target]
        if "Solution" in self.names and hasattr(self.names["Solution"], target):
            return getattr(self.names["Solution"](), target)
        raise NameError(f"the program has no {target}")

    def call(self, number, call):
        args, kwargs = (decode(call[part], self.returned.__getitem__) for part in ("args", "kwargs"))
        self.returned[number] = self.find(call["target"])(*args, **kwargs)
        try:
            return encode(self.returned[number])
        except TypeError:
            return encode(Reference(number))


def within(limit_s, function):
    """Return (what a function returns, None) or (None, its error as type and text)."""
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return function(), None
    except BaseException as error:  # also SystemExit: the next call is another case
        return None, describe(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    """Make the calls of `calls.json` and print their answers."""
    with open("calls.json", encoding="utf-8") as file:
        job = json.load(file)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.setrecursionlimit(10_000)
    callee = Callee()
    _, failure = within(job["limit_s"], callee.load)
    print(json.dumps({"load": failure}), file=answers)
    for number, call in enumerate(job["calls"] if failure is None else ()):
        value, error = within(job["limit_s"], lambda: json.dumps(callee.call(number, call)))  # noqa: B023
        line = '{"call": %d, "value": %s}' % (number, value) if error is None else None  # noqa: UP031
        print(line or json.dumps({"call": number, "error": error}), file=answers)


main()
