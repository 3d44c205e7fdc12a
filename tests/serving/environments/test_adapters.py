"""Environments of other packages. `make environments` installs openenv and verifiers for two of these tests."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.serving.agent_loop.base import AgentLoopContext, lookup_agent_loop
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.serving.scripted_policy import PROMPT, RESPONSE, Script

SUPPORT = Path(__file__).parents[2] / "support" / "serving"
LAKE = {"class_name": "gymnasium", "config": {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}}
WORDS = ["left", "down", "right", "up"]


def other_python(name: str) -> str:
    """Return the interpreter with a package that cannot be installed beside vLLM; skip the test without it."""
    python = os.environ.get(f"HYBRIDRL_{name.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"{name} is in an environment of its own: run `make environments`")
    return python


def test_an_environment_of_gymnasium_is_one_of_texts(play, tiny_tokenizer):
    config = LAKE["config"] | {"actions": WORDS, "invalid_reward": -0.5}
    way = ["Down", "jump", " down", "right", "right", "down", "right"]
    won, lost = play(LAKE | {"config": config}, ({}, way), ({"seed": 3}, ["right", "down"]))
    text = tiny_tokenizer.decode(won.response_ids)
    # The lake has four by four fields, and each observation is the number of a field.
    assert "user\n4<" in text and "user\nThis is no action. Answer with one of: left, down, right, up<" in text
    assert won.reward == 0.5 and won.counts["environment/steps"] == 7
    assert lost.reward == 0.0 and lost.counts["environment/steps"] == 2


def test_gymnasium_shows_a_picture_of_letters_and_takes_numbers(play, tiny_tokenizer):
    [output] = play(LAKE | {"config": LAKE["config"] | {"show": "render"}}, ({}, ["2", "1"]))
    assert "FFFH" in tiny_tokenizer.decode(output.prompt_ids) and "(Right)" in tiny_tokenizer.decode(
        output.response_ids
    )
    with pytest.raises(ConfigError, match="action space Box.*Text or Discrete"):
        play({"class_name": "gymnasium", "config": {"id": "Pendulum-v1"}})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_of_openenv_is_an_environment_of_texts(play, tiny_tokenizer):
    python = other_python("openenv")
    config = {"command": [python, str(SUPPORT / "openenv_server.py"), "{port}"], "action": "word"}
    entry = {"class_name": "openenv", "python": python, "config": config | {"observation": "text"}}
    rows = [({"seed": 3, "longest": 4}, ["ab", "abcd"]), ({"seed": 4}, ["abcdefghi"])]
    first, second = play(entry, *rows)
    assert "user\nseed 3<" in tiny_tokenizer.decode(first.prompt_ids)
    assert "user\nab 2<" in tiny_tokenizer.decode(first.response_ids)
    assert (first.reward, second.reward) == (6.0, 9.0)
    [output] = play(entry | {"config": config}, rows[1])  # all fields
    assert json.dumps({"text": "seed 4"})[1:-1] in tiny_tokenizer.decode(output.prompt_ids)
    with pytest.raises((AgentFailed, DataError), match="of the server"):
        play(entry, ({}, ["crash"]))


@pytest.fixture
def play_alone(site, tmp_path):
    """Return a function that lets an environment play an episode by itself, as a client of the endpoint."""

    def play_alone(entry: dict, kwargs: dict, answers: list[str]):
        path, tokenizer = tmp_path / "environments.json", site.served.tokenizer
        path.write_text(json.dumps({"interaction": [{"name": "it", **entry}]}))
        context = AgentLoopContext(
            tokenizer,
            RESPONSE,
            max_prompt_length=PROMPT,
            environments=str(path),
            session_host=site.endpoint.session_host,
        )
        loop, sampling = lookup_agent_loop("verifiers_agent")(context), SamplingParams(RESPONSE)
        row = {"extra_info": {"interaction_kwargs": {"name": "it", **kwargs}}, "raw_prompt": []}
        request = Request("r", (5,), sampling, 7)
        return asyncio.run(loop.run(sampling, **row, request=request, client=Script(tokenizer, answers)))

    return play_alone


def test_an_environment_that_plays_by_itself_gives_its_conversation_and_its_reward(play_alone, site):
    entry = {"class_name": f"{SUPPORT / 'sample_environments.py'}:OwnClient"}
    output = play_alone(entry, {"question": "Two letters b?", "wanted": "abba"}, ["abba"])
    assert output.reward == 1.0
    assert "Two letters b?" in site.served.tokenizer.decode(output.prompt_ids)
    assert site.served.tokenizer.decode(output.response_ids).startswith("abba")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_environment_of_verifiers_plays_on_the_endpoint(play_alone, site, monkeypatch):
    python = other_python("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    agent = {"harness": {"id": "letters_taskset"}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "letters_taskset"}, "agent": agent}

    def play(env, idx, answers):
        return play_alone({"class_name": "verifiers", "python": python, "config": {"env": env}}, {"idx": idx}, answers)

    output = play(env, 1, ["abba"])
    assert output.reward == 1.0  # two letters b, each half a point
    assert site.served.tokenizer.decode(output.response_ids).startswith("abba")
    assert "Write b." in site.served.tokenizer.decode(output.prompt_ids)
    with pytest.raises(DataError, match="idx=5: the taskset has 2 tasks"):
        play(env, 5, ["abba"])
    broken = env | {"agent": agent | {"harness": {"id": "letters_taskset", "is_broken": True}}}
    with pytest.raises(AgentFailed, match="the episode failed: .*the harness is broken"):
        play(broken, 0, ["abba"])
