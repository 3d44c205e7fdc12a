"""`main_distill` on the tiny model: every form learns from a teacher, and nothing depends on how the work is cut."""

import pytest
import torch

from hybridrl import main_distill, main_ppo
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = pytest.mark.timeout(300)
LOSS = "distillation__distillation_loss__"
TEACHER = "distillation__teacher_models__teacher_model__model_path"
IN_LOSS = {f"{LOSS}use_policy_gradient": False}
FORMS = {
    "advantages": {},
    "k2": IN_LOSS | {f"{LOSS}loss_mode": "k2"},
    "topk": IN_LOSS | {f"{LOSS}loss_mode": "forward_kl_topk", f"{LOSS}topk": 16},
    "whole": IN_LOSS | {f"{LOSS}loss_mode": "reverse_kl"},
}
QUIET = {"trainer__val_before_train": False, "trainer__test_freq": -1}


@pytest.fixture(scope="module")
def teacher(tiny_qwen2, tiny_tokenizer, tmp_path_factory):
    """The tiny model with noise: about 0.1 nats per token away from it."""
    return save_noisy(tiny_qwen2, tiny_tokenizer, tmp_path_factory.mktemp("teacher"), seed=3)


def save_noisy(model, tokenizer, folder, *, seed):
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def distill(folder, model, **changes):
    folder.mkdir(exist_ok=True)
    words = [word for word in settings(folder, model, **changes) if not word.startswith("custom_reward_function")]
    assert main_distill.main(words) == 0  # no reward function is needed
    return metrics(folder / "run")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_learns_and_micro_batches_do_not_change_the_update(tmp_path, tiny_qwen2, teacher, form):
    found = []
    for name, rows in (("by_two", 2), ("whole", 12)):
        cut = dict.fromkeys(
            (
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu",
                "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu",
            ),
            rows,
        )
        packed = {"actor_rollout_ref__model__use_remove_padding": rows == 2}
        changes = {TEACHER: teacher, "trainer__total_training_steps": 2} | FORMS[form] | QUIET | cut | packed
        rows_of_run = distill(tmp_path / name, tiny_qwen2, **changes)
        assert all(0 < row["actor/grad_norm"] < 100 for row in rows_of_run)
        assert ("distillation/loss" in rows_of_run[0]) == ("actor/pg_loss" not in rows_of_run[0]) == bool(FORMS[form])
        found.append(weights(tmp_path / name / "run/global_step_2", tmp_path / f"hf_{name}"))
    assert largest_difference(*found) < 1e-6


def test_a_student_comes_closer_to_its_teacher(tmp_path, tiny_qwen2, teacher):
    changes = {TEACHER: teacher, "trainer__total_training_steps": 12, "trainer__save_freq": -1}
    rows = distill(tmp_path, tiny_qwen2, **changes, **FORMS["whole"], **QUIET)
    assert rows[-1]["distillation/loss"] < 0.3 * rows[0]["distillation/loss"]


def test_a_student_that_is_its_teacher_has_no_gradient(tmp_path, tiny_qwen2):
    for form in ("advantages", "k2", "whole"):
        changes = {TEACHER: tiny_qwen2, "trainer__total_training_steps": 1, "trainer__save_freq": -1}
        changes["actor_rollout_ref__actor__ppo_mini_batch_size"] = 4  # one step: AdamW also moves by rounding errors
        [row] = distill(tmp_path / form, tiny_qwen2, **changes, **FORMS[form], **QUIET)
        assert abs(row["distillation/kl"]) < 1e-6 and row["actor/grad_norm"] < 1e-4  # 0.1 to 1 with another one


def test_as_many_top_tokens_as_there_are_is_the_whole_vocabulary(tmp_path, tiny_qwen2, teacher):
    found = []
    for name, mode in (("all", "forward_kl"), ("topk", "forward_kl_topk")):
        changes = {TEACHER: teacher, "trainer__total_training_steps": 1, f"{LOSS}loss_mode": mode} | IN_LOSS | QUIET
        more = {f"{LOSS}topk": 10000} if name == "topk" else {}
        distill(tmp_path / name, tiny_qwen2, **changes, **more)
        found.append(weights(tmp_path / name / "run/global_step_1", tmp_path / f"hf_{name}"))
    assert largest_difference(*found) < 1e-6


def test_the_shortest_responses_are_chosen_without_any_reward(tmp_path, tiny_qwen2, teacher):
    changes = {TEACHER: teacher, "trainer__total_training_steps": 1, "trainer__save_freq": -1} | FORMS["whole"] | QUIET
    changes |= {"algorithm__filter_groups__order": "shortest", "data__gen_batch_size": 6}
    [row] = distill(tmp_path, tiny_qwen2, **changes)
    assert row["actor/grad_norm"] > 0


