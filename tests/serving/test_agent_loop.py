"""Agent loops on a policy with scripted turns: turns, masks, tools and their errors, and rejected settings."""

import asyncio
import copy
from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_loop.base import AgentLoopContext, AgentLoopOutput, lookup_agent_loop
from hybridrl.serving.agent_loop.tools.function_tools import call_tool, function_tool, load_tools
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.serving.scripted_policy import ScriptedTurns

PROMPT = (7, 8, 9)


@function_tool
def add(a: int, b: int) -> int:
    return a + b


@function_tool
async def echo(text: str) -> dict:
    await asyncio.sleep(0)
    return {"text": text}


@function_tool
def breaks() -> None:
    raise ZeroDivisionError("of its own")


TOOLS = {"add": add, "echo": echo, "breaks": breaks}


def run(tokenizer, turns: list[str], *, length: int = 200, name: str = "tool_agent", max_turns: int | None = None):
    policy, sampling = ScriptedTurns(tokenizer, turns), SamplingParams(length)
    loop = lookup_agent_loop(name)(AgentLoopContext(tokenizer, length, TOOLS, max_turns))
    output = asyncio.run(loop.run(sampling, request=Request("r", PROMPT, sampling, 5), client=policy))
    return output, policy


def split_text(tokenizer, output: AgentLoopOutput) -> tuple[str, str]:
    """Return the text of the policy, and the text of tools."""
    pairs = list(zip(output.response_ids, output.response_mask, strict=True))
    return tuple(tokenizer.decode([token for token, mask in pairs if mask == sampled]) for sampled in (1, 0))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def test_a_call_is_answered_and_the_policy_continues(tiny_tokenizer):
    output, policy = run(tiny_tokenizer, [f"Let me see. {CALL}", "It is 5."])
    sampled, observed = split_text(tiny_tokenizer, output)
    assert sampled == f"Let me see. {CALL}<|im_end|>It is 5.<|im_end|>"
    assert observed == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_ids == list(PROMPT) and output.num_turns == 4 and output.version == 1
    first, second = policy.requests
    assert second.prompt_ids == (
        *PROMPT,
        *output.response_ids[: second.num_done],
    )  # the sampled tokens, not encoded again
    assert first.seed == second.seed and first.num_done == 0 and second.num_done == len(second.prompt_ids) - len(PROMPT)
    assert [lp for lp, m in zip(output.response_logprobs, output.response_mask, strict=True) if m] == [-0.5] * sum(
        output.response_mask
    )
    assert all(lp == 0 for lp, m in zip(output.response_logprobs, output.response_mask, strict=True) if not m)


@pytest.mark.parametrize(("num_calls", "num_made"), [(3, 3), (129, 0)])
def test_a_turn_with_more_calls_or_longer_answers_than_fit_ends_the_response_untokenized(
    tiny_tokenizer, num_calls, num_made
):
    made = []

    def large() -> str:
        made.append(None)
        return "x" * 2**19

    class NeverRenders(lookup_agent_loop("tool_agent")):
        def render_messages(self, calls, answers):
            raise AssertionError("these answers fit into no response")

    policy = ScriptedTurns(tiny_tokenizer, ['<tool_call>{"name": "large"}</tool_call>' * num_calls])
    sampling = SamplingParams(10_000)
    loop = NeverRenders(AgentLoopContext(tiny_tokenizer, 10_000, {"large": large}))
    output = asyncio.run(loop.run(sampling, request=Request("r", PROMPT, sampling, 5), client=policy))
    assert 0 not in output.response_mask and len(made) == num_made


def test_the_whole_conversation_reads_as_the_chat_template_writes_it(tiny_tokenizer):
    output, _ = run(tiny_tokenizer, [CALL, "It is 5."])
    turns = [("user", "q"), ("assistant", CALL), ("tool", "5"), ("assistant", "It is 5.")]
    whole = tiny_tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in turns], tokenize=False
    )
    assert whole.endswith(tiny_tokenizer.decode(output.response_ids) + "\n")


