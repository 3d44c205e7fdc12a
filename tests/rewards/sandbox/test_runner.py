"""What a hostile program does stays in its sandbox. Real programs in every isolation that this machine has."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.rewards.sandbox import Program
from tests.support.sandbox_attacks import (
    ATTACKS,
    PRELUDE,
    SECRET,
    SessionPrograms,
    Site,
    open_site,
    run_attack,
)

QUICK = {
    *("a daemon in a session of its own", "reads files of the parent", "descriptors of the parent"),
    *("makes namespaces, mounts, changes the machine", "links and pipes among the returned files"),
    *("forges its report and exit status", "memory without an owner (memfd_create, System V)"),
}
HARMLESS = (
    "reads files of the parent",
    "reads the environment of every process",
    "connects to the network, also loopback",
)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with open_site() as opened:
        yield opened


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=attack.name, marks=() if attack.name in QUICK else pytest.mark.slow)
        for attack in ATTACKS
    ],
)
def test_an_attack_gets_nothing_and_the_machine_stays_usable(attack, sandbox, site):
    _, escapes = run_attack(sandbox, attack, site)
    assert escapes == []
    after = sandbox.run(Program("print('still here')"))
    assert (after.verdict, after.stdout) == ("ok", "still here\n")


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda it: it.name)
def test_an_attack_in_a_session_gets_nothing_and_the_session_goes_on(attack, sandbox, site):
    _, escapes = run_attack(SessionPrograms(), attack, site)
    assert escapes == []


@pytest.mark.slow
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.name in HARMLESS], ids=lambda it: it.name)
def test_the_same_program_without_a_sandbox_would_be_noticed(attack, site):
    known = (str(site.file), site.port, site.abstract, SECRET)
    code = PRELUDE.replace("{mark!r}", "'outside'").replace("{site!r}", repr(known)) + attack.code
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "ESCAPED" in ran.stdout


def test_the_page_says_how_many_attacks_there_are_and_how_to_run_them():
    text = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert f"`python -m tests.support.sandbox_attacks` runs {len(ATTACKS)} attacks" in text
