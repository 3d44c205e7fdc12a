"""Score a response by the program in its last code block: the share of test cases that it passes.

The program runs in a sandbox (`hybridrl.rewards.sandbox`, which the caller gives as `sandbox`). No expected value is
where the program is, and no judgement comes from there:

* standard input and output: the program prints, the texts are compared here;
* calls: `in_sandbox/calls.py` runs beside the program and prints what it returned; the values are compared here;
* unit tests: they run in a sandbox of their own, on the recorded answers of the program (`in_sandbox/judge.py`).

Every program has the names of `in_sandbox/prelude.py` without importing them.

So a program that ends early with status 0, prints "passed", or returns an object that equals everything fails. So does
one that leaves no time for the other cases, or forges a value that cannot be compared. What fails without the program's
fault (a server is gone, tests that cannot be run) raises, and is no score.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reward_score.code_tests import CallTests, InputTests, UnitTests, read_tests, same_output, same_value

BLOCK = re.compile(r"```(?P<language>[\w+-]*)[ \t]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "py", "python3")
PROGRAMS = Path(__file__).parent / "in_sandbox"
RUN = "import prelude\nexec(compile(open('solution.py', 'rb').read(), 'solution.py', 'exec'))"
MAX_ROUNDS = 6  # in which unit tests ask for calls that depend on the answers of others
MAX_DEPTH = 100  # of lists in what a call returns
LATE = "timeout"


class Outcome(Protocol):
    """What became of a program: `verdict` is "ok", "timeout" or another word."""

    verdict: str
    stdout: str
    stderr: str
    detail: str


class Runner(Protocol):
    """Runs Python programs that nobody has read: `hybridrl.rewards.sandbox.ProgramRunner`.

    Attributes:
        time_limit_s: Of one test case.
        budget_s: Time in which the cases of one response begin, and in which calls of one process end.
        concurrency: Programs that it can run at the same time.
    """

    time_limit_s: float
    budget_s: float
    concurrency: int

    def run(self, code: str, *, stdin: str = "", files: Mapping[str, bytes], time_limit_s: float) -> Outcome:
        """Return what became of a program. Raises an error of its own if the sandbox failed."""
        ...


@dataclass(frozen=True)
class Case:
    """Result of one test case. `reason`: why it failed, "" if it passed; `late`: it was not done in time."""

    reason: str = ""
    late: bool = False


def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    sandbox: Runner | None = None,
    continuous: bool = True,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Return the score of the response's last block of Python code; 0 without one.

    Args:
        solution_str: The response.
        ground_truth: The tests, see `code_tests`.
        sandbox: What runs the program.
        continuous: The score is the share of cases passed; else 1.0 if all are passed, and the first failure ends it.
        tolerance: By how much numbers may differ; None: not at all.

    Returns:
        `score`; `acc`: whether all cases are passed; `late`: share of the cases that were not done in time; `failure`:
        why the first case failed, or "".

    Raises:
        RuntimeError: There is no sandbox.
        ValueError: The ground truth has no tests, or tests that cannot be run.
        TimeoutError: There are too many cases for the time of one call.
    """
    if sandbox is None:
        raise RuntimeError("programs run in a sandbox only: pass sandbox=hybridrl.rewards.sandbox.ProgramRunner()")
    tests, code = read_tests(ground_truth), extract_code(solution_str)
    if code is None:
        return {"score": 0.0, "acc": 0.0, "late": 0.0, "failure": "no block of Python code"}
    if isinstance(tests, InputTests):
        cases = score_inputs(code, tests, sandbox, continuous=continuous, tolerance=tolerance)
    elif isinstance(tests, CallTests):
        cases = score_calls(code, tests, sandbox, tolerance=tolerance)
    else:
        cases = score_unit_tests(code, tests, sandbox)
    return as_score(cases, continuous=continuous)


def as_score(cases: Sequence[Case], *, continuous: bool) -> dict[str, Any]:
    """Return the score of test cases."""
    failed = [case for case in cases if case.reason]
    share = 1 - len(failed) / len(cases)
    return {
        "score": share if continuous else float(not failed),
        "acc": float(not failed),
        "late": sum(case.late for case in cases) / len(cases),
        "failure": failed[0].reason if failed else "",
    }


def extract_code(text: str) -> str | None:
    """Return the last block that is named as Python, else the last one without a language, else None.

    A block that does not end, because the response was cut, counts.
    """
    for languages in (PYTHON, ("",)):
        if blocks := [match["code"] for match in BLOCK.finditer(text) if match["language"].lower() in languages]:
            return blocks[-1]
    return None


