"""What is dangerous is in one place each: starting a process, loading code, listening, writing to the terminal.

A call elsewhere fails here, so that a second place is a decision: `docs/security.md` says what the first one checks.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hybridrl"

STARTS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.Popen"}
STARTS |= {
    "subprocess.getoutput",
    "os.fork",
    "os.forkpty",
    "os.system",
    "os.popen",
    "os.posix_spawn",
    "os.posix_spawnp",
}
STARTS |= {"pty.fork", "pty.spawn", "multiprocessing.Process", "multiprocessing.Pool", "ProcessPoolExecutor"}
LOADS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "torch.load"}
LOADS |= {"marshal.loads", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "joblib.load"}
LOADS |= {"numpy.load", "np.load", "shelve.open", "eval", "exec", "dill.loads", "pandas.read_pickle"}
LISTENS = {"socket.create_server", "create_server", "asyncio.start_server", "dist.TCPStore", "TCPStore"}
WRITES = {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"}
LISTEN_METHODS = {"listen", "create_server", "start_server"}

OWN_PROCESSES = "bytes between processes of one job, over Ray, which asks for its cluster's token"
OWN_PARENT = "bytes from the process that started this one, over a socket that both inherited"
HOMES = {
    "starts a process": {
        "system/child_process.py": "every child: it ends with its parent, and takes along what it started",
        "system/child_guard.py": "the guard's own child",
        "driver/cluster/watch.py": "the program that ends what is left of a cluster when this process is killed",
        "driver/cluster/holder.py": "a fork of its own, which holds the Ray cluster of this machine",
        "driver/supervisor.py": "forks that are drivers and must not load anything again; they end with the program",
        "testing/transport.py": "the peer of a suite for transports of users",
        "rewards/sandbox/local.py": "a sandbox: it ends with its control pipe, which ends with this process",
        "rewards/sandbox/inside/first_process.py": "the program in a sandbox, and the sandbox's first process",
        "serving/environments/adapters/openenv_client.py": "a server inside the process of an environment",
    },
    "loads what may name code": {
        "data_plane/serialization.py": "files of batches: plain data only",
        "workers/engine/safe_load.py": "metadata of a checkpoint: its own classes only",
        "workers/engine/megatron/checkpoint.py": "weights_only=True",
        "config/introspection.py": "a SafeLoader without aliases",
        "master/job_files/job_file.py": "a SafeLoader",
        "system/child_program.py": OWN_PARENT,
        "rewards/sandbox/inside/first_process.py": OWN_PARENT,
        "framework/parallel/message.py": OWN_PROCESSES,
        "framework/parallel/group_member.py": OWN_PROCESSES,
        "master/jobs/entry_worker.py": OWN_PROCESSES,
        "master/jobs/job_handle.py": OWN_PROCESSES,
        "single_controller/processes/worker_host.py": OWN_PROCESSES,
        "single_controller/processes/worker_processes.py": OWN_PROCESSES,
        "trainer/recovery/snapshots.py": OWN_PROCESSES,
        "testing/transport.py": "what the suite itself has pickled",
    },
    "writes to the terminal": {
        "driver/terminal.py": "replaces control characters",
        "config/load.py": "the caller's own settings",
        "config/__main__.py": "the reference of all settings",
        "cli/models/evaluate.py": "a count that goes back to the start of its line",
    },
    "listens at a port": {
        "master/health/heartbeat_server.py": "loopback while the cluster has one machine; a token per master",
        "serving/openai/connections.py": "the endpoint and the training service: loopback by default, keys, limits",
        "view/server.py": "the page about runs: reads only; loopback by default, else a token",
        "system/rendezvous.py": "rank 0 of a group, at its own address",
        "workers/process_setup.py": "the same, once the listener is there",
        "workers/weight_transfer/channel.py": "the weight channel, at its own address, keys with a secret prefix",
    },
}


def kind_of(call: ast.Call) -> str | None:
    """Return what a call does of which there is one place; None for any other call."""
    if not isinstance(call.func, ast.Attribute | ast.Name):
        return None
    name = ast.unparse(call.func)
    if name in STARTS or (name.endswith(".Process") and any(keyword.arg == "target" for keyword in call.keywords)):
        return "starts a process"
    if name in LOADS or (isinstance(call.func, ast.Attribute) and name.endswith("Unpickler")):
        return "loads what may name code"
    if name in WRITES:
        return "writes to the terminal"
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in LISTEN_METHODS
    return "listens at a port" if name in LISTENS or is_method else None


def dangerous_calls(source: str) -> Iterator[str]:
    """Yield what the calls of a module, and the base classes of its classes, do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (kind := kind_of(node)):
            yield kind
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Unpickler") for base in node.bases):
            yield "loads what may name code"


@functools.cache
def found_homes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {kind: set() for kind in HOMES}
    for path in sorted(PACKAGE.rglob("*.py")):
        for kind in dangerous_calls(path.read_text(encoding="utf-8")):
            found[kind].add(path.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("kind", HOMES)
def test_what_is_dangerous_has_its_places(kind):
    assert found_homes()[kind] == HOMES[kind].keys()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("subprocess.Popen(['ls'])", "starts a process"),
        ("os.system('ls')", "starts a process"),
        ("SPAWN.Process(target=f)", "starts a process"),
        ("torch.load(path)", "loads what may name code"),
        ("cloudpickle.loads(data)", "loads what may name code"),
        ("class Mine(pickle.Unpickler): pass", "loads what may name code"),
        ("yaml.load(file, Loader)", "loads what may name code"),
        ("print(text)", "writes to the terminal"),
        ("held.listen()", "listens at a port"),
        ("socket.create_server(address)", "listens at a port"),
    ],
)
def test_a_second_place_would_be_found(line, kind):
    assert list(dangerous_calls(line)) == [kind]


@pytest.mark.parametrize("line", ["json.loads(text)", "yaml.safe_load(file)", "os.execv(name, words)", "model.eval()"])
def test_what_is_harmless_is_not_found(line):
    assert list(dangerous_calls(line)) == []
