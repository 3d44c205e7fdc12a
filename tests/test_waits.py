"""Every wait has a deadline, and says what it waits for.

A wait without one turns a frozen process into a frozen run. Ray's objects are awaited in two places only, because a
bare `ray.get` raises an error that names nobody: `awaiting.py` names role, rank and method of a worker, `get_value`
names what a single actor was asked for.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hybridrl"
DEADLINES = ("timeout", "timeout_s")  # keyword arguments of a test's calls, in seconds
RAY_GET_HOMES = {"single_controller/awaiting.py", "single_controller/cluster.py"}

CALL = "a call of workers, or a push: it ends at the deadline of each of its calls"
DONE = "the caller knows that it is done"
STAGES = "stages of a step: every wait in them has a deadline"
IDLE = "a thread without work: it ends with its process, or when it is told to"
PARENT = "a child that waits for its parent: the parent's end ends the wait"
SERVICE = "runs until it is stopped"
LIMIT = "a program in a sandbox: it ends at its limit of time, or with its parent"
LOOP = "a coroutine that ends with its event loop, or when the router is resumed or closed"
COLLECTIVE = "a collective: its process group has a deadline"
# File -> wait -> why it needs no deadline of its own.
EXCEPTIONS = {
    "data_plane/futures.py": {"whole.chunk(parts)[index].get()": CALL},
    "driver/run_context.py": {"channel.recv(RECEIVE_BYTES)": PARENT},
    "evaluation/endpoint.py": {"task.result()": DONE},
    "framework/composition.py": {"future.result()": DONE, "future.exception()": DONE},
    "framework/parallel/inbox.py": {"self._changed.wait()": IDLE},
    "framework/parallel/outbox.py": {"self._changed.wait()": IDLE},
    "framework/threads.py": {
        "calls.get()": IDLE,
        "future.exception()": DONE,
        "wait(futures, return_when=FIRST_EXCEPTION)": STAGES,
    },
    "master/jobs/submit.py": {"running.wait()": SERVICE, "self._outcome.result()": SERVICE},
    "master/service/job_master.py": {"self._queue.get()": DONE},
    "rewards/sandbox/inside/first_process.py": {"os.waitpid(first, 0)": LIMIT, "watched.wait()": LIMIT},
    "sdk/data_queue.py": {
        "self._owner()._call(f'DataQueue.{self.name}.{operation}', args, {}, record).result()": CALL,
    },
    "sdk/pending_calls.py": {
        "self._changed.wait()": IDLE,
        "self._ready.get()": IDLE,
        "output.exception()": DONE,
    },
    "sdk/role_calls.py": {"answer.result()": DONE, "answer.exception()": DONE},
    "sdk/future_sequence.py": {"self.wait()": CALL},
    "sdk/role_group.py": {
        "actor._call(name, args, kwargs, record).result()": CALL,
        "argument.wait()": CALL,
    },
    "training_service/client.py": {
        "pending.result()": "its own default: an hour",
        "self.pending(request_id, json.loads).result()": "the same",
    },
    "serving/agent_loop/batch.py": {
        "self.work.wait()": CALL,
        "raised.wait()": LOOP,
        "task.result()": DONE,
        "task.exception()": DONE,
    },
    "serving/agent_loop/manager.py": {"partial.get()": CALL},
    "serving/agent_loop/episode_clock.py": {"slots.acquire()": LOOP},
    "serving/openai/server.py": {"arrived.get()": LOOP},
    "serving/openai/connections.py": {"stop_requested.wait()": SERVICE},
    "serving/router.py": {"self._resumed.wait()": LOOP, "asyncio.wait(pumps)": CALL, "pump.exception()": DONE},
    "serving/service.py": {"future.result()": CALL, "self.done.result()": CALL, "receive().wait()": CALL},
    "single_controller/references.py": {
        "argument.get()": CALL,
        "asyncio.run_coroutine_threadsafe(value, _event_loop()).result()": "user code in a worker: its caller has a "
        "deadline",
    },
    "system/child_guard.py": {"guard.wait()": SERVICE},
    "system/child_program.py": {"sock.recv(min(size, 1 << 20))": PARENT},
    "testing/transport.py": {"parent.recv()": "polled with a deadline right before"},
    "trainer/ppo/ppo_loop.py": {"call.get()": CALL},
    "trainer/ppo/trainer.py": {"call.get()": CALL},
    "trainer/submitted_call.py": {"future.get()": CALL},
    "trainer/ppo/policy/rollout_pipeline.py": {
        "self.greedy.get()": CALL,
        "self.responses.get()": CALL,
        "push.wait()": CALL,
        "self._submit(prompts).get()": CALL,
    },
    "trainer/ppo/policy/remote_evaluator.py": {"self._requests.get()": IDLE},
    "workers/weight_transfer/broadcast.py": {
        "self._in_flight[slot].wait()": COLLECTIVE,
        "self._group.broadcast(data, 0).wait()": COLLECTIVE,
    },
}

COLLECTIVES = {"all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"}
COLLECTIVES |= {"reduce_scatter", "full_tensor", "clip_grad_norm_", "set_model_state_dict"}
BLOCK_WITHOUT_ARGUMENTS = {"get", "wait", "join", "result", "exception", "communicate", "acquire", "select", "poll"}
TAKE_TIMEOUT_FIRST = {"wait", "join", "result", "exception", "select", "poll"}  # in milliseconds: poll
NEED_TIMEOUT = {"communicate", "wait_for"}  # whatever else they are given
RECEIVE = {"recv", "recv_into", "recvfrom", "recv_bytes", "accept"}
LIMIT_OF_SOCKETS = (".settimeout(", ".setblocking(False)", "select.select(", "selectors.")
SUBPROCESS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
FOREVER = {"os.wait", "os.wait3", "os.system", "os.popen", "signal.pause", "signal.sigwait", "signal.sigwaitinfo"}
FOREVER |= {"subprocess.getoutput", "subprocess.getstatusoutput"}
FUTURES = {f"{module}{name}" for module in ("", "futures.", "concurrent.futures.") for name in ("wait", "as_completed")}
WITH_TIMEOUT = {"ray.wait", "asyncio.wait", "asyncio.as_completed", "urlopen", "urllib.request.urlopen"} | SUBPROCESS
WITH_TIMEOUT |= {"socket.create_connection", "create_connection", "dist.init_process_group", "dist.new_group"} | FUTURES
WITH_TIMEOUT |= {"multiprocessing.connection.wait"}
TIMEOUTS = {"timeout", "timeout_s"}
BOUNDED = {"asyncio.wait_for", "asyncio.timeout"}
BOUNDED_NAMES = {"wait_for", "timeout"}


EXACT = FOREVER | WITH_TIMEOUT | {"ray.get", "os.waitpid", "select.select", "fcntl.flock"}
NAMES = {name.rpartition(".")[2] for name in EXACT} | BLOCK_WITHOUT_ARGUMENTS | NEED_TIMEOUT | RECEIVE


# What limits a wait whose timeout is no argument of that name; `select.poll()` makes an object that waits.
OTHER_LIMITS: dict[str, Callable[[ast.Call], bool]] = {
    "os.waitpid": lambda call: ast.unparse(call.args[1]) != "0",
    "select.select": lambda call: len(call.args) > 3,
    "select.poll": lambda call: True,
    "fcntl.flock": lambda call: any(flag in ast.unparse(call) for flag in ("LOCK_NB", "LOCK_UN")),
}


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def unbounded_waits(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every call that may wait for ever, and of every `ray.get`."""
    tree = ast.parse(source)
    variables = {
        target.id
        for node in ast.walk(tree)
        if "ContextVar" in source
        and isinstance(node, ast.Assign | ast.AnnAssign)
        and "ContextVar" in ast.unparse(node.value or node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    bounded = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _last_name(node.func) in BOUNDED_NAMES and ast.unparse(node.func) in BOUNDED
        for argument in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in bounded and _may_wait_for_ever(node, source, variables):
            yield node.lineno, ast.unparse(node)


def _without_none(call: ast.Call) -> ast.Call:
    """Return a call without the timeouts that are None: they are none."""
    keywords = [
        keyword for keyword in call.keywords if not (keyword.arg in TIMEOUTS and ast.unparse(keyword.value) == "None")
    ]
    takes_first = isinstance(call.func, ast.Attribute) and call.func.attr in TAKE_TIMEOUT_FIRST
    is_none = takes_first and [ast.unparse(argument) for argument in call.args] == ["None"]
    return ast.Call(func=call.func, args=[] if is_none else call.args, keywords=keywords)


def _is_alone(call: ast.Call) -> bool:
    return any(keyword.arg == "world_size" and ast.unparse(keyword.value) == "1" for keyword in call.keywords)


def _may_wait_for_ever(call: ast.Call, source: str, context_variables: set[str]) -> bool:
    if _last_name(call.func) not in NAMES:
        return False
    call = _without_none(call)
    name, keywords = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    last = name.rpartition(".")[2]
    if name == "ray.get" or name in FOREVER:
        return True
    if name in WITH_TIMEOUT:
        # `wait(futures, 3.0)` of concurrent.futures; no other of these takes a timeout by position
        return not (keywords & TIMEOUTS or (name in FUTURES and len(call.args) > 1) or _is_alone(call))
    if name in OTHER_LIMITS:
        return not OTHER_LIMITS[name](call)
    if not isinstance(call.func, ast.Attribute):
        return False
    if last in RECEIVE and not (last == "accept" and call.args):
        return not any(limit in source for limit in LIMIT_OF_SOCKETS)
    if last in NEED_TIMEOUT:
        return not (keywords & TIMEOUTS or name in BOUNDED or (last == "wait_for" and len(call.args) > 1))
    if name.removesuffix(".get") in context_variables or not _is_wait(last, source):
        return False
    blocks = not call.args or (
        last in ("get", "acquire") and [ast.unparse(argument) for argument in call.args] == ["True"]
    )
    return blocks and not keywords & TIMEOUTS


def _is_wait(method: str, source: str) -> bool:
    """Return whether a method of this name waits; `select` and `poll` are also names of methods that do not."""
    if method in ("select", "poll"):
        return "selectors" in source or "select.poll" in source
    return method in BLOCK_WITHOUT_ARGUMENTS


@functools.cache
def waits_of_package() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        waits = {text for _, text in unbounded_waits(path.read_text(encoding="utf-8"))}
        if name in RAY_GET_HOMES:
            waits = {text for text in waits if not (text.startswith("ray.get(") and "timeout=" in text)}
        if waits:
            found[name] = waits
    return found


def test_every_wait_has_a_deadline_or_a_reason():
    found = waits_of_package()
    without = {name: sorted(waits - EXCEPTIONS.get(name, {}).keys()) for name, waits in found.items()}
    assert {name: waits for name, waits in without.items() if waits} == {}, (
        "give the wait a timeout and an error that names what was awaited; a Ray object is awaited by "
        "`awaiting.wait_all` or `cluster.get_value`"
    )


def test_every_exception_is_still_there():
    found = waits_of_package()
    assert {name: sorted(waits.keys() - found.get(name, set())) for name, waits in EXCEPTIONS.items()} == {
        name: [] for name in EXCEPTIONS
    }


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(reference)",
        "ray.get(reference, timeout=3)",
        "ray.wait(references, num_returns=1)",
        "inbox.get()",
        "stopped.wait()",
        "thread.join()",
        "future.result()",
        "process.communicate()",
        "subprocess.run(['ls'])",
        "os.waitpid(pid, 0)",
        "connection.recv(4096)",
        "socket.create_connection(address)",
        "dist.init_process_group('gloo')",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "wait(futures)",
        "concurrent.futures.wait(futures)",
        "futures.as_completed(pending)",
        "stopped.wait(None)",
        "thread.join(timeout=None)",
        "inbox.get(True)",
        "inbox.get(block=True)",
        "lock.acquire()",
        "future.exception()",
        "process.communicate(data)",
        "condition.wait_for(ready)",
        "select.select([a], [], [])",
        "os.system('ls')",
    ],
)
def test_a_wait_without_a_deadline_would_be_found(line):
    assert [text for _, text in unbounded_waits(line)] == [line]


