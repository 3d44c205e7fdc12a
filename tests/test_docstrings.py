"""Module docstrings begin with the noun or the verb that says what the module is or does, not with a question."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hybridrl"
QUESTIONS = {"how", "what", "when", "where", "whether", "which", "who", "whom", "whose", "why"}


def begins_with_a_question(source: str) -> bool:
    words = (ast.get_docstring(ast.parse(source)) or "").split()
    return bool(words) and words[0].lower().strip("`*,:") in QUESTIONS


def test_no_module_begins_with_a_question():
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 300
    assert [str(path.relative_to(PACKAGE)) for path, text in sources.items() if begins_with_a_question(text)] == []


def test_a_question_is_found():
    assert begins_with_a_question('"""What follows a failure: one table."""')
    assert begins_with_a_question('"""Whether two processes are on one machine."""\nimport os\n')
    assert not begins_with_a_question('"""Reactions to failures: one table of what follows which."""')
    assert not begins_with_a_question("what = 1\n")
