"""DI-engine's page "Distributed" (v0.2.3), block by block, in its order.

Its learner, collector and other objects are in bandit.py. Corrected on the way: `max_iteration` for `max_iterations`,
`train_ter`, an `evaluate` that uses a `task` it was not given, and counters that are read in the next step without
being kept. Also corrected: a last checkpoint that is missed when a peer finishes just after `train` has checked.
"""

import os
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from hybridrl.framework import Parallel, Task
from hybridrl.framework.wrapper import StepTimer
from tests.support.framework.bandit import (
    MAX_ITERATION,
    TARGET,
    UPDATES_PER_COLLECT,
    Collector,
    Evaluator,
    Learner,
    Policy,
    ReplayBuffer,
    get_epsilon_greedy_fn,
    make_model,
)


class Instances:
    """The objects that every `main` of the page creates first."""

    def __init__(self, folder, *, target=TARGET):
        self.model = make_model()
        self.learner = Learner(Policy(self.model), folder)
        self.collector = Collector(self.model)
        self.evaluator = Evaluator(self.model, target)
        self.replay_buffer = ReplayBuffer()
        self.epsilon_greedy = get_epsilon_greedy_fn(0.95, 0.1, 500)


@dataclass
class Outcome:
    """Result of a `main` in one process.

    Attributes:
        reward: That of the last evaluation in this process, None without one.
    """

    weight: torch.Tensor
    train_iter: int
    reward: float | None
    evaluated_iters: list[int]
    labels: set[str]
    process: int

    @classmethod
    def of(cls, instances, labels=()):
        seen = instances.evaluator.evaluations
        weight, train_iter = instances.model.weight.detach(), instances.learner.train_iter
        return cls(
            weight, train_iter, seen[-1][2] if seen else None, [entry[0] for entry in seen], set(labels), os.getpid()
        )

    def reached(self):
        return self.reward is not None and self.reward >= TARGET

    def is_trained_like_the_loop(self):
        """Return whether the weights equal, bit for bit, those of the page's first loop after as many iterations.

        That loop runs without stopping at a target.
        """
        rounds, rest = divmod(self.train_iter, UPDATES_PER_COLLECT)
        return rest == 0 and torch.equal(self.weight, loop(None, max_iterations=rounds, target=2.0).weight)


def saved(folder):
    """Return the iterations that have a checkpoint."""
    return sorted(int(path.stem.removeprefix("iteration_")) for path in folder.glob("iteration_*.pt"))


# -- Task: from a loop to middleware


def loop(folder, *, max_iterations=MAX_ITERATION, target=TARGET):
    it = Instances(folder, target=target)
    learner, collector, evaluator, replay_buffer = it.learner, it.collector, it.evaluator, it.replay_buffer
    for _ in range(max_iterations):
        if evaluator.should_eval(learner.train_iter):
            stop, _ = evaluator.eval(learner.save_checkpoint, learner.train_iter, collector.envstep)
            if stop:
                break
        eps = it.epsilon_greedy(collector.envstep)
        new_data = collector.collect(train_iter=learner.train_iter, policy_kwargs={"eps": eps})
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)
        for _ in range(UPDATES_PER_COLLECT):
            train_data = replay_buffer.sample(learner.policy.get_attribute("batch_size"), learner.train_iter)
            if train_data is not None:
                learner.train(train_data, collector.envstep)
    return Outcome.of(it)


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    """Result of the plain loop, without this package."""
    return loop(tmp_path_factory.mktemp("loop"))


def test_the_loop_reaches_the_target_after_many_evaluations(looped):
    assert (
        looped.reached()
        and looped.evaluated_iters == list(range(0, looped.train_iter + 1, 10))
        and looped.train_iter > 40
    )
    assert looped.is_trained_like_the_loop()


