"""Programs of responses against tests in the forms of datasets; programs that try to look right. A real sandbox."""

import json
from dataclasses import replace

import pytest

from hybridrl.rewards.sandbox import ProgramRunner, SandboxFailed, SandboxUnavailable
from reward_score import DATA_SOURCES, code, default_compute_score, runs_programs
from reward_score.code_tests import CallTests, InputTests, UnitTests, read_tests, same_output, same_value
from reward_score.in_sandbox.wire import decode, encode
from tests.support.sandbox_server import serve_sandbox

MBPP = {"test_list": ["assert f(1, 2) == 3", "assert abs(f(0.5, 1) - 1.5) < 1e-9", "assert f('a', 'b') == 'ab'"]}
HUMAN_EVAL = {
    "prompt": 'def step(x):\n    return x + 1\n\ndef back(x: int) -> int:\n    """Undo step."""\n',
    "test": (
        "import random\n\ndef check(candidate):\n    for _ in range(3):\n        x = random.randint(0, 99)\n"
        "        assert candidate(step(x)) == x\n    assert candidate(candidate(5)) == 3\n"
    ),
    "entry_point": "back",
}


@pytest.fixture(scope="module")
def runner() -> ProgramRunner:
    found = ProgramRunner(time_limit_s=20, budget_s=40)
    try:
        found.check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return found


def block(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nthen\n```python3\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nits output\n```", "a\n"),
        ("```python\na\n```\nExample output:\n```\n5\n```", "a\n"),
        ("```\na\n```\nor\n```\nb\n```", "b\n"),
        ("```python\nprint(1)\nprint(2", "print(1)\nprint(2"),
        ("print(1)", None),
        ("```cpp\nint main(){}\n```", None),
    ],
)
def test_the_last_block_of_python_is_the_program(text, found):
    assert code.extract_code(text) == found


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, InputTests(("1\n",), ("2\n",))),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, InputTests(("1\n2",), ("3",))),
        (
            {"inputs": [[1, [2]], '1\n"a"', ["11", "1"]], "outputs": [[3], '"b"', "100"], "fn_name": "f"},
            CallTests("f", ([1, [2]], [1, "a"], ["11", "1"]), ([3], "b", "100")),
        ),
        (
            [{"input": "1", "output": "2", "testtype": "stdin"}],
            InputTests(("1",), ("2",)),
        ),
        (
            [{"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}],
            CallTests("f", ([1],), (2,)),
        ),
        (["assert f(1)"], UnitTests(("assert f(1)",))),
        ({"assert_case": ["assert f(1)"], "inputs": [""], "outputs": [""]}, UnitTests(("assert f(1)",))),
        (
            {"test_list": ["assert f(1)"], "test_imports": ["import math"], "test_setup_code": "x = 1"},
            UnitTests(("assert f(1)",), "import math\nx = 1"),
        ),
        (
            {"test": "def check(candidate): ...", "entry_point": "f"},
            UnitTests(("check(f)",), "def check(candidate): ...", ("f",)),
        ),
    ],
)
def test_the_forms_of_datasets_are_read_as_objects_and_as_json(truth, tests):
    found = read_tests(truth)
    assert (
        found == read_tests(json.dumps(truth)) == (replace(tests, setup=found.setup) if "\n" in str(tests) else tests)
    )
    assert getattr(found, "setup", "").strip() == getattr(tests, "setup", "").strip()


def test_a_functional_test_needs_the_name_of_its_function():
    case = {"input": "[2,7]\n9", "output": "[0,1]", "testtype": "functional"}
    for cases in ([case], [case | {"metadata": {"func_name": name}} for name in "fg"]):
        with pytest.raises(ValueError, match="functional tests need one func_name"):
            read_tests(cases)
    assert read_tests([case, case | {"metadata": {"func_name": "f"}}]).function == "f"


