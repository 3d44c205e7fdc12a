"""`trainer_invocation` and `RG_<ROLE>`: seven attributes, both forms of pre_func and post_func, unmarked methods."""

import time

import pytest

from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.sdk import BaseTrainer, trainer_invocation
from hybridrl.sdk.first_generation.trainer import WorkloadMeta
from hybridrl.sdk.first_generation.workload_handles import RoleGroupProxy, WorkloadHandle
from hybridrl.single_controller.references import OutputRefs
from tests.support.sdk.thread_group import ThreadWorkerGroup


def with_size(proxy, *args, **kwargs):
    return (args[0] + proxy.world_size,), kwargs


def with_role(proxy, result):
    return {proxy.role: result}


def not_below_zero(input: int):
    return 0 if input < -1 else input


class Actor:
    number = 0  # its rank

    def plain(self, *args, **kwargs):
        return self.number, args, kwargs

    @trainer_invocation
    def bare(self, x):
        return self.number, x

    @trainer_invocation(auto_shard=False)
    def same_for_all(self, x):
        return x

    @trainer_invocation(target="RANK0")
    def first(self, x):
        return self.number, x

    @trainer_invocation(target="RANK0", blocking=False)
    def first_later(self, x):
        return self.number, x

    @trainer_invocation(blocking=False)
    def later(self, x):
        return self.number + x

    @trainer_invocation(is_async=True, timeout=0.3)
    def naps(self, seconds):
        time.sleep(seconds if self.number else 0)
        return self.number

    @trainer_invocation(timeout=0.1)
    def naps_without_deadline(self):
        time.sleep(0.3)
        return self.number

    @trainer_invocation(pre_func=with_size, post_func=with_role)
    def in_the_form_of_the_code(self, x):
        return x

    @trainer_invocation(pre_function=not_below_zero, post_function=sum)
    def in_the_form_of_the_guide(self, x):
        return x + 1

    @trainer_invocation(target="RANK0", post_func=lambda result: (type(result), result))
    def first_with_post(self):
        return "output"

    @trainer_invocation(blocking=False, post_func=lambda result: [type(result), result])
    def later_with_post(self):
        return "output"


@pytest.fixture
def group():
    group = ThreadWorkerGroup(Actor, role="actor", world_size=2)
    yield group
    group.shutdown()


@pytest.fixture
def rg(group):
    return RoleGroupProxy(group)


def test_a_method_without_a_mark_is_called_on_all(rg):
    assert rg.plain(1, key="k") == [(0, (1,), {"key": "k"}), (1, (1,), {"key": "k"})]
    assert rg.bare(1) == [(0, 1), (1, 1)]


def test_lists_with_one_entry_per_process_are_sharded_if_all_arguments_are_such_lists(rg):
    assert rg.plain([1, 2], key=["a", "b"]) == [(0, (1,), {"key": "a"}), (1, (2,), {"key": "b"})]
    assert rg.plain([1, 2], 3) == [(0, ([1, 2], 3), {}), (1, ([1, 2], 3), {})]  # not all are lists
    assert rg.plain([1, 2, 3]) == [(0, ([1, 2, 3],), {}), (1, ([1, 2, 3],), {})]  # another length
    assert rg.plain() == [(0, (), {}), (1, (), {})]
    assert rg.same_for_all([1, 2]) == [[1, 2], [1, 2]]  # auto_shard=False


def test_rank0_gives_a_list_of_one_with_all_arguments(rg):
    assert rg.first([1, 2]) == [(0, [1, 2])]
    references = rg.first_later(3)
    assert len(references) == 1 and references.fetch(references) == [(0, 3)]


def test_not_blocking_gives_one_reference_per_process(rg):
    references = rg.later(1)
    assert isinstance(references, OutputRefs) and references.fetch(references) == [1, 2]
    submitted = rg.bare.submit(1)
    assert submitted.fetch(submitted) == [(0, 1), (1, 1)]


def test_is_async_waits_for_all_and_raises_at_the_timeout(rg):
    assert rg.naps(0.1) == [0, 1]  # DLRover returns after the first and drops the others
    with pytest.raises(CallTimeout):
        rg.naps(0.6)


def test_the_timeout_is_not_used_without_is_async(rg):
    assert rg.naps_without_deadline() == [0, 1]


def test_pre_and_post_in_the_form_of_the_code_get_the_proxy(rg):
    assert rg.in_the_form_of_the_code(5) == {"actor": [7, 7]}


def test_pre_and_post_in_the_form_of_the_guide_get_the_value(rg):
    assert rg.in_the_form_of_the_guide(-5) == 2 and rg.in_the_form_of_the_guide(x=3) == 8
    with pytest.raises(TypeError, match=r"in_the_form_of_the_guide\(\).*one argument.*got 2"):
        rg.in_the_form_of_the_guide(1, 2)


def test_post_gets_what_the_call_returns(rg):
    assert rg.first_with_post() == (list, ["output"])
    assert rg.later_with_post()[0] is OutputRefs


def test_without_a_proxy_a_function_that_needs_it_says_so(group):
    assert group.in_the_form_of_the_guide(1) == 4
    with pytest.raises(TypeError, match=r"in_the_form_of_the_code\(\): its pre_func takes the proxy; .*RG_<ROLE>"):
        group.in_the_form_of_the_code(1)