def training(learner, collector, evaluator, replay_buffer, epsilon_greedy):
    def _training(ctx):
        if evaluator.should_eval(learner.train_iter):
            stop, _ = evaluator.eval(learner.save_checkpoint, learner.train_iter, collector.envstep)
            if stop:
                ctx.finish = True
                return
        eps = epsilon_greedy(collector.envstep)
        new_data = collector.collect(train_iter=learner.train_iter, policy_kwargs={"eps": eps})
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)
        for _ in range(UPDATES_PER_COLLECT):
            train_data = replay_buffer.sample(learner.policy.get_attribute("batch_size"), learner.train_iter)
            if train_data is not None:
                learner.train(train_data, collector.envstep)

    return _training


def test_the_loop_as_one_middleware_is_the_loop(tmp_path, looped):
    it = Instances(tmp_path)
    with Task() as task:
        task.use(training(it.learner, it.collector, it.evaluator, it.replay_buffer, it.epsilon_greedy))
        task.run(max_step=MAX_ITERATION)
    outcome = Outcome.of(it)
    assert (
        torch.equal(outcome.weight, looped.weight) and outcome.evaluated_iters == looped.evaluated_iters and task.finish
    )
    assert task.ctx.total_step == looped.train_iter / UPDATES_PER_COLLECT, "steps before the one that only evaluated"
    assert saved(tmp_path) == [looped.train_iter]


def test_a_middleware_may_be_an_object(tmp_path, looped):
    class Training:
        def __init__(self, it):
            self.train = training(it.learner, it.collector, it.evaluator, it.replay_buffer, it.epsilon_greedy)

        def __call__(self, ctx):
            self.train(ctx)

    it = Instances(tmp_path)
    with Task() as task:
        task.use(Training(it)).run(max_step=MAX_ITERATION)
    assert torch.equal(it.model.weight, looped.weight) and [spec.name for spec in task.stages] == ["Training"]


def evaluate_coupled(learner, collector, evaluator):
    def _evaluate(ctx):
        if evaluator.should_eval(learner.train_iter):
            stop, _ = evaluator.eval(learner.save_checkpoint, learner.train_iter, collector.envstep)
            if stop:
                ctx.finish = True

    return _evaluate


def collect_coupled(epsilon_greedy, learner, collector, replay_buffer):
    def _collect(ctx):
        eps = epsilon_greedy(collector.envstep)
        new_data = collector.collect(train_iter=learner.train_iter, policy_kwargs={"eps": eps})
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)

    return _collect


def train_coupled(learner, collector, replay_buffer):
    def _train(ctx):
        for _ in range(UPDATES_PER_COLLECT):
            train_data = replay_buffer.sample(learner.policy.get_attribute("batch_size"), learner.train_iter)
            if train_data is not None:
                learner.train(train_data, collector.envstep)

    return _train


def test_three_middlewares_that_share_their_objects_evaluate_what_the_loop_evaluates(tmp_path, looped):
    it = Instances(tmp_path)
    with Task() as task:
        task.use(evaluate_coupled(it.learner, it.collector, it.evaluator))
        task.use(collect_coupled(it.epsilon_greedy, it.learner, it.collector, it.replay_buffer))
        task.use(train_coupled(it.learner, it.collector, it.replay_buffer))
        task.run(max_step=MAX_ITERATION)
    outcome = Outcome.of(it)
    assert (
        outcome.reward == looped.reward
        and outcome.evaluated_iters == looped.evaluated_iters
        and saved(tmp_path) == [looped.train_iter]
    )
    assert outcome.train_iter == looped.train_iter + UPDATES_PER_COLLECT, (
        "a step that sets finish still runs to its end"
    )
    assert outcome.is_trained_like_the_loop()


# -- ctx: middlewares that know only their own object


def evaluate(evaluator):
    def _evaluate(ctx):
        ctx.keep("train_iter", "envstep")
        ctx.setdefault("envstep", -1)
        ctx.setdefault("train_iter", -1)
        if evaluator.should_eval(ctx.train_iter):
            stop, _ = evaluator.eval(None, ctx.train_iter, ctx.envstep)
            if stop:
                ctx.finish = True

    return _evaluate


def collect(epsilon_greedy, collector, replay_buffer):
    def _collect(ctx):
        ctx.setdefault("train_iter", -1)
        eps = epsilon_greedy(collector.envstep)
        new_data = collector.collect(train_iter=ctx.train_iter, policy_kwargs={"eps": eps})
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)
        ctx.envstep = collector.envstep

    return _collect


