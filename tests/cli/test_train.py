"""`hybridrl train`: the command that it prints, for each kind of data, and that this command trains."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import cli, main_dpo, main_ppo, main_sft
from hybridrl.cli.arguments import command_parser
from hybridrl.cli.data.inspection import row_tokens
from hybridrl.cli.train import chosen_run
from hybridrl.planning.machine import ThisMachine
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.tokenizer import load_tokenizer
from tests.support.end_to_end.runs import metrics, write_prompts, write_reward

GIB = 2**30


def lines(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def command(capsys, data: str, model, *settings: str) -> tuple[str, list[str]]:
    """Return the module and the settings of the command that is printed."""
    assert cli.main(["train", "--print", data, str(model), *settings]) == 0
    python, flag, module, *words = shlex.split(capsys.readouterr().out)
    assert (python, flag) == ("python", "-m")
    return module, words


def test_prompts_are_trained_by_grpo_with_lengths_of_the_data_and_the_model(tmp_path, tiny_qwen2, capsys):
    file = write_prompts(tmp_path / "a.parquet", 5)
    module, words = command(capsys, file, tiny_qwen2, "trainer.total_training_steps=2")
    assert module == "hybridrl.main_ppo" and words[0] == "--config-name=grpo_trainer"
    chosen = dict(word.split("=", 1) for word in words[1:])
    prompt = int(chosen["data.max_prompt_length"])
    assert prompt % 32 == 0 and int(chosen["data.max_response_length"]) == 256  # of a CPU; the model has 512 positions
    assert chosen["actor_rollout_ref.actor.use_prefix_grouper"] == "true"
    assert chosen["data.train_batch_size"] == "5" and chosen["trainer.total_training_steps"] == "2"
    assert main_ppo.main([*words, "--cfg", "job"]) == 0


def test_responses_are_as_long_as_sampled_answers_and_prompts_as_nearly_all_rows(tmp_path, tiny_qwen2, capsys):
    model = shutil.copytree(tiny_qwen2, tmp_path / "model")
    every_token = {"eos_token_id": [*range(json.loads((model / "config.json").read_text())["vocab_size"])]}
    (model / "generation_config.json").write_text(json.dumps(every_token))
    rows = [{"prompt": "a b", "ground_truth": "c"}] * 200 + [{"prompt": "a b " * 150, "ground_truth": "c"}]
    assert cli.main(["train", "--print", lines(tmp_path / "a.jsonl", *rows), str(model)]) == 0
    printed = capsys.readouterr()
    assert "data.max_response_length=32 " in printed.out and "data.max_prompt_length=32 " in printed.out
    assert "16 of 16 sampled answers end before token 256, 95 % of these before token 2\n" in printed.err
    assert "if responses have 1 tokens;" in printed.err  # as the sampled ones have


@pytest.mark.parametrize(
    ("row", "module", "program"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "main_sft", main_sft),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "main_dpo", main_dpo),
        ({"prompt": "a", "completion": "b", "label": True}, "main_dpo", main_dpo),
    ],
)
def test_the_columns_choose_the_program(tmp_path, tiny_qwen2, capsys, row, module, program):
    found, words = command(capsys, lines(tmp_path / "a.jsonl", row), tiny_qwen2)
    assert found == f"hybridrl.{module}" and ("loss.loss_type=kto" in words) == ("label" in row)
    assert "data.max_token_len_per_gpu=4096" in words  # of a CPU
    assert program.main([*words, "--cfg", "job"]) == 0


def test_fine_tuning_says_the_expected_seconds_for_the_rows_mean_tokens(tmp_path, tiny_qwen2, capsys):
    rows = [{"messages": [{"role": "assistant", "content": text}]} for text in ("b", "b b", "b b b", "b " * 9)]
    file, tokenizer = lines(tmp_path / "a.jsonl", *rows), load_tokenizer(str(tiny_qwen2), key="")
    tokens = [*map(len, row_tokens(ParquetRows(file), "messages", tokenizer, is_prompt=False))]
    assert cli.main(["train", "--print", file, str(tiny_qwen2), "data.train_batch_size=2"]) == 0
    assert f" s, 2 conversations of {round(sum(tokens) / 4)} tokens\n" in capsys.readouterr().err


def test_gpus_get_ray_and_what_does_not_fit_is_refused(tmp_path, tiny_qwen2):
    file = write_prompts(tmp_path / "a.parquet", 5)
    arguments = command_parser().parse_args(["train", file, str(tiny_qwen2)])
    arguments.settings = []
    words = chosen_run(arguments, ThisMachine("cuda", "H100", 80 * GIB, cores=16, gpus=4, bfloat16="")).words
    assert "trainer.n_gpus_per_node=4" in words and "trainer.backend=local" not in words
    assert not [word for word in words if "prefix_grouper" in word]  # its kernel has not been run on a GPU
    with pytest.raises(ValueError, match="does not fit into this machine's memory"):
        chosen_run(arguments, ThisMachine("cuda", "tiny", 1e6, cores=1, gpus=1, bfloat16=""))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("absent", "DATA absent: no such file; give a parquet or .jsonl file"),
        ("other.jsonl", "no program reads its columns"),
    ],
)
def test_data_that_cannot_be_trained_is_one_error(tmp_path, monkeypatch, tiny_qwen2, data, text, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "other.jsonl", {"question": "a"})
    assert cli.main(["train", data, str(tiny_qwen2)]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_a_wrong_setting_is_refused_before_answers_are_sampled(tmp_path, tiny_qwen2, capsys):
    file = write_prompts(tmp_path / "a.parquet", 5)
    assert cli.main(["train", "--print", file, str(tiny_qwen2), "data.max_response_lenght=9"]) == 2
    error = capsys.readouterr().err
    assert "did you mean data.max_response_length?" in error and "sampled answers" not in error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_trains(tmp_path, tiny_qwen2):
    file, reward = write_prompts(tmp_path / "a.parquet", 6), write_reward(tmp_path / "reward.py")
    settings = ["trainer.total_training_steps=1", "data.max_response_length=8", "trainer.num_threads=1"]
    settings += [f"custom_reward_function.path={reward}", "trainer.logger=[console,jsonl]"]
    words = ["train", file, str(tiny_qwen2), *settings, f"trainer.default_local_dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, "-m", "hybridrl.cli", *words], timeout=250, check=True, cwd=tmp_path)
    assert [row["step"] for row in metrics(tmp_path / "run") if "critic/score/mean" in row] == [1]


def test_columns_of_ones_own_choose_the_program_by_their_names(tmp_path, tiny_qwen2, capsys):
    file = lines(tmp_path / "qa.jsonl", {"question": "2 + 3 =", "answer": "5"})
    own = ["data.prompt_key=question", "data.ground_truth_key=answer"]
    module, words = command(capsys, file, tiny_qwen2, *own)
    assert module == "hybridrl.main_ppo" and {*own} <= {*words}
    assert cli.main(["train", "--print", file, str(tiny_qwen2)]) == 2
    assert "no program reads its columns question, answer" in capsys.readouterr().err
