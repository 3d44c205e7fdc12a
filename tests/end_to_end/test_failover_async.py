"""Losses in runs with `rollout.mode=async`: the router brings back a rollout process of its own, the trainer every
other one, and the run ends with the parameters of an undisturbed one, bit for bit, where each response is made by the
weights that it was made by there.
"""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.step_ledger import account, read_ledger
from tests.support.end_to_end.failing_runs import SAME, fault, hits, run_with
from tests.support.end_to_end.runs import assert_none_is_left, largest_difference, metrics, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLLOUT = "actor_rollout_ref__rollout__"
ASYNC = {f"{ROLLOUT}mode": "async", f"{ROLLOUT}ignore_eos": True, "data__max_response_length": 40}
SEPARATED = {"trainer__n_gpus_per_node": 1, f"{ROLLOUT}n_gpus_per_node": 2}
BESIDE = ASYNC | SEPARATED | {"trainer__lag": 1}


def run_well(folder: Path, model: Path, *faults: dict, **changes: object) -> list[dict]:
    """Run to a good end, with these faults carried out, one update for each committed step, and no process left.

    Returns the metrics.
    """
    done = run_with(folder, model, *faults, timeout_s=500, **changes)
    assert done.returncode == 0, done.stderr
    if faults:
        assert len(hits(folder)) == len(faults)
    ledger = account(read_ledger(str(folder / "run/ledger.jsonl")))
    assert not ledger.problems()
    assert_none_is_left(f"FAULTS_LOG={folder}/")
    return metrics(folder / "run")


def losses(folder: Path) -> list[list[str]]:
    """What the trainer brought back."""
    path = folder / "run/failures.jsonl"
    return [json.loads(line)["lost"] for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_end(found: Path, wanted: Path, *, step: int = 3) -> None:
    held = [weights(folder / f"run/global_step_{step}", folder / "hf") for folder in (found, wanted)]
    assert largest_difference(*held) == 0
    rows = [[[row.get(name) for name in SAME] for row in metrics(folder / "run")] for folder in (found, wanted)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_process_of_actor_and_rollout_dies_while_it_generates_and_while_it_trains(
    tmp_path, tiny_qwen2, num_processes
):
    last, pool = num_processes - 1, {"trainer__n_gpus_per_node": num_processes}
    run_well(tmp_path / "well", tiny_qwen2, **ASYNC, **pool)
    faults = [
        fault(2, "gen", "actor_rollout", last, method="serve", after_s=0.02),
        fault(3, "update_actor", "actor_rollout", 0, method="update_actor", after_s=0.02),
    ]
    run_well(tmp_path / "hit", tiny_qwen2, *faults, **ASYNC, **pool)
    assert losses(tmp_path / "hit") == [[f"actor_rollout-{last}"], ["actor_rollout-0"]]
    assert_same_end(tmp_path / "hit", tmp_path / "well")


def test_a_rollout_of_its_own_is_the_routers_to_bring_back_and_an_actor_the_trainers(tmp_path, tiny_qwen2):
    run_well(tmp_path / "well", tiny_qwen2, **ASYNC, **SEPARATED)
    faults = [
        fault(1, "gen", "rollout", 0, method="serve", after_s=0.02),
        fault(2, "gen", "actor", 0),
        fault(2, "gen", "rollout", 1, method="serve", after_s=0.02),  # which gets no weights from an actor that is dead
        fault(3, "update_actor", "actor", 0),
        fault(3, "update_weights", "rollout", 0),
    ]
    rows = run_well(tmp_path / "hit", tiny_qwen2, *faults, **ASYNC, **SEPARATED)
    assert max(row.get("rollout/replicas_lost", 0) for row in rows) >= 2
    assert "rollout-0" in losses(tmp_path / "hit")[-1] and any("actor-0" in lost for lost in losses(tmp_path / "hit"))
    assert_same_end(tmp_path / "hit", tmp_path / "well")


def test_an_actor_that_dies_while_generation_runs_ahead_and_a_rollout_that_dies_in_it(tmp_path, tiny_qwen2):
    """The endpoint answers again after each, on the same port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    run_well(tmp_path / "well", tiny_qwen2, **BESIDE)
    faults = [
        fault(2, "update_actor", "actor", 0, method="update_actor", after_s=0.02),
        fault(3, "gen", "rollout", 1, method="serve", after_s=0.02),
    ]
    versions: list[int] = []
    asking = threading.Thread(target=ask, args=(port, tiny_qwen2.name, versions), daemon=True)
    asking.start()
    run_well(tmp_path / "hit", tiny_qwen2, *faults, **BESIDE, **{f"{ROLLOUT}endpoint_port": port})
    assert losses(tmp_path / "hit") == [["actor-0"]]
    assert_same_end(tmp_path / "hit", tmp_path / "well")
    assert {0, 1, 2} <= set(versions)


def ask(port: int, name: str, versions: list[int]) -> None:
    """Ask the policy again and again, whether it answers or not, and note which weights spoke."""
    body = json.dumps({"model": name, "prompt": [50, 60], "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                versions.append(json.load(answer)["weights_version"])
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.05)


def test_responses_in_the_middle_begin_again_when_what_made_them_is_lost(tmp_path, tiny_qwen2):
    partial = BESIDE | {
        "trainer__lag": 3,
        "trainer__partial_rollout": True,
        "trainer__total_training_steps": 6,
        "trainer__save_freq": 6,
    }
    faults = [
        fault(3, "update_actor", "actor", 0, method="update_actor", after_s=0.02),
        fault(4, "gen", "rollout", 0, method="serve", after_s=0.02),
        fault(5, "update_weights", "actor", 0, method="send_weights"),
    ]
    rows = run_well(tmp_path, tiny_qwen2, *faults, **partial)
    assert [row["training/global_step"] for row in rows if "training/global_step" in row] == [1, 2, 3, 4, 5, 6]
    assert max(row.get("async/age_max", 0) for row in rows) <= 3
