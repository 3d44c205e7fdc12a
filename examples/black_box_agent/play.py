"""Play the rows of a run with mini-swe-agent, as it comes from PyPI: `python play.py URL`, in its own environment.

Each thread claims a row at the endpoint, runs the agent on it in a new directory, and ends the episode with its reward.
The agent sends its requests to the base URL of the episode. Ends with the process that started it.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

CONFIG = Path(__file__).with_name("mini.yaml")
CLAIM_S, RETRY_S = 20, 0.5


def solve(episode: dict[str, Any], *, key: str) -> float:
    """Return the reward of one episode: whether the agent has submitted the right number."""
    config, row = yaml.safe_load(CONFIG.read_text()), episode["row"]
    client = {"api_base": episode["base_url"], "api_key": key}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in row["extra_info"]["files"].items():
            Path(folder, name).write_text(text)
        model = get_model(f"openai/{episode['model']}", {**config["model"], "model_kwargs": client})
        environment = LocalEnvironment(cwd=folder, **config["environment"])
        end = DefaultAgent(model, environment, **config["agent"]).run(row["raw_prompt"][0]["content"])
    return float(end.get("submission", "").strip() == row["reward_model"]["ground_truth"])


def play(url: str, *, key: str) -> None:
    """Claim and end episodes for ever."""
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=3 * CLAIM_S) as http:
        while True:
            try:
                claimed = http.post(f"{url}/v1/episodes", json={"wait_s": CLAIM_S}).raise_for_status()
                if claimed.status_code == 200:
                    episode = claimed.json()
                    http.post(f"{url}/v1/episodes/{episode['session']}/end", json=_end_of(episode, key=key))
            except httpx.HTTPError:  # the run has not started yet, or starts its endpoint again
                time.sleep(RETRY_S)


def _end_of(episode: dict[str, Any], *, key: str) -> dict[str, Any]:
    try:
        return {"reward": solve(episode, key=key)}
    except Exception as error:  # of the agent: the run counts it, and offers the row again
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the endpoint, such as http://127.0.0.1:8000")
    parser.add_argument("--threads", type=int, default=16, help="episodes at the same time (default: 16)")
    args = parser.parse_args()
    key, starter = os.environ.get("HYBRIDRL_API_KEY", "none"), os.getppid()
    for _ in range(args.threads):
        threading.Thread(target=play, args=(args.url,), kwargs={"key": key}, daemon=True).start()
    while os.getppid() == starter:
        time.sleep(RETRY_S)


if __name__ == "__main__":
    main()
