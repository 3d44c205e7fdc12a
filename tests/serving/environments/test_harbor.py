"""Task directories of harbor. `make environments` installs the package, for the tests that start environments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.harbor.harbor_dockerfile import Step, read_image
from examples.harbor.harbor_task import command_of, cut
from hybridrl.errors import AgentFailed, ConfigError, DataError
from hybridrl.rewards.sandbox import LocalSandbox, SandboxUnavailable
from hybridrl.serving.environments.process import HANGS
from hybridrl.serving.environments.settings import load_environments

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests" / "support" / "serving" / "harbor_tasks"
EXAMPLE = ROOT / "examples" / "harbor"
SORT = "tr ' ' '\\n' < list.txt | sort > sorted.txt"
LIMITS = {"command_timeout_s": 2, "max_output": 60}


@pytest.fixture
def entry() -> dict:
    """The environment `sandbox`, in an interpreter that has the package."""
    python = os.environ.get("HYBRIDRL_HARBOR_PYTHON")
    if not python:
        pytest.skip("harbor needs Python 3.12, and an environment of its own: run `make environments`")
    try:
        LocalSandbox().check()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    config = {"tasks": str(TASKS), "environment": "sandbox", **LIMITS}
    return {"class_name": f"{EXAMPLE / 'harbor_task.py'}:HarborTask", "python": python, "config": config}


def test_the_list_of_the_example_is_read():
    [spec] = load_environments(str(EXAMPLE / "environments.yaml")).values()
    assert (spec.name, spec.address) == ("harbor", f"{EXAMPLE / 'harbor_task.py'}:HarborTask")


@pytest.mark.parametrize(
    ("turn", "command"),
    [
        ("ls -l\n", "ls -l"),
        ("<think>\n```bash\nno\n```</think> I list.\n```bash\nls\npwd\n```\nThat is it.", "ls\npwd"),
        ("```\nfirst\n```\nor\n```sh\nsecond\n```", "second"),
        ('{"command": "ls"}', "ls"),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "ls"),
        ('{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}', "ls"),
        ("{ echo 1; } > file", "{ echo 1; } > file"),
        ('{"words": 1}', '{"words": 1}'),
        ('{"arguments": 1}', '{"arguments": 1}'),
        ("done", None),
        ("```bash\ndone\n```", None),
        ('{"done": true}', None),
        ('{"name": "done", "arguments": {}}', None),
        ("I am done", "I am done"),
        ("", ""),
    ],
)
def test_a_turn_is_a_command_or_the_end(turn, command):
    assert command_of(turn) == command


def test_a_long_output_keeps_its_beginning_and_its_end():
    assert cut("abcdefghij\n", 11) == "abcdefghij"
    assert cut("abcdefghij", 4) == "ab\n[6 characters left out]\nij"


def test_a_dockerfile_says_what_is_in_the_tree(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    lines = [
        *("# a comment", "FROM debian:12", "LABEL a=b", "WORKDIR /srv", "WORKDIR in"),
        *('ENV WHO=me GREETING="hello $WHO"', "ENV BOTH=$WHO,${GREETING}"),
        *("COPY *.txt data ./", "COPY data /data", "COPY a.txt ../c.txt"),
        *("RUN make \\", "  # why", "  all", 'CMD ["sh"]'),
    ]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    image = read_image(tmp_path, workdir=None)
    variables = {"WHO": "me", "GREETING": "hello $WHO", "BOTH": "me,hello $WHO"}
    assert (image.workdir, image.variables) == ("/srv/in", variables)
    assert image.directories() == {"/srv", "/data"}
    copied = {"/srv/in/a.txt": tmp_path / "a.txt", "/srv/in/b.txt": tmp_path / "b.txt", "/srv/in": tmp_path / "data"}
    assert [step.sources for step in image.steps[:3]] == [
        copied,
        {"/data": tmp_path / "data"},
        {"/srv/c.txt": tmp_path / "a.txt"},
    ]
    assert image.steps[3] == Step("make    all", directory="/srv/in", variables=variables)
    assert read_image(tmp_path, workdir="/app").workdir == "/app"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("FROM a\nUSER me", "USER me: is not covered"),
        ("FROM a AS b\nFROM c", "FROM a AS b: is not covered"),
        ("FROM a\nCOPY --from=b /x /y", "COPY --from=b /x /y: is not covered"),
        ("FROM a\nCOPY ../secret .", "COPY ../secret .: copies"),
        ("FROM a\nCOPY link .", "COPY link .: copies files from elsewhere"),
        ("FROM a\nCOPY absent .", "COPY absent .: copies nothing that is there"),
        ("FROM a\nENV WHO me", "ENV WHO me: is no NAME=VALUE"),
        ("FROM a\nRUN cat <<E", "RUN cat <<E: is not covered"),
    ],
)
def test_a_dockerfile_that_needs_more_is_refused_with_the_line(tmp_path, text, refused):
    folder = tmp_path / "environment"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "Dockerfile").write_text(text)
    with pytest.raises(ValueError, match=f"Dockerfile: {refused}.*take the environment docker"):
        read_image(folder, workdir=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_of_a_task_give_the_reward(play, entry, tiny_tokenizer):
    rows = [
        ({"task": "words"}, ["cat language; ls", f"```bash\n{SORT}\n```", "done"]),
        ({"task": "words"}, ["tr ' ' '\\n' < list.txt > sorted.txt", "done"]),
        ({"task": "words"}, ["done"]),
    ]
    solved, unordered, unsolved = play(entry, *rows, length=400)
    assert "in the order of the alphabet." in tiny_tokenizer.decode(solved.prompt_ids)
    assert "user\nen\nlanguage\nlist.txt\nnotes\n[exit status 0]<" in tiny_tokenizer.decode(solved.response_ids)
    assert (solved.reward, unordered.reward, unsolved.reward) == (1.0, 0.5, 0.0)
    assert solved.counts == {"environment/steps": 3.0}
    # The tests also judge an episode that ends because its turns or its tokens are used up.
    assert play(entry, ({"task": "words"}, [SORT, "ls"]), max_turns=1)[0].reward == 1.0
    assert play(entry, ({"task": "words"}, [SORT, "ls"]), length=len(SORT) + 20)[0].reward == 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_and_tests_that_hang_are_ended(play, entry, tiny_tokenizer):
    turns = ["sleep 100 & sleep 100", "yes", "done"]
    [output] = play(entry, ({"task": "endless"}, turns), length=800)
    text = tiny_tokenizer.decode(output.response_ids)
    assert "user\n[killed]<" in text and "characters left out]" in text
    assert output.reward == 0.0  # tests that are not done in time have failed, although they have written a reward
    slow = entry | {"step_timeout_s": 0.5, "config": entry["config"] | {"command_timeout_s": 20}}
    with pytest.raises(AgentFailed, match="did not answer `step` within 0.5 s") as caught:
        play(slow, ({"task": "words"}, ["sleep 100"]))
    assert caught.value.cause == HANGS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_malicious_command_gets_nothing_of_the_machine_and_no_reward(
    play, entry, tiny_tokenizer, tmp_path, monkeypatch
):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PYTHON_SECRET", "swordfish")  # reaches the environment's process, and no command
    forged = "mkdir -p /logs/verifier /tests; echo 1 | tee /logs/verifier/reward.{txt,json}"
    turns = [
        f"cat {secret}; echo x > {secret}; cat {TASKS}/words/tests/expected; rm -rf {TASKS}",
        "env; cat /proc/*/environ; ls /proc",
        "rm -rf --no-preserve-root / 2> /dev/null; cat /etc/passwd /etc/shadow; kill -9 -1",
        f"{forged}; ln -sf {secret} /tests/test.sh; (while true; do {forged}; done) & chmod 000 /logs /tests",
        "done",
    ]
    [output] = play(
        entry | {"config": entry["config"] | {"max_output": 2000}}, ({"task": "words"}, turns), length=20_000
    )
    assert "swordfish" not in tiny_tokenizer.decode(output.response_ids)
    assert "apple fig pear" not in tiny_tokenizer.decode(output.response_ids)
    assert secret.read_text() == "swordfish" and (TASKS / "words" / "tests" / "expected").exists()
    assert output.counts == {"environment/steps": 5.0} and output.reward == 0.0
    full = "head -c 999999999 /dev/zero > /app/zeros; mkdir /tests/d; chmod 000 /tests/d; rm -rf /logs/verifier"
    many = "cd /var && rm -rf /logs/verifier && seq 9000 | xargs touch"
    for turns in ([SORT, full, "done"], [SORT, many, "done"]):  # the tests find no place
        assert play(entry, ({"task": "words"}, turns), length=20_000)[0].reward == 0.0, turns


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_that_cannot_be_judged_are_left_out(play, entry, tmp_path):
    with pytest.raises(DataError, match="silent gave no reward.*'no reward today'"):
        play(entry, ({"task": "silent"}, ["done"]))
    for name in ("../words", "absent", None, "."):
        with pytest.raises(DataError, match="task="):
            play(entry, ({"task": name}, ["done"]))
    shutil.copytree(TASKS / "words", tmp_path / "needs_network")
    dockerfile = tmp_path / "needs_network" / "environment" / "Dockerfile"
    dockerfile.write_text("FROM debian\nRUN apt-get install -y cowsay")
    mine = entry | {"config": entry["config"] | {"tasks": str(tmp_path)}}
    with pytest.raises(DataError, match="step 1, RUN 'apt-get install -y cowsay', .*status"):
        play(mine, ({"task": "needs_network"}, ["done"]))
    dockerfile.write_text("FROM debian\nWORKDIR /usr/src/app")
    with pytest.raises(DataError, match="writes to /usr, which the sandbox shows read-only"):
        play(mine, ({"task": "needs_network"}, ["done"]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_this_machine_lacks_ends_the_run_before_it_begins(play, entry):
    has_daemon = (
        shutil.which("docker") and not subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode
    )
    if has_daemon:
        pytest.skip("a Docker daemon runs here")
    with pytest.raises(ConfigError, match="environment=docker: Docker .*`environment: sandbox` runs tasks"):
        play(entry | {"config": {"tasks": str(TASKS)}})
    with pytest.raises(ConfigError, match="tasks=/absent: there is no such directory"):
        play(entry | {"config": {"tasks": "/absent"}})
