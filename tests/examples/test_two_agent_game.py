"""The game for two: its rules, the other side of a table, and that training runs as the page says."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.two_agent_game.make_data import main as make_data
from examples.two_agent_game.nim import Nim, NimTable, best_move
from hybridrl.import_path import load_module
from hybridrl.serving.agent_loop.base import AgentLoopContext, lookup_agent_loop
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.end_to_end.runs import metrics
from tests.support.serving.scripted_policy import ScriptedTurns

ROOT = Path(__file__).parents[2]
GAME = ROOT / "examples" / "two_agent_game"


def play(environment, sticks: int, moves: str) -> tuple[float, list[str]]:
    """Return the reward of a game and what was seen."""
    seen, reward, is_done = [environment.reset({"kwargs": {"sticks": sticks}, "seed": 1})], 0.0, False
    for move in moves:
        assert not is_done
        observation, more, is_done = environment.step(move)
        seen, reward = [*seen, observation], reward + more
    assert is_done
    return reward, seen


def test_the_first_player_wins_with_the_last_stick():
    assert play(NimTable(), 6, "231") == (1.0, ["6 sticks", "4 sticks", "1 sticks", "0 sticks"])
    assert play(NimTable(), 5, "23")[0] == 0.0
    assert play(NimTable(), 5, "4")[0] == -0.5 and play(NimTable(), 5, "x")[0] == -0.5
    assert play(NimTable(), 4, "23")[0] == 1.0  # the other side took more than there was


def test_the_scripted_player_loses_only_to_the_best_moves():
    assert [best_move(sticks) for sticks in range(1, 9)] == [1, 2, 3, 1, 1, 2, 3, 1]
    assert play(Nim(), 7, "33") == (1.0, ["7 sticks", "3 sticks", "0 sticks"])
    assert play(Nim(), 7, "21") == (0.0, ["7 sticks", "4 sticks", "0 sticks"])


def test_the_policy_plays_both_sides_and_only_the_first_is_in_the_response(tmp_path, tiny_tokenizer):
    load_module(str(GAME / "self_play.py"))
    context = AgentLoopContext(tiny_tokenizer, 200, max_prompt_length=200, environments=str(GAME / "environments.yaml"))
    loop, sampling = lookup_agent_loop("self_play")(context), SamplingParams(200)
    policy = ScriptedTurns(tiny_tokenizer, ["1", "3", "1"])
    rules = [{"role": "system", "content": "Rules."}]
    row = {"raw_prompt": rules, "extra_info": {"interaction_kwargs": {"name": "nim_table", "sticks": 5}}}
    output = asyncio.run(loop.run(sampling, **row, request=Request("r", (5,), sampling, 1), client=policy))
    loop.close()
    own = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert tiny_tokenizer.decode(own) == "1<|im_end|>1<|im_end|>" and output.reward == 1.0
    other = tiny_tokenizer.decode(policy.requests[1].prompt_ids)
    assert "Rules." in other and "user\n4 sticks<" in other and "5 sticks" not in other
    assert policy.requests[1].seed != policy.requests[0].seed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("opponent", ["itself", "script"])
def test_the_example_runs_from_data_to_validation(tmp_path, opponent):
    sizes = {"SFT_STEPS": "20", "STEPS": "2", "BACKEND": "local", "OPPONENT": opponent}
    variables = os.environ | sizes | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", str(GAME / "run.sh"), str(tmp_path / "out")], cwd=ROOT, env=variables, check=True)
    rows = metrics(tmp_path / "out" / "grpo")
    assert sum("val-core/environment/reward/mean@8" in row for row in rows) == 2
    steps = [row["rollout/agent/environment/steps"] for row in rows if "rollout/agent/environment/steps" in row]
    assert len(steps) >= 2 and min(steps) > 0


def test_the_data_name_environments_that_there_are(tmp_path):
    import pyarrow.parquet as pq

    assert make_data(["--local_dir", str(tmp_path)]) == 0
    names = {
        row["extra_info"]["interaction_kwargs"]["name"]
        for split in ("train", "test")
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
    }
    assert names == {"nim_table", "nim_test"}
    listed = (GAME / "environments.yaml").read_text()
    assert all(f"name: {name} " in listed or f"name: {name}\n" in listed for name in names)
