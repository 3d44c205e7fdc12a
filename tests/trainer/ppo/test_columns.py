"""The table of columns and the list of stages agree, whatever the settings."""

import functools
import itertools
import re

import pytest

from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import ConfigError
from hybridrl.main_ppo import worker_classes
from hybridrl.trainer.ppo.columns import COLUMNS
from hybridrl.trainer.ppo.step_settings import StepSettings, check_roles
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

CHOICES = [
    (
        "algorithm.adv_estimator=grpo",
        "algorithm.adv_estimator=gae",
        "algorithm.adv_estimator=remax",
        "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[score]",
        "algorithm.adv_estimator=optimal_token_baseline",
    ),
    ("trainer.lag=0", "trainer.lag=2 trainer.partial_rollout=true"),
    (
        "",
        "trainer.replay.groups=2 trainer.staleness=4 algorithm.filter_groups.enable=true algorithm.select_samples.k=1",
    ),
    (
        "",
        "algorithm.use_kl_in_reward=true reward_model.enable=true actor_rollout_ref.rollout.calculate_log_probs=true "
        "algorithm.rollout_correction.preset=decoupled_geo_rs_token_tis",
    ),
    ("", "distillation.enabled=true"),
]
IN_LOSS = "distillation.enabled=true distillation.distillation_loss.use_policy_gradient=false"
DISTRIBUTIONS = [
    f"{IN_LOSS} distillation.distillation_loss.loss_mode={mode}" for mode in ("forward_kl_topk", "reverse_kl")
]
AGENTS = [
    (),
    (CHOICES[0][2], CHOICES[1][1], "reward_model.enable=true actor_rollout_ref.rollout.calculate_log_probs=true"),
    (CHOICES[0][3],),
]
ADAPTERS = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.model.lora_rank=4 "
    "actor_rollout_ref.rollout.name=hf"
)
ONE_STEP = "data.train_batch_size=256"  # as many prompts as in a mini-batch
CORRECTION = "algorithm.rollout_correction"


@functools.cache
def config_of(*words: str) -> PPOConfig:
    settings = ["actor_rollout_ref.rollout.n=2", "trainer.n_gpus_per_node=2"]
    settings += [word for group in words for word in group.split()]
    return load_config(PPOConfig, settings, program="p", config_name="ppo_trainer")


@functools.cache
def stages_of(*words: str):
    config = config_of(*words)
    return [stage.spec for stage in RayPPOTrainer.step(config, worker_classes(config)) if stage.enabled]


@pytest.mark.parametrize("words", [*itertools.product(*CHOICES), *((words,) for words in DISTRIBUTIONS)])
def test_stages_write_what_the_table_says_and_read_what_an_earlier_stage_wrote(words):
    written: set[str] = set()
    for spec in stages_of(*words):
        assert set(spec.reads) <= written, spec
        assert [name for name in spec.writes if spec.name not in COLUMNS[name].written_by] == [], spec
        written |= {*spec.writes}


def test_every_tensor_column_of_the_table_is_written_by_the_stages_it_names():
    writers: dict[str, set[str]] = {}
    for words in [
        *itertools.product(*CHOICES),
        *(("actor_rollout_ref.rollout.mode=async", *words) for words in AGENTS),
        *((words,) for words in DISTRIBUTIONS),
        (f"{CORRECTION}.bypass_mode=true",),
        (ADAPTERS,),
    ]:
        for spec in stages_of(*words):
            for name in spec.writes:
                writers.setdefault(name, set()).add(spec.name)
    writers["num_turns"] |= {"filter_groups", "select_samples", "replay"}  # of agent loops, which are tried alone here
    tensors = {name: {*column.written_by} for name, column in COLUMNS.items() if column.dtype != "object"}
    assert writers == tensors


@pytest.mark.parametrize("words", [*itertools.product(*CHOICES), *((words,) for words in (*DISTRIBUTIONS, ADAPTERS))])
def test_a_column_is_written_exactly_with_the_settings_with_which_the_table_has_it(words):
    config = config_of(*words)
    settings = StepSettings(config, worker_classes(config), RayPPOTrainer)
    written = {name for spec in stages_of(*words) for name in spec.writes}
    tensors = {name for name, column in COLUMNS.items() if column.dtype != "object"}
    assert written == {name for name in tensors if COLUMNS[name].when(settings)}


def test_a_condition_of_one_stage_names_a_stage_that_lists_the_column():
    config = config_of()
    whole_list = RayPPOTrainer.step.__wrapped__(RayPPOTrainer, config, worker_classes(config))
    lists = {stage.spec.name: {*stage.reads, *stage.writes} for stage in whole_list}
    for name, column in COLUMNS.items():
        assert {*column.only} <= {stage for stage, columns in lists.items() if name in columns}, name


