"""The options with which worker processes start."""

import pytest

from hybridrl.single_controller.dispatch import register
from hybridrl.single_controller.invocation import CONCURRENT, CONTROL, USER_CODE
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.host_start import actor_options
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, create_colocated_worker_cls
from hybridrl.single_controller.worker import Worker


class Plain(Worker): ...


class Threaded(Worker):
    @register(concurrency=8)
    def sleep(self) -> None: ...


def groups_of(recipe: RayClassWithInitArgs) -> dict[str, int] | None:
    pool = RayResourcePool([1], use_gpu=False)
    options = actor_options(pool, recipe.recipes("role"), share=1.0, options=recipe.actor_options, environment={})
    return options.get("concurrency_groups")


def recipe_of(cls: type, **groups: int) -> RayClassWithInitArgs:
    recipe = RayClassWithInitArgs(cls)
    if groups:
        recipe.update_options({"concurrency_groups": groups})
    return recipe


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (recipe_of(Plain), None),
        (recipe_of(Threaded), {CONCURRENT: 8}),
        (recipe_of(Plain, user_code=1, control=1), {USER_CODE: 1, CONTROL: 1}),
        (recipe_of(Threaded, control=1), {CONCURRENT: 8, CONTROL: 1}),
        (recipe_of(Threaded, concurrent=64), {CONCURRENT: 64}),
        (recipe_of(Threaded, concurrent=2), {CONCURRENT: 8}),
    ],
)
def test_a_process_has_the_threads_that_its_recipe_asks_for_and_its_methods_need(recipe, expected):
    assert groups_of(recipe) == expected


def test_roles_that_share_a_process_share_the_larger_groups():
    roles = {"a": recipe_of(Plain, user_code=1, concurrent=2), "b": recipe_of(Threaded, concurrent=16)}
    assert groups_of(create_colocated_worker_cls(roles)) == {USER_CODE: 1, CONCURRENT: 16}
