"""Context: the values of a step, and which of them are kept."""

import math
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hybridrl.framework import Context, OfflineRLContext, OnlineRLContext, ding_init
from hybridrl.framework.events.task_events import unpicklable_keys


def test_attributes_and_items_are_the_same_values():
    ctx = Context()
    ctx.batch = [1]
    ctx["scores"] = [2]
    assert ctx["batch"] == [1] and ctx.scores == [2]
    assert "scores" in ctx and "values" not in ctx
    assert sorted(ctx) == ["batch", "finish", "scores", "total_step"]
    del ctx["scores"]
    assert "scores" not in ctx


def test_a_context_is_made_and_read_like_a_dict():
    ctx = Context(hello="world", finish=True)
    assert ctx.hello == ctx["hello"] == "world" and ctx.finish and ctx.total_step == 0
    assert len(ctx) == 3 == len(ctx.values()) and dict(ctx) == dict(ctx.items())
    ctx.update({"a": 1}, b=2)
    ctx.update([("c", 3)])
    assert (ctx.a, ctx.b, ctx.c) == (1, 2, 3) and "hello" not in ctx.renew()
    assert len(pickle.loads(pickle.dumps(ctx))) == 6 and bool(Context())


@pytest.mark.parametrize(("kind", "own"), [(OnlineRLContext, "env_step"), (OfflineRLContext, "trained_env_step")])
def test_a_program_of_di_engine_finds_its_fields_and_the_first_evaluation_is_the_best_so_far(kind, own):
    ctx = kind()
    assert ctx.eval_value == ctx.last_eval_value == -math.inf and ctx.last_eval_iter == -1
    assert ctx.train_data is None and ctx.train_output is None and ctx.eval_output == ctx.info_for_logging == {}
    ctx.eval_value, ctx.train_data, ctx.wandb_url = 0.5, [1], "w"
    ctx.last_eval_value = max(ctx.last_eval_value, ctx.eval_value)
    ctx[own] += 8
    new = ctx.renew()
    assert (new.last_eval_value, new.wandb_url, new[own]) == (0.5, "w", 8)
    assert new.eval_value == -math.inf and new.train_data is None


def test_an_online_context_has_the_fields_of_collectors():
    ctx = OnlineRLContext()
    assert ctx.collect_kwargs == {} and ctx.trajectory_end_idx == []
    assert ctx.obs is ctx.action is ctx.inference_output is ctx.trajectories is ctx.episodes is None
    ctx.collect_kwargs["eps"] = 0.1
    assert ctx.renew().collect_kwargs == {}


def test_a_missing_value_is_an_error_by_attribute_and_by_item():
    with pytest.raises(AttributeError):
        _ = Context().missing
    with pytest.raises(KeyError):
        _ = Context()["missing"]


def test_get_and_setdefault_fill_in_only_what_is_missing():
    ctx = Context()
    assert ctx.get("a") is None and ctx.get("a", 1) == 1 and "a" not in ctx
    assert ctx.setdefault("a", 2) == 2 and ctx.setdefault("a", 3) == 2 and ctx.a == 2


def test_renew_drops_what_was_not_kept_and_counts_the_step():
    ctx = Context(total_step=4, finish=True)
    ctx.batch = [1]
    new = ctx.renew()
    assert type(new) is Context and new.total_step == 5
    assert "batch" not in new and new.finish is False
    assert ctx.batch == [1] and ctx.total_step == 4, "the old context is left as it was"


def test_a_key_kept_once_survives_every_later_renewal():
    ctx = Context()
    ctx.keep("train_iter", "set_later")
    ctx.train_iter = 7
    ctx = ctx.renew().renew()
    ctx.set_later = "x"
    ctx = ctx.renew().renew()
    assert (ctx.train_iter, ctx.set_later, ctx.total_step) == (7, "x", 4)


def test_keeping_in_one_context_does_not_reach_back_into_an_older_one():
    old = Context()
    new = old.renew()
    new.keep("a")
    old.a = 1
    assert "a" not in old.renew()


def test_online_context_keeps_its_counters_and_drops_its_batch():
    ctx = OnlineRLContext(batch="rows", train_iter=3, env_step=100, last_eval_value=0.5)
    ctx.metrics["loss"] = 1.0
    ctx.timing["gen"] = 2.0
    new = ctx.renew().renew()
    assert (new.train_iter, new.env_step, new.last_eval_value, new.last_eval_iter) == (3, 100, 0.5, -1)
    assert new.batch is None and new.metrics == {} and new.timing == {}


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_ding_init_makes_the_folder_of_the_experiment(kind, tmp_path):
    assert ding_init(kind(exp_name=str(tmp_path / "a" / "b"))).is_dir()
    with pytest.raises(ValueError, match=r"cfg.exp_name=None must be the folder"):
        ding_init(kind())


@dataclass(repr=False, eq=False)
class _OwnContext(Context):
    best: float = 0.0

    def __post_init__(self) -> None:
        self.keep("best")


def test_a_subclass_declares_its_own_kept_fields():
    ctx = _OwnContext(best=0.25)
    assert isinstance(ctx.renew(), _OwnContext) and ctx.renew().best == 0.25


def test_a_context_and_its_kept_keys_survive_pickling():
    ctx = OnlineRLContext(train_iter=2)
    ctx.keep("extra")
    ctx.extra = [1]
    new = pickle.loads(pickle.dumps(ctx)).renew()
    assert (new.train_iter, new.extra, new.total_step) == (2, [1], 1)


def test_repr_names_the_keys_and_not_the_values():
    ctx = Context()
    ctx.batch = "a very long batch"
    assert "batch" in repr(ctx) and "a very long" not in repr(ctx) and "_kept" not in repr(ctx)


def test_what_cannot_be_pickled_is_found_beside_a_value_of_any_name():
    assert unpicklable_keys(Context(items=[1], keys=2, reader=(i for i in ()))) == ["'reader'"]
