"""Durable files appear complete or not at all."""

import os
import signal
import subprocess
import sys

import pytest

from hybridrl.system.atomic_write import atomic_write, replaced_file


def test_a_file_has_its_text_when_the_block_ends(tmp_path):
    path = tmp_path / "state.json"
    with atomic_write(path) as file:
        file.write("ä")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "ä" and os.listdir(tmp_path) == ["state.json"]


def test_an_error_in_the_block_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "state.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="half-way"), atomic_write(path, "wb") as file:
        file.write(b"new")
        raise RuntimeError("half-way")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state.bin"]


def test_a_process_that_is_killed_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    code = (
        "import os, signal, sys\n"
        "from hybridrl.system.atomic_write import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write('new'); file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_a_full_directory_of_writers_ends_with_one_whole_file(tmp_path):
    path = tmp_path / "state"
    code = (
        "import sys\n"
        "from hybridrl.system.atomic_write import atomic_write\n"
        "for _ in range(50):\n"
        "    with atomic_write(sys.argv[1]) as file:\n"
        "        file.write(sys.argv[2] * 10000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), letter]) for letter in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert path.read_text() in ("a" * 10000, "b" * 10000) and os.listdir(tmp_path) == ["state"]


def test_a_library_that_opens_files_itself_gets_a_name_with_the_same_suffix(tmp_path):
    path = tmp_path / "graph.svg"
    with replaced_file(path) as partial:
        assert partial.suffix == ".svg" and partial.parent == tmp_path
        partial.write_text("<svg/>")
    assert path.read_text() == "<svg/>" and os.listdir(tmp_path) == ["graph.svg"]


def test_appending_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mode='a' must be 'w' or 'wb'"), atomic_write(tmp_path / "x", "a"):
        pass


def test_a_private_file_is_never_readable_by_others(tmp_path):
    with atomic_write(tmp_path / "state", private=True) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    with atomic_write(tmp_path / "other"):
        pass
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o666 & ~mask
