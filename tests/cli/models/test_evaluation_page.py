"""docs/evaluation.md: its commands run as written, with the tiny model; others' tools only where they are installed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl import cli, main_eval, main_generation
from tests.support.end_to_end.runs import write_prompts

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def of(program: str) -> list[str]:
    """Return the words of the page's command of this program, with a tiny size."""
    [line] = [line for line in COMMANDS if line.split("=")[0].startswith(program) or f" {program}" in line]
    return shlex.split(line, comments=True)


def test_responses_are_generated_and_scored_as_written(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "test.parquet", 2)
    small = ["rollout.response_length=8", "trainer.num_threads=1", "trainer.device=cpu", f"model.path={tiny_qwen2}"]
    assert main_generation.main([*of("python -m hybridrl.main_generation")[3:], *small]) == 0
    assert main_eval.main(of("python -m hybridrl.main_eval")[3:]) == 0
    assert "openai/gsm8k: 2 prompts, 8 samples" in capsys.readouterr().out
    assert (tmp_path / "samples.jsonl").read_text().count("\n") == 8


def test_every_option_on_the_page_exists(capsys):
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    shown = capsys.readouterr().out
    options = re.findall(r"^\| `(--[\w-]+)", TEXT, re.MULTILINE)
    assert len(options) == 5 and all(option in shown for option in options)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "package"), [("lm-eval run", "lm_eval"), ("HYBRIDRL_BASE_URL", "inspect_ai")])
def test_tools_of_others_talk_to_the_endpoint(tiny_site, tmp_path, program, package):
    if find_spec(package) is None or shutil.which(program.split()[0]) is None and package == "lm_eval":
        pytest.skip(f"{package} is not installed")
    url = f"http://127.0.0.1:{tiny_site.endpoint.port}"
    words = [word.replace("http://127.0.0.1:8000", url).replace("MODEL", "tiny") for word in of(program)]
    assigned = [word for word in words if re.match(r"[A-Z_]+=", word)]
    environment = {
        **os.environ,
        "HF_DATASETS_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment |= dict(word.split("=", 1) for word in assigned) | {"INSPECT_LOG_DIR": str(tmp_path)}
    done = subprocess.run(
        words[len(assigned) :], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exact_match" in done.stdout if package == "lm_eval" else "accuracy" in done.stdout