def test_task_rewards_and_teacher_add_up(tmp_path, tiny_qwen2, teacher):
    changes = {TEACHER: teacher, "trainer__total_training_steps": 1, "trainer__save_freq": -1} | QUIET
    changes |= {"distillation__enabled": True, f"{LOSS}loss_mode": "k1", f"{LOSS}distillation_loss_coef": 0.5}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) == 0
    [row] = metrics(tmp_path / "run")
    assert row["critic/score/mean"] > 0
    # A token's estimate is limited to 10 and none is that large here: the mean is half of minus the mean of k1.
    assert row["distillation/advantages"] == pytest.approx(-0.5 * row["distillation/kl"], abs=1e-6)


@pytest.mark.slow
def test_two_ranks_and_a_pool_of_teachers_take_the_same_steps_as_one_process(
    tmp_path, tiny_qwen2, teacher, ray_cluster
):
    for form in ("advantages", "topk"):
        changes = {TEACHER: teacher, "trainer__total_training_steps": 2} | FORMS[form] | QUIET
        pools = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2, "distillation__n_gpus_per_node": 2}
        found = []
        for name, more in (("one", {}), ("two", pools)):
            folder = tmp_path / f"{form}_{name}"
            distill(folder, tiny_qwen2, **changes, **more)
            found.append(weights(folder / "run/global_step_2", folder / "hf"))
        assert largest_difference(*found) < 1e-5  # as for every other loss: sums over ranks are rounded differently


def test_the_data_source_selects_the_teacher(tmp_path, tiny_qwen2, teacher, tiny_tokenizer):
    """Rows of one source have the student itself as teacher, the others a different one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = settings(tmp_path, tiny_qwen2)
    path = tmp_path / "train.parquet"
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["data_source"] = "own" if row["extra_info"]["index"] % 2 else "other"
    pq.write_table(pa.Table.from_pylist(rows), path)
    two = {"a.key": "own", "a.model_path": tiny_qwen2, "b.key": "other", "b.model_path": teacher}
    words += [f"distillation.teacher_models.{name}={value}" for name, value in two.items()]
    words += ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    words += [f"trainer.rollout_data_dir={tmp_path / 'rollouts'}"]
    assert main_distill.main(words) == 0
    [row] = metrics(tmp_path / "run")
    assert row["actor/grad_norm"] > 0
    rows[0]["data_source"] = "nobody"
    pq.write_table(pa.Table.from_pylist(rows[:4]), path)
    assert main_distill.main([*words, "trainer.resume_mode=disable", f"trainer.default_local_dir={tmp_path}/x"]) != 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "distillation.teacher_models={}: distillation.enabled=true has no teacher"),
        (["distillation.teacher_models.a.path=x"], "teacher_models.a={path:x}: has no model; set"),
        (["distillation.teacher_models.a.model_path=./nowhere"], "a.model_path=./nowhere: there is no such directory"),
        (["distillation.distillation_loss.use_policy_gradient=false"], "loss_mode=k1: its gradient does not depend"),
        (["distillation.distillation_loss.loss_mode=forward_kl"], "compares distributions, and"),
        (["distillation.distillation_loss.topk=3"], "topk=3: has no effect with loss_mode=k1"),
        (["critic.enable=true"], "trains on no rewards, and a critic needs them"),
        (["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2"], "and groups are filtered by them"),
        (["data.sampler.class_path=a.py", "data.sampler.class_name=A"], "and a sampler is shown them"),
        (["distillation.n_gpus_per_node=1"], "trainer.backend=local has one process only"),
        (["distillation.enabled=false"], "distillation_loss.loss_mode=k1: has no effect without distillation.enabled"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_before_anything_starts(tmp_path, tiny_qwen2, capsys, words, message):
    assert main_distill.main([*settings(tmp_path, tiny_qwen2), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, tiny_qwen2, tiny_tokenizer, capsys):
    from transformers import AutoTokenizer

    folder = tmp_path / "teacher"
    save_noisy(tiny_qwen2, tiny_tokenizer, folder, seed=1)
    other = AutoTokenizer.from_pretrained(folder)
    other.add_tokens(["<call>"])
    other.save_pretrained(folder)
    words = settings(tmp_path, tiny_qwen2, **{TEACHER: folder})
    assert main_distill.main(words) == 2
    assert "has another vocabulary than the student" in capsys.readouterr().err
