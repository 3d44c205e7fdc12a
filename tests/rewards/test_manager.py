"""Reward managers: numbers worked out by hand, masked and counted failures, and the way from a config to a manager."""

import logging
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridrl.config import PPOConfig, from_dict
from hybridrl.config.schema.workers import OverlongBufferConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards import BatchRewardManager, DAPORewardManager, RewardManager, load_reward_manager

torch.set_num_threads(1)

WORDS = ["<pad>", "<eos>", "####", "5", "6", "what", "boom", "hang", "number"]
PAD, EOS = 0, 1
WIDTH, PROMPT_WIDTH = 6, 3


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_batch(texts: list[str], *, truths: list[str] | None = None, sources: list[str] | None = None) -> DataProto:
    """Return a batch as generation leaves it.

    Prompt "what" is left-padded to 3; responses with EOS are right-padded to 6 with tokens that must never be read.
    """
    rows = len(texts)
    tokens = [[WORDS.index(word) for word in text.split()] + [EOS] for text in texts]
    garbage = WORDS.index("6")  # after the end, where the mask is 0: must never be read
    responses = torch.tensor([row + [garbage] * (WIDTH - len(row)) for row in tokens])
    response_mask = torch.tensor([[1] * len(row) + [0] * (WIDTH - len(row)) for row in tokens])
    prompts = torch.tensor([[PAD, PAD, WORDS.index("what")]] * rows)
    attention_mask = torch.cat([(prompts != PAD).long(), response_mask], dim=-1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
    }
    columns = {
        "data_source": sources or ["openai/gsm8k"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths or ["5"] * rows],
        "extra_info": [{"row": row} for row in range(rows)],
        "index": [100 + row for row in range(rows)],
    }
    arrays = {name: np.fromiter(values, dtype=object, count=rows) for name, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)


@pytest.fixture
def manager(tokenizer):
    managers = []

    def make(compute_score=None, *, cls=RewardManager, num_examine=0, timeout_s=30.0, **settings):
        managers.append(cls(tokenizer, num_examine, compute_score, timeout_s=timeout_s, **settings))
        return managers[-1]

    yield make
    for each in managers:
        each.close()


@pytest.fixture
def scripted():
    """A function pickled by value. By name, its process would import this module and with it torch."""

    def score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "boom":
            raise RuntimeError("it went wrong")
        if solution_str == "hang":
            time.sleep(600)
        return {"score": 0.5, "acc": True}

    return score


def test_the_score_is_on_the_last_valid_token_only(manager):
    output = manager()(make_batch(["#### 5", "#### 6", "what what #### 5", "5"]))
    # lengths with EOS: 3, 3, 5, 2; scores of the built-in gsm8k judge: 1, 0, 1, 0 (no mark)
    expected = torch.zeros(4, WIDTH)
    expected[0, 2] = expected[2, 4] = 1.0
    assert torch.equal(output.reward_tensor, expected) and output.reward_tensor.dtype == torch.float32
    assert output.valid.tolist() == [True] * 4 and output.valid.dtype == torch.bool
    assert output.extra == {}
    assert output.metrics.pop("reward/time_s") > 0
    assert output.metrics == {"reward/timeout_ratio": 0.0, "reward/error_ratio": 0.0, "reward/num_failed": 0.0}


def test_a_response_of_full_width_gets_its_score_on_the_last_column(manager):
    output = manager()(make_batch(["what what what #### 5"]))
    assert output.reward_tensor.tolist() == [[0, 0, 0, 0, 0, 1]]


def test_the_score_is_on_the_last_token_of_the_policy_where_a_response_ends_with_the_environments(manager):
    batch = make_batch(["what what #### 5", "#### 5", "#### 5"])
    # tokens: 5, 3, 3; the policy sampled 0, 1 and 3 of the first row, 0 of the second, and none of the third
    batch.batch["response_mask"] = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6])
    output = manager()(batch)
    assert [row.nonzero().flatten().tolist() for row in output.reward_tensor] == [[3], [0], [2]]
    assert (output.reward_tensor * batch.batch["response_mask"]).sum(-1).tolist() == [1, 1, 0]


def test_a_batch_without_response_mask_has_the_score_on_the_last_valid_token(manager):
    batch = make_batch(["#### 5"])
    batch.batch.pop("response_mask")
    assert manager()(batch).reward_tensor.tolist() == [[0, 0, 1, 0, 0, 0]]


