"""Programs of agents: their rewards, and how those end that fail, hang or lose the policy."""

import asyncio
import dataclasses
import json
import sys

import pytest

from hybridrl.errors import AgentFailed, ConfigError, DataError, WorkerLost
from hybridrl.serving.agent_loop.base import AgentLoopContext
from hybridrl.serving.agent_loop.programs import http_agent
from hybridrl.serving.agent_loop.programs.http_agent import AgentTask, HTTPAgentLoop, load_program
from hybridrl.workers.rollout import SamplingParams
from hybridrl.workers.rollout.requests import Request
from tests.support.serving.scripted_policy import PROMPT, RESPONSE, Script

AGENTS = """
import asyncio, json, time, urllib.request


def post(url, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))


def ask(task, text="How many?"):
    body = {"model": task.model, "messages": [{"role": "user", "content": text}]}
    return post(f"{task.base_url}/chat/completions", body)["choices"][0]["message"]["content"]


def scores(task):
    return len(ask(task)) + task.row["extra_info"]["bonus"]


def rewards_its_helper(task):
    ask(task)
    body = {"model": task.model, "messages": [{"role": "user", "content": "You judge."}]}
    answer = post(f"{task.base_url}/chat/completions", body)
    post(f"{task.base_url}/reward", {"reward": 1.0})
    post(f"{task.base_url}/reward", {"reward": -0.5, "id": answer["id"]})


def is_silent(task):
    return 1.0


def crashes(task):
    ask(task)
    raise ValueError("of its own")


def hides_errors(task):
    try:
        ask(task)
    except Exception:
        return 0.0


def is_late(task):
    time.sleep(30)


async def never_ends(task):
    await asyncio.Event().wait()


def is_nan(task):
    ask(task)
    return float("nan")
"""


class LostPolicy:
    async def generate(self, request, *, conversation=None):
        raise WorkerLost("rollout", 0, "serve", "killed by SIGKILL")


@pytest.fixture
def run(site, tmp_path):
    """Return a function that runs an agent of the file above, or a command, for one row."""
    (tmp_path / "agents.py").write_text(AGENTS)

    def run(program: str, *, client=None, timeout_s: float = 60.0, **context_changes):
        program = f"{tmp_path / 'agents.py'}:{program}" if program.isidentifier() else program
        context = AgentLoopContext(
            site.served.tokenizer,
            RESPONSE,
            max_prompt_length=PROMPT,
            program=program,
            agent_timeout_s=timeout_s,
            session_host=site.endpoint.session_host,
            **context_changes,
        )
        sampling = SamplingParams(RESPONSE)
        row = {"request": Request("r", (1, 2), sampling, 5), "extra_info": {"bonus": 2}}
        row["client"] = client or Script(site.served.tokenizer, ["yes"])
        return asyncio.run(HTTPAgentLoop(context).run(sampling, **row))

    return run


def test_a_function_gives_the_reward_of_its_conversation(run, site):
    output = run("scores")
    assert (output.reward, output.num_turns, output.version) == (len("yes") + 2, 2, 7)
    assert site.served.tokenizer.decode(output.prompt_ids).endswith("How many?<|im_end|>\n<|im_start|>assistant\n")
    assert output.response_mask == [1] * len(output.response_ids) and output.counts["requests/first"] == 1


@pytest.mark.parametrize("trains", [True, False])
def test_a_helpers_conversation_is_a_row_with_the_reward_that_its_answer_got(run, site, trains):
    output = run("rewards_its_helper", client=Script(site.served.tokenizer, ["yes", "no"]), trains_branches=trains)
    assert output.reward == 1.0 and ("branches_left_out" in output.counts) is not trains
    if not trains:
        assert output.branches == [] and output.counts["tokens_left_out"] == len(output.response_ids)
        return
    [helper] = output.branches
    assert (helper.reward, helper.branches, helper.num_turns, helper.version) == (-0.5, [], 2, 7)
    assert "You judge." in site.served.tokenizer.decode(helper.prompt_ids) and all(helper.response_mask)


@pytest.mark.parametrize(
    ("program", "cause", "message"),
    [
        ("is_silent", "no request", "does its client use the base_url"),
        ("crashes", "ValueError", "raised ValueError: of its own"),
        ("is_nan", "reward not finite", "returned nan"),
        ("never_ends", "timeout", "did not end within 0.5 s"),
        ("is_late", "timeout", "did not end within 0.5 s"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "ended by itself with exit status 3", "ended by itself"),
        ("sleep 60", "timeout", "did not end within 0.5 s"),
    ],
)
def test_an_agent_that_fails_is_named_by_its_cause(run, program, cause, message):
    with pytest.raises(AgentFailed, match=message) as failed:
        run(program, timeout_s=0.5 if cause == "timeout" else 60.0)
    assert failed.value.cause == cause


@pytest.mark.parametrize("program", ["crashes", "hides_errors"])
def test_a_lost_policy_is_the_trainers_and_no_failure_of_the_agent(run, program):
    with pytest.raises(WorkerLost, match="killed by SIGKILL"):
        run(program, client=LostPolicy())


def test_a_command_gets_its_session_and_its_row(monkeypatch):
    task = AgentTask("http://x/sessions/s/v1", "key", "tiny", "s", {"extra_info": {"a": 1}, "index": 4})
    found = task.environment()
    assert found["OPENAI_BASE_URL"] == task.base_url and json.loads(found["HYBRIDRL_ROW"]) == task.row
    monkeypatch.setattr(http_agent, "MAX_ROW_BYTES", 10)
    with pytest.raises(DataError, match="row 4 has .* bytes.*variable at most 10"):
        dataclasses.replace(task).environment()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("absent.py:agent", "no file absent.py"),
        ("json:absent", "json has no 'absent'"),
        ("math:pi", "pi is no function"),
        ("'unclosed", "is no command"),
        (" ", "give a Python function"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused(program, message):
    with pytest.raises(ConfigError, match=message):
        load_program(program)
