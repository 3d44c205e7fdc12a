"""`environment_agent` with real environment processes and a scripted policy."""

import copy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.vision.build_model import build_model
from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.serving.agent_loop.failures import FailureSort, cause_of, sort_failure
from hybridrl.serving.environments import pool
from hybridrl.serving.environments.process import CRASHED, HANGS, NONSENSE
from tests.support.workers.image_cases import TEXTS, read_processor

FILE = Path(__file__).parents[2] / "support" / "serving" / "sample_environments.py"
GUESS = {"class_name": f"{FILE}:Guess"}


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_the_policy_and_the_environment_take_turns(play, tiny_tokenizer):
    rows = ({"number": 3}, ["5", "3"]), ({"number": 4, "opening": ""}, ["4"])
    first, second = play(GUESS | {"config": {"low": "lower"}}, *rows)
    start = "<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(first.prompt_ids) == turn("system", "Guess.") + turn("user", "Which number?") + start
    assert tiny_tokenizer.decode(first.response_ids) == f"5<|im_end|>\n{turn('user', 'lower 1')}{start}3<|im_end|>"
    own = [token for token, mask in zip(first.response_ids, first.response_mask, strict=True) if mask]
    assert tiny_tokenizer.decode(own) == "5<|im_end|>3<|im_end|>"
    assert first.reward == 0.75 and first.counts == {"environment/steps": 2.0}
    # Without a first observation the prompt is that of the row.
    assert tiny_tokenizer.decode(second.prompt_ids) == "given" and second.reward == 1.0


