"""The example with an agent of PyPI: its data and its template, and that it runs with mini-swe-agent itself."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples.black_box_agent.make_data import WORDS, write_all
from examples.quickstart.build_model import read_texts, train_tokenizer
from hybridrl.serving.openai.tool_calls import detect_format
from hybridrl.serving.sessions.session import Session
from tests.support.end_to_end.runs import metrics

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "black_box_agent"
AGENT_PYTHON = "HYBRIDRL_AGENTS_PYTHON"
BASH = {"name": "bash", "description": "Execute a bash command", "parameters": {"properties": {"command": {}}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("black_box_agent")
    write_all(folder, seed=1, num_train=60, num_test=20, num_demonstrations=300)
    return folder


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_the_command_that_the_words_ask_for_prints_the_number_to_submit(data, tmp_path):
    for row in rows(data / "test.parquet"):
        for name, text in row["extra_info"]["files"].items():
            (tmp_path / name).write_text(text)
        question = row["prompt"][0]["content"].rstrip(".")
        [command] = [command for words, command in WORDS.items() if words in question]
        in_file = command.format(file=question[-1])
        printed = subprocess.check_output(in_file, shell=True, cwd=tmp_path, text=True, timeout=30)
        assert printed.strip() == row["reward_model"]["ground_truth"]


def test_no_question_of_the_test_is_trained_on(data):
    held_out, trained = (
        {row["prompt"][0]["content"] for row in rows(data / f"{name}.parquet")} for name in ("test", "train")
    )
    shown = {row["messages"][2]["content"] for row in rows(data / "sft_train.parquet")}
    assert len(held_out) == 20 and not held_out & (trained | shown)


def test_the_agents_messages_become_the_tokens_of_a_demonstration(data):
    """What the endpoint makes of the agent's requests is what supervised fine-tuning has shown, token by token."""
    template = (EXAMPLE / "chat_template.jinja").read_text()
    tokenizer = train_tokenizer(read_texts(data / "sft_train.parquet"), chat_template=template)
    shown = rows(data / "sft_train.parquet")[0]["messages"]
    whole = tokenizer.apply_chat_template(shown, return_dict=True)["input_ids"]
    _, system, user, call, result, submit = shown
    session, tools = Session("s"), [{"type": "function", "function": BASH}]

    def answer(plan, text: str) -> dict:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        _, [parsed] = detect_format(tokenizer).parse(text)
        function = {"name": parsed.name, "arguments": parsed.arguments}
        reply = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
        session.record(plan, token_ids=ids, log_probs=[0.0] * len(ids), versions=[1] * len(ids), reply=reply)
        return reply

    first = session.plan([system, user], tools, tokenizer)
    reply = answer(first, call["content"])
    observed = {"role": "tool", "tool_call_id": "1", "content": result["content"]}
    second = session.plan([system, user, reply, observed], tools, tokenizer)
    assert second.kind == "continued"
    end = [*tokenizer.encode(submit["content"]), tokenizer.eos_token_id, *tokenizer.encode("\n")]
    assert [*second.prompt_ids, *end] == whole


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["outside", "command"])
def test_the_example_runs_with_mini_swe_agent(tmp_path, form):
    if AGENT_PYTHON not in os.environ:
        pytest.skip("mini-swe-agent is in an environment of its own: run `make environments`")
    sizes = {"SFT_STEPS": "40", "STEPS": "2", "BATCH": "1", "NUM_TEST": "2", "BACKEND": "local", "FORM": form}
    variables = os.environ | sizes | {"PYTHON": sys.executable, "AGENT_PYTHON": os.environ[AGENT_PYTHON]}
    command = ["bash", "examples/black_box_agent/run.sh", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env=variables, timeout=880, check=True)
    found = metrics(tmp_path / "out" / "grpo")
    assert found[-1]["step"] == 2 and sum("val-core/environment/reward/mean@1" in row for row in found) == 2
    steps = [row for row in found if "rollout/agent/requests/first" in row]
    assert len(steps) == 2 and all(row["rollout/agent/requests/first"] == 8 for row in steps)
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
