"""A program collects seldom while it starts, and as Python does afterwards."""

import gc
import subprocess
import sys

import pytest

from hybridrl.system.collector import STARTUP_THRESHOLD, USUAL_THRESHOLDS, collect_as_usual, collect_seldom


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    collect_as_usual()
    gc.set_threshold(*before)


def test_the_thresholds_of_the_process_come_back_and_those_that_it_chose_stay():
    collect_seldom()
    collect_seldom()
    assert gc.get_threshold()[0] == STARTUP_THRESHOLD
    collect_as_usual()
    assert gc.get_threshold() == USUAL_THRESHOLDS
    gc.set_threshold(5)
    collect_as_usual()
    assert gc.get_threshold()[0] == 5


def test_a_program_starts_with_few_collections_and_a_module_that_is_imported_does_not():
    code = "import gc, runpy, sys; sys.argv = ['x', '--help']\n"
    run = "try: runpy.run_module('hybridrl.main_sft', run_name='__main__', alter_sys=True)\nexcept SystemExit: pass\n"
    say = f"print(gc.get_threshold()[0] == {STARTUP_THRESHOLD})"
    for text, expected in ((code + run + say, True), ("import gc, hybridrl.main_sft\n" + say, False)):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == str(expected)