def test_the_function_gets_source_text_truth_and_info_of_its_row(manager):
    def echo(data_source, solution_str, ground_truth, extra_info, factor):
        return {"score": factor * extra_info["row"], "seen": (data_source, solution_str, ground_truth, extra_info)}

    output = manager(echo, kwargs={"factor": 2})(make_batch(["5 6", "6"], truths=["7", "8"], sources=["a", "b"]))
    assert output.reward_tensor.sum(-1).tolist() == [0, 2]
    assert output.extra == {"seen": [["a", "5 6", "7", {"row": 0}], ["b", "6", "8", {"row": 1}]]}


def test_failed_samples_are_masked_counted_and_logged(manager, caplog, scripted):
    with caplog.at_level(logging.WARNING):
        output = manager(scripted, timeout_s=0.5)(
            make_batch(["5", "boom", "hang", "6 6"], sources=["a", "b", "c", "d"])
        )
    assert output.valid.tolist() == [True, False, False, True]
    assert output.reward_tensor.sum(-1).tolist() == [0.5, 0, 0, 0.5]
    assert output.extra == {"acc": [True, None, None, True]}
    assert {name: value for name, value in output.metrics.items() if name != "reward/time_s"} == {
        "reward/timeout_ratio": 0.25,
        "reward/error_ratio": 0.25,
        "reward/num_failed": 2.0,
    }
    boom, hang, count = [record.getMessage() for record in caplog.records]
    assert "data_source=b index=101" in boom and "RuntimeError: it went wrong" in boom
    assert "data_source=c index=102" in hang and "not done after 0.5 s" in hang
    assert count == "no reward for 2 of 4 samples; they are left out of the loss"


def test_each_reason_is_logged_once(manager, caplog, scripted):
    with caplog.at_level(logging.WARNING):
        output = manager(scripted)(make_batch(["boom"] * 50))
    assert output.metrics["reward/num_failed"] == 50 and not output.valid.any()
    assert len(caplog.records) == 2 and "50 of 50" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (float("nan"), "it returned nan"),
        (float("-inf"), "it returned -inf"),
        ({"score": float("inf")}, "it returned inf"),
        (-1e39, "it returned -1e+39, more than float32 can hold"),
        ({"acc": 1}, 'without "score", only acc'),
        ("1.0", "it returned a str"),
        (None, "it returned a NoneType"),
        ([1.0], "it returned a list"),
    ],
)
def test_a_result_that_is_no_finite_number_is_an_error_and_not_a_zero(manager, caplog, returned, reason):
    output = manager(lambda **_: returned)(make_batch(["5"]))
    assert output.valid.tolist() == [False]
    assert output.metrics["reward/error_ratio"] == 1.0
    assert reason in caplog.text


@pytest.mark.parametrize("returned", [1, True, np.float32(1.0), np.array([1.0]), {"score": np.int64(1)}])
def test_numbers_of_python_and_numpy_are_scores(manager, returned):
    output = manager(lambda **_: returned)(make_batch(["5"]))
    assert output.valid.all() and output.reward_tensor.sum() == 1.0


def test_an_async_function_is_a_reward_function(manager):
    async def judge(data_source, solution_str, ground_truth, extra_info):
        return len(solution_str)

    assert manager(judge)(make_batch(["5", "5 6 5"])).reward_tensor.sum(-1).tolist() == [1, 5]


def judged_by_model(texts: list[str], scores: list[float]) -> DataProto:
    """Return a batch with a reward model's scores. Texts have one token, so with EOS the last is the second."""
    batch = make_batch(texts)
    batch.batch["rm_scores"] = torch.tensor([[0.0, score, 0, 0, 0, 0] for score in scores])
    return batch


def test_without_a_custom_function_rm_scores_are_the_reward_and_rows_with_nan_are_invalid(manager):
    output = manager()(judged_by_model(["5", "5"], [0.25, float("nan")]))
    assert output.reward_tensor.tolist() == [[0, 0.25, 0, 0, 0, 0], [0.0] * 6]
    assert output.valid.tolist() == [True, False] and output.metrics["reward/error_ratio"] == 0.5


@pytest.mark.parametrize("validate", [False, True])
def test_a_custom_function_decides_and_may_read_the_reward_models_score(manager, validate):
    def halved(data_source, solution_str, ground_truth, extra_info):
        return extra_info["rm_score"] / 2 + extra_info["row"]

    output = manager(halved, validate=validate)(judged_by_model(["5", "5"], [0.5, -3.0]))
    assert output.reward_tensor.sum(-1).tolist() == [0.25, -0.5]
    batched = manager(
        lambda data_sources, solution_strs, ground_truths, extra_infos: [info["rm_score"] for info in extra_infos],
        cls=BatchRewardManager,
        validate=validate,
    )
    assert batched(judged_by_model(["5", "5"], [0.5, -3.0])).reward_tensor.sum(-1).tolist() == [0.5, -3.0]


