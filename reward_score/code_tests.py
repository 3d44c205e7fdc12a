"""Tests of a program in the forms in which datasets ship them, and how outputs are compared.

`read_tests` takes a dict, a list, or the JSON of one:

    {"inputs": [...], "outputs": [...]}                     standard input and output: APPS, TACO, Codeforces, PRIME
    {"inputs": [...], "outputs": [...], "fn_name": "f"}     calls: an input is a list of arguments, or has one per line
    [{"input": ..., "output": ..., "testtype": ..., "metadata": {"func_name": "f"}}, ...]   either: LiveCodeBench
    {"assert_case": [...]}, {"test_list": [...]}, [...]     assertions: verl, MBPP
    {"test": "def check(candidate): ...", "entry_point": "f", "prompt": ...}   HumanEval
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class InputTests:
    """Programs read `inputs` and print `outputs`, one program per case."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class CallTests:
    """`function` is called with each of `arguments` and returns what is in `expected`."""

    function: str
    arguments: tuple[list, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True)
class UnitTests:
    """Each of `tests` is Python code that raises no exception.

    `setup` runs before them, and `preamble` before the program. `functions` are the program's even if `setup` has them.
    """

    tests: tuple[str, ...]
    setup: str = ""
    functions: tuple[str, ...] = ()
    preamble: str = ""


Tests = InputTests | CallTests | UnitTests


def read_tests(ground_truth: Any) -> Tests:
    """Return the tests in a row's `ground_truth`.

    Raises:
        ValueError: It has none, or in no form of the module's docstring, or calls of a function without a name.
    """
    truth = json.loads(ground_truth) if isinstance(ground_truth, str | bytes) else ground_truth
    if isinstance(truth, Sequence):
        truth = _of_list(truth)
    if not isinstance(truth, Mapping):
        raise _unknown_form(truth)
    if "test" in truth and "entry_point" in truth:
        return _human_eval(truth)
    if assertions := truth.get("assert_case") or truth.get("test_list"):
        setup = [*(truth.get("test_imports") or ()), truth.get("test_setup_code") or ""]
        return UnitTests(tuple(assertions), "\n".join(setup))
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if inputs is None or outputs is None or len(inputs) == 0 or len(inputs) != len(outputs):
        raise _unknown_form(truth)
    if function := truth.get("fn_name"):
        return CallTests(function, tuple(map(_arguments, inputs)), tuple(map(_expected, inputs, outputs)))
    return InputTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def _unknown_form(truth: Any) -> ValueError:
    has = ", ".join(map(str, truth)) if isinstance(truth, Mapping) else type(truth).__name__
    return ValueError(
        f"ground_truth has no tests ({has or 'nothing'}): it needs as many inputs as outputs, test_list, or test and "
        "entry_point; docs/sandbox.md has the forms"
    )


def _of_list(cases: Sequence[Any]) -> Any:
    """Return assertions, or cases with an input and an output each, as a mapping."""
    if cases and all(isinstance(case, str) for case in cases):
        return {"test_list": cases}
    if not cases or not all(isinstance(case, Mapping) and {"input", "output"} <= case.keys() for case in cases):
        return cases
    found: dict[str, Any] = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    calls = [case for case in cases if case.get("testtype") == "functional"]
    if not calls:
        return found
    names = {name for case in calls if (name := (case.get("metadata") or {}).get("func_name"))}
    if len(names) != 1:
        raise ValueError(
            f"ground_truth: functional tests need one func_name, and have {sorted(names) or 'none'}: add "
            "metadata={'func_name': ...} to a case, or give {'inputs': ..., 'outputs': ..., 'fn_name': ...}"
        )
    return found | {"fn_name": names.pop()}


def _human_eval(truth: Mapping[str, Any]) -> UnitTests:
    """Return HumanEval's tests.

    Its checks use helpers of the prompt, whose text is therefore a part of the setup. The program may leave out the
    prompt's imports and helpers: what is before the function itself.
    """
    name, prompt = truth["entry_point"], truth.get("prompt") or ""
    setup = f"{prompt}\n    pass\n{truth['test']}" if prompt else truth["test"]
    return UnitTests((f"check({name})",), setup, (name,), f"\n{prompt}".rpartition(f"\ndef {name}(")[0])


def _text(lines: Any) -> str:
    """Return standard input or output: a text, or a list of its lines."""
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _arguments(value: Any) -> list:
    """Return the arguments of a call: a list, or a text with the JSON of one per line."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    return list(value)


def _expected(arguments: Any, value: Any) -> Any:
    """Return what a call shall return.

    A text is read as JSON where the arguments are a text, too, if it is JSON.
    """
    if isinstance(arguments, str) and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def same_output(printed: str, expected: str, *, tolerance: float | None = None) -> bool:
    """Return whether two texts have the same words, as judges compare them: white space only separates.

    Numbers are compared as texts, unless `tolerance` says by how much they may differ, absolutely or relatively.
    """
    left, right = printed.split(), expected.split()
    if tolerance is None or len(left) != len(right):
        return left == right
    return all(a == b or _close(_number(a), _number(b), tolerance) for a, b in zip(left, right, strict=True))


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _close(left: float, right: float, tolerance: float) -> bool:
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)


def same_value(returned: Any, expected: Any, *, tolerance: float | None = None) -> bool:
    """Return whether a call returned what it should.

    Datasets are JSON: a tuple is a list there, keys are texts. Some put the value into a list of one.

    Args:
        returned: As `in_sandbox.wire` encodes it.
        expected: From the dataset.
        tolerance: As in `same_output`.
    """
    found, wanted = _as_json(returned), _as_json(expected)
    is_wrapped = isinstance(wanted, list) and len(wanted) == 1
    return _equal(found, wanted, tolerance) or (is_wrapped and _equal(found, wanted[0], tolerance))


def _as_json(value: Any) -> Any:
    """Return lists for tuples and sets, and texts for keys."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"kind", "value"}:
        return {str(key): _as_json(item) for key, item in value.items()}
    kind, inner = value["kind"], value["value"]
    if kind == "dict":
        return {str(_as_json(key)): _as_json(item) for key, item in inner}
    if kind in ("set", "frozenset"):
        return sorted(map(_as_json, inner), key=repr)
    return [_as_json(item) for item in inner] if kind in ("tuple", "iterator") else value


def _equal(found: Any, wanted: Any, tolerance: float | None) -> bool:
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(_equal(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key], tolerance) for key in found)
    if tolerance is not None and isinstance(found, float | int) and isinstance(wanted, float | int):
        return _close(found, wanted, tolerance)
    return type(found) is type(wanted) and found == wanted if isinstance(found, bool) else found == wanted
