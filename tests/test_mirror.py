"""Tests lie where the package has what they test: `tests/<room>/<folder>/test_<module>.py`."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tests.conftest import LONG_FILES

TESTS = Path(__file__).parent
ROOT = TESTS.parent

# Folders that mirror no room: whole programs, faults, devices, pages and examples, behaviour of others, test tools.
OF_NO_ROOM = {
    "benchmarks",
    "chaos",
    "conformance",
    "data_preprocess",
    "end_to_end",
    "examples",
    "families",
    "gpu",
    "reward_score",
    "support",
}

# Tests of the whole tree, beside this file.
OF_THE_TREE = {
    "test_architecture.py",
    "test_docs_imports.py",
    "test_docs_site.py",
    "test_docstrings.py",
    "test_import_verl.py",
    "test_imports.py",
    "test_learning.py",
    "test_limits.py",
    "test_mirror.py",
    "test_one_place.py",
    "test_security_page.py",
    "test_versions.py",
    "test_waits.py",
}

# A property of several modules, or of a module that has another file.
OF_A_TOPIC = {
    "algos/test_contract.py",
    "algos/test_more_advantages.py",
    "algos/test_more_policy_losses.py",
    "cli/models/test_evaluation_page.py",
    "config/checks/test_features.py",
    "data_plane/test_fuzz.py",
    "data_plane/test_stored_arrays.py",
    "rewards/sandbox/test_rewards.py",
    "rewards/test_waiting.py",
    "serving/environments/test_harbor.py",
    "serving/sessions/test_pypi_agents.py",
    "serving/test_router_states.py",
    "single_controller/test_calls.py",
    "single_controller/test_failures.py",
    "trainer/data/test_step_prompts.py",
    "workers/rollout/test_images.py",
    "workers/test_nonfinite.py",
}


def mirrors(test: PurePosixPath, exists: Callable[[str], bool]) -> bool:
    """Return whether a module, a folder or the test's own folder has the name after `test_`."""
    name = test.stem.removeprefix("test_")
    folder = PurePosixPath("hybridrl", *test.parent.parts)
    if name == test.parent.name:
        return exists(str(folder))
    return exists(f"{folder / name}.py") or exists(str(folder / name))


def test_files_of_tests() -> None:
    tests = [PurePosixPath(path.relative_to(TESTS).as_posix()) for path in TESTS.rglob("test_*.py")]
    of_rooms = {test for test in tests if test.parts[0] not in OF_NO_ROOM and test.name not in OF_THE_TREE}
    elsewhere = {str(test) for test in of_rooms if not mirrors(test, lambda path: (ROOT / path).exists())}
    assert elsewhere == OF_A_TOPIC, "move the file to the folder of its module, or name its topic in OF_A_TOPIC"


def test_a_file_that_names_no_module_is_found() -> None:
    package = {"hybridrl/algos", "hybridrl/algos/kl.py", "hybridrl/algos/advantages", "hybridrl/errors.py"}
    good = ["algos/test_kl.py", "algos/test_advantages.py", "algos/test_algos.py", "test_errors.py", "test_algos.py"]
    bad = ["algos/advantages/test_kl.py", "algos/test_kls.py", "kl/test_kl.py", "test_kl.py", "algos/test_errors.py"]
    assert [path for path in good + bad if mirrors(PurePosixPath(path), package.__contains__)] == good


def test_the_files_that_begin_first_exist():
    assert [name for name in LONG_FILES if not (TESTS / name).exists()] == []