def test_validation_is_by_rule_where_a_row_has_one(manager):
    batch = judged_by_model(["5", "5", "5"], [0.5, -3.0, float("inf")])
    batch.batch["responses"][0, :2] = torch.tensor([WORDS.index("####"), WORDS.index("5")])
    for row in (1, 2):
        batch.non_tensor_batch["reward_model"][row] = {"style": "model", "ground_truth": "what was chosen"}
    output = manager(validate=True)(batch)
    assert output.reward_tensor.sum(-1).tolist() == [1.0, -3.0, 0.0] and output.valid.tolist() == [True, True, False]


def test_return_dict_gives_the_names_of_verl(manager, scripted):
    result = manager(scripted)(make_batch(["5"]), return_dict=True)
    assert result["reward_tensor"].sum() == 0.5 and result["reward_extra_info"] == {"acc": [True]}
    assert result["reward_valid"].tolist() == [True]


def test_an_empty_batch_and_a_row_without_tokens_are_scored(manager):
    batch = make_batch(["5", "5"])
    batch.batch["attention_mask"][0, PROMPT_WIDTH:] = 0
    batch.batch["response_mask"][0] = 0
    make = manager(lambda **_: 1.0)
    assert make(batch).reward_tensor.tolist() == [[0.0] * WIDTH, [0, 1, 0, 0, 0, 0]]
    empty = make(batch[[]])
    assert empty.reward_tensor.shape == (0, WIDTH) and empty.metrics["reward/num_failed"] == 0


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_a_missing_column_is_named(manager, column, scripted):
    batch = make_batch(["5"])
    del batch.non_tensor_batch[column]
    with pytest.raises(DataError, match=f"no column '{column}'"):
        manager(scripted)(batch)


def test_reward_fn_key_names_the_column_of_the_source(manager):
    batch = make_batch(["#### 5"], sources=["unknown"])
    batch.non_tensor_batch["task"] = np.array(["openai/gsm8k"], dtype=object)
    assert manager(reward_fn_key="task")(batch).reward_tensor.sum() == 1.0


def test_the_error_for_an_unknown_data_source_lists_the_known_ones(manager, caplog):
    output = manager()(make_batch(["#### 5"], sources=["mine"]))
    assert not output.valid.any() and "data_source='mine'" in caplog.text and "openai/gsm8k" in caplog.text


def test_first_samples_of_each_source_are_logged_once(manager, caplog, scripted):
    examined = manager(scripted, num_examine=1)
    with caplog.at_level(logging.INFO):
        examined(make_batch(["5", "6", "5 5"], sources=["a", "a", "b"]))
        examined(make_batch(["5"], sources=["a"]))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines == [
        "sample of a: prompt 'what', response '5', ground truth '5', score 0.5",
        "sample of b: prompt 'what', response '5 5', ground truth '5', score 0.5",
    ]


def test_a_pickled_manager_scores_the_same(manager):
    copy = pickle.loads(pickle.dumps(manager()))
    assert copy(make_batch(["#### 5"])).reward_tensor.sum() == 1.0
    copy.close()


def test_batch_manager_calls_once_with_lists(manager):
    def score_all(data_sources, solution_strs, ground_truths, extra_infos, bonus):
        calls.append(1)
        return [
            {"score": len(text) + bonus, "calls": len(calls)} if row else 0.5 for row, text in enumerate(solution_strs)
        ]

    calls = []
    output = manager(score_all, cls=BatchRewardManager, kwargs={"bonus": 1})(make_batch(["5", "5 6", "6"]))
    assert output.reward_tensor.sum(-1).tolist() == [0.5, 4, 2]
    assert output.extra == {"calls": [None, 1, 1]}


@pytest.mark.parametrize(
    ("returned", "reason"), [([1.0], "must return 2 scores"), (1.0, "must return 2 scores"), (1 / 3, "0.333")]
)
def test_batch_function_that_returns_another_number_of_scores_fails_all(manager, caplog, returned, reason):
    output = manager(lambda **_: returned, cls=BatchRewardManager)(make_batch(["5", "6"]))
    assert not output.valid.any() and reason in caplog.text