def score_inputs(
    code: str, tests: InputTests, sandbox: Runner, *, continuous: bool, tolerance: float | None
) -> list[Case]:
    """Return the case of every input: the program reads it and prints the output."""

    def run_case(number: int) -> Case:
        outcome = run_program(code, sandbox, stdin=tests.inputs[number])
        if outcome.verdict != "ok":
            return Case(outcome.detail or outcome.verdict, late=outcome.verdict == LATE)
        same = _is_same(same_output, outcome.stdout, tests.outputs[number], tolerance=tolerance)
        return Case() if same else Case(f"case {number}: another output")

    return run_cases(run_case, len(tests.inputs), sandbox, stop_early=not continuous)


def run_program(code: str, sandbox: Runner, *, stdin: str = "") -> Outcome:
    """Return what became of a program that reads this standard input."""
    return sandbox.run(RUN, stdin=stdin, files=_files(code), time_limit_s=sandbox.time_limit_s)


def run_cases(run_case: Callable[[int], Case], count: int, sandbox: Runner, *, stop_early: bool) -> list[Case]:
    """Return the results of cases 0 to count - 1, at least one of them.

    Cases begin within `sandbox.budget_s`. Those that do not count as late if a case was late, or if an empty program
    would have left time for all. With `stop_early`, none begins after a failure: the result then ends with it.

    Raises:
        TimeoutError: The time has ended, and an empty program would not have been done, either.
    """
    deadline, cases = time.monotonic() + sandbox.budget_s, list[Case]()
    with ThreadPoolExecutor(max_workers=min(sandbox.concurrency, count)) as pool:
        while len(cases) < count:
            if cases and time.monotonic() > deadline:
                if not (any(case.late for case in cases) or _leaves_time(count, sandbox)):
                    raise TimeoutError(
                        f"only {len(cases)} of {count} cases began within {sandbox.budget_s:g} s, and none was late: "
                        "raise reward_model.timeout_s"
                    )
                return cases + [Case("not run: others took the time", late=True)] * (count - len(cases))
            numbers = range(len(cases), min(len(cases) + sandbox.concurrency, count))
            cases += pool.map(run_case, numbers)
            if stop_early and any(case.reason for case in cases):
                return cases
    return cases


