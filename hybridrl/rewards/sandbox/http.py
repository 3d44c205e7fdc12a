"""`HttpSandbox`: programs run by a server with the interface of SandboxFusion.

    POST URL {code, language, stdin, files, fetch_files, run_timeout, compile_timeout, memory_limit_MB}
    -> {status, message, compile_result, run_result: {status, return_code, stdout, stderr, execution_time}, files}

`status` is "Success", "Failed" (a program ended with another status than 0, or too late) or "SandboxError". That and
everything else that says nothing about the program is tried again, and then raised as SandboxFailed.
"""

import base64
import binascii
import functools
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hybridrl.rewards.sandbox import job

KEY = "reward_model.sandbox_fusion.url"
MAX_TRIES = 4
BACK_OFF_S = 0.5  # before the second try; twice as long before each further one, plus up to as much by chance
ANSWER_TIMEOUT_S = 30.0  # beyond the program's own limit: waiting in the server's queue, and the network
WAIT_TIMEOUT_S = 600.0  # for other requests of this process to end
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
MAX_ANSWER_BYTES = 64 << 20
FINISHED, TOO_LATE = "Finished", "TimeLimitExceeded"


class HttpSandbox:
    """Runs programs on a server. A pickled copy counts its own requests.

    Args:
        url: Where requests are posted to, with its path (SandboxFusion: `/run_code`).
        max_concurrent: Requests of this object at the same time; further calls wait.
    """

    def __init__(self, url: str, *, max_concurrent: int = 8):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise job.SandboxUnavailable(f"{KEY}={url}: must be like http://HOST:8080/run_code")
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent={max_concurrent}: must be at least 1")
        self.url, self.max_concurrent = url, max_concurrent
        self._places = threading.BoundedSemaphore(max_concurrent)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(HttpSandbox, self.url, max_concurrent=self.max_concurrent), ()

    def run(self, program: job.Program) -> job.Outcome:
        if (refused := job.refusal(program)) is not None:
            return refused
        if not self._places.acquire(timeout=WAIT_TIMEOUT_S):
            raise job.SandboxFailed(f"{self.max_concurrent} requests to {self.url} took more than {WAIT_TIMEOUT_S:g} s")
        try:
            return read_answer(self._request(program), program.limits)
        finally:
            self._places.release()

    def check(self) -> str:
        try:
            outcome = self.run(job.PROBE)
        except job.SandboxFailed as error:
            raise job.SandboxUnavailable(
                f"{KEY}={self.url}: {error}; start the server, correct the URL (SandboxFusion: .../run_code), or leave "
                "it out to run programs on this machine"
            ) from error
        if not outcome.ok or outcome.stdout.strip() != "skrow":
            raise job.SandboxUnavailable(
                f"{KEY}={self.url}: a program that prints a word ended with {outcome.verdict} {outcome.detail}; is it "
                "a server with the interface of SandboxFusion?"
            )
        return f"remote, {self.url}"

    def _request(self, program: job.Program) -> dict[str, Any]:
        """Return the server's answer about a program, after `MAX_TRIES` tries at most. Raises SandboxFailed."""
        body = json.dumps(request_of(program)).encode()
        for number in range(1, MAX_TRIES + 1):
            try:
                return self._ask(body, program.limits.wall_s + ANSWER_TIMEOUT_S)
            except _TryAgain as error:
                if number == MAX_TRIES:
                    raise job.SandboxFailed(f"{self.url} failed {MAX_TRIES} times: {error}") from error
                time.sleep(BACK_OFF_S * 2 ** (number - 1) * (1 + random.random()))
        raise AssertionError("the last try returns or raises")

    def _ask(self, body: bytes, timeout_s: float) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer = json.loads(response.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            text = f"HTTP status {error.code}"
            raise (_TryAgain if error.code in TRY_AGAIN else job.SandboxFailed)(text) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
            told = str(answer.get("message") if isinstance(answer, dict) else answer)[:200]
            raise _TryAgain(f"the server says {answer.get('status') if isinstance(answer, dict) else ''} {told}")
        return answer


class _TryAgain(Exception):
    """A failure that another try may not have."""


def request_of(program: job.Program) -> dict[str, Any]:
    """Return a program as the server's interface has it. It has no limit of processes: that is the server's."""
    return {
        "code": program.code,
        "language": program.language,
        "stdin": program.stdin,
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "fetch_files": list(program.fetch),
        "run_timeout": program.limits.wall_s,
        "compile_timeout": program.limits.wall_s,
        "memory_limit_MB": program.limits.memory_mb,
    }


def read_answer(answer: dict[str, Any], limits: job.Limits) -> job.Outcome:
    """Return the outcome in a server's answer.

    Raises:
        SandboxFailed: The answer has none.
    """
    compiled, ran = answer.get("compile_result"), answer.get("run_result")
    result = compiled if compiled and (compiled.get("return_code") or compiled.get("status") != FINISHED) else ran
    if not isinstance(result, dict) or result.get("status") not in (FINISHED, TOO_LATE):
        raise job.SandboxFailed(f"an answer without a result: {str(answer)[:200]}")
    most = limits.output_kb << 10
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    try:
        files = {name: base64.b64decode(content) for name, content in (answer.get("files") or {}).items()}
    except (binascii.Error, TypeError, AttributeError) as error:
        raise job.SandboxFailed(f"files in an answer are not base64: {error}") from error
    status = result.get("return_code")
    verdict, detail = job.Verdict.OK, ""
    if result["status"] == TOO_LATE:
        verdict, detail = job.Verdict.TIMEOUT, f"it was not done after {limits.wall_s:g} s"
    elif max(len(stdout), len(stderr)) > most:
        verdict, detail = job.Verdict.OUTPUT_LIMIT, f"it printed more than {limits.output_kb} KiB"
    elif status != 0:
        verdict, detail = job.Verdict.RUNTIME_ERROR, f"it ended with status {status}"
    return job.Outcome(verdict, stdout[:most], stderr[:most], exit_status=status, files=files, detail=detail)
