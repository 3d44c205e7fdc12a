"""Registries: names and import paths behind a setting."""

from enum import Enum

import pytest

from hybridrl.algos import ADVANTAGE_ESTIMATORS
from hybridrl.errors import ConfigError
from hybridrl.registry import Registry


@pytest.fixture
def shapes():
    registry = Registry("shape.kind", kind="shape", builtins={"fraction": "fractions:Fraction"}, plugins="shape.path")
    registry.register("square")(dict)
    return registry


def test_a_registered_name_is_found(shapes):
    assert shapes.lookup("square") is dict


def test_a_built_in_entry_is_imported_when_it_is_looked_up(shapes):
    from fractions import Fraction

    assert "fraction" in shapes and shapes.names() == ["fraction", "square"]
    assert shapes.lookup("fraction") is Fraction and shapes["fraction"] is Fraction


def test_names_are_known_before_their_entries_are_imported():
    later = Registry("shape.kind", kind="shape", builtins={"broken": "no_such_module:Shape"})
    assert list(later) == ["broken"] and "broken" in later and len(later) == 1 and later.problem("broken") == ""
    with pytest.raises(ConfigError, match=r"^actor.shape=no_such_module:Shape: no module named 'no_such_module'"):
        later.lookup("broken", setting="actor.shape")
    with pytest.raises(ConfigError, match=r"^shape.kind=no_such_module:Shape: "):
        list(later.values())


def test_the_name_of_a_built_in_entry_is_taken_before_it_is_imported(shapes):
    from fractions import Fraction

    with pytest.raises(ConfigError, match="'fraction' is taken by fractions:Fraction; register builtins.list"):
        shapes.register("fraction")(list)
    shapes.register("fraction")(Fraction)


def test_a_forgotten_entry_is_gone_and_a_forgotten_built_in_loads_again(shapes):
    before = dict(shapes)
    shapes.clear()
    assert dict(shapes) == {"fraction": before["fraction"]}
    shapes.update(before)
    assert dict(shapes) == before


def test_a_forgotten_built_in_is_again_what_its_decorator_had_entered():
    before = ADVANTAGE_ESTIMATORS["grpo"]
    ADVANTAGE_ESTIMATORS.clear()
    assert ADVANTAGE_ESTIMATORS["grpo"] is before and before.needs_group
    ADVANTAGE_ESTIMATORS["grpo"] = "mine"
    del ADVANTAGE_ESTIMATORS["grpo"]
    assert ADVANTAGE_ESTIMATORS["grpo"] is before


def test_an_import_path_is_a_name(shapes, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Circle:\n    pass\n")
    assert shapes.lookup(f"{file}:Circle").__name__ == "Circle"
    assert shapes.lookup("decimal:Decimal")("1.5") == 1.5
    assert shapes.problem("decimal:Decimal") == "" and "decimal:Decimal" not in shapes


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(shapes):
    with pytest.raises(ConfigError, match=r"^shape.kind='sqare' .*did you mean 'square'\? Known: "):
        shapes.lookup("sqare")
    assert "a file in shape.path registers" in shapes.problem("sqare")


def test_a_registry_without_import_paths_refuses_them(tmp_path):
    formulas = Registry("loss", kind="loss", import_paths=False)
    formulas.enter("mean", sum)
    with pytest.raises(ConfigError, match=r"^loss='builtins:sum' .*did you mean 'mean'\?") as refused:
        formulas.lookup("builtins:sum")
    assert "import path" not in str(refused.value)


def test_an_import_path_that_cannot_be_imported_names_the_setting_and_the_path(shapes):
    with pytest.raises(ConfigError, match=r"^actor.shape=no_such_module:Circle: no module named 'no_such_module'"):
        shapes.lookup("no_such_module:Circle", setting="actor.shape")
    with pytest.raises(ConfigError, match=r"^shape.kind=decimal:Decmal: decimal has no 'Decmal'; did you mean"):
        shapes.lookup("decimal:Decmal")


def test_the_member_of_an_enum_is_a_name_and_a_number_is_not(shapes):
    class Kind(Enum):
        OVAL = "oval"
        THIRD = 3

    shapes.register(Kind.OVAL)(list)
    assert shapes.lookup("oval") is list is shapes.lookup(Kind.OVAL)
    with pytest.raises(ConfigError, match="name 3 of builtins.list .*int; .*str"):
        shapes.register(Kind.THIRD)(list)
    with pytest.raises(ConfigError, match="did you mean 'oval'"):
        shapes.lookup("ovel")


def test_a_name_is_taken_once_but_the_same_entry_may_come_again(shapes):
    shapes.register("square")(dict)
    with pytest.raises(ConfigError, match="'square' is taken by builtins.dict; register builtins.list"):
        shapes.register("square")(list)
