"""`simulate`: run the trainer with stand-ins for its workers, and return what each step took in virtual time.

The trainer is `RayPPOTrainer` with the settings of a run: schedule, stages, formulas, ledger. What is not simulated:
the driver's own time, rewards (half of the responses are right), failures, agents and their requests.
"""

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.generator import TimedGenerator
from benchmarks.simulation.group import TimedWorkerGroup, timed_groups
from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.worker import SimulatedWork, TimedWorker
from hybridrl import main_ppo
from hybridrl.config import PPOConfig
from hybridrl.config.load import compose_settings
from hybridrl.errors import ConfigError
from hybridrl.framework.stage import spec_of, with_spec
from hybridrl.framework.step_runner import run_once
from hybridrl.planning.costs import Costs
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import RewardOutput, at_last_token, reward_positions
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.run.middleware import BatchContext

GPUS_PER_NODE = 8
MAX_COLUMNS = 64  # of a response
ROLES = {"actor", "rollout", "actor_rollout", "ref"}


@dataclass(frozen=True)
class Simulation:
    """A run to simulate.

    Attributes:
        costs: Seconds of a device's work.
        gpus: Devices that train; also those that generate if `rollout_gpus` is 0.
        rollout_gpus: Devices that only generate.
        prompts: Prompts of a step.
        n: Responses per prompt.
        mini_batch: Prompts of an optimizer step; 0 means all of the step.
        steps: Steps to run.
        warmup: First steps that the result leaves out: the pipeline fills.
        lengths: Of the responses.
        settings: Further settings of `main_ppo` by their dotted names, such as trainer.lag.
    """

    costs: Costs
    gpus: int
    rollout_gpus: int = 0
    prompts: int = 512
    n: int = 16
    mini_batch: int = 0
    steps: int = 8
    warmup: int = 3
    lengths: Lengths = field(default_factory=Lengths)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> int:
        """Tokens that a column of a response stands for."""
        return -(-self.lengths.cap // MAX_COLUMNS)

    def config(self, directory: str) -> PPOConfig:
        """Return the settings of the run; its files go to `directory`.

        Raises:
            ConfigError: A setting is wrong, or the run has a role without a stand-in.
        """
        chosen = {
            "data.train_batch_size": self.prompts,
            "data.max_prompt_length": 1,
            "data.max_response_length": -(-self.lengths.cap // self.unit),
            "data.shuffle": False,
            "actor_rollout_ref.model.path": "simulated",
            "actor_rollout_ref.rollout.n": self.n,
            "actor_rollout_ref.rollout.mode": "async",
            "actor_rollout_ref.rollout.agent.train_branches": False,
            "actor_rollout_ref.actor.ppo_mini_batch_size": self.mini_batch or self.prompts,
            "actor_rollout_ref.actor.calculate_old_log_probs": True,  # as in the published runs
            "trainer.total_training_steps": self.steps,
            "trainer.default_local_dir": directory,
            "trainer.logger": [],
            "trainer.device": "cpu",
            "trainer.master": False,
            "trainer.snapshot_freq": 0,
            "trainer.val_before_train": False,
            "trainer.parity_limit": "off",  # stand-ins compute nothing that could be compared
            **_pool("trainer", self.gpus),
            **(_pool("actor_rollout_ref.rollout", self.rollout_gpus) if self.rollout_gpus else {}),
            **self.settings,
        }
        config = compose_settings(PPOConfig, chosen, config_name="grpo_trainer")
        main_ppo.validate_config(config, with_inputs=False)
        unknown = {str(role) for role in main_ppo.worker_classes(config)} - ROLES
        if unknown:
            raise ConfigError(
                f"the simulation has no stand-in for {sorted(unknown)}; it knows the roles {sorted(ROLES)}"
            )
        return config


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated run took, without its first `warmup` steps.

    Attributes:
        step_s: Mean seconds of a step.
        stages_s: Stage -> mean seconds in which the driver waited in it.
        tokens_per_s: Generated tokens of trained responses per second.
        trainer_busy, rollout_busy: Share of the time in which these devices worked, the whole run; equal without
            devices that only generate.
        age_mean: Mean age of trained tokens in weight versions.
        ends_s: Virtual time at which each step ended.
        workers_cpu_s: Real CPU seconds of the whole run that the stand-ins took.
    """

    step_s: float
    stages_s: Mapping[str, float]
    tokens_per_s: float
    trainer_busy: float
    rollout_busy: float
    age_mean: float
    ends_s: tuple[float, ...]
    workers_cpu_s: float


def simulate(simulation: Simulation) -> SimulationResult:
    """Run the trainer on a virtual clock.

    Raises:
        ConfigError: A setting is wrong, or there is no stand-in for it.
    """
    clock = VirtualClock()
    workload = SimulatedWork(simulation.costs, simulation.lengths, simulation.unit)
    with tempfile.TemporaryDirectory() as directory:
        config = simulation.config(directory)
        workers: main_ppo.WorkerClasses = dict.fromkeys(main_ppo.worker_classes(config), TimedWorker)
        manager = main_ppo.resource_pools(config, workers)
        manager.backend = "local"  # pools of slots, of which nothing is reserved
        trainer = _TimedTrainer(
            config=config,
            tokenizer=_Tokenizer(),
            role_worker_mapping=workers,
            resource_pool_manager=manager,
            ray_worker_group_cls=timed_groups(clock, workload),
            reward_fn=half_right,
            agent_loops=TimedGenerator(config) if config.actor_rollout_ref.rollout.mode == "async" else None,
            train_dataset=_Prompts(simulation.prompts * simulation.steps * 4),
        )
        trainer.init_workers()
        try:
            trainer.fit()
            return _result(simulation, trainer, clock)
        finally:
            trainer.shutdown()


class _TimedTrainer(RayPPOTrainer):
    """The trainer of a run; notes the virtual time at which its stages end."""

    def init_workers(self) -> None:
        super().init_workers()
        self.ends_s: list[float] = []
        self.stages_s: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self.ages: list[float] = []

    def model_uses(self) -> Mapping[str, Any]:
        """Return nothing: the model has no files, and the devices nothing to measure."""
        return {}

    def stages(self) -> list[Any]:
        """Return the stages, each of which notes its virtual time."""
        return [self._timed(stage) for stage in super().stages()]

    def _timed(self, stage: Any) -> Any:
        @functools.wraps(stage)
        def timed(ctx: BatchContext) -> None:
            clock = self.policy.actor.clock
            start = clock.now_s
            run_once([stage], ctx)
            if spec_of(stage).name == "next_batch":
                self.stages_s.append({})
            self.stages_s[-1][spec_of(stage).name] = clock.now_s - start

        return with_spec(timed, spec_of(stage))

    def commit(self, *, required: bool = False) -> None:
        """Do nothing, also where the simulating program is told to end: there is nothing to save."""

    def log(self, ctx: BatchContext) -> None:
        super().log(ctx)
        self.ends_s.append(self.policy.actor.clock.now_s)
        self.tokens.append(int(ctx.batch.batch["responses"][:, 0].sum()))
        self.ages.append(float(ctx.metrics.get("async/age_mean", 0.0)))


def _result(simulation: Simulation, trainer: _TimedTrainer, clock: VirtualClock) -> SimulationResult:
    first = min(simulation.warmup, len(trainer.ends_s) - 1)
    ends = trainer.ends_s
    seconds = ends[-1] - (ends[first - 1] if first else 0.0)
    counted = len(ends) - first
    stages = trainer.stages_s[first:]
    return SimulationResult(
        step_s=seconds / counted,
        stages_s={name: float(np.mean([step.get(name, 0.0) for step in stages])) for name in stages[-1]},
        tokens_per_s=sum(trainer.tokens[first:]) / seconds,
        trainer_busy=_busy(trainer.policy.actor, clock),
        rollout_busy=_busy(trainer.policy.rollout, clock),
        age_mean=float(np.mean(trainer.ages[first:])),
        ends_s=tuple(ends),
        workers_cpu_s=clock.workers_cpu_s,
    )


def _busy(group: TimedWorkerGroup, clock: VirtualClock) -> float:
    """Return the share of the whole run in which the devices of a group worked."""
    busy = [clock.busy_s.get((group.pool, rank), 0.0) for rank in range(group.world_size)]
    return float(np.mean(busy)) / clock.now_s


def half_right(batch: DataProto, return_dict: bool = True) -> RewardOutput:
    """Return rewards 0 and 1 that depend on the responses alone, and are right for half of them."""
    lengths = batch.batch["responses"][:, 0]
    scores = ((lengths * 2_654_435_761) >> 7) % 2
    width = batch.batch["responses"].shape[1]
    rewards = at_last_token(scores.float(), reward_positions(batch), width=width)
    return RewardOutput(rewards, torch.ones(len(batch), dtype=torch.bool), {}, {})


class _Tokenizer:
    pad_token_id, eos_token_id = 0, 1


class _Prompts:
    """Prompts of one column. What a response to them is like depends on their seed in the run."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {
            "input_ids": torch.ones(1, dtype=torch.int64),
            "data_source": "simulated",
            "reward_model": {"ground_truth": None},
            "uid": str(row),
        }


def _pool(section: str, gpus: int) -> dict[str, int]:
    """Return the settings of a pool of this many devices.

    Raises:
        ConfigError: They do not fill nodes of `GPUS_PER_NODE`.
    """
    if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE:
        raise ConfigError(f"{gpus} devices: more than {GPUS_PER_NODE} must be a multiple of {GPUS_PER_NODE}")
    per_node = min(gpus, GPUS_PER_NODE)
    return {f"{section}.nnodes": gpus // per_node, f"{section}.n_gpus_per_node": per_node}