def test_a_pre_func_that_returns_no_pair_is_named(group):
    class Wrong:
        @trainer_invocation(pre_func=lambda proxy, *args: args)
        def update(self, x): ...

    with pytest.raises(TypeError, match=r"update\(\): its pre_func returned \(1,\), not \(args, kwargs\)"):
        RoleGroupProxy(ThreadWorkerGroup(Wrong, role="actor", world_size=1)).update(1)


def one(x): ...
def two(x, y): ...
def none(): ...


@pytest.mark.parametrize(
    ("method", "pre", "takes_proxy"),
    [
        (one, lambda x: x, False),
        (one, lambda proxy: proxy, True),
        (none, lambda group: ((), {}), True),
        (one, lambda group, *args, **kwargs: (args, kwargs), True),
        (one, lambda group, x: ((x,), {}), True),
        (two, lambda group, x, y: ((x, y), {}), True),
        (one, abs, False),
    ],
)
def test_the_form_of_pre_func_is_told_by_its_signature(method, pre, takes_proxy):
    trainer_invocation(pre_func=pre)(method)
    assert method.__hybridrl_invocation__.pre.takes_proxy is takes_proxy


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (one, {"pre_func": lambda *args, **kwargs: 0}, "cannot tell which of its arguments is the proxy"),
        (one, {"pre_func": lambda: 0}, "cannot tell"),
        (two, {"pre_func": lambda x: 0}, "takes one argument, but the method takes 2"),
        (two, {"pre_func": lambda x, y: 0}, "takes 2 arguments, which are neither the proxy and the method's 2"),
        (one, {"pre_func": lambda a, b, c: 0}, "takes 3 arguments"),
        (one, {"pre_func": 5}, "pre_func=5 is no function"),
        (one, {"post_func": lambda: 0}, "has 0 parameters; it must be post_func"),
        (one, {"post_func": lambda a, b, c: 0}, "has 3 parameters"),
        (one, {"post_func": lambda *a: 0}, "has 1 parameters"),
        (one, {"pre_func": abs, "pre_function": abs}, "pre_func and pre_function are two names"),
        (one, {"timeout": 0}, r"timeout=0\): must be a number of seconds"),
        (one, {"timeout": "5"}, r"timeout='5'"),
        (one, {"target": "RANK1"}, r"target='RANK1'\): known are ALL and RANK0"),
        (one, {"blocking": "no"}, r"blocking='no'\): must be True or False"),
    ],
)
def test_what_is_wrong_is_said_at_the_decoration(method, arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer_invocation(**arguments)(method)


def test_a_method_that_does_not_exist_is_named_with_those_that_do(rg):
    with pytest.raises(AttributeError, match="role 'actor': Actor .*'upate'.* bare, first"):
        rg.upate(1)
    with pytest.raises(AttributeError):
        rg._private()


# -- BaseTrainer


class Trainer(BaseTrainer):
    def init(self): ...
    def fit(self): ...


@pytest.fixture
def trainer(group):
    own = ThreadWorkerGroup(Actor, role="tool-user", world_size=1)
    handles = {g.role: [WorkloadHandle(g, rank) for rank in range(g.world_size)] for g in (group, own)}
    metas = {"actor": WorkloadMeta(Actor, {"cpu": 1.0, "accelerator": 0.5})}
    yield Trainer(handles, metas, {"steps": 3, "optim": {"lr": 0.1}})
    own.shutdown()


def test_every_role_has_a_group_also_one_with_a_name_of_its_own(trainer):
    assert trainer.get_role_groups() == ["RG_ACTOR", "RG_TOOL_USER"]
    assert trainer.RG_ACTOR.plain() == [(0, (), {}), (1, (), {})] and trainer.RG_TOOL_USER.plain() == [(0, (), {})]
    assert len(trainer.RG_ACTOR) == 2 and len(trainer.actors) == 2 and trainer.critics == []
    with pytest.raises(AttributeError, match="RG_CRITIC: .*no such role.* RG_ACTOR, RG_TOOL_USER"):
        trainer.RG_CRITIC.update()


def test_a_handle_calls_one_process_and_returns_a_reference(trainer):
    first, second = trainer.actor_handles["ACTOR"]
    assert second.plain.remote(1, a=2).result() == (1, (1,), {"a": 2}) and (first.rank, second.rank) == (0, 1)
    with pytest.raises(TypeError, match=r"actor-0.plain\(\) runs in another process; write .plain.remote"):
        first.plain(1)


def test_config_and_resources(trainer):
    assert trainer.config.optim.lr == 0.1
    assert trainer.get_workload_resource("actor") == trainer.actor_resource == {"cpu": 1.0, "accelerator": 0.5}
    assert trainer.critic_resource == {} and trainer.actor_metas is trainer.actor_classes


def test_init_and_fit_are_abstract_and_actor_metas_is_another_name():
    with pytest.raises(TypeError, match="abstract"):
        BaseTrainer({}, {}, {})
    assert Trainer({}, actor_metas={"ACTOR": WorkloadMeta(Actor, {})}, config={}).actor_classes["ACTOR"].cls is Actor


def test_a_constructor_that_passes_nothing_on_is_named():
    class Forgets(Trainer):
        def __init__(self, actor_handles, actor_classes, config): ...

    for name in ("RG_ACTOR", "config", "actors"):
        with pytest.raises(AttributeError, match=r"Forgets.*: call super\(\).__init__\(actor_handles"):
            getattr(Forgets({}, {}, {}), name)
