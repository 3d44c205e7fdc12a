"""docs/sdk.md: its two programs run as they stand and print what the page says, and its names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import sdk

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sdk.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py: .*?\n(.*?)```", TEXT, re.DOTALL))


def test_the_page_lists_every_public_name():
    listed = TEXT.partition("become `hybridrl.sdk`:")[2].partition("Both styles")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(sdk.__all__)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "number"), [("first_generation", 0), ("unified", 1)])
def test_a_program_prints_what_the_page_says(tmp_path, name, number):
    (tmp_path / f"{name}.py").write_text(PROGRAMS[name])
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"It prints `(.*?)` and `(.*?)`\.", TEXT)[number]
    assert [line for line in said if line not in done.stdout + done.stderr] == []
