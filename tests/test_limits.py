"""What `.ci/limits.py` counts. The limits themselves are checked by `make lint`."""

import ast

import pytest

from tests.support.source.counts import code_lines, pass_through_functions, small_modules, twins, words


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
