"""The directory among the temporary files is this user's own, or is refused."""

import os
import stat

import pytest

from hybridrl.errors import ConfigError
from hybridrl.master.service import run_journals
from hybridrl.master.service.journal import JournaledState
from hybridrl.master.service.private_directory import make_directory, private_root


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_journal_among_the_temporary_files_is_in_a_directory_of_this_user_alone(temporary):
    JournaledState(os.path.join(private_root(), "jobs", "run-1")).close()
    assert stat.S_IMODE(os.stat(private_root()).st_mode) == 0o700


def test_permissions_of_others_are_taken_away(temporary):
    os.mkdir(private_root(), 0o755)
    os.chmod(private_root(), 0o777)
    make_directory(os.path.join(private_root(), "jobs"))
    assert stat.S_IMODE(os.stat(private_root()).st_mode) == 0o700


def another_users_directory(path):
    os.mkdir(path)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("prepared", ["directory", "link", "file"])
def test_what_somebody_else_has_prepared_is_refused_by_who_writes_and_by_who_reads(temporary, prepared, monkeypatch):
    if prepared == "directory":
        if os.getuid() != 0:
            pytest.skip("only root can make a directory of another user")
        another_users_directory(private_root())
    elif prepared == "link":
        os.symlink(temporary, private_root())
    else:
        (temporary / os.path.basename(private_root())).write_text("")
    with pytest.raises((ConfigError, FileExistsError), match="hybridrl-"):
        JournaledState(os.path.join(private_root(), "jobs", "run-1"))
    monkeypatch.setattr(run_journals, "JOURNAL_ROOT", os.path.join(private_root(), "jobs"))
    with pytest.raises(ConfigError, match="is not a directory of this user"):
        run_journals.journals_of("job")


def test_another_directory_is_made_as_it_is(tmp_path):
    make_directory(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
