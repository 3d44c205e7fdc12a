"""A sandbox behind HTTP: a real server that runs real programs, and one that fails."""

import pickle
import threading

import pytest

from hybridrl.rewards.sandbox import HttpSandbox, Limits, Program, SandboxFailed, SandboxUnavailable, Verdict, http


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch):
    monkeypatch.setattr(http, "BACK_OFF_S", 0.01)


def test_programs_have_the_same_outcomes_as_on_this_machine(server, sandbox):
    remote = HttpSandbox(server.url)
    programs = [
        Program("print(input()[::-1])", stdin="abc"),
        Program("print(1); raise SystemExit(3)"),
        Program("1 / 0"),
        Program(
            "open('out', 'wb').write(open('in', 'rb').read() * 2)", files={"in": b"\x00\xff"}, fetch=("out", "missing")
        ),
    ]
    for program in programs:
        here, there = sandbox.run(program), remote.run(program)
        assert (there.verdict, there.exit_status, there.files) == (here.verdict, here.exit_status, here.files)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr)


def test_a_late_program_and_one_that_prints_too_much_are_outcomes(server):
    remote = HttpSandbox(server.url)
    late = remote.run(Program("while True: pass", limits=Limits(wall_s=0.5)))
    assert (late.verdict, late.detail) == (Verdict.TIMEOUT, "it was not done after 0.5 s")
    loud = remote.run(Program("print('x' * 5000)", limits=Limits(output_kb=4)))
    assert (loud.verdict, len(loud.stdout)) == (Verdict.OUTPUT_LIMIT, 4096)


def test_the_request_is_sandbox_fusions(server):
    HttpSandbox(server.url).run(Program("print(1)", limits=Limits(wall_s=3, memory_mb=256)))
    [request] = server.requests
    assert request == {
        "code": "print(1)",
        "language": "python",
        "stdin": "",
        "files": {},
        "fetch_files": [],
        "run_timeout": 3,
        "compile_timeout": 3,
        "memory_limit_MB": 256,
    }


@pytest.mark.parametrize(
    "failure",
    [500, 503, 429, b"no json", b'{"status": "SandboxError", "message": "the runner is gone"}', b"[]"],
)
def test_what_the_server_fails_at_is_tried_again(server, failure):
    server.failures = [failure, failure]
    assert HttpSandbox(server.url).run(Program("print(1)")).stdout == "1\n"
    assert len(server.requests) == 3


def test_a_server_that_goes_on_failing_is_an_error_and_no_outcome(server):
    server.failures = [b'{"status": "SandboxError", "message": "the runner is gone"}'] * 10
    with pytest.raises(SandboxFailed, match="failed 4 times: .*SandboxError the runner is gone"):
        HttpSandbox(server.url).run(Program("print(1)"))
    assert len(server.requests) == http.MAX_TRIES


def test_a_refused_request_is_not_tried_again(server):
    server.failures = [404]
    with pytest.raises(SandboxFailed, match="HTTP status 404"):
        HttpSandbox(server.url).run(Program("print(1)"))
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b'{"status": "Success", "run_result": null}',
        b'{"status": "Failed", "run_result": {"status": "Error"}}',
        b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0}, "files": {"a": 1}}',
    ],
)
def test_an_answer_without_a_result_is_an_error(server, answer):
    server.failures = [answer]
    with pytest.raises(SandboxFailed):
        HttpSandbox(server.url).run(Program("print(1)"))


def test_a_program_that_does_not_compile_has_the_compilers_message(server):
    server.failures = [
        b'{"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1, "stderr": "line 1: no"}}'
    ]
    outcome = HttpSandbox(server.url).run(Program("int main(", language="cpp"))
    assert (outcome.verdict, outcome.exit_status, outcome.stderr) == (Verdict.RUNTIME_ERROR, 1, "line 1: no")


def test_no_more_requests_than_allowed_are_under_way(server):
    remote = HttpSandbox(server.url, max_concurrent=2)
    threads = [threading.Thread(target=remote.run, args=(Program("print(1)"),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(server.requests) == 6
    assert server.most_at_once <= 2


def test_a_pickled_copy_asks_the_same_server(server):
    assert pickle.loads(pickle.dumps(HttpSandbox(server.url))).check() == f"remote, {server.url}"


def test_a_server_that_is_not_there_is_refused_with_setting_and_way_out():
    with pytest.raises(SandboxUnavailable) as raised:
        HttpSandbox("http://127.0.0.1:9/run_code").check()
    assert "reward_model.sandbox_fusion.url=http://127.0.0.1:9/run_code" in str(raised.value)
    assert "start the server" in str(raised.value)


def test_a_server_that_runs_nothing_is_refused(server):
    server.failures = [b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "hi"}}']
    with pytest.raises(SandboxUnavailable, match="server with the interface of SandboxFusion"):
        HttpSandbox(server.url).check()


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host/run_code", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(SandboxUnavailable, match="must be like http://HOST:8080/run_code"):
        HttpSandbox(url)
