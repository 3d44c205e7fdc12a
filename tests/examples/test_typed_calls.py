"""A type checker finds mistakes in remote calls; `make lint` checks the example itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "typed_calls.py"
DEADLINE_S = 280  # mypy reads torch and Ray first, where it has no cache yet
MISTAKES = {
    "type": (
        "group.calls.add(batch)",
        "group.calls.add(5)",
        'Argument 1 to "add" of "Counter" has incompatible type "int"',
    ),
    "name": ("group.calls.add(batch)", "group.calls.ad(batch)", '"Counter" has no attribute "ad"'),
    "result": ("text: str =", "text: int =", "Incompatible types in assignment"),
}


@pytest.mark.timeout(300)
def test_each_mistake_in_a_remote_call_is_found_without_running_it(tmp_path):
    source = EXAMPLE.read_text()
    for name, (right, wrong, _) in MISTAKES.items():
        assert right in source
        (tmp_path / f"{name}.py").write_text(source.replace(right, wrong))
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, tmp_path.glob("*.py"))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    for name, (_, _, complaint) in MISTAKES.items():
        assert any(f"/{name}.py:" in line and complaint in line for line in found.splitlines()), (name, found)
