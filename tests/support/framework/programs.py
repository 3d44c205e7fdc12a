"""Programs that `test_runner.py` runs in several processes."""

import os
import signal
import time

import numpy as np

from hybridrl.framework import OnlineRLContext, Parallel, Role, Task, task

DEADLINE_S = 30.0


def wait_until(condition):
    until = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the condition did not become true")
        time.sleep(0.002)


def facts():
    """Return whether this process is in a group, its node id, its labels and its process id."""
    router = Parallel()
    return router is task.router, router.is_active, router.node_id, sorted(Task(labels={"own"}).labels), os.getpid()


def greet(num_messages, late):
    """Emit from every process at once; node 1 starts to listen `late` seconds later.

    Returns what this process received, by sender.
    """
    router = Parallel()
    for i in range(num_messages):
        # Every tenth message goes through the object store; the small ones after it must not overtake it.
        router.emit("greeting", router.node_id, i, np.zeros(200_000 if i % 10 == 0 else 1, np.uint8))
    time.sleep(late if router.node_id == 1 else 0)
    received = {0: [], 1: [], 2: []}
    router.on("greeting", lambda sender, i, _: received[sender].append(i))
    wait_until(lambda: all(len(received[other]) >= num_messages for other in {0, 1, 2} - {router.node_id}))
    return received


def count_events(steps):
    """Register several listeners for one event; return what each received from the other process."""
    received = {"a": [], "b": [], "once": [], "off": []}
    with Task(auto_sync_ctx=False) as loop:
        for name in ("a", "b"):
            loop.on("count", received[name].append)
        loop.once("count", received["once"].append)
        loop.once("count", received["off"].append)
        loop.off("count", received["off"].append)
        node = loop.router.node_id

        def count(ctx):
            loop.emit("count", (node, ctx.total_step), only_remote=True)
            if (
                node == 0 and ctx.total_step == steps - 1
            ):  # finishing ends the other's run, which must emit all events first
                wait_until(lambda: len(received["a"]) >= steps)

        loop.use(count).run(max_step=steps)
        wait_until(lambda: len(received["a"]) >= steps or node == 1)
        if node == 0:
            loop.emit("enough", only_remote=True)
        else:
            loop.wait_for("enough", timeout=DEADLINE_S)
    return received


def received_from():
    """Emit this node's id; return the ids received."""
    router, received = Parallel(), set()
    router.on("here", received.add)
    router.emit("here", router.node_id)
    time.sleep(0.3)
    return sorted(received)


def ping_pong(rounds):
    """Node 0 emits and waits for the answer of node 1; no listeners are registered."""
    with Task(auto_sync_ctx=False) as loop:
        if loop.router.node_id == 0:

            def serve(ctx):
                loop.emit("ping", ctx.total_step)
                (answer,), _ = loop.wait_for("pong", timeout=DEADLINE_S, ignore_timeout_exception=False)
                assert answer == ctx.total_step

            loop.use(serve).run(max_step=rounds)
        else:

            def answer(ctx):
                received = loop.wait_for("ping", timeout=DEADLINE_S)
                if received is not None:
                    loop.emit("pong", *received[0])

            loop.use(answer).run()
        return loop.ctx.total_step


def share_context(steps):
    """Node 0 works and node 1 records the contexts it receives."""
    seen = []
    with Task(ctx=OnlineRLContext()) as loop:
        if loop.router.node_id == 0:

            def work(ctx):
                ctx.weights = np.full(300_000, ctx.total_step, np.float32)
                ctx.train_iter += 1

            loop.use(work).run(max_step=steps)
            return None
        loop.on("sync_parallel_ctx", lambda ctx: seen.append((ctx.total_step, ctx.train_iter, float(ctx.weights[-1]))))
        assert loop.parallel_ctx.get("weights") is None
        loop.use(lambda ctx: time.sleep(0.01)).run()
        newest = loop.parallel_ctx
        newest.weights[0] = -1  # the received copy is private
        return seen, newest.total_step, loop.ctx.finish


def finish_by(kind):
    """Node 1 ends the run of all, by `kind`. Returns the number of completed steps."""
    with Task() as loop:

        def work(ctx):
            if loop.router.node_id == 1 and ctx.total_step == 3:
                if kind == "ctx":
                    ctx.finish = True
                else:
                    loop.finish = True
            time.sleep(0.005)

        loop.use(work).run(max_step=100_000)
        return loop.ctx.total_step


def by_role():
    with task.start(ctx=OnlineRLContext()):
        task.add_role(Role.LEARNER if task.router.node_id == 0 else Role.COLLECTOR)
        task.use(lambda ctx: ctx.setdefault("role", "learner")) if task.has_role(Role.LEARNER) else task.use(
            task.void()
        )
        task.use(lambda ctx: ctx.setdefault("role", "collector") and time.sleep(0.01), filter_labels=["node.[1-9]"])
        task.run(max_step=2)
        return task.ctx.role


def only_node_0_has_work():
    with Task() as loop:
        loop.use(lambda ctx: time.sleep(0.02), filter_labels=["node.0"]).run(max_step=10)
        return loop.ctx.total_step


def fail(kind, node_id, times=1):
    """Fail on one node while it was restarted fewer than `times` times; the others run for 1000 s."""
    router = Parallel()
    if router.node_id == node_id and router.retries < times:
        time.sleep(0.2)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            raise SystemExit(3)
        raise LookupError("no such thing")
    while times == 1:
        time.sleep(0.01)  # until it is interrupted
    return os.getpid(), router.retries