def test_every_turn_is_rendered_with_the_options_of_the_template(play, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template += "{% if add_generation_prompt and note is defined %}{{ note }}{% endif %}"
    [output] = play(GUESS, ({"number": 3}, ["5", "3"]), reader=(tokenizer, None), options={"note": "brief "})
    start = "<|im_start|>assistant\nbrief "
    assert tokenizer.decode(output.prompt_ids).endswith(start)
    assert tokenizer.decode(output.response_ids).count(start) == 1


def test_an_episode_ends_at_the_last_turn_and_where_no_answer_fits(play):
    rows = [({"number": 3}, ["5", "6", "7"])]
    assert play(GUESS | {"reward": "last"}, *rows, max_turns=2)[0].reward == -0.25
    [cut] = play(GUESS, *rows, length=12)  # "5", its end, and then an observation of more than 10 tokens
    assert sum(cut.response_mask) == len(cut.response_ids) == 2 and cut.reward == -0.25
    [none] = play(GUESS, *rows, length=1)  # the action itself is cut off
    assert none.reward == 0.0 and none.counts == {"environment/steps": 0.0}


def test_an_environment_gives_the_last_reward_of_an_episode_that_is_cut(play):
    judged = {"class_name": f"{FILE}:JudgedGuess", "reward": "last"}
    [by_turns] = play(judged, ({"number": 3}, ["5", "6", "7"]), max_turns=2)
    assert by_turns.reward == 0.375 and by_turns.counts == {"environment/steps": 2.0}
    assert play(judged, ({"number": 3}, ["5", "6", "7"]), length=12)[0].reward == 0.375
    assert play(judged, ({"number": 3}, ["3"]))[0].reward == 0.0  # the environment has ended it
    with pytest.raises(AgentFailed, match="nan from `finish`.*finite number or None"):
        play(judged, ({"number": -1}, ["5", "6"]), max_turns=1)


def test_async_methods_and_the_interactions_of_verl_are_environments(play, tiny_tokenizer):
    assert play({"class_name": f"{FILE}:AsyncGuess"}, ({"number": 1}, ["1"]))[0].reward == 1.0
    entry = {"class_name": f"{FILE}:Polite", "config": {"greeting": "hi"}}
    [output] = play(entry, ({"wanted": "b"}, ["a", "b"]))
    text = tiny_tokenizer.decode(output.response_ids)
    assert "user\nit 2 hi<|im_end|>" in text and output.reward is None
    assert play(entry | {"reward": "sum"}, ({"wanted": "b"}, ["a", "b"]))[0].reward == 1.0
    with pytest.raises(ConfigError, match="data_source=environment: the environment 'it' says no reward"):
        play(entry, ({"wanted": "b"}, ["b"]), data_source="environment")


@pytest.mark.parametrize(
    ("fault", "cause", "sort"),
    [
        ("crash", CRASHED, FailureSort.INFRASTRUCTURE),
        ("exit", "SystemExit", FailureSort.INFRASTRUCTURE),
        ("hang", HANGS, FailureSort.INFRASTRUCTURE),
        ("memory", "MemoryError", FailureSort.INFRASTRUCTURE),
        ("bug", "TypeError", FailureSort.INFRASTRUCTURE),
        ("nan", NONSENSE, FailureSort.INFRASTRUCTURE),
        ("none", NONSENSE, FailureSort.INFRASTRUCTURE),
        ("short", NONSENSE, FailureSort.INFRASTRUCTURE),
        ("object", "TypeError", FailureSort.INFRASTRUCTURE),
        ("forge", NONSENSE, FailureSort.INFRASTRUCTURE),
        ("row", "DataError", FailureSort.DATA),
    ],
)
def test_a_fault_is_sorted_and_the_next_episode_gets_another_process(play, fault, cause, sort):
    calm = GUESS | {"limits": {"memory_mb": 500}, "step_timeout_s": 30.0}
    entry = calm | ({"step_timeout_s": 1.0} if fault == "hang" else {})
    with pytest.raises((AgentFailed, DataError), match="environment 'it'") as caught:
        play(entry, ({"number": 3, "fault": fault}, ["3"]))
    assert cause_of(caught.value) == cause and sort_failure(caught.value) is sort
    [shared] = pool._pools.values()
    assert shared._idle == []
    [output] = play(calm, ({"number": 3}, ["5", "3"]))
    assert output.reward == 0.75


def test_observations_may_have_pictures(play, tmp_path):
    tokenizer, processor = read_processor(str(build_model(tmp_path / "model", texts=TEXTS)))
    [output] = play({"class_name": f"{FILE}:Pictures"}, ({}, ["a", "b"]), reader=(tokenizer, processor))
    ids = [*output.prompt_ids, *output.response_ids]
    starts, numbers = output.images["image_starts"], output.images["image_tokens"]
    assert numbers.tolist() == [2, 1] and starts[0] < len(output.prompt_ids) < starts[1]
    for start, number in zip(starts, numbers, strict=True):
        assert ids[start - 1 : start + number + 1] == tokenizer.encode(
            f"<|vision_start|>{'<|image_pad|>' * number}<|vision_end|>"
        )
    shown = [Image.new("RGB", size, colour) for size, colour in (((32, 16), "red"), ((16, 16), "blue"))]
    _, expected = processor(np.array([processor.token_id] * 2), shown)
    assert output.images["image_hashes"].tolist() == expected["image_hashes"].tolist() and output.reward == 1.0


def test_a_copy_of_the_process_does_not_answer(play):
    outputs = play(GUESS, ({"number": 3, "fault": "fork"}, ["3"]), ({"number": 3}, ["5", "3"]))
    assert [output.reward for output in outputs] == [0.5, 0.75]


def test_rows_and_templates_that_do_not_fit_are_refused(play, tiny_tokenizer, monkeypatch):
    with pytest.raises(ConfigError, match="name='maze': .*no such environment.*: it"):
        play(GUESS, ({"name": "maze"}, ["3"]))
    with pytest.raises(DataError, match="first observation have .* tokens; data.max_prompt_length is 200"):
        play(GUESS, ({"number": 3, "opening": "so many words " * 200}, ["3"]))
    with pytest.raises(ConfigError, match="'it' .*:Unmakeable. .*FileNotFoundError: no such level"):
        play({"class_name": f"{FILE}:Unmakeable"})
