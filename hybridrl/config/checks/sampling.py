"""Rules on rewards, and on the settings that decide which samples a step trains on."""

from hybridrl.config.build import Problems, idle_problems
from hybridrl.config.checks.asynchrony import OUTSIDE_AGENT
from hybridrl.config.plugs import REWARD_MANAGERS, import_problems
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.errors import ConfigError


def sampling_problems(config: PPOConfig) -> Problems:
    """Yield settings of sampling without effect, or with which no batch gets full."""
    yield from _group_problems(config)
    yield from _tail_problems(config)
    yield from _selection_problems(config)


def _group_problems(config: PPOConfig) -> Problems:
    data, algorithm, samples = config.data, config.algorithm, config.actor_rollout_ref.rollout.n
    filters, generated = algorithm.filter_groups, data.gen_batch_size or data.train_batch_size
    too_few = generated <= data.train_batch_size
    if filters.defers and too_few or filters.order == "shortest" and too_few and not filters.enable:
        yield (
            f"algorithm.filter_groups.order={filters.order}: there are no more groups to choose from; set "
            f"data.gen_batch_size above data.train_batch_size={data.train_batch_size}"
        )
    if not filters.enable:
        if generated != data.train_batch_size and filters.order == "drawn":
            why = (
                "without algorithm.filter_groups.enable=true; leave it out, or set "
                f"data.train_batch_size={generated}, or algorithm.filter_groups.order=shortest"
            )
            yield from idle_problems(config, "data.gen_batch_size", why=why)
        return
    if samples == 1:
        yield (
            "actor_rollout_ref.rollout.n=1: algorithm.filter_groups.enable=true compares several samples of a prompt; "
            "set actor_rollout_ref.rollout.n=2 or more"
        )
    if filters.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before log-probs are computed, so "
            "without the KL of algorithm.use_kl_in_reward=true; use algorithm.filter_groups.metric=seq_reward"
        )
    limit = filters.max_num_gen_batches
    if limit and limit * generated < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={limit}: so many generation batches of {generated} prompts "
            f"(data.gen_batch_size) never fill data.train_batch_size={data.train_batch_size}; set "
            f"{-(-data.train_batch_size // generated)} or more, or 0 for no limit"
        )


def _tail_problems(config: PPOConfig) -> Problems:
    """Yield what tail batching cannot be combined with."""
    if not config.algorithm.filter_groups.defers:
        return
    setting, rollout = "algorithm.filter_groups.order=tail_batching", config.actor_rollout_ref.rollout
    if config.trainer.lag:
        yield (
            f"{setting}: is a schedule of synchronous training, and trainer.lag={config.trainer.lag} hides long "
            "responses behind training already; leave one of both out"
        )
    if rollout.mode == "sync":
        yield (
            f"{setting}: actor_rollout_ref.rollout.mode=sync generates each batch in one call, which cannot leave out "
            "long responses; set actor_rollout_ref.rollout.mode=async"
        )
    elif rollout.agent.default_agent_loop == OUTSIDE_AGENT:
        yield (
            f"{setting}: programs of actor_rollout_ref.rollout.agent.default_agent_loop={OUTSIDE_AGENT} play at their "
            "own pace, so a round would end with the last of them; use order=shortest"
        )


def _selection_problems(config: PPOConfig) -> Problems:
    algorithm, samples = config.algorithm, config.actor_rollout_ref.rollout.n
    chosen, method = algorithm.select_samples.k, algorithm.select_samples.method
    if chosen is not None and chosen >= samples:
        yield (
            f"algorithm.select_samples.k={chosen}: there are only actor_rollout_ref.rollout.n={samples} samples to "
            "choose from; raise n, or leave k out"
        )
    if chosen == 1 and method == "max_variance":
        yield (
            "algorithm.select_samples.k=1: one score has no variance; set k=2 or more, or "
            "algorithm.select_samples.method=max_reward"
        )
    if chosen is None:
        why = "without algorithm.select_samples.k; set k"
        yield from idle_problems(config, "algorithm.select_samples.method", why=why)
    if not algorithm.use_pf_ppo:
        yield from idle_problems(
            config, "algorithm.pf_ppo", why="without algorithm.use_pf_ppo=true; set it, or leave this out"
        )
    elif algorithm.pf_ppo.reweight_method != "pow":
        yield from idle_problems(config, "algorithm.pf_ppo.weight_pow", why="without reweight_method=pow; leave it out")
    if config.distillation.task_rewards:
        return
    scored = {
        "algorithm.select_samples.k": chosen,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "reward_model.length_reward_coef": config.reward_model.length_reward_coef,
        "actor_rollout_ref.actor.positive_nll_coef": config.actor_rollout_ref.actor.positive_nll_coef,
    }
    for key, value in scored.items():
        if value:
            yield f"{key}={value}: needs scores, which a distillation without task rewards has not; leave it out"


def reward_problems(config: PPOConfig) -> Problems:
    """Yield incomplete or unused settings of reward model, limits and length penalties."""
    model, overlong = config.reward_model, config.reward_model.overlong_buffer
    if model.enable and model.model.path is None:
        yield "reward_model.enable=true: there is no reward model; set reward_model.model.path"
    if not model.enable and model.model.path is not None:
        yield f"reward_model.model.path={model.model.path}: has no effect; set reward_model.enable=true"
    yield from import_problems(REWARD_MANAGERS, [model.reward_manager])
    try:
        RewardLimits.of(model.limits)
    except ConfigError as error:
        yield str(error)
    if config.distillation.task_rewards:
        yield from _length_reward_problems(config)
    if not overlong.enable:
        return
    if model.reward_manager != "dapo" and model.reward_manager in REWARD_MANAGERS.builtins:
        yield (
            "reward_model.overlong_buffer.enable=true: only reward_model.reward_manager=dapo applies it, not "
            f"{model.reward_manager}"
        )
    limit = config.data.max_response_length
    if not 0 < overlong.len <= limit:
        yield f"reward_model.overlong_buffer.len={overlong.len}: must be between 1 and data.max_response_length={limit}"


def _length_reward_problems(config: PPOConfig) -> Problems:
    coef, name = config.reward_model.length_reward_coef, config.algorithm.adv_estimator
    keys = config.algorithm.gdpo_reward_keys
    if not coef:
        return
    setting = f"reward_model.length_reward_coef={coef}"
    if config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{setting}: it compares several samples of a prompt; set actor_rollout_ref.rollout.n=2 or more, or leave "
            "it out"
        )
    if name == "gdpo" and not {"score", "length_reward"} & set(keys):
        yield f"{setting}: gdpo reads only algorithm.gdpo_reward_keys={keys}; add length_reward there, or leave it out"
    if name == "maxrl":
        yield f"{setting}: maxrl needs rewards of 0 or more, and long responses lose; leave it out"