def train(learner, replay_buffer):
    def _train(ctx):
        ctx.setdefault("envstep", -1)
        for _ in range(UPDATES_PER_COLLECT):
            train_data = replay_buffer.sample(learner.policy.get_attribute("batch_size"), learner.train_iter)
            if train_data is not None:
                learner.train(train_data, ctx.envstep)
                ctx.train_iter = learner.train_iter
        if ctx.finish:
            learner.save_checkpoint()

    return _train


def use_all(task, it):
    task.use(evaluate(it.evaluator))
    task.use(collect(it.epsilon_greedy, it.collector, it.replay_buffer))
    task.use(train(it.learner, it.replay_buffer))


def test_middlewares_that_share_only_the_context_do_the_same(tmp_path, looped):
    it = Instances(tmp_path)
    with Task() as task:
        use_all(task, it)
        task.run(max_step=MAX_ITERATION)
    outcome = Outcome.of(it)
    assert outcome.reward == looped.reward and outcome.is_trained_like_the_loop()
    assert outcome.evaluated_iters == [-1, *range(10, looped.train_iter + 1, 10)], "-1: before the first count"
    assert saved(tmp_path) == [outcome.train_iter] == [looped.train_iter + UPDATES_PER_COLLECT]


def test_a_value_lasts_for_one_step_unless_it_is_kept():
    seen = []

    def count(ctx):
        if ctx.total_step == 0:
            ctx.keep("train_iter")
        seen.append((ctx.get("train_iter"), ctx.get("loss")))
        ctx.train_iter = ctx.setdefault("train_iter", 0) + 1
        ctx["loss"] = 0.5

    with Task() as task:
        task.use(count).run(max_step=3)
    assert seen == [(None, None), (1, None), (2, None)]


# -- Magic time: StepTimer and async_mode


def test_one_line_shows_the_time_of_every_stage(tmp_path, looped, caplog):
    it = Instances(tmp_path)
    with Task() as task:
        task.use_step_wrapper(timer := StepTimer(print_per_step=1))
        use_all(task, it)
        task.run(max_step=MAX_ITERATION)
    assert Outcome.of(it).reward == looped.reward
    steps = task.ctx.total_step + 1
    for name in ("_evaluate", "_collect", "_train"):
        assert sum(f"stage {name} took " in line for line in caplog.messages) == steps
        assert len(timer.records[name]) == timer.window == 10 and min(timer.records[name]) > 0


def test_asynchronous_middlewares_reach_the_target_too(tmp_path):
    it = Instances(tmp_path)
    with Task(async_mode=True) as task:
        task.use_step_wrapper(timer := StepTimer(print_per_step=1))
        use_all(task, it)
        task.run(max_step=MAX_ITERATION)
    outcome = Outcome.of(it)
    assert outcome.reached() and task.finish and set(timer.records) == {"_evaluate", "_collect", "_train"}


def test_asynchronous_middlewares_run_concurrently_and_the_step_waits_for_all():
    met, ended = threading.Barrier(3), []

    def meet(ctx):
        ended.append((ctx.total_step, met.wait(timeout=30) >= 0))

    with Task(async_mode=True) as task:
        task.use(meet).use(meet).use(meet).run(max_step=2)
    assert ended == [(0, True)] * 3 + [(1, True)] * 3


# -- Async and parallel


def main_of_three(folder):
    it = Instances(folder)
    with Task() as task:
        use_all(task, it)
        task.run(max_step=MAX_ITERATION)
        assert task.finish
        return Outcome.of(it, task.labels)


@pytest.mark.slow
def test_three_processes_in_a_star_each_train_until_one_reaches_the_target(ray_cluster, tmp_path, looped):
    outcomes = Parallel.runner(n_parallel_workers=3, topology="star")(main_of_three, tmp_path)
    assert len({os.getpid(), *(outcome.process for outcome in outcomes)}) == 4
    assert [sorted(outcome.labels) for outcome in outcomes] == [["distributed", f"node.{i}"] for i in range(3)]
    assert any(outcome.reached() for outcome in outcomes), "the one that has ends the others"
    assert all(outcome.is_trained_like_the_loop() for outcome in outcomes), "no process trains with another's data"
    assert {outcome.reward for outcome in outcomes if outcome.reached()} == {looped.reward}