def test_two_calls_of_one_turn_are_answered_in_their_order(tiny_tokenizer):
    second = CALL.replace("2", "40")
    output, _ = run(tiny_tokenizer, [CALL + second, "done"])
    assert split_text(tiny_tokenizer, output)[1].split("<|im_start|>tool\n")[1:] == [
        "5<|im_end|>\n",
        "43<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    "body, answer",
    [
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; there are add, breaks, echo"),
        ('{"name": "add", "arguments": {"a": 1}}', "TypeError: missing a required argument: 'b'"),
        ('{"name": "breaks"}', "ZeroDivisionError: of its own"),
        ('{"name": "add", "arguments": [1, 2]}', "this is no tool call"),
        ("add 1 and 2", "this is no tool call (JSONDecodeError"),
        ("[1]", "this is no tool call"),
        ('{"name": "echo", "arguments": {"text": "x"}}', '{"text": "x"}'),
    ],
)
def test_a_call_that_fails_is_an_answer(tiny_tokenizer, body, answer):
    output, _ = run(tiny_tokenizer, [f"<tool_call>{body}</tool_call>", "Sorry."])
    assert answer in split_text(tiny_tokenizer, output)[1] and output.num_turns == 4


def test_turns_and_length_are_limits(tiny_tokenizer):
    assert run(tiny_tokenizer, [CALL] * 3, max_turns=2)[0].num_turns == 4
    turn = len(tiny_tokenizer.encode(CALL)) + 1
    cut, _ = run(tiny_tokenizer, [CALL], length=turn - 1)
    assert len(cut.response_ids) == turn - 1 and cut.num_turns == 2
    full, _ = run(tiny_tokenizer, [CALL], length=turn + 2)  # the answer does not fit
    assert len(full.response_ids) == turn and set(full.response_mask) == {1}


def test_a_tool_that_never_answers_times_out(monkeypatch):
    monkeypatch.setattr("hybridrl.serving.agent_loop.tools.function_tools.TOOL_TIMEOUT_S", 0.05)

    @function_tool
    async def forever() -> None:
        await asyncio.Event().wait()

    assert asyncio.run(call_tool({"forever": forever}, "forever", {})) == "Error: forever did not answer within 0.05 s"


def test_tools_are_loaded_from_a_file_and_mistakes_are_rejected(tmp_path: Path, tiny_tokenizer):
    tools = (
        "from hybridrl.serving.agent_loop import function_tool\n@function_tool\ndef one():\n    return 1\ndef "
        "no(): ...\n"
    )
    (tmp_path / "tools.py").write_text(tools)
    assert list(load_tools(str(tmp_path / "tools.py"), key="k")) == ["one"]
    named = tools.replace("@function_tool\n", '@function_tool("first")\n') + "@function_tool()\ndef two(): ...\n"
    (tmp_path / "named.py").write_text(named)
    assert list(load_tools(str(tmp_path / "named.py"), key="k")) == ["first", "two"]
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function in it is marked with @function_tool"):
        load_tools(str(tmp_path / "none.py"), key="k")
    with pytest.raises(ConfigError, match="k=.*absent.py: no file"):
        load_tools(str(tmp_path / "absent.py"), key="k")
    with pytest.raises(ConfigError, match="no agent loop 'tool_agnet'.*registered: .*single_turn_agent, tool_agent"):
        lookup_agent_loop("tool_agnet")
    with pytest.raises(ConfigError, match="tool_agent needs tools"):
        lookup_agent_loop("tool_agent")(AgentLoopContext(tiny_tokenizer, 10))
    with pytest.raises(ValueError, match="2 tokens, a mask of 1"):
        AgentLoopOutput([1], [2, 3], [1], [0.0, 0.0])


def test_options_of_the_chat_template_hold_for_answers_of_tools(tiny_tokenizer):
    tokenizer = copy.copy(tiny_tokenizer)
    tokenizer.chat_template += "{%- if add_generation_prompt and thoughts is false -%}<think></think>{%- endif -%}"
    texts = []
    for options in ({}, {"thoughts": False}):
        loop = lookup_agent_loop("tool_agent")(AgentLoopContext(tokenizer, 200, TOOLS, template_options=options))
        texts.append(tokenizer.decode(loop.render_messages([], ["3"])))
    assert texts[1] == texts[0] + "<think></think>"
