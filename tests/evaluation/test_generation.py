"""`main_generation` and `main_eval`: a file of prompts, one with responses, its scores."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl import main_eval, main_generation
from hybridrl.errors import ConfigError
from hybridrl.evaluation.output_files import OutputParts
from hybridrl.rewards.sandbox import LocalSandbox, SandboxUnavailable
from hybridrl.trainer.data.row_files import prompt_table, write_table
from tests.support.end_to_end.runs import write_prompts, write_reward
from tests.support.sandbox_server import serve_sandbox
from tests.support.workers.image_cases import image_rows, plain_answers, save_tiny

TEXT_ONLY = """
from dataclasses import replace

from hybridrl.workers.rollout.hf import HFRollout


class TextOnly(HFRollout):
    capabilities = replace(HFRollout.capabilities, images=frozenset())
"""


def words(folder: Path, model: Path, **changes: object) -> list[str]:
    values = {
        "data.path": folder / "prompts.parquet",
        "data.output_path": folder / "out" / "responses.parquet",
        "data.n_samples": 2,
        "data.batch_size": 2,
        "model.path": model,
        "rollout.name": "hf",
        "rollout.prompt_length": 60,
        "rollout.response_length": 6,
        "trainer.backend": "local",
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def generated(tmp_path_factory, tiny_qwen2) -> Path:
    """A directory with five prompts and out/responses.parquet."""
    folder = tmp_path_factory.mktemp("generated")
    write_prompts(folder / "prompts.parquet", 5)
    assert main_generation.main(words(folder, tiny_qwen2)) == 0
    return folder


def test_the_output_has_all_columns_and_n_responses_in_each_row(generated):
    rows, prompts = pq.read_table(generated / "out" / "responses.parquet"), pq.read_table(generated / "prompts.parquet")
    assert rows.drop_columns(["responses"]).to_pylist() == prompts.to_pylist()
    texts = rows["responses"].to_pylist()
    assert [len(of_row) for of_row in texts] == [2] * 5 and len({text for of_row in texts for text in of_row}) > 5
    assert [path.name for path in (generated / "out").iterdir()] == ["responses.parquet"]  # the parts are gone


def test_a_repeated_command_generates_only_what_is_missing(generated, tmp_path, tiny_qwen2, capsys, caplog):
    whole = generated / "out" / "responses.parquet"
    again = tmp_path / "again.parquet"
    parts = tmp_path / "again.parquet.parts"
    parts.mkdir()
    expected = pq.read_table(whole)
    arguments = words(generated, tiny_qwen2, data__output_path=again)
    for start in (0, 4):  # as if the command had been killed before it wrote the part of rows 2 and 3
        pq.write_table(expected.slice(start, 2), parts / f"{start:09d}.parquet")
    assert main_generation.main(arguments) == 0
    assert "2 of 5 prompts have no responses yet" in caplog.text
    assert pq.read_table(again).to_pylist() == expected.to_pylist()
    assert main_generation.main(arguments) == 0 and "is complete already" in capsys.readouterr().out
    assert main_generation.main([*arguments, "rollout.response_length=7"]) == 2
    assert "was made with other settings, data or model" in capsys.readouterr().err


def test_a_model_that_reads_images_answers_as_plain_transformers_does(tmp_path, capsys):
    model, rows = save_tiny(tmp_path, "qwen3_vl"), image_rows(6)
    write_table(prompt_table(rows), str(tmp_path / "prompts.parquet"))
    settings = words(tmp_path, model, data__n_samples=1, rollout__temperature=0)
    assert main_generation.main(settings) == 0
    answers = pq.read_table(tmp_path / "out" / "responses.parquet")["responses"].to_pylist()
    assert answers == [[answer] for answer in plain_answers(model, rows, length=6)]
    assert len({answer for [answer] in answers[:5]}) > 1, "one question with five pictures"
    (tmp_path / "text_only.py").write_text(TEXT_ONLY)
    name = f"{tmp_path}/text_only.py:TextOnly"
    assert main_generation.main([*settings, f"rollout.name={name}", "data.batch_size=3"]) == 2
    assert f"rollout.name={name}: it does not run with images" in capsys.readouterr().err


def test_parts_of_another_output_are_refused(tmp_path):
    table = pa.table({"a": [1]})
    first = OutputParts(str(tmp_path / "x.parquet"), num_rows=2, size=1, made_from={"seed": 1})
    first.write(0, table)
    assert [*first.missing()] == [(1, 2)]
    with pytest.raises(ConfigError, match=r"data.output_path=.*000000000.parquet was made with other settings"):
        OutputParts(str(tmp_path / "x.parquet"), num_rows=2, size=1, made_from={"seed": 2})


def test_scores_are_estimated_for_each_data_source(generated, tmp_path, capsys):
    samples, reward = tmp_path / "scored" / "samples.jsonl", write_reward(tmp_path / "reward.py")
    arguments = [f"data.path={generated / 'out' / 'responses.parquet'}", "reward_model.num_processes=2"]
    assert main_eval.main([*arguments, f"custom_reward_function.path={reward}", f"data.output_path={samples}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    mean = sum(row["score"] for row in rows) / 10
    assert shown[0] == "openai/gsm8k: 5 prompts, 10 samples" and shown[1].split()[0] == "avg@2"
    assert json.loads(shown[-1]) == {"test_score/openai/gsm8k": pytest.approx(mean)} and 0 < mean < 1
    assert all(row["score"] == sum(c.isdigit() for c in row["output"]) / max(1, len(row["output"])) for row in rows)


def test_a_response_without_a_score_is_left_out_and_counted(tmp_path, capsys, caplog):
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **_):\n    return float(solution_str)\n")
    rows = [{"data_source": "s", "responses": texts} for texts in (["1", "x"], ["0", "0"], ["y", "z"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"data.path={tmp_path / 'rows.jsonl'}", f"custom_reward_function.path={tmp_path / 'reward.py'}"]
    assert main_eval.main([*arguments, "reward_model.num_processes=1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "s: 2 prompts, 3 samples"
    assert "3 of 6 responses have no score" in caplog.text and "could not convert" in caplog.text


@pytest.mark.parametrize(
    ("program", "arguments", "text"),
    [
        (main_generation, [], "data.output_path=null: where should the responses go?"),
        (main_generation, ["data.n_samples=2", "rollout.temperature=0"], "greedy responses are all the same"),
        (main_generation, ["data.path=absent.parquet"], "data.path=absent.parquet: there is no such file"),
        (main_eval, ["data.output_path=/proc/x/y.jsonl"], "has no column 'responses'"),
        (main_eval, [], "data.path=[]: nothing to read"),
        (main_eval, ["reward_model.limits={memory: 3}"], "reward_model.limits.memory: there is no such key"),
    ],
)
def test_settings_that_cannot_work_are_refused_first(program, arguments, text, capsys, tmp_path):
    file = [] if text.startswith("data.path") else [f"data.path={write_prompts(tmp_path / 'p.parquet', 1)}"]
    assert program.main([*file, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_data_that_cannot_be_scored_is_one_error(tmp_path, capsys):
    file = write_prompts(tmp_path / "p.parquet", 1)
    assert main_eval.main([f"data.path={file}"]) == 2
    assert "has no column 'responses' (data.response_key)" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps({"data_source": "unknown", "responses": ["x"]}) + "\n")
    assert main_eval.main([f"data.path={tmp_path / 'rows.jsonl'}"]) == 2
    assert "no reward function for data_source='unknown'" in capsys.readouterr().err


def test_programs_run_in_the_sandbox_of_the_settings_which_is_checked_first(tmp_path, capsys):
    row = {"data_source": "apps", "reward_model": {"ground_truth": '{"inputs": ["1 2"], "outputs": ["3"]}'}}
    row["responses"] = [f"```python\nprint({text})\n```" for text in ("sum(map(int, input().split()))", "4")]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"data.path={tmp_path / 'rows.jsonl'}", "reward_model.num_processes=1", "reward_model.timeout_s=60"]
    assert main_eval.main([*words, "reward_model.sandbox_fusion.timeout_s=50"]) == 2
    assert "set reward_model.timeout_s=101 or more" in capsys.readouterr().err
    try:
        LocalSandbox().check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with serve_sandbox() as server:
        for own in ([f"reward_model.sandbox_fusion.url={server.url}"], []):
            assert main_eval.main([*words, *own]) == 0
            assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"test_score/apps": 0.5}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rollouts_on_ray_give_the_same_responses(generated, tmp_path, tiny_qwen2, ray_cluster):
    output = tmp_path / "ray.parquet"
    changes = {"data__output_path": output, "trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    assert (
        main_generation.main([word for word in words(generated, tiny_qwen2, **changes) if "num_threads" not in word])
        == 0
    )
    expected = pq.read_table(generated / "out" / "responses.parquet")
    assert pq.read_table(output).to_pylist() == expected.to_pylist()


def test_settings_of_published_commands_of_verl_are_accepted(capsys):
    given = "trainer.nnodes=1 trainer.n_gpus_per_node=8 data.path=a.parquet data.prompt_key=prompt data.batch_size=2048"
    given += " data.n_samples=1 data.output_path=b.parquet model.path=m +model.trust_remote_code=True rollout.name=vllm"
    given += (
        " rollout.temperature=0.0 rollout.top_k=50 rollout.top_p=1.0 rollout.prompt_length=4096 rollout.dtype=bfloat16"
    )
    given += " rollout.response_length=32768 rollout.tensor_model_parallel_size=1 rollout.gpu_memory_utilization=0.95"
    given += " rollout.max_num_batched_tokens=65536 rollout.max_num_seqs=1024 rollout.enforce_eager=True"
    assert main_generation.main(["--config-name", "generation", *given.split(), "--cfg", "job"]) == 0
    given = "data.path=a.parquet data.prompt_key=prompt data.response_key=responses data.data_source_key=data_source"
    given += " data.reward_model_key=reward_model custom_reward_function.path=x.py custom_reward_function.name=f"
    assert main_eval.main([*given.split(), "--cfg", "job"]) == 0
    assert "response_key: responses" in capsys.readouterr().out
