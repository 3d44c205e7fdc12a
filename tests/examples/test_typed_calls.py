"""A type checker's view of remote calls."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "typed_calls.py"
DEADLINE_S = 280  # mypy reads torch and Ray first, where it has no cache yet

pytestmark = pytest.mark.timeout(300)


def mypy(path: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S).stdout


def test_the_example_passes():
    assert "Success: no issues found in 1 source file" in mypy(EXAMPLE)


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        (
            "group.calls.add(batch)",
            "group.calls.add(5)",
            'Argument 1 to "add" of "Counter" has incompatible type "int"',
        ),
        ("group.calls.add(batch)", "group.calls.ad(batch)", '"Counter" has no attribute "ad"'),
        ("text: str =", "text: int =", "Incompatible types in assignment"),
    ],
)
def test_a_mistake_in_a_remote_call_is_found_without_running_it(tmp_path, right, wrong, complaint):
    source = EXAMPLE.read_text()
    assert right in source
    changed = tmp_path / "mistaken.py"
    changed.write_text(source.replace(right, wrong))
    assert complaint in mypy(changed)
