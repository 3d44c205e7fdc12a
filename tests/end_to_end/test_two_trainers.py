"""Two trainers in one process do not see each other's attempts, signals and traces."""

import os
import signal
import threading

import pytest

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, load_config
from hybridrl.driver.run_context import RunContext
from hybridrl.driver.signals import Terminated
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.recovery.policies import with_resume_overrides
from tests.support.end_to_end.runs import metrics, settings


def settings_of(folder, model, **changes) -> PPOConfig:
    folder.mkdir()
    words = settings(folder, model, **{"trainer__test_freq": -1, "trainer__total_training_steps": 3} | changes)
    return load_config(PPOConfig, words, program="test", config_name="ppo_trainer")


def train(config: PPOConfig, trainer_cls=RayPPOTrainer, context: RunContext | None = None) -> None:
    classes = main_ppo.worker_classes(config)
    pools = main_ppo.resource_pools(config, classes)
    main_ppo.run(config, classes, pools, trainer_cls=trainer_cls, context=context)


class OneLoad(RayPPOTrainer):
    """Loads its model while no other trainer does: transformers cannot load two at a time in one process."""

    lock = threading.Lock()

    def init_workers(self):
        with self.lock:
            super().init_workers()


def steps(folder) -> list[int]:
    return [row["step"] for row in metrics(folder / "run") if "actor/pg_loss" in row]


def test_sigterm_ends_the_trainer_of_the_main_thread_and_not_the_one_beside_it(tmp_path, tiny_qwen2):
    seen: dict[str, RayPPOTrainer] = {}
    both_run, first_ended = threading.Barrier(2, timeout=60), threading.Event()

    class First(OneLoad):
        def next_batch(self, ctx):
            super().next_batch(ctx)
            if self.global_steps == 1:
                seen["first"] = self
                both_run.wait()
                os.kill(os.getpid(), signal.SIGTERM)

    class Second(OneLoad):
        def next_batch(self, ctx):
            super().next_batch(ctx)
            if self.global_steps == 1:
                seen["second"] = self
                both_run.wait()
                assert first_ended.wait(60)

    first = settings_of(tmp_path / "first", tiny_qwen2)
    second = settings_of(tmp_path / "second", tiny_qwen2)
    context = RunContext()
    context.lifecycle.attempt = 2  # a driver that was started again
    beside = threading.Thread(target=train, args=(second, Second))
    beside.start()
    try:
        with pytest.raises(Terminated):
            train(first, First, context)
    finally:
        first_ended.set()
        beside.join(60)
    assert seen["first"].context is context and context.termination.received
    assert steps(tmp_path / "first") == [1]  # committed, then ended
    assert (tmp_path / "first/run/global_step_1/manifest.json").exists()
    other = seen["second"].context
    assert not other.termination.received and other.lifecycle.attempt == 1
    assert steps(tmp_path / "second") == [1, 2, 3]
    assert seen["first"].job != seen["second"].job


def test_a_trainer_after_another_starts_without_its_attempt_signal_and_trace(tmp_path, tiny_qwen2):
    traces = []

    class Traced(RayPPOTrainer):
        def log(self, ctx):
            super().log(ctx)
            traces.append(self.context.trace)

    one = settings_of(tmp_path / "one", tiny_qwen2, trainer__trace=True, trainer__total_training_steps=1)
    context = RunContext()
    context.lifecycle.attempt, context.termination.received = 2, True
    train(one, Traced, context)
    assert context.trace is None and traces[0] is not None
    assert with_resume_overrides(one, context.lifecycle).trainer.resume_mode == "auto"
    two = settings_of(tmp_path / "two", tiny_qwen2, trainer__total_training_steps=2)
    train(two, Traced)
    assert steps(tmp_path / "two") == [1, 2]
    assert traces[1:] == [None, None] and not (tmp_path / "two/run/trace").exists()
