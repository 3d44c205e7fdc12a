"""`main_ppo` on the tiny model: what a run computes, writes and logs, in one process and on Ray."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl import main_ppo
from hybridrl.system.directory_lock import LOCK_FILE, lock_directory
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights, write_prompts

VERL_NAMES = {
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/max",
    "critic/advantages/min",
    "critic/returns/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/max",
    "training/global_step",
    "training/epoch",
    "training/rollout_probs_diff_max",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/throughput",
    "perf/mfu/actor",
    "perf/mfu/actor_infer",
    "perf/mfu/rollout",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_per_token_ms/gen",
}


def test_every_stage_with_a_model_uses_a_share_of_the_machine(tmp_path, tiny_qwen2, capsys):
    [_, step, _] = train(tmp_path, tiny_qwen2, algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True)
    shares = {name.removeprefix("perf/mfu/"): value for name, value in step.items() if name.startswith("perf/mfu/")}
    assert shares.keys() == {"actor", "actor_infer", "critic", "critic_infer", "ref", "rollout"}
    assert all(0 < share < 1 for share in shares.values()), shares
    kept = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert 2 <= len(kept) <= 4 and kept[0].keys() >= {"input", "output", "score", "gts", "step", "id"}
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("  ")
    )  # the table of stages is the last that a run prints


def test_a_grpo_run_learns_logs_and_commits(tmp_path, tiny_qwen2, capsys):
    rows = train(
        tmp_path,
        tiny_qwen2,
        trainer__rollout_data_dir=tmp_path / "rollouts",
        trainer__validation_data_dir=tmp_path / "val",
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1].keys() >= VERL_NAMES
    assert rows[2]["val-core/openai/gsm8k/reward/mean@1"] >= 0
    assert rows[1]["training/rollout_log_probs_diff_max"] < 1e-4
    assert rows[1]["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 3 and samples[0].keys() >= {"input", "output", "score", "gts", "step"}
    assert len((tmp_path / "val" / "2.jsonl").read_text().splitlines()) == 5
    assert (tmp_path / "run" / "global_step_2" / "manifest.json").exists()
    shown = capsys.readouterr().out
    assert "last checkpoint" in shown and f"curves: hybridrl view {tmp_path / 'run'}\n" in shown
    tuned = weights(tmp_path / "run" / "global_step_2", tmp_path / "hf")
    assert (
        largest_difference(tuned, dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())) == 0
    )
    assert largest_difference(tuned, dict(AutoModelForCausalLM.from_pretrained(tiny_qwen2).named_parameters())) > 1e-4


@pytest.mark.timeout(300)
def test_two_ranks_on_ray_take_the_same_steps_as_one_process(tmp_path, tiny_qwen2, ray_cluster):
    kl = {
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__actor__entropy_coeff": 0.01,
        "trainer__test_freq": -1,
    }
    one = train(tmp_path / "one", tiny_qwen2, **kl)
    two = train(tmp_path / "two", tiny_qwen2, trainer__backend="ray", trainer__n_gpus_per_node=2, **kl)
    for name in (
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/grad_norm",
        "actor/entropy",
        "critic/score/mean",
        "response_length/mean",
    ):
        for left, right in zip(one[1:], two[1:], strict=True):
            assert left[name] == pytest.approx(right[name], abs=1e-5), name
    step = "run/global_step_2"
    assert (
        largest_difference(
            weights(tmp_path / "one" / step, tmp_path / "a"), weights(tmp_path / "two" / step, tmp_path / "b")
        )
        < 1e-5
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_ppo_with_critic_reference_and_reward_model(tmp_path, tiny_qwen2, tiny_classifier, request, backend):
    if backend == "ray":  # where they have processes of their own
        request.getfixturevalue("ray_cluster")
    rows = train(
        tmp_path,
        tiny_qwen2,
        algorithm__adv_estimator="gae",
        algorithm__use_kl_in_reward=True,
        algorithm__kl_ctrl__type="adaptive",
        reward_model__enable=True,
        reward_model__model__path=tiny_classifier,
        critic__optim__lr=1e-3,
        trainer__critic_warmup=1,
        trainer__backend=backend,
        trainer__colocate="device" if backend == "ray" else "process",
        trainer__rollout_data_dir=tmp_path / "rollouts",
        trainer__validation_data_dir=tmp_path / "val",
    )
    for folder in ("rollouts", "val"):  # the function decides, not the reward model
        samples = [json.loads(line) for line in (tmp_path / folder / "2.jsonl").read_text().splitlines()]
        shares = [
            sum(letter.isdigit() for letter in sample["output"]) / max(1, len(sample["output"])) for sample in samples
        ]
        assert [sample["score"] for sample in samples] == pytest.approx(shares)
    assert "actor/pg_loss" not in rows[1] and rows[2]["actor/grad_norm"] > 0  # the first step trains the critic only
    assert {
        "critic/vf_loss",
        "critic/values/mean",
        "actor/reward_kl_penalty",
        "timing_s/ref",
        "timing_s/values",
    } <= rows[2].keys()
    assert rows[2]["actor/reward_kl_penalty_coeff"] != rows[1]["actor/reward_kl_penalty_coeff"]
    assert (tmp_path / "run" / "global_step_2" / "critic").is_dir()


@pytest.fixture(scope="module")
def tiny_classifier(tiny_qwen2, tiny_tokenizer, tmp_path_factory):
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_pretrained(tiny_qwen2, num_labels=1).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, tiny_qwen2):
    changes = {"data__shuffle": True, "actor_rollout_ref__actor__shuffle": True, "trainer__max_ckpt_to_keep": 1}
    train(tmp_path / "whole", tiny_qwen2, trainer__total_training_steps=4, **changes)
    train(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=2, **changes)
    rows = train(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=4, **changes)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    whole, parts = (weights(tmp_path / run / "run/global_step_4", tmp_path / f"hf_{run}") for run in ("whole", "parts"))
    assert largest_difference(whole, parts) == 0
    assert [p.name for p in (tmp_path / "parts/run").glob("global_step_*")] == ["global_step_4"]
    same = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm")
    assert [[row.get(n) for n in same] for row in rows] == [
        [row.get(n) for n in same] for row in metrics(tmp_path / "whole/run")
    ]


def test_samples_whose_reward_fails_are_counted_and_left_out(tmp_path, tiny_qwen2, caplog):
    reward = tmp_path / "flaky.py"
    reward.write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if extra_info['index'] % 3 == 0: time.sleep(60)\n"
        "    if extra_info['index'] % 3 == 1: raise RuntimeError('no judge')\n"
        "    return len(solution_str) / 100\n"
    )
    rows = train(
        tmp_path,
        tiny_qwen2,
        custom_reward_function__path=reward,
        reward_model__timeout_s=1.0,
        trainer__val_before_train=False,
        trainer__test_freq=-1,
        data__shuffle=False,
        trainer__total_training_steps=1,
    )
    # rows 0..3, three samples each: 0 and 3 hang, 1 raises, 2 is scored
    assert rows[0]["reward/timeout_ratio"] == pytest.approx(6 / 12) and rows[0]["reward/error_ratio"] == pytest.approx(
        3 / 12
    )
    assert rows[0]["critic/score/mean"] > 0 and rows[0]["actor/grad_norm"] > 0
    assert "no judge" in caplog.text


def test_every_validation_logs_a_response_to_the_same_prompt_and_the_report_the_first_and_the_last(
    tmp_path, tiny_qwen2, caplog, capsys
):
    changes = {
        "trainer__total_training_steps": 4,
        "trainer__test_freq": 2,
        "trainer__validation_data_dir": tmp_path / "val",
    }
    train(tmp_path, tiny_qwen2, **changes)
    shown = [
        r.message
        for r in caplog.records
        if r.message.startswith("asked (openai/gsm8k): Tom buys 0 boxes of 0 pens. How many?  [0]")
    ]
    assert [message.split("answered")[0].split("\n")[1] for message in shown] == ["  step 0 ", "  step 2 ", "  step 4 "]
    closing = capsys.readouterr().out.splitlines()[-3:]
    assert closing == [*shown[0].split("\n"), shown[2].split("\n")[1]]
    row = json.loads((tmp_path / "val" / "4.jsonl").read_text().splitlines()[0])
    assert " ".join(row["output"].split())[:100] in closing[2] and f"score {row['score']:g}" in closing[2]


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_run_with_vllm_agrees_with_the_trainer(tmp_path, tiny_qwen2, ray_cluster):
    kernel = {
        "actor_rollout_ref__model__override_config": "{attn_implementation:eager}"
    }  # of the trainer; vLLM has its own
    rows = train(tmp_path, tiny_qwen2, actor_rollout_ref__rollout__name="vllm", trainer__backend="ray", **kernel)
    assert max(row["training/rollout_log_probs_diff_max"] for row in rows[1:]) < 1e-4
    assert rows[2]["actor/grad_norm"] > 0


def test_a_call_past_its_deadline_ends_the_run_and_names_the_setting(tmp_path, tiny_qwen2, ray_cluster, capsys):
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, trainer__backend="ray", trainer__call_timeout_s=0.01)) == 1
    assert (
        "init_model() did not answer within 0.01 s" in (err := capsys.readouterr().err)
        and "trainer.call_timeout_s" in err
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("actor_rollout_ref.actor.optm.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("data.train_batch_size=0", "data.train_batch_size=0"),
        ("actor_rollout_ref.rollout.n=1", "rollout.n"),
        ("data.train_files=nowhere.parquet", "nowhere.parquet"),
        ("custom_reward_function.path=nowhere.py", "nowhere.py"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path"),
        ("trainer.n_gpus_per_node=2", "trainer.backend=local"),
        ("data.prompt_key=question", "data.prompt_key"),
        ("data.max_prompt_length=5", "data.max_prompt_length=5"),
        ("trainer.default_local_dir=/proc/nowhere", "trainer.default_local_dir=/proc/nowhere"),
    ],
)
def test_an_input_error_is_one_readable_line_with_a_hint(tmp_path, tiny_qwen2, capsys, argument, message):
    arguments = [a for a in settings(tmp_path, tiny_qwen2) if not a.startswith(argument.split("=")[0] + "=")] + [
        argument
    ]
    assert main_ppo.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and len(err.strip().splitlines()) <= 2
    assert [path.name for path in (tmp_path / "run").glob("*")] in ([], [LOCK_FILE])


def test_a_run_does_not_resume_with_other_data_and_logs_other_changes(tmp_path, tiny_qwen2, capsys, caplog):
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    more = {"trainer__total_training_steps": 2, "algorithm__gamma": 0.9}
    with caplog.at_level("INFO"):
        train(tmp_path, tiny_qwen2, **more)
    assert "algorithm.gamma 1 -> 0.9" in caplog.text
    others = write_prompts(tmp_path / "others.parquet", 11)
    assert (
        main_ppo.main(
            settings(tmp_path, tiny_qwen2, **more | {"trainer__total_training_steps": 3, "data__train_files": others})
        )
        == 1
    )
    assert "another data.train_files" in capsys.readouterr().err


def test_a_run_resumes_before_a_damaged_checkpoint_and_ends_as_an_undisturbed_one(tmp_path, tiny_qwen2, caplog):
    train(tmp_path / "calm", tiny_qwen2, trainer__total_training_steps=3)
    train(tmp_path, tiny_qwen2)
    victim = next((tmp_path / "run/global_step_2/actor").rglob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=3)
    [said] = [message for message in caplog.messages if "damaged" in message]
    assert victim.name in said and said.endswith("the run resumes from " + str(tmp_path / "run/global_step_1"))
    found, wanted = (weights(f / "run/global_step_3", f / "hf") for f in (tmp_path, tmp_path / "calm"))
    assert largest_difference(found, wanted) == 0


def test_a_run_without_a_whole_checkpoint_is_refused_before_anything_starts(tmp_path, tiny_qwen2, capsys):
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    victim = next((tmp_path / "run/global_step_1/actor").rglob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main_ppo.main(settings(tmp_path, tiny_qwen2)) == 1
    captured = capsys.readouterr()
    assert victim.name in captured.err and "damaged" in captured.err and "resume_mode=auto" in captured.err


def test_a_second_run_in_the_same_directory_is_refused(tmp_path, tiny_qwen2, capsys):
    with lock_directory(str(tmp_path)):
        assert main_ppo.main(settings(tmp_path, tiny_qwen2, trainer__default_local_dir=tmp_path)) == 2
    assert f"{tmp_path} is in use by a run" in capsys.readouterr().err
