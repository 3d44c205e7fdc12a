"""What `.ci/limits.py` counts. The limits themselves are checked by `make lint`."""

import ast
import runpy
import tomllib

import pytest

from tests.support.source.counts import (
    code_lines,
    compared,
    limits_of,
    pass_through_functions,
    small_modules,
    twins,
    words,
)
from tests.support.source.imports import ROOT


def test_code_lines_are_neither_blank_nor_a_comment_nor_a_docstring():
    source = (
        '"""Head.\n\nMore."""\nimport os\n\n\n# a reason\ndef f():\n    """Tail."""\n    return (\n        1\n    )\n'
    )
    assert code_lines(source) == 5  # import, def, and three of the return
    assert code_lines(source, with_imports=False) == 4


@pytest.mark.parametrize(
    "passes",
    [
        "def f(x): return g(x)",
        "async def f(self, x, *rest, key, **more): return await self.g.h(x, *rest, key=key, **more)",
        'def f(self):\n    """Say what."""\n    self.server.close(self.limit.seconds)',
        "def f(): g()",
    ],
)
def test_a_function_that_only_passes_a_call_on_is_counted(passes):
    assert pass_through_functions(ast.parse(passes)) == ["f"]


@pytest.mark.parametrize(
    "works",
    [
        "def f(x): return g(x + 1)",
        "def f(x): return g(x, 2)",
        "def f(x): return g(other)",
        "def f(x): return len(x)",
        "def __call__(self, x): return self.g(x)",
        "def f(x): return g(x).h()",
        "def f(x): return x",
        "def f(x):\n    check(x)\n    return g(x)",
    ],
)
def test_a_function_that_does_something_is_not(works):
    assert pass_through_functions(ast.parse(works)) == []


def test_a_small_module_has_less_than_40_lines_and_one_importer(tmp_path):
    files = {name: tmp_path / f"{name}.py" for name in ("small", "shared", "large", "__init__")}
    for name, path in files.items():
        path.write_text("x = 1\n" * (40 if name == "large" else 39))
    importers = {name: {"a"} for name in files} | {"shared": {"a", "b"}}
    assert small_modules(importers, files) == ["small"]


def test_twins_are_classes_of_one_name_in_two_modules():
    trees = {"a": "class One: pass\nclass Two: pass", "b": "def f():\n    class One: pass", "c": "class Two_: pass"}
    assert twins({name: ast.parse(text) for name, text in trees.items()}) == {"One": ["a", "b"]}


def test_words_are_counted_as_wc_does(tmp_path):
    (tmp_path / "page.md").write_text("# One  two\n\n* three\n")
    assert words([tmp_path / "page.md"]) == 5


@pytest.mark.parametrize(
    ("size", "fits", "verdict"), [(9, True, "  lower the limit"), (10, True, ""), (11, False, "  above the limit")]
)
def test_a_size_above_its_limit_does_not_fit_and_one_below_can_lower_it(size, fits, verdict):
    line = f"core_lines                    {size:>2} of       10{verdict}"
    assert compared({"core_lines": size}, {"core_lines": 10, "other": 0}) == ([line], fits)


def test_a_capability_that_came_later_adds_what_it_needs_to_the_limits():
    table = {
        "code_lines": 100,
        "words": 7,
        "added": {"images": {"code_lines": 20}, "sound": {"code_lines": 3, "words": 1}},
    }
    assert limits_of(table) == {"code_lines": 123, "words": 8}


def test_a_capability_cannot_add_to_a_size_without_a_limit():
    with pytest.raises(KeyError):
        limits_of({"code_lines": 100, "added": {"images": {"lines": 20}}})


def test_the_program_of_the_limits_fails_above_one(tmp_path, monkeypatch, capsys):
    names = limits_of(tomllib.loads((ROOT / ".ci" / "limits.toml").read_text(encoding="utf-8")))
    (tmp_path / "limits.toml").write_text(
        "".join(f"{name} = {1 if name == 'code_lines' else 10**6}\n" for name in names)
    )
    program = runpy.run_path(str(ROOT / ".ci" / "limits.py"))
    monkeypatch.setitem(program["main"].__globals__, "sizes", lambda: dict.fromkeys(names, 10))
    assert program["main"](tmp_path / "limits.toml") == 1
    verdicts = {line.split()[0]: line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()}
    assert verdicts.pop("code_lines").endswith("above the limit")
    assert verdicts and all(verdict.endswith("lower the limit") for verdict in verdicts.values())