def test_batch_samples_fail_one_by_one_where_only_one_score_is_bad(manager):
    output = manager(lambda **_: [1.0, float("nan")], cls=BatchRewardManager)(make_batch(["5", "6"]))
    assert output.valid.tolist() == [True, False]


def test_a_batch_function_may_return_an_array_also_of_one_sample(manager):
    def score_all(data_sources, solution_strs, ground_truths, extra_infos):
        import numpy

        return numpy.array([len(text) for text in solution_strs], dtype=numpy.float32)

    batched = manager(score_all, cls=BatchRewardManager)
    assert batched(make_batch(["5", "5 6"])).reward_tensor.sum(-1).tolist() == [1, 3]
    assert batched(make_batch(["5 6"])).reward_tensor.sum(-1).tolist() == [3]


def test_batch_manager_needs_a_function(manager):
    with pytest.raises(ConfigError, match="data_sources, solution_strs"):
        manager(cls=BatchRewardManager)


def test_the_dapo_penalty_equals_numbers_worked_out_by_hand(manager):
    # limit 6, buffer 4, factor 0.5: no penalty up to 2 tokens, then 1/4 * 0.5 for each token more
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=0.5)
    dapo = manager(lambda **_: 1.0, cls=DAPORewardManager, max_response_length=6, overlong_buffer=buffer)
    output = dapo(make_batch(["5", "5 5", "5 5 5", "5 5 5 5 5"]))  # with EOS 2, 3, 4, 6 tokens
    assert output.reward_tensor.sum(-1).tolist() == [1.0, 0.875, 0.75, 0.5]
    penalties = {"overlong_reward": [0.0, -0.125, -0.25, -0.5], "overlong": [False, True, True, True]}
    assert output.extra == {"acc": [1.0] * 4} | penalties


def test_dapo_names_a_plain_score_acc_and_keeps_what_a_function_returns(manager):
    plain = manager(lambda **_: 0.5, cls=DAPORewardManager)(make_batch(["5"]))
    own = manager(lambda **_: {"score": 0.5, "acc": 1.0}, cls=DAPORewardManager)(make_batch(["5"]))
    failed = manager(lambda **_: float("nan"), cls=DAPORewardManager)(make_batch(["5"]))
    assert (plain.extra, own.extra, failed.extra) == ({"acc": [0.5]}, {"acc": [1.0]}, {})


def test_dapo_without_penalty_scores_as_the_naive_manager_and_a_failed_sample_stays_without_score(manager, scripted):
    batch = make_batch(["5", "boom boom boom", "boom"])
    plain = manager(scripted)(batch)
    off = manager(scripted, cls=DAPORewardManager, max_response_length=6, overlong_buffer=OverlongBufferConfig(len=4))(
        batch
    )
    assert torch.equal(off.reward_tensor, plain.reward_tensor) and off.extra == plain.extra
    on = manager(
        scripted, cls=DAPORewardManager, max_response_length=6, overlong_buffer=OverlongBufferConfig(enable=True, len=6)
    )(batch)
    assert on.valid.tolist() == [True, True, False] and on.reward_tensor[2].sum() == 0


@pytest.mark.parametrize(("length", "limit"), [(0, 6), (7, 6), (4, None)])
def test_dapo_refuses_a_buffer_that_does_not_fit(manager, length, limit, scripted):
    with pytest.raises(ConfigError, match=f"overlong_buffer.len={length}"):
        manager(
            scripted,
            cls=DAPORewardManager,
            max_response_length=limit,
            overlong_buffer=OverlongBufferConfig(enable=True, len=length),
        )


def test_a_manager_of_the_users_is_named_by_its_import_path(tmp_path, loaded):
    (tmp_path / "mine.py").write_text(
        "from hybridrl.rewards import RewardManager\n\n\nclass Halved(RewardManager):\n"
        "    def adjust(self, scores, lengths_B):\n        return [score.with_penalty(-0.5) for score in scores]\n"
    )
    manager = loaded(make_config(kind=f"{tmp_path / 'mine.py'}:Halved"))
    assert type(manager).__name__ == "Halved" and manager.max_response_length == WIDTH
    with pytest.raises(ConfigError, match="^reward_model.reward_manager=no_such_module:Halved: no module named"):
        loaded(make_config(kind="no_such_module:Halved"))


