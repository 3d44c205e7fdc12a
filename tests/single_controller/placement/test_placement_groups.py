"""Reservations on a cluster of several machines follow the placement options, or are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_roles_are_placed_as_described():
    """A is the machine with four cores; B and C, with two each, are in another zone."""
    driver = [sys.executable, "-m", "tests.support.master.machines_driver"]
    out = subprocess.run(driver, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True).stdout.splitlines()
    assert out[0] == "strict_spread a=ABC"
    assert out[1].startswith("too_many no node can hold 1 worker process of 'a' (1 CPU) beside the rest of the job")
    assert out[2].startswith("spread a=") and set("ABC") <= set(out[2]) and len(out[2]) == len("spread a=ABCC")
    assert out[3] in ("labels a=A b=B", "labels a=A b=C")
    assert out[4] == "apart a=A b=BC"
    assert out[5] == "strict_pack a=A"
    assert out[6] in ("heavy a=A b=A c=B", "heavy a=A b=A c=C")  # only two of the three fit on A
    assert out[7] in ("other a=B b=A c=A", "other a=C b=A c=A")
