"""docs/graph.md and docs/master.md: their commands run as written, and docs/graph.md shows how their output begins."""

import re
import shlex
from pathlib import Path

import pytest

from hybridrl import cli, main_ppo
from tests.support.end_to_end.runs import settings

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL) for line in block.splitlines()
]
MASTER = (PAGE.parent / "master.md").read_text()
JOB_FILE = re.findall(r"```yaml\n(.*?)```", MASTER, re.DOTALL)
JOB_COMMANDS = re.findall(r"^hybridrl job (?:submit|graph) grpo.*?(?=  #|$)", MASTER, re.MULTILINE)
GRAPHS = [line for line in COMMANDS if line.startswith("hybridrl job graph")]


def run(line: str) -> int:
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "hybridrl.main_ppo"]:
        return main_ppo.main(words[3:])
    assert words[0] == "hybridrl"
    return cli.main(words[1:])


def texts_of(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text(), re.DOTALL)


def test_the_page_has_a_command_for_every_format():
    assert len(GRAPHS) == 2 and len(COMMANDS) == 4


@pytest.mark.parametrize("line", GRAPHS)
def test_a_graph_command_runs_as_written(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(line) == 0, capsys.readouterr().err


def test_the_table_on_the_page_is_the_beginning_of_what_its_command_prints(capsys):
    assert run(GRAPHS[0]) == 0
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(shown.splitlines()) > 15 and capsys.readouterr().out.startswith(shown)


def test_the_picture_on_the_page_has_the_texts_that_its_command_draws(tmp_path):
    assert run(f"{GRAPHS[0]} --output {tmp_path / 'graph.svg'}") == 0
    drawn = texts_of(tmp_path / "graph.svg")
    assert len(drawn) > 40 and drawn == texts_of(PAGE.with_suffix(".svg"))


def test_a_run_and_its_timeline_are_two_commands(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, trace = COMMANDS[-2:]
    assert run(train.replace("...", shlex.join(settings(tmp_path, tiny_qwen2)))) == 0
    assert run(trace) == 0
    assert (tmp_path / "run" / "trace.json").stat().st_size > 1000


def test_the_page_of_the_master_describes_one_job_in_a_file_and_has_commands_for_it():
    assert len(JOB_FILE) == 1 and len(JOB_COMMANDS) == 3


@pytest.mark.parametrize("line", JOB_COMMANDS)
def test_a_command_about_a_job_file_runs_as_written(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text(JOB_FILE[0])
    assert run(line) == 0, capsys.readouterr().err


def test_the_job_in_the_file_is_the_job_of_the_builder_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text(JOB_FILE[0])
    assert run(JOB_COMMANDS[0]) == 0
    plan = capsys.readouterr().out
    shown = next(text for text in re.findall(r"```text\n(.*?)```", MASTER, re.DOTALL) if text.startswith("grpo: "))
    assert plan == shown


def test_every_option_and_command_on_the_page_of_the_master_exists(capsys):
    for line in re.findall(r"^hybridrl job (\w+)", MASTER, re.MULTILINE):
        with pytest.raises(SystemExit):
            cli.main(["job", line, "--help"])
        capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["job", "submit", "--help"])
    shown = capsys.readouterr().out
    options = re.findall(r"^\| `(--[\w-]+)", MASTER, re.MULTILINE)
    assert len(options) == 5 and all(option in shown for option in options)
