"""The recorded runs of `hybridrl view --demo`: small, without names of a machine, and with something for every view."""

from importlib.resources import files
from pathlib import Path

from hybridrl.cli.runs import recorded_runs
from hybridrl.view.readers.samples import SampleQuery
from hybridrl.view.runs import open_runs

MACHINE_FOLDERS = ("tmp", "work", "root", "home")
MAX_BYTES = 200_000


def test_the_recorded_runs_have_something_for_every_view():
    with recorded_runs() as directory:
        runs = open_runs([directory])
        quick, soak = runs["quickstart"], runs["soak"]
        assert quick.summary()["step"] == quick.summary()["total_steps"] == 40
        sample = quick.samples("rollout").page(SampleQuery(lowest=1.0))["samples"][0]
        tokens = quick.samples("rollout").tokens(sample["step"], sample["id"])
        assert tokens is not None and "".join(tokens["tokens"]).startswith(sample["output"])
        assert tokens["old"] and tokens["rollout"] and tokens["advantage"]
        assert quick.timeline.window()["last"] == 40 and quick.ledger.read()["steps"] == 40
        assert any(row["differs"] for row in quick.settings.table()["settings"])
        (journal,) = soak.failures.read()["journals"]
        assert sum(worker["restarts"] for worker in journal["workers"]) >= 3 and not journal["problem"]
        assert len(soak.failures.read()["recoveries"]) >= 3
    assert not Path(directory).exists()


def test_the_archive_is_small_and_names_no_machine():
    assert len((files("hybridrl.view") / "demo_run.zip").read_bytes()) < MAX_BYTES
    with recorded_runs() as directory:
        for path in Path(directory).rglob("*.json*"):
            text = path.read_text(encoding="utf-8")
            assert not any(f"/{name}/" in text for name in MACHINE_FOLDERS), path
