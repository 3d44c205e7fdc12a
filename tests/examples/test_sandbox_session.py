"""Commands of a session: files stay from one to the next, and nothing else does."""

import threading
import time
from collections.abc import Iterator

import pytest

from examples.harbor.sandbox_session import SandboxSession
from hybridrl.rewards.sandbox import Limits, LocalSandbox, SandboxFailed, SandboxUnavailable, Verdict


@pytest.fixture(scope="module")
def session() -> Iterator[SandboxSession]:
    try:
        LocalSandbox().check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with SandboxSession(writable=("/app", "/logs"), limits=Limits(wall_s=20.0, disk_mb=16)) as opened:
        yield opened


def test_files_stay_and_processes_end_with_their_command(session):
    first = session.run(
        "echo $NUMBER > number; sleep 100 & cat", directory="/app", environment={"NUMBER": "4"}, stdin=b"in"
    )
    assert (first.verdict, first.stdout) == (Verdict.OK, "in")
    second = session.run("cat number; cat /proc/[0-9]*/comm | grep sleep; echo note >&2; exit 3", directory="/app")
    assert (second.stdout, second.stderr, second.exit_status) == ("4\n", "note\n", 3)


def test_a_command_over_a_limit_ends_alone(session):
    slow = session.run("touch /app/before; sleep 100", limits=Limits(wall_s=0.3))
    assert (slow.verdict, slow.detail) == (Verdict.TIMEOUT, "it was not done after 0.3 s")
    flood = session.run("yes", limits=Limits(output_kb=8, wall_s=20))
    assert (flood.verdict, flood.stdout) == (Verdict.OUTPUT_LIMIT, "y\n" * 4096)
    full = session.run("head -c 20000000 /dev/zero > /app/zeros")
    assert full.exit_status == 1 and "No space left" in full.stderr
    assert session.run("cat", stdin=b"in").detail == "there is no space left for its input"
    assert session.run("rm zeros; ls before", directory="/app").stdout == "before\n"


def test_only_the_named_directories_and_tmp_can_be_written_to(session):
    for path in ("/new", "/usr/new", "/bin/bash", "/etc/new", "/dev/new"):
        assert "Read-only" in session.run(f"echo x > {path}").stderr, path
    assert session.run("mv /app /gone; mv /usr /gone; rm -rf --no-preserve-root / 2> /dev/null; ls -d /app /usr").ok
    for wrong in ("app", "/usr", "/tmp", "/", "/home/user", "/app/../usr"):
        with pytest.raises(ValueError, match="directory to write to .*of the root"):
            SandboxSession(writable=(wrong,))


def test_a_command_can_be_cancelled_and_what_bash_cannot_take_is_not_started(session):
    canceller = threading.Timer(0.3, session.cancel)
    canceller.start()
    began = time.monotonic()
    assert session.run("sleep 15").detail == "it was cancelled"
    assert time.monotonic() - began < 15
    assert session.run("echo " + "x" * 100_000).verdict is Verdict.REFUSED
    assert session.run("pwd", directory="/absent").exit_status == 1
    assert session.run("pwd", directory="/logs").stdout == "/logs\n"


def test_a_session_that_has_ended_says_so(session):
    session = SandboxSession()
    session.close()
    session.close()
    with pytest.raises(SandboxFailed, match="the session is closed"):
        session.run("true")
    killed = SandboxSession()
    killed._process.kill()  # what the machine does when it is out of memory
    with pytest.raises(SandboxFailed, match="the sandbox has ended"):
        killed.run("sleep 10")
    killed.close()
