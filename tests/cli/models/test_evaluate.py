"""`hybridrl eval`: a model, and the same model behind an endpoint."""

import json
import re
from functools import partial

import pytest

from hybridrl import Role, cli
from hybridrl.cli.models.evaluate import default_length, run_settings
from hybridrl.config import PPOConfig, load_config
from hybridrl.evaluation.estimates import grouped
from hybridrl.framework.status import reporting
from hybridrl.main_ppo import worker_classes
from hybridrl.serving.openai.standalone import StandaloneModel
from hybridrl.trainer.data.row_files import prompt_table, write_table
from hybridrl.trainer.ppo import ppo_loop
from hybridrl.workers.rollout import make_rollout
from tests.support.end_to_end.runs import settings, write_reward
from tests.support.serving.site import Site
from tests.support.workers.image_cases import image_rows, plain_answers, read_processor, save_tiny


def test_a_model_is_evaluated_with_all_samples_kept(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = dict(word.split("=", 1) for word in settings(tmp_path, tiny_qwen2))
    file, own = words["data.val_files"], [f"{name}={words[name]}" for name in words if name.startswith("custom_reward")]
    command = ["eval", file, str(tiny_qwen2), "--n", "2", "--output", "out"]
    lengths = ["data.max_prompt_length=48", "data.max_response_length=8"]
    assert cli.main([*command, *lengths, *own]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples" / "0.jsonl").read_text().splitlines()]
    assert len(grouped(rows)) * 2 == len(rows)
    assert f"{len(rows) // 2} prompts, {len(rows)} samples" in shown and "avg@2" in shown
    assert "last checkpoint" not in shown and "step 0" not in shown and "validation  openai/gsm8k" in shown
    assert cli.main([*command, *lengths, *own]) == 2
    assert "out: has samples already" in capsys.readouterr().err


def test_an_evaluation_says_how_far_it_is_and_one_that_was_stopped_can_start_again(
    tmp_path, tiny_qwen2, monkeypatch, caplog
):
    monkeypatch.setattr(ppo_loop, "reporting", partial(reporting, first_s=0.02, period_s=0.02))
    words = [word for word in settings(tmp_path, tiny_qwen2) if word.startswith(("custom_reward", "data.val_files"))]
    command = ["eval", words[0].split("=")[1], str(tiny_qwen2), "--output", str(tmp_path / "out"), *words[1:]]
    (tmp_path / "out" / "samples").mkdir(parents=True)  # as a program that was killed leaves it
    assert cli.main([*command, "data.max_response_length=64", "trainer.num_threads=1"]) == 0
    tokens = [int(found) for found in re.findall(r"validation: (\d+) of 320 tokens, \d+ s so far", caplog.text)]
    assert tokens and tokens == sorted(tokens)


def test_a_model_is_evaluated_without_an_actor_and_a_checkpoint_with_one(tmp_path, tiny_qwen2):
    folder = tmp_path / "out"
    words = [*run_settings("v.parquet", str(tiny_qwen2), folder, 1)[1:], "algorithm.adv_estimator=gae"]
    assert [*worker_classes(load_config(PPOConfig, words, program="test", config_name="local_debug"))] == [Role.Rollout]
    words.append("trainer.resume_mode=auto")
    assert Role.ActorRollout in worker_classes(load_config(PPOConfig, words, program="test", config_name="local_debug"))


def test_the_lengths_are_half_of_the_models_positions(tiny_qwen2, tmp_path):
    assert default_length(str(tiny_qwen2)) == 256  # of 512
    assert default_length(str(tmp_path)) == 1024


def test_the_same_model_behind_an_endpoint_gives_the_same_samples(tmp_path, tiny_qwen2, tiny_site, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = dict(word.split("=", 1) for word in settings(tmp_path, tiny_qwen2))
    file, own = words["data.val_files"], [f"{name}={words[name]}" for name in words if name.startswith("custom_reward")]
    url = f"http://127.0.0.1:{tiny_site.endpoint.port}/v1"
    found = {}
    for model in (str(tiny_qwen2), url):
        assert cli.main(["eval", file, model, "--output", "out", "data.max_response_length=8", *own]) == 0
        rows = [json.loads(line) for line in (tmp_path / "out" / "samples" / "0.jsonl").read_text().splitlines()]
        found[model] = {row["gts"]: (row["output"], row["score"]) for row in rows}  # the truths are 0 to 4
        (tmp_path / "out").rename(tmp_path / f"out-{len(found)}")
    assert found[url] == found[str(tiny_qwen2)] and len(found[url]) == 5
    shown = capsys.readouterr().out
    assert f"model: tiny at {url}" in shown and "openai/gsm8k: 5 prompts, 5 samples" in shown


PARTIAL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "2":
        raise ValueError("no judgement")
    return {"score": -0.5, "acc": float(ground_truth == "1")}
"""


def test_samples_without_a_score_are_left_out_and_columns_have_ones_own_names(
    tmp_path, tiny_qwen2, tiny_site, monkeypatch, capsys, caplog
):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": f"What is {number}?", "answer": str(number)}) for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(PARTIAL_REWARD)
    own = ["data.prompt_key=question", "data.ground_truth_key=answer", "custom_reward_function.path=reward.py"]
    sampling = ["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "data.max_response_length=8"]
    sampling += ["actor_rollout_ref.rollout.val_kwargs.temperature=0.7"]
    for number, place in enumerate((str(tiny_qwen2), f"http://127.0.0.1:{tiny_site.endpoint.port}/v1")):
        caplog.clear()
        command = ["eval", "rows.jsonl", place, "--output", f"out-{number}", *own, *sampling]
        assert cli.main(command) == 0
        shown = capsys.readouterr().out
        assert "3 prompts, 3 samples" in shown and re.search(r"avg@1 +0\.3333", shown), shown
        assert "temperature 0.7, top_p 1" in shown
        assert "1 of 4 responses have no score and are left out" in caplog.text
        lines = (tmp_path / f"out-{number}" / "samples" / "0.jsonl").read_text().splitlines()
        assert [row["score"] for row in map(json.loads, lines) if row["gts"] == "2"] == [None]


def test_what_cannot_be_scored_is_refused_before_a_request(tmp_path, tiny_site, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    url = f"http://127.0.0.1:{tiny_site.endpoint.port}/v1"
    row = {"prompt": "a", "data_source": "nowhere", "reward_model": {"ground_truth": "1"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "text.jsonl").write_text(json.dumps(row | {"reward_model": "1"}))
    (tmp_path / "code.jsonl").write_text(json.dumps(row | {"data_source": "apps"}))
    for file, text in (("rows.jsonl", "nowhere"), ("text.jsonl", "reward_model"), ("code.jsonl", "timeout_s=19 or")):
        assert cli.main(["eval", file, url, "reward_model.sandbox_fusion.timeout_s=9"]) == 2
        error = capsys.readouterr().err
        assert text in error and " of 1 responses" not in error and "Traceback" not in error


def test_the_settings_of_an_evaluation_are_shown_without_running_it(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a"}))
    assert cli.main(["eval", "rows.jsonl", str(tiny_qwen2), "--cfg", "job"]) == 0
    assert "val_only: true" in capsys.readouterr().out


def test_a_model_that_reads_images_answers_as_plain_transformers_does_also_behind_an_endpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, rows = save_tiny(tmp_path, "qwen2_5_vl"), image_rows(5)
    write_table(prompt_table(rows), str(tmp_path / "pictures.parquet"))
    model = StandaloneModel(path, "tiny", read_processor(path)[0], device="cpu")
    site = Site(make_rollout("hf", model.setup()), model.served())
    assert site.served.max_length == 512, "positions of the text part"
    own = ["data.max_response_length=6", f"custom_reward_function.path={write_reward(tmp_path / 'reward.py')}"]
    for place, name in ((path, "model"), (f"http://127.0.0.1:{site.endpoint.port}/v1", "site")):
        assert cli.main(["eval", "pictures.parquet", place, "--output", name, *own]) == 0
        found = [json.loads(line) for line in (tmp_path / name / "samples" / "0.jsonl").read_text().splitlines()]
        answers = {row["gts"]: row["output"] for row in found}
        assert [answers[row["ground_truth"]] for row in rows] == plain_answers(path, rows, length=6)
    site.close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.parquet", "MODEL"], "TASK nowhere.parquet: no such file; give a parquet or .jsonl file"),
        (["arithmetic", "http://127.0.0.1:9/v1"], "no OpenAI-compatible endpoint answers there"),
        (["arithmetic", "MODEL", "trainer.validation_data_dir=x"], "trainer.validation_data_dir: an evaluation writes"),
        (["arithmetic", "MODEL", "--n", "0"], "--n=0: must be 1 or more"),
        (["arithmetic", "MODEL", "--concurrency", "0"], "--concurrency=0: must be 1 or more"),
    ],
)
def test_wrong_input_is_one_error(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error
