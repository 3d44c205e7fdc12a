"""Loading the user's objects by path and name."""

import sys

import pytest

from hybridrl.errors import ConfigError
from hybridrl.import_path import load_object


def test_an_object_comes_from_a_file_or_from_a_module(tmp_path):
    (tmp_path / "mine.py").write_text("def score(x):\n    return 2 * x\n")
    assert load_object(str(tmp_path / "mine.py"), "score")(4) == 8
    assert load_object("os.path", "join")("a", "b") == "a/b"


def test_a_file_runs_once_and_its_classes_can_be_found_by_pickle(tmp_path):
    (tmp_path / "mine.py").write_text("class Scorer: ...\n")
    cls = load_object(str(tmp_path / "mine.py"), "Scorer")
    assert load_object(str(tmp_path / "mine.py"), "Scorer") is cls
    assert getattr(sys.modules[cls.__module__], "Scorer") is cls  # noqa: B009


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"NAME = {folder!r}\n")
    assert [load_object(str(tmp_path / folder / "mine.py"), "NAME") for folder in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("{dir}/mime.py", "score", r"no file .*mime.py; did you mean mine.py\?"),
        ("{dir}/nowhere/x.py", "score", "no file .*x.py$"),
        ("{dir}/notes.txt", "score", r"notes.txt is not a Python file; its name must end in .py"),
        ("{dir}/mine.py", "scor", r"mine.py has no 'scor'; did you mean score\?"),
        ("{dir}/mine.py", "zzz", "mine.py has no 'zzz'; it has math, score"),
        ("{dir}/broken.py", "score", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
        (
            "{dir}/needs.py",
            "score",
            "needs.py cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        ("no_such_package.rewards", "score", "no module named 'no_such_package'"),
        ("os.no_such_part", "score", "no module named 'os.no_such_part'"),
        ("json", "dump_all", r"json has no 'dump_all'; did you mean dump"),
    ],
)
def test_a_load_error_names_the_path_and_the_nearest_match(tmp_path, path, name, message):
    (tmp_path / "mine.py").write_text("import math\ndef score(): ...\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "needs.py").write_text("import no_such_thing\n")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        load_object(path.format(dir=tmp_path), name)


def test_a_file_that_failed_is_executed_again_after_a_fix(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text("1 / 0\n")
    with pytest.raises(ConfigError) as failed:
        load_object(str(code), "score")
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    code.write_text("score = 10000\n")
    assert load_object(str(code), "score") == 10000
