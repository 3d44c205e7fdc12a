"""A server with the interface of SandboxFusion that runs programs in this machine's sandbox."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hybridrl.rewards.sandbox import Limits, LocalSandbox, Program, Verdict


class SandboxServer(ThreadingHTTPServer):
    """Answers POST /run_code.

    Attributes:
        failures: What the next requests get instead of an answer: a status of HTTP, or the bytes of an answer.
        requests: The requests so far.
        most_at_once: Requests that were answered at the same time.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sandbox = LocalSandbox()
        self.failures: list[int | bytes] = []
        self.requests: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/run_code"


class _Handler(BaseHTTPRequestHandler):
    server: SandboxServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.at_once, self.server.most_at_once)
            failure = self.server.failures.pop(0) if self.server.failures else None
        try:
            answer = json.dumps(answer_to(body, self.server.sandbox)).encode() if failure is None else failure
        finally:
            with self.server.lock:  # before the answer: its reader may send the next request at once
                self.server.at_once -= 1
        if isinstance(answer, int):
            self.send_error(answer)
        else:
            self._send(answer)

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def answer_to(body: dict[str, Any], sandbox: LocalSandbox) -> dict[str, Any]:
    """Return SandboxFusion's answer to a request."""
    program = Program(
        body["code"],
        language=body["language"],
        stdin=body["stdin"] or "",
        files={name: base64.b64decode(content) for name, content in body["files"].items()},
        fetch=tuple(body["fetch_files"]),
        limits=Limits(wall_s=body["run_timeout"], memory_mb=body["memory_limit_MB"]),
    )
    outcome = sandbox.run(program)
    late = outcome.verdict is Verdict.TIMEOUT
    return {
        "status": "Success" if outcome.ok else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": 0.0,
            "return_code": None if late else -9 if outcome.exit_status is None else outcome.exit_status,
            "stdout": outcome.stdout,
            "stderr": outcome.stderr,
        },
        "executor_pod_name": None,
        "files": {name: base64.b64encode(content).decode() for name, content in outcome.files.items()},
    }


@contextlib.contextmanager
def serve_sandbox() -> Iterator[SandboxServer]:
    with SandboxServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)