@pytest.mark.parametrize(
    "truth", [{}, [], {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, 7, "7", [1]]
)
def test_a_row_without_tests_has_no_score(truth, runner):
    with pytest.raises(ValueError, match="ground_truth has no tests"):
        code.compute_score(block("print(1)"), truth, sandbox=runner)


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        ("1 2\n3\n\n", "1 2 \n3", None, True),
        ("1\n2\n3", "1 2 3", None, True),
        ("12", "1 2", None, False),
        ("", "", None, True),
        ("Yes", "YES", None, False),
        ("0.5", "0.50", None, False),
        ("0.5 a", "0.50 a", 1e-6, True),
        ("0.5", "0.6", 1e-6, False),
        ("1000001", "1000000", 1e-5, True),
        ("x", "1", 1e-6, False),
        ("nan", "nan", 1e-6, True),
    ],
)
def test_outputs_are_compared_by_words_and_numbers_only_with_a_tolerance(printed, expected, tolerance, same):
    assert same_output(printed, expected, tolerance=tolerance) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        ((1, 2), [[1, 2]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({2, 1}, [1, 2], True),
        (1, [2], False),
        (True, 1, False),
        (1.0, 1, True),
        (None, None, True),
        ("1", 1, False),
        ({"kind": 1}, {"kind": 1}, True),
    ],
)
def test_what_a_call_returns_is_compared_as_json(returned, expected, same):
    assert same_value(encode(returned), expected) is same


@pytest.mark.parametrize(
    "value",
    [1, -(2**80), 0.1, "é\ud800", None, True, [1, (2, {3: {4}})], frozenset({1}), b"\x00\xff", 1 + 2j, range(3), {}],
)
def test_a_value_arrives_as_it_was(value):
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value and type(found) is type(value)


def test_continuous_is_the_share_of_cases_and_otherwise_all_count(runner):
    truth = {"inputs": ["1 2", "3 4", "5 6", "0 0"], "outputs": ["3", "7", "12", "0"]}
    text = block("print(sum(map(int, input().split())))")
    found = code.compute_score(text, truth, sandbox=runner)
    assert found == {"score": 0.75, "acc": 0.0, "late": 0.0, "failure": "case 2: another output"}
    assert code.compute_score(text, truth, sandbox=runner, continuous=False)["score"] == 0.0
    right = code.compute_score(text, {"inputs": ["1 2"], "outputs": ["3"]}, sandbox=runner, continuous=False)
    assert (right["score"], right["acc"]) == (1.0, 1.0)


def test_functions_and_methods_of_solution_are_called(runner):
    truth = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8], "fn_name": "add"}
    function = "print('noise')\ndef add(a, b):\n    print('more')\n    return a + b"
    assert code.compute_score(block(function), truth, sandbox=runner)["score"] == 0.5
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert code.compute_score(block(method), truth, sandbox=runner)["score"] == 0.5
    assert code.compute_score(block("x = 1"), truth, sandbox=runner)["failure"].startswith("NameError: the program has")


def test_unit_tests_call_the_program_from_outside(runner):
    assert code.compute_score(block("def f(a, b): return a + b"), MBPP, sandbox=runner)["score"] == 1.0
    assert code.compute_score(block("def f(a, b): return 3"), MBPP, sandbox=runner)["score"] == pytest.approx(1 / 3)
    assert code.compute_score(block("def back(x): return x - 1"), HUMAN_EVAL, sandbox=runner)["score"] == 1.0
    assert code.compute_score(block("def back(x): return x"), HUMAN_EVAL, sandbox=runner)["score"] == 0.0


def test_a_program_may_leave_out_the_imports_that_its_data_set_gives(runner):
    method = (
        "from __future__ import annotations\nclass Solution:\n    def add(self, xs: List[int], y: int) -> Any:\n"
        "        counts: DefaultDict = defaultdict(int)\n        heapq.heapify(xs)\n"
        "        return heappop(xs) + pow(y, 1, 7) + math.gcd(4, 6) + len(counts) + isinstance(Counter, type)"
    )
    calls = {"inputs": [[[2, 1], 3]], "outputs": [7], "fn_name": "add"}
    assert code.compute_score(block(method.partition("\n")[2]), calls, sandbox=runner)["score"] == 1.0
    assert code.compute_score(block(method), calls, sandbox=runner)["score"] == 1.0
    program = (
        "from __future__ import annotations\nxs: deque[int] = deque(map(int, sys.stdin.readline().split()))\n"
        "print(max(xs), pow(2, 3, 5), open(0).name, __name__, Counter is collections.Counter)\n1 / 0"
    )
    outcome = code.run_program(program, runner, stdin="1 2")
    assert outcome.stdout == "2 3 0 __main__ True\n" and '"solution.py", line 4' in outcome.stderr