def test_conversations_of_agents_become_rows_after_the_samples_are_chosen():
    names = [
        spec.name for spec in stages_of("actor_rollout_ref.rollout.mode=async", *(choice[1] for choice in CHOICES))
    ]
    assert names[names.index("replay") : names.index("old_log_prob")] == ["replay", "add_branches"]
    off = stages_of("actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.agent.train_branches=false")
    assert "add_branches" not in [spec.name for spec in off]


def test_an_actor_with_adapters_scores_its_reference_in_the_same_call():
    both = {spec.name: spec for spec in stages_of(ADAPTERS)}
    assert "ref" not in both and "ref_log_prob" in both["old_log_prob"].writes
    alone = [spec.name for spec in stages_of(ADAPTERS, ONE_STEP)]  # no pass before the update
    assert "ref" in alone and "old_log_prob" not in alone


def test_settings_add_and_remove_stages():
    names = [spec.name for spec in stages_of("algorithm.adv_estimator=grpo")]
    outputs = ["update_weights", "testing", "log", "save_checkpoint"]
    assert names == ["next_batch", "gen", "reward", "old_log_prob", "adv", "update_actor", *outputs]
    more = [spec.name for spec in stages_of(*(choice[1] for choice in CHOICES))]
    models = ["old_log_prob", "rollout_correction", "ref", "teacher", "values", "adv", "update_critic", "update_actor"]
    assert more == ["next_batch", "gen", "reward", "filter_groups", "select_samples", "replay", *models, *outputs]


@pytest.mark.parametrize(
    ("setting", "readers"),
    [
        ("algorithm.use_pf_ppo=false", set()),
        ("algorithm.use_pf_ppo=true", {"update_actor", "update_critic"}),
        ("actor_rollout_ref.actor.positive_nll_coef=0.1", {"update_actor"}),
    ],
)
def test_updates_that_use_scores_say_that_they_read_them(setting, readers):
    stages = stages_of("algorithm.adv_estimator=gae", setting)
    found = {spec.name for spec in stages if "token_level_scores" in spec.reads}
    assert found - {"adv"} == readers


def test_a_distillation_without_rewards_has_no_stage_of_its_estimator():
    without = "distillation.enabled=true distillation.distillation_loss.use_task_rewards=false"
    names = [spec.name for spec in stages_of("algorithm.adv_estimator=remax", without)]
    assert "teacher" in names and "reward_baselines" not in names


def test_bypass_mode_has_no_forward_pass_for_the_old_log_probs():
    names = [spec.name for spec in stages_of(f"{CORRECTION}.preset=bypass_pg_geo_rs_token_tis")]
    assert "reuse_log_probs" in names and not {"old_log_prob", "rollout_correction"} & {*names}


@pytest.mark.parametrize(
    "reader",
    [
        "data.train_batch_size=257",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.replay.groups=1 trainer.staleness=1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.preset=decoupled_token_is actor_rollout_ref.rollout.calculate_log_probs=true",
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
        "distillation.enabled=true",
        "trainer.critic_warmup=1 algorithm.adv_estimator=gae",
        "trainer.middleware=[examples/middleware.py:log_stage_times]",
        "actor_rollout_ref.actor.calculate_old_log_probs=true",
    ],
)
def test_one_optimizer_step_has_no_pass_before_it_unless_something_reads_its_log_probs(reader):
    base = ("algorithm.adv_estimator=grpo", ONE_STEP)
    assert not any("old_log_probs" in spec.reads + spec.writes for spec in stages_of(*base))
    readers = {spec.name for spec in stages_of(*base, reader) if "old_log_probs" in spec.reads}
    assert "old_log_prob" in [spec.name for spec in stages_of(*base, reader)] and "update_actor" in readers


@pytest.mark.parametrize("name", ["update_actor", "stages", "old_log_prob"])
def test_a_trainer_with_stages_of_its_own_has_the_log_probs_they_may_read(name):
    own = type("OwnTrainer", (RayPPOTrainer,), {name: getattr(RayPPOTrainer, name)})
    words = ["actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo", ONE_STEP]
    config = load_config(PPOConfig, words, program="p", config_name="ppo_trainer")
    found = {cls: [s.spec.name for s in cls.step(config, worker_classes(config)) if s.enabled] for cls in (own, Plain)}
    assert "old_log_prob" in found[own] and "old_log_prob" not in found[Plain]


class Plain(RayPPOTrainer):
    def log(self, ctx):
        super().log(ctx)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calculate_old_log_probs=false actor_rollout_ref.actor.ppo_epochs=3", "ppo_epochs=3: later epochs"),
        ("calculate_old_log_probs=false data.train_batch_size=300", "ppo_mini_batch_size=256: a step of 300 prompts"),
        ("calculate_old_log_probs=true algorithm.rollout_correction.preset=bypass_ppo_clip", "leave one out"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(words, message):
    settings = f"actor_rollout_ref.rollout.n=2 algorithm.adv_estimator=grpo {ONE_STEP} actor_rollout_ref.actor.{words}"
    config = load_config(PPOConfig, settings.split(), program="p", config_name="ppo_trainer")
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_roles(config, worker_classes(config), has_reward=True, has_agent_loops=False)