def recover(kind):
    """Node 1 fails in its fourth step and restarts; then the two exchange events again.

    Returns the first event that this node received.
    """
    received = []
    with Task() as loop:
        node, retries = loop.router.node_id, loop.router.retries
        loop.on("back", received.append)

        def work(ctx):
            ctx.weights = ctx.total_step
            if node == 1 and retries == 0 and ctx.total_step == 3:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise LookupError("no such thing")
            if node == 1 and retries == 1:
                loop.emit("back", os.getpid())
                ctx.finish = loop.parallel_ctx.get("weights") is not None and ctx.total_step > 3
            time.sleep(0.01)

        loop.use(work).run(max_step=2000)
        return retries, received[:1], os.getpid()


def fail_in_listener():
    with Task() as loop:

        def bad(value):
            raise LookupError(f"cannot handle {value}")

        if loop.router.node_id == 1:
            loop.on("e", bad)
        loop.use(lambda ctx: loop.emit("e", 7, only_remote=True) or time.sleep(0.01)).run()


def emit_unpicklable():
    Parallel().emit("e", (i for i in range(3)))


def send_unpicklable_context():
    with Task() as loop:
        loop.use(lambda ctx: ctx.update(rows=[1], reader=(i for i in range(3)))).run()


def end_with_the_group(folder, kind):
    """Node 1 raises when the others are at work, if `kind` is "raise".

    The others leave files when they end.
    """
    node = Parallel().node_id
    if node == 1 and kind == "raise":
        wait_until(lambda: len(list(folder.glob("started-*"))) == 2)
        raise LookupError("no such thing")
    try:
        if node == 2:  # a loop that knows nothing of the group
            (folder / "started-2").touch()
            while True:
                time.sleep(0.01)
        with Task() as loop:
            loop.on_exit(lambda: (folder / f"hook-{node}").write_text(str(loop.ctx.total_step)))
            loop.use(lambda ctx: (folder / f"started-{node}").touch() or time.sleep(0.01)).run()
    finally:
        (folder / f"finally-{node}").touch()


def state_of(process):
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def emit_to_a_stopped_peer(steps):
    """Node 0 stops the process of node 1, runs all its steps, and lets it go on.

    Returns what node 1 received.
    """
    weights, counts = [], []
    with Task() as loop:
        if loop.router.node_id == 0:
            (peer,), _ = loop.wait_for("process", timeout=DEADLINE_S, ignore_timeout_exception=False)
            os.kill(peer, signal.SIGSTOP)
            wait_until(lambda: state_of(peer) == "T")

            def work(ctx):
                ctx.step = ctx.total_step
                loop.emit("weights", ctx.total_step, newest_only=True)
                loop.emit("count", ctx.total_step)

            try:
                loop.use(work).run(max_step=steps)
                return state_of(peer)
            finally:
                os.kill(peer, signal.SIGCONT)
        loop.on("weights", weights.append)
        loop.on("count", counts.append)
        loop.emit("process", os.getpid())
        loop.use(lambda ctx: time.sleep(0.01)).run()
        return weights, counts, loop.parallel_ctx.get("step")


def loop_by_hand(steps):
    """Node 0 loops by hand and leaves.

    Node 1 runs until it does. Returns steps and the received contexts' steps.
    """
    received = []
    with Task() as loop:
        loop.on("sync_parallel_ctx", lambda ctx: received.append(ctx.get("mine")))

        def halves(ctx):
            yield
            ctx.mine = ctx.total_step

        if loop.router.node_id == 0:
            for _ in range(steps):
                loop.forward(halves)
                loop.renew()
        else:
            loop.use(lambda ctx: time.sleep(0.01)).run()
        return loop.ctx.total_step, received


def call_by_name():
    """Call a function of the peers with the names of DI-engine v0.2.3; return what this process received."""
    received = []
    with Parallel() as router:
        router.register_rpc("add", received.append)
        router.send_rpc("add", router.node_id)
        wait_until(lambda: received)
        router.unregister_rpc("add")
        return received, router.get_attch_to_len()


def learner(steps):
    """Run a group of one until it has received `steps` events of attached processes."""
    received = []
    with Task(ctx=OnlineRLContext()) as loop:
        loop.on("data", received.append)

        def work(ctx):
            ctx.train_iter += 1
            ctx.finish = len(received) >= steps
            time.sleep(0.01)

        loop.use(work).run()
        return loop.router.name, received[:steps]


def collector():
    first = []
    with Task(ctx=OnlineRLContext(), attach_callback=first.append) as loop:
        loop.use(lambda ctx: loop.emit("data", ctx.total_step) or time.sleep(0.01)).run(max_step=100_000)
        return first[0].train_iter, loop.router.attached_to


def env_labels():
    return sorted(Task().labels)


def start_slowly(seconds):
    time.sleep(seconds)
    return time.time()


def fail_beside_a_sleeper():
    router = Parallel()
    if router.node_id == 0:
        router.emit("asleep", newest_only=True)
        time.sleep(1000)  # nothing interrupts it
    asleep = []
    router.on("asleep", lambda: asleep.append(True))
    wait_until(lambda: asleep)
    raise LookupError("no such thing")
