"""A program that is kept running (`hybridrl.driver.supervisor`), for tests: `python -m
tests.support.driver.supervised_driver SCENARIO` says what its lives do.
"""

import os
import signal
import sys
import time

from hybridrl.driver.lifecycle import LIFE
from hybridrl.driver.supervisor import keep_running


def say(*words: object) -> None:
    print(*words, flush=True)


def killed_twice() -> int:
    say("life", LIFE.number, LIFE.run)
    if LIFE.number < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 5


def killed_always() -> int:
    say("life", LIFE.number)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def killed_once_a_step() -> int:
    say("life", LIFE.number)
    LIFE.reached(LIFE.number)
    if LIFE.number < 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def ends_without_a_word() -> int:
    if LIFE.number == 1:
        os._exit(9)
    return 0


def raises() -> int:
    say("life", LIFE.number)
    raise ValueError("a mistake")


def loses_the_job() -> int:
    say("life", LIFE.number, LIFE.run)
    LIFE.reached(4)
    LIFE.lost_the_job("no machine is left")
    return 1


def freezes() -> int:
    say("life", LIFE.number)
    if LIFE.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    return 0


def hears() -> int:
    """End 1.5 s after the first signal."""
    got: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
    say("pid", os.getpid())
    until = time.monotonic() + 60
    while not got and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1.5)
    say(*got)
    return 143


if __name__ == "__main__":
    sys.exit(keep_running(globals()[sys.argv[1]]))