VERLS = """
class Plain:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer = tokenizer
    def __call__(self, data, return_dict=False):
        return data
class Narrow(Plain):
    def __init__(self, tokenizer, num_examine, compute_score=None):
        self.tokenizer = tokenizer
from hybridrl.rewards import RewardManager
class Derived(RewardManager):
    __init__, __call__ = Plain.__init__, Plain.__call__
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Plain", "Plain has no check_function, close; derive it from hybridrl.rewards.RewardManager"),
        (
            "Narrow",
            r"Narrow.__init__ does not take what it gets \(got an unexpected keyword argument 'num_processes'\)",
        ),
        ("Derived", r"Derived.__init__ does not call super\(\).__init__\(\*args, \*\*kwargs\)"),
    ],
)
def test_a_manager_for_verl_is_refused_before_the_run(tmp_path, loaded, name, problem):
    (tmp_path / "verls.py").write_text(VERLS)
    with pytest.raises(ConfigError, match=rf"^reward_model.reward_manager=.*:{name}: {problem}"):
        loaded(make_config(kind=f"{tmp_path / 'verls.py'}:{name}"))


def make_config(path=None, *, kind="naive", **custom) -> PPOConfig:
    settings = {
        "custom_reward_function": {"path": path and str(path), **custom},
        "reward_model": {
            "reward_manager": kind,
            "timeout_s": 30.0,
            "overlong_buffer": {"enable": kind == "dapo", "len": 3},
        },
        "data": {"max_response_length": WIDTH},
    }
    return from_dict(PPOConfig, settings)


@pytest.fixture
def loaded(tokenizer):
    managers = []

    def load(config):
        managers.append(load_reward_manager(config, tokenizer, num_examine=0))
        return managers[-1]

    yield load
    for each in managers:
        each.close()


def test_config_without_function_uses_the_built_in_ones(loaded):
    assert loaded(make_config())(make_batch(["#### 5", "5"])).reward_tensor.sum(-1).tolist() == [1, 0]


def test_config_decides_how_many_calls_run_side_by_side(loaded):
    assert loaded(make_config()).processes.num_processes == min(4, os.cpu_count())
    config = make_config()
    given = replace(config, reward_model=replace(config.reward_model, num_processes=3))
    assert loaded(given).processes.num_processes == 3


def test_config_with_a_file_uses_its_function_and_kwargs(loaded, tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def judge(data_source, solution_str, ground_truth, extra_info, bonus): return bonus"
    )
    config = make_config(tmp_path / "mine.py", name="judge", kwargs={"bonus": 0.25}, kind="dapo")
    output = loaded(config)(make_batch(["5", "5 5 5 5 5"]))  # with EOS 2 and 6 tokens of 6, buffer 3
    assert output.reward_tensor.sum(-1).tolist() == [0.25, -0.75]


def test_config_with_a_module_uses_its_compute_score(loaded):
    config = make_config("reward_score.gsm8k")
    with pytest.raises(ConfigError, match="custom_reward_function.name=compute_score in reward_score.gsm8k"):
        loaded(config)
    assert (
        loaded(make_config("reward_score", name="default_compute_score"))(make_batch(["#### 5"])).reward_tensor.sum()
        == 1.0
    )


def test_functions_that_cannot_be_used_are_rejected_with_key_value_and_fix(loaded, tmp_path):
    (tmp_path / "mine.py").write_text("def other(data_source, solution_str, ground_truth, extra_info, bonus): return 0")
    (tmp_path / "broken.py").write_text("import no_such_thing")
    (tmp_path / "typo.py").write_text("def compute_score(:\n")
    mine = tmp_path / "mine.py"
    refused = [
        (
            make_config(tmp_path / "no.py"),
            f"custom_reward_function.path={tmp_path}/no.py: no such file; give an existing",
        ),
        (
            make_config(mine),
            f"custom_reward_function.name=compute_score in {mine}: no such name there; it has other; set",
        ),
        (make_config(mine, name="other"), "missing a required argument: 'bonus'"),
        (make_config(mine, name="other", kwargs={"bonus": 1, "malus": 1}), "unexpected keyword argument 'malus'"),
        (make_config(mine, name="other", kwargs={"bonus": 1}, kind="batch"), "data_sources"),
        (make_config(tmp_path / "broken.py"), "No module named 'no_such_thing'"),
        (make_config(tmp_path / "typo.py"), "SyntaxError: invalid syntax"),
        (make_config(name="other"), "custom_reward_function.name=other: in which file?"),
        (make_config(kind="batch"), "reward_model.reward_manager: the built-in function takes one sample"),
    ]
    for config, message in refused:
        with pytest.raises(ConfigError) as caught:
            loaded(config)
        assert message in str(caught.value) and "<frozen" not in str(caught.value)