def test_a_program_may_leave_out_what_its_prompt_has_before_the_function(runner):
    prompt = f"import cmath as c\n{HUMAN_EVAL['prompt']}"
    text = block("def back(x: List[int]) -> int:\n    return x - step(0) + int(abs(c.phase(1)))")
    assert code.compute_score(text, {**HUMAN_EVAL, "prompt": prompt}, sandbox=runner)["score"] == 1.0


def test_objects_of_the_program_stay_there_and_errors_are_raised_in_the_tests(runner):
    text = block(
        "class Account:\n    def __init__(self, sum): self.sum = sum\n    def pay(self, x):\n        self.sum -= x\n"
        "        return self.sum\ndef total(accounts): return sum(a.sum for a in accounts)\n"
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5"
    )
    tests = [
        "a = Account(5)\nassert a.pay(2) == 3 and a.pay(2) == 1",
        "assert total([Account(1), Account(2)]) == 3",
        "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'negative'",
        "assert list(map(root, [4, 9])) == [2, 3]",
    ]
    assert code.compute_score(text, tests, sandbox=runner)["score"] == 1.0


FORGERIES = {
    "ends with status 0": "import os\nos._exit(0)",
    "ends in the call": "import os\ndef f(a, b): os._exit(0)",
    "an object that equals everything": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __abs__(self): return 0\n    def __lt__(self, o): return True\ndef f(a, b): return E()"
    ),
    "a text that equals everything": (
        "class E(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(a, b): return E('x')"
    ),
    "changes builtins": "import builtins\nbuiltins.abs = lambda x: 0\nAssertionError = None\ndef f(a, b): return 7",
    "prints reports": (
        "import json, os\n"
        "for text in ('passed', json.dumps({'calls': [], 'passed': [True] * 3, 'late': [False] * 3}),\n"
        "             json.dumps({'load': None}), json.dumps({'call': 0, 'value': {'kind': 'evil', 'value': 1}})):\n"
        "    for number in range(64):\n        try:\n            os.write(number, text.encode() + b'\\n')\n"
        "        except OSError:\n            pass\nos._exit(0)"
    ),
    "nested without an end": (
        "import os\nfor number in range(64):\n"
        "    for text in ('[' * 90000, '{\"call\": 0, \"value\": ' + '[' * 500 + ']' * 500 + '}'):\n"
        "        try:\n            os.write(number, text.encode() + b'\\n')\n        except OSError:\n"
        "            pass\nos._exit(0)"
    ),
    "a range that exhausts the tests": "def f(a, b): return range(10**12)",
    "other tests": "open('tests.json', 'w').write('[]')\nopen('judge.py', 'w').write('')\ndef f(a, b): return None",
    "another wire": "import wire\nwire.encode = lambda *_: 3\ndef f(a, b): return 4",
    "reads the caller": (
        "import sys\ndef f(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "            if isinstance(value, dict) and 'expected' in value: return value['expected']\n"
        "        frame = frame.f_back"
    ),
}


QUICK_FORGERIES = ("ends in the call", "an object that equals everything", "prints reports", "nested without an end")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_FORGERIES else pytest.mark.slow) for name in FORGERIES]
)
def test_a_program_that_forges_its_result_passes_nothing_and_is_scored(name, runner):
    tests = {"test_list": [*MBPP["test_list"], "assert sorted(f([2], [1])) == [1, 2]"]}
    found = code.compute_score(block(FORGERIES[name]), tests, sandbox=runner)
    assert (found["score"], found["acc"]) == (0.0, 0.0)


def test_a_late_case_has_failed_and_the_rest_of_a_hanging_program_is_not_run(runner):
    short = replace(runner, time_limit_s=0.5, budget_s=0.2)
    truth = {"inputs": ["1"] * 5, "outputs": ["1"] * 5}
    found = code.compute_score(block("while True: pass"), truth, sandbox=short)
    assert (found["score"], found["late"]) == (0.0, 1.0)
    calls = {"inputs": [[1]] * 3, "outputs": [1] * 3, "fn_name": "f"}
    hangs_once = "def f(x, seen=[]):\n    seen.append(x)\n    while len(seen) == 2: pass\n    return x"
    found = code.compute_score(block(hangs_once), calls, sandbox=replace(runner, time_limit_s=0.5))
    assert (round(found["score"], 2), round(found["late"], 2)) == (0.67, 0.33)