@pytest.mark.parametrize(
    "line",
    [
        "ray.wait(references, timeout=1.0)",
        "inbox.get(timeout=3)",
        "settings.get('key')",
        "', '.join(names)",
        "stopped.wait(POLL_PERIOD_S)",
        "subprocess.run(['ls'], timeout=3)",
        "os.waitpid(pid, os.WNOHANG)",
        "connection.settimeout(3.0); connection.recv(4096)",
        "asyncio.wait_for(settled.wait(), 3.0)",
        "current = ContextVar('current'); current.get()",
        "wait(futures, 3.0)",
        "concurrent.futures.wait(futures, timeout=3.0)",
        "process.communicate(data, timeout=3.0)",
        "condition.wait_for(ready, 3.0)",
        "select.select([a], [], [], 3.0)",
        "lock.acquire(timeout=3.0)",
        "inbox.get(False)",
        "process.poll()",
    ],
)
def test_a_wait_with_a_deadline_is_accepted(line):
    assert list(unbounded_waits(line)) == []


def test_every_module_with_a_collective_is_in_the_table_of_waits():
    page = (PACKAGE.parent / "docs" / "failover.md").read_text()
    table = page.partition("## Where a step can wait")[2].partition("\n## ")[0]
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _last_name(node.func) in COLLECTIVES
    }
    assert len(found) > 10
    assert {name for name in found if f"`{name}`" not in table} == {"testing/engine.py"}  # a conformance suite


def test_a_test_outlasts_the_deadlines_of_what_it_starts(pytestconfig):
    """Otherwise the test ends first, and what the process printed is not shown."""
    late, usual = [], float(pytestconfig.getini("timeout"))
    for path in Path(__file__).parent.rglob("test_*.py"):
        module = ast.parse(path.read_text())
        of_file = [ast.unparse(n) for n in module.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
        for test in (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"):
            marks = " ".join([*map(ast.unparse, test.decorator_list), *of_file])
            limit = max(map(float, re.findall(r"mark\.timeout\((\d+)", marks)), default=usual)
            waits = [node for node in ast.walk(test) if isinstance(node, ast.keyword) and node.arg in DEADLINES]
            seconds = [node.value.value for node in waits if isinstance(node.value, ast.Constant)]
            late += [(path.name, test.name, wait) for wait in seconds if wait is not None and wait > limit]
    assert late == []