def evaluate_anywhere(task, evaluator, model):
    last_train_iter = -1

    def _evaluate(ctx):
        nonlocal last_train_iter
        ctx.keep("train_iter", "envstep")
        ctx.setdefault("envstep", -1)
        ctx.setdefault("train_iter", -1)
        if task.router.is_active:
            while True:
                if ctx.finish:
                    return
                if task.parallel_ctx.get("state_dict") and task.parallel_ctx.get("train_iter") > last_train_iter:
                    newest = task.parallel_ctx
                    model.load_state_dict(newest.state_dict)
                    ctx.train_iter = last_train_iter = newest.train_iter
                    ctx.envstep = newest.envstep
                    break
                time.sleep(0.01)
        if evaluator.should_eval(ctx.train_iter):
            stop, _ = evaluator.eval(None, ctx.train_iter, ctx.envstep)
            if stop:
                ctx.finish = True

    return _evaluate


def train_anywhere(task, learner, model, replay_buffer):
    def _train(ctx):
        ctx.setdefault("envstep", -1)
        for _ in range(UPDATES_PER_COLLECT):
            train_data = replay_buffer.sample(learner.policy.get_attribute("batch_size"), learner.train_iter)
            if train_data is not None:
                learner.train(train_data, ctx.envstep)
                ctx.train_iter = learner.train_iter
                if task.router.is_active:
                    ctx.state_dict = model.state_dict()

    return _train


def main(folder, *, async_mode=False):
    it = Instances(folder)
    with Task(async_mode=async_mode) as task:
        task.use(evaluate_anywhere(task, it.evaluator, it.model), filter_labels=["standalone", "node.1"])
        task.use(collect(it.epsilon_greedy, it.collector, it.replay_buffer), filter_labels=["standalone", "node.0"])
        task.use(train_anywhere(task, it.learner, it.model, it.replay_buffer), filter_labels=["standalone", "node.0"])
        if task.match_labels(["standalone", "node.0"]):
            task.on_exit(it.learner.save_checkpoint)
        task.run(max_step=MAX_ITERATION)
        return Outcome.of(it, task.labels)


@pytest.mark.parametrize("async_mode", [False, True])
def test_the_program_for_two_processes_also_runs_in_one(tmp_path, async_mode, looped):
    outcome = main(tmp_path, async_mode=async_mode)
    assert outcome.reached() and saved(tmp_path) == [outcome.train_iter]
    assert outcome.labels == {"standalone", *(["async"] if async_mode else [])}
    if not async_mode:
        assert outcome.reward == looped.reward and outcome.is_trained_like_the_loop()


def test_evaluating_in_another_process_changes_nothing_in_training(ray_cluster, tmp_path):
    trainer, evaluator = Parallel.runner(n_parallel_workers=2, topology="star")(main, tmp_path)
    assert evaluator.reached() and trainer.reward is None and trainer.process != evaluator.process
    assert evaluator.train_iter == 0 and trainer.train_iter >= evaluator.evaluated_iters[-1] > 40, (
        "one only evaluates, one only trains"
    )
    assert trainer.is_trained_like_the_loop() and saved(tmp_path) == [trainer.train_iter]
    evaluated = loop(None, max_iterations=evaluator.evaluated_iters[-1] // UPDATES_PER_COLLECT, target=2.0)
    assert torch.equal(evaluator.weight, evaluated.weight), "the weights belong to the iteration in their context"


def test_labels_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("HYBRIDRL_TASK_LABELS", "fast, node.x")
    with Task() as task:
        task.use(lambda ctx: ctx.setdefault("fast", True), filter_labels=["fast"])
        task.use(lambda ctx: ctx.setdefault("slow", True), filter_labels=["slow*", "distributed"])
        task.run(max_step=1)
    assert task.ctx.get("fast") and not task.ctx.get("slow") and task.labels == {"standalone", "fast", "node.x"}