def _leaves_time(count: int, sandbox: Runner) -> bool:
    """Return whether so many cases of an empty program, which is run once, would begin within `sandbox.budget_s`."""
    began = time.monotonic()
    run_program("", sandbox)
    return (time.monotonic() - began) * -(-count // sandbox.concurrency) <= sandbox.budget_s


def _is_same(compare: Callable[..., bool], found: Any, expected: Any, *, tolerance: float | None) -> bool:
    """Return whether `compare` takes them for equal. What a program forges may not even be comparable."""
    try:
        return compare(found, expected, tolerance=tolerance)
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return False


def score_calls(code: str, tests: CallTests, sandbox: Runner, *, tolerance: float | None) -> list[Case]:
    """Return the case of every call: the function returns what it should."""
    calls = [{"target": tests.function, "args": _wire(args), "kwargs": _wire({})} for args in tests.arguments]
    answers = answer_calls(code, calls, sandbox, within_s=sandbox.budget_s)
    cases = []
    for number, (answer, expected) in enumerate(zip(answers, tests.expected, strict=True)):
        if "error" in answer:
            cases.append(Case(": ".join(answer["error"]), late=answer["error"][0] == "TimeUp"))
        else:
            same = _is_same(same_value, answer["value"], expected, tolerance=tolerance)
            cases.append(Case() if same else Case(f"case {number}: returned another value"))
    return cases


def answer_calls(
    code: str, calls: Sequence[dict[str, Any]], sandbox: Runner, *, within_s: float, preamble: str = ""
) -> list[dict[str, Any]]:
    """Return {"value": ...} or {"error": [type, text]} of every call of the program's functions, made in one process.

    What the program prints instead is an answer of the program. Calls after the end of its process, which is at
    `within_s` at the latest, have an error. `preamble` is code that runs before the program.
    """
    job = json.dumps({"calls": list(calls), "limit_s": sandbox.time_limit_s})
    files = {"preamble.py": preamble.encode(), "calls.json": job.encode(), **_files(code), **_wire_file()}
    outcome = sandbox.run(_program("calls.py"), files=files, time_limit_s=within_s)
    kind = "TimeUp" if outcome.verdict == LATE else "Ended"
    missing = {"error": [kind, outcome.detail or "the program ended before this call"]}
    answers = dict.fromkeys(range(len(calls)), missing)
    for line in outcome.stdout.splitlines():
        answer = _read_line(line)
        if answer.get("load"):
            return [{"error": [str(word) for word in answer["load"]]}] * len(calls)
        if answer.get("call") in answers and _is_error(answer.get("error")):
            answers[answer["call"]] = {"error": answer["error"]}
        elif answer.get("call") in answers and "value" in answer and _is_value(answer["value"], MAX_DEPTH):
            answers[answer["call"]] = {"value": answer["value"]}
    return list(answers.values())


def _read_line(line: str) -> dict[str, Any]:
    """Return the object in a line that a program may have written; {} if it is none."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_answer = isinstance(answer, dict) and isinstance(answer.get("call"), int | None)
    is_load = is_answer and (answer.get("load") is None or _is_error(answer["load"]))
    return answer if is_load else {}


def _is_error(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(word, str) for word in value)


def _is_value(value: Any, depth: int) -> bool:
    """Return whether a value is one as `in_sandbox.wire` encodes them, at most so deep."""
    if isinstance(value, dict):
        is_kind = value.keys() == {"kind", "value"} and isinstance(value["kind"], str)
        return is_kind and depth > 0 and _is_value(value["value"], depth - 1)
    return not isinstance(value, list) or (depth > 0 and all(_is_value(item, depth - 1) for item in value))


def score_unit_tests(code: str, tests: UnitTests, sandbox: Runner) -> list[Case]:
    """Return the case of every unit test.

    Raises:
        ValueError: The tests cannot be run.
    """
    calls, reason = first_calls(tests, sandbox), f"the tests ask for further calls after {MAX_ROUNDS} rounds"
    deadline = time.monotonic() + sandbox.budget_s
    for _ in range(MAX_ROUNDS):
        if (left_s := deadline - time.monotonic()) <= 0:
            return [Case(f"its calls took more than {sandbox.budget_s:g} s", late=True)] * len(tests.tests)
        answers = answer_calls(code, calls, sandbox, within_s=left_s, preamble=tests.preamble)
        outcome = judge(tests, calls, answers, sandbox)
        if outcome.verdict != "ok":  # without its answers they ran: it may have returned what exhausts them
            reason = f"the tests did not end on its answers: {outcome.detail}"
            break
        found = json.loads(outcome.stdout)
        if found["passed"] is not None:
            each = zip(found["passed"], found["late"], strict=True)
            return [Case() if passed else Case("a test failed", late=late) for passed, late in each]
        calls = found["calls"]
    return [Case(reason)] * len(tests.tests)


@functools.lru_cache(maxsize=1024)
def first_calls(tests: UnitTests, sandbox: Runner) -> list[dict[str, Any]]:
    """Return the calls that tests make before anything is known of the answers.

    They are the same for all responses to a row. Raises ValueError if the tests cannot be run.
    """
    outcome = judge(tests, [], [], sandbox)
    if outcome.verdict != "ok":
        last = outcome.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"the unit tests cannot be run: {last or outcome.detail}; {tests.tests[0][:200]!r}")
    return json.loads(outcome.stdout)["calls"]


def judge(tests: UnitTests, calls: list, answers: list, sandbox: Runner) -> Outcome:
    """Run unit tests on the answers of calls. The outcome's output is the report of `in_sandbox/judge.py`."""
    job = {"setup": tests.setup, "tests": tests.tests, "functions": tests.functions, "calls": calls, "answers": answers}
    files = {"tests.json": json.dumps(job).encode(), **_wire_file()}
    return sandbox.run(_program("judge.py"), files=files, time_limit_s=sandbox.time_limit_s)


@functools.cache
def _program(name: str) -> str:
    return (PROGRAMS / name).read_text(encoding="utf-8")


def _files(code: str) -> dict[str, bytes]:
    return {"solution.py": code.encode("utf-8", "replace"), "prelude.py": _program("prelude.py").encode()}


def _wire_file() -> dict[str, bytes]:
    return {"wire.py": _program("wire.py").encode()}


def _wire(value: Any) -> Any:
    """Return JSON data as `in_sandbox.wire` has it."""
    if isinstance(value, dict):
        return {"kind": "dict", "value": [[key, _wire(item)] for key, item in value.items()]}
    return [_wire(item) for item in value] if isinstance(value, list | tuple) else value
