"""Play one row with the command `mini` of mini-swe-agent: the command form of the example.

`rollout.agent.program="PYTHON command.py"` starts this in mini-swe-agent's environment, once per episode. The command
finds the endpoint in `OPENAI_BASE_URL` by itself. This file writes the row's files and posts the reward.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

CONFIG = Path(__file__).with_name("mini.yaml").resolve()
TIMEOUT_S = 300


def run_mini(question: str, *, directory: str, trajectory: Path) -> str:
    """Return what the agent submitted, "" if it ended without."""
    mini = Path(sys.executable).with_name("mini")
    options = ["--yolo", "--exit-immediately", "--model", f"openai/{os.environ['OPENAI_MODEL']}"]
    command = [mini, "--config", CONFIG, "--task", question, "--output", trajectory, *options]
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        sys.exit(f"mini ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(trajectory.read_text())["info"]["submission"]


def post_reward(reward: float) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"reward": reward}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/reward", body, headers)
    urllib.request.urlopen(request, timeout=TIMEOUT_S).close()


def main() -> None:
    row = json.loads(os.environ["HYBRIDRL_ROW"])
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as outside:
        for name, text in row["extra_info"]["files"].items():
            Path(directory, name).write_text(text)
        question, trajectory = row["raw_prompt"][0]["content"], Path(outside, "trajectory.json")
        submission = run_mini(question, directory=directory, trajectory=trajectory)
    post_reward(float(submission.strip() == row["reward_model"]["ground_truth"]))


if __name__ == "__main__":
    main()
