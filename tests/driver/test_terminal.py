"""No foreign text commands the terminal: what programs write and log has no control characters."""

import subprocess
import sys

import pytest

from hybridrl.driver.terminal import one_line, printable

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\b\x7f\u202e\ud800"


@pytest.mark.parametrize("text", ["a\tb\n", "日本語 naïve 👩‍👩‍👧 א", "a\u00a0b"])
def test_texts_of_all_languages_stay(text):
    assert printable(text) == text


def test_control_characters_are_replaced():
    assert printable(ESCAPES) == "\ufffd]0;title\ufffd\ufffd[2J\ufffd31m" + "\ufffd" * 5
    assert one_line("a\nb\tc\x00") == "a b c\ufffd"


PROGRAM = f"""
import logging, sys
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.errors import ConfigError
from hybridrl.driver.terminal import show
from hybridrl.trainer.run.console import ConsoleProgress
text = {ESCAPES!r}
set_up_logging()
def work():
    show("shown " + text)
    logging.getLogger("hybridrl").info("logged %s", text)
    ConsoleProgress(2).log({{f"val-core/{{text}}/reward/mean@1": 1.0}}, 1)
    try:
        raise ValueError(text)
    except ValueError as error:
        logging.getLogger("hybridrl").exception("raised")
        raise ConfigError("refused " + text) if sys.argv[1] == "own" else error
sys.exit(run_program(work))
"""


@pytest.mark.parametrize("error", ["own", "foreign"])
def test_a_program_prints_logs_and_fails_without_them(error):
    done = subprocess.run([sys.executable, "-c", PROGRAM, error], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if error == "own" else 1)
    assert "shown" in done.stdout and "validation" in done.stdout and "logged" in done.stderr
    assert done.stderr.count("title") >= 3
    assert not {*"\x1b\x07\x9b\r\b\x7f\u202e"} & {*done.stdout, *done.stderr}