FORGED_VALUES = ['{"kind":"dict","value":5}', '{"kind":"set","value":{"kind":"x","value":1}}', "1" + "0" * 400]
NESTED = '{"kind":"tuple","value":' * 300 + "1" + "}" * 300


@pytest.mark.parametrize("value", [*FORGED_VALUES, NESTED], ids=["dict", "set", "number", "nested"])
def test_a_forged_value_that_cannot_be_compared_is_a_wrong_one(value, runner):
    forged = (
        "import os\nfor number in range(64):\n    try:\n"
        f'        os.write(number, b\'{{"call":0,"value":{value}}}\\n\')\n'
        "    except OSError:\n        pass\nos._exit(0)"
    )
    calls = {"inputs": [[1]], "outputs": [1], "fn_name": "f"}
    found = code.compute_score(block(forged), calls, sandbox=runner, tolerance=1e-6)
    assert (found["score"], found["late"]) == (0.0, 0.0)
    found = code.compute_score(block(forged), ["assert f(1) == 1"], sandbox=runner)
    assert found["score"] == 0.0


def test_a_program_that_sleeps_below_the_limit_of_a_case_is_scored(runner):
    truth = {"inputs": ["1"] * 4, "outputs": ["1"] * 4}
    short = replace(runner, time_limit_s=4.0, budget_s=6.0)
    found = code.compute_score(block("import time\ntime.sleep(3.5)"), truth, sandbox=short)
    assert (found["score"], found["late"]) == (0.0, 0.5) and found["failure"] == "case 0: another output"


def test_more_cases_than_the_time_of_a_call_allows_are_no_score(runner):
    truth = {"inputs": ["1"] * 5, "outputs": ["1"] * 5}
    with pytest.raises(TimeoutError, match="raise reward_model.timeout_s"):
        code.compute_score(block("print(input())"), truth, sandbox=replace(runner, budget_s=0.0))


def test_tests_that_cannot_be_run_are_no_score(runner):
    with pytest.raises(ValueError, match="the unit tests cannot be run: SyntaxError"):
        code.compute_score(block("def f(): pass"), ["assert f( =="], sandbox=runner)


def test_a_sandbox_that_is_gone_is_no_score(monkeypatch):
    monkeypatch.setattr("hybridrl.rewards.sandbox.http.BACK_OFF_S", 0.01)
    gone = ProgramRunner(url="http://127.0.0.1:9/run_code")
    with pytest.raises(SandboxFailed, match="failed 4 times"):
        code.compute_score(block("print(1)"), {"inputs": [""], "outputs": ["1"]}, sandbox=gone)
    with pytest.raises(RuntimeError, match="programs run in a sandbox only"):
        code.compute_score(block("print(1)"), {"inputs": [""], "outputs": ["1"]})


def test_a_remote_sandbox_gives_the_same_scores(runner):
    with serve_sandbox() as server:
        remote = replace(runner, url=server.url, max_concurrent=3)
        truth = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "0", "4"]}
        assert code.compute_score(block("print(input())"), truth, sandbox=remote)["score"] == 0.75
        assert code.compute_score(block("def f(a, b): return a + b"), MBPP, sandbox=remote)["score"] == 1.0
        assert code.compute_score(block(FORGERIES["ends in the call"]), MBPP, sandbox=remote)["score"] == 0.0


def test_the_usual_data_sources_run_programs(runner):
    sources = {"codecontests", "apps", "codeforces", "taco", "mbpp", "openai_humaneval"}
    assert sources <= {source for source in DATA_SOURCES if runs_programs(source)}
    assert not runs_programs("openai/gsm8k") and not runs_programs("aime_2024") and not runs_programs("unknown")
    truth = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    found = default_compute_score("apps", block("print(2)"), truth, None, sandbox=runner, continuous=False)
    assert found["score"] == 1.0
    assert default_compute_score("openai/gsm8k", "#### 1", "1", None, sandbox=runner) == 1.0


def test_a_limit_of_a_case_that_leaves_no_time_for_a_second_is_refused():
    with pytest.raises(SandboxUnavailable, match="set reward_model.timeout_s=21 or more"):
        ProgramRunner(time_limit_s=10, budget_s=-1).check()
