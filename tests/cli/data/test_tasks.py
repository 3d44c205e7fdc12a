"""`hybridrl data list` and `inspect`: what is known, what is in a file, and what would be refused."""

import json

import pytest

from hybridrl import cli
from hybridrl.cli.data import tasks
from tests.support.end_to_end.runs import write_prompts


def inspect(capsys, *words: str) -> tuple[int, str]:
    code = cli.main(["data", "inspect", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def lines(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_known_tasks_are_listed_with_their_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    (tmp_path / "gsm8k").mkdir()
    write_prompts(tmp_path / "gsm8k" / "test.parquet", 1)
    assert cli.main(["data", "list"]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'gsm8k'}: test" in shown and "python -m data_preprocess.arithmetic" in shown
    assert all(name in shown for name in tasks.TASKS)


def test_a_good_file_has_columns_meanings_and_lengths(tmp_path, tiny_qwen2, tiny_tokenizer, capsys):
    file = write_prompts(tmp_path / "a.parquet", 5)
    code, shown = inspect(capsys, file, "--model", str(tiny_qwen2))
    assert code == 0 and f"{file}: 5 rows, for main_ppo" in shown and "chooses the score function" in shown
    longest = max(
        len(tiny_tokenizer.apply_chat_template([row], add_generation_prompt=True, return_dict=True)["input_ids"])
        for row in (
            {"role": "user", "content": f"Tom buys {i} boxes of {i} {word}. How many?"}
            for i, word in enumerate(("pens", "boxes", "dollars", "coins", "pens"))
        )
    )
    assert f"longest {longest}; data.max_prompt_length={longest} keeps all rows" in shown
    assert shown.endswith("nothing would be refused\n") and shown.count("\n") < 24


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"prompt": "x"}, {"prompt": ""}, {"prompt": None}], ["row 1: expected a non-empty list", "(2 rows)"]),
        ([{"prompt": "x", "reward_model": "4"}], ["column 'reward_model' must have a mapping in every row"]),
        ([{"messages": [{"role": "user"}]}], ["for main_sft", "expected a message with role and content", "(1 rows)"]),
        ([{"question": "x"}], ["for no program", "no program reads these columns", "chosen, rejected"]),
        ([{"prompt": "x"}], ["note: no row has a data_source", "note: there is no reward_model"]),
        ([{"prompt": "x", "data_source": "mine"}], ["note: data_source 'mine' has no score function"]),
        (
            [{"prompt": "x", "reward_model": {"ground_truth": "4"}}, {"prompt": "y", "reward_model": None}],
            ["refused: 1 of 2 rows have no reward_model.ground_truth"],
        ),
    ],
)
def test_what_is_wrong_or_may_surprise_is_said(tmp_path, capsys, rows, expected):
    code, shown = inspect(capsys, lines(tmp_path / "a.jsonl", *rows))
    assert all(text in shown for text in expected), shown
    assert code == ("\nrefused: " in shown) and shown.count("\n") < 24


def test_a_file_that_cannot_be_read_is_one_error(tmp_path, capsys):
    (tmp_path / "a.parquet").write_text("no parquet")
    code, shown = inspect(capsys, str(tmp_path / "a.parquet"))
    assert code == 2 and "not a parquet file" in shown and shown.count("\n") == 1


def test_columns_of_ones_own_are_inspected_by_their_names(tmp_path, capsys):
    (tmp_path / "qa.jsonl").write_text('{"question": "2 + 3 =", "answer": "5"}\n')
    file, own = str(tmp_path / "qa.jsonl"), ["data.prompt_key=question", "data.ground_truth_key=answer"]
    assert cli.main(["data", "inspect", file]) == 1 and "data.prompt_key=COLUMN" in capsys.readouterr().out
    assert cli.main(["data", "inspect", file, *own]) == 0
    shown = capsys.readouterr().out
    assert "1 rows, for main_ppo" in shown and "nothing would be refused" in shown and "no ground truth" not in shown
    assert cli.main(["data", "inspect", file, "data.prompt_key=prompt"]) == 2
    assert "no such column (data.prompt_key=prompt); it has question, answer" in capsys.readouterr().err


def test_a_blank_response_is_found_by_the_inspection(tmp_path, capsys):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": " "}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["data", "inspect", str(tmp_path / "a.jsonl")]) == 1
    assert "a.jsonl row 1: the response is blank; remove the row" in capsys.readouterr().out
