"""Stage specs: declaring and looking up."""

import functools

import pytest

from hybridrl.framework import StageSpec, spec_of, stage
from hybridrl.framework.stage import Stage


class _Trainer:
    @stage("gen", role="rollout", reads=["prompts"], writes=["responses"])
    def generate(self, ctx):
        ctx.seen = self

    def plain(self, ctx):
        pass


class _Callable:
    def __call__(self, ctx):
        pass


def test_a_decorated_method_and_its_bound_form_carry_the_spec():
    expected = StageSpec("gen", "rollout", ("prompts",), ("responses",), True)
    assert spec_of(_Trainer.generate) == spec_of(_Trainer().generate) == expected


def test_the_name_defaults_to_the_function_name():
    @stage(pure=False)
    def update_actor(ctx):
        pass

    assert spec_of(update_actor) == StageSpec("update_actor", None, (), (), False)


def test_an_undecorated_stage_has_its_name_and_is_not_taken_for_pure():
    assert spec_of(_Trainer().plain) == StageSpec("plain", pure=False)
    assert spec_of(_Callable()).name == "_Callable"


def test_a_partial_is_known_as_its_function():
    def work(scale, ctx):
        pass

    assert spec_of(functools.partial(work, 2)).name == "work"
    assert spec_of(functools.partial(_Trainer.generate, _Trainer())).name == "gen"


def test_a_wrapper_made_with_functools_wraps_keeps_the_spec():
    method = _Trainer().generate

    @functools.wraps(method)
    def wrapped(ctx):
        return method(ctx)

    assert spec_of(wrapped).name == "gen"


def test_a_bound_method_can_be_named_where_it_is_used():
    trainer = _Trainer()
    named = stage("second", role="actor")(trainer.plain)
    assert spec_of(named) == StageSpec("second", "actor", (), (), True)
    assert spec_of(trainer.plain).name == "plain"


def test_a_spec_cannot_be_changed():
    with pytest.raises(AttributeError):
        spec_of(_Trainer.generate).name = "other"


def test_the_decorator_without_parentheses_is_refused():
    with pytest.raises(TypeError, match="parentheses"):

        @stage
        def forgotten(ctx):
            pass


def test_a_line_of_a_step_is_data_until_it_is_bound():
    line = Stage(_Trainer.plain, role="actor", reads=("a", "b", "a"), writes=("c",), pure=False)
    assert line.spec == StageSpec("plain", "actor", ("a", "b"), ("c",), False)
    assert line.enabled and not line.when([]).enabled and line.when(2).enabled
    assert Stage(_Trainer.plain, "other").spec == StageSpec("other", pure=True)


def test_a_bound_line_calls_the_method_of_that_trainer():
    class Context:
        seen = None

    trainer, ctx = _Trainer(), Context()
    bound = Stage(_Trainer.generate, "renamed").bind(trainer)
    bound(ctx)
    assert ctx.seen is trainer and spec_of(bound).name == "renamed" and spec_of(trainer.generate).name == "gen"
