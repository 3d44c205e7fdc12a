"""A run whose episodes are played by a program outside, which knows an HTTP client and OpenAI's client only."""

import subprocess
import sys
import threading

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from tests.support.end_to_end.ports import free_port
from tests.support.end_to_end.runs import metrics, settings

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
httpx = pytest.importorskip("httpx", reason="httpx is not installed; the openai client brings it")
pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import sys, time
import httpx, openai

SERVER, NUM_ABANDONED = sys.argv[1], int(sys.argv[2])


def claim(client):
    while True:  # the server is there when the run has begun, and is gone after it
        try:
            answer = client.post(f"{SERVER}/v1/episodes", json={"wait_s": 5}, timeout=30)
        except httpx.TransportError:
            if claim.has_begun:
                return None
            time.sleep(0.1)
            continue
        claim.has_begun = True
        if answer.status_code == 200:
            return answer.json()


def play(episode):
    policy = openai.OpenAI(base_url=episode["base_url"], api_key="none", timeout=60)
    messages = [dict(message) for message in episode["row"]["raw_prompt"]]
    for _ in range(2):
        answer = policy.chat.completions.create(model=episode["model"], messages=messages, max_tokens=5)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]


claim.has_begun, num = False, 0
with httpx.Client() as client:
    while (episode := claim(client)) is not None:
        num += 1
        if num <= NUM_ABANDONED:
            continue
        play(episode)
        index = episode["row"]["extra_info"]["index"]
        said = {"reward": index % 2} if index < 5 else {}
        client.post(f"{SERVER}/v1/episodes/{episode['session']}/end", json=said)
print(num)
"""


def run(tmp_path, model, port: int, **changes: object) -> list:
    """Train two steps, and return the scored batches."""
    batches = []

    class Watching(RayPPOTrainer):
        def reward(self, ctx):
            super().reward(ctx)
            batches.append(ctx.batch)

    changes = {"actor_rollout_ref__rollout__agent__timeout_s": 100} | changes
    arguments = settings(
        tmp_path,
        model,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__endpoint_port=port,
        actor_rollout_ref__rollout__agent__default_agent_loop="outside_agent",
        actor_rollout_ref__rollout__n=2,
        data__max_prompt_length=96,
        data__max_response_length=40,
        trainer__val_before_train="false",
        trainer__test_freq=-1,
        trainer__save_freq=-1,
        **changes,
    )
    assert main_ppo.main(arguments, trainer_cls=Watching) == 0
    return batches


def play_in_thread(monkeypatch, port: int, *, abandoned: int) -> threading.Thread:
    monkeypatch.setattr(sys, "argv", ["program", f"http://127.0.0.1:{port}", str(abandoned)])
    thread = threading.Thread(target=exec, args=(PROGRAM, {}), daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_program_outside_plays_the_episodes_of_a_run(tmp_path, tiny_qwen2, monkeypatch):
    port = free_port()
    thread = play_in_thread(monkeypatch, port, abandoned=0)
    batches = run(tmp_path, tiny_qwen2, port)
    thread.join(60)
    assert not thread.is_alive() and [len(batch) for batch in batches] == [8, 8]
    for version, batch in enumerate(batches):
        assert batch.batch["weights_version"].tolist() == [version] * 8
        assert batch.batch["num_turns"].tolist() == [4] * 8
        indices = [info["index"] for info in batch.non_tensor_batch["extra_info"]]
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        own = [(index, score) for index, score in zip(indices, scores, strict=True) if index < 5]
        assert own and all(score == index % 2 for index, score in own)
        assert batch.batch["reward_valid"].all()  # the reward function has scored the others
    rows = metrics(tmp_path / "run")
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows)  # what was trained is what was sampled
    assert not any(name.startswith("rollout/agent/failures") for row in rows for name in row)


@pytest.mark.slow
def test_an_episode_that_a_program_abandons_is_offered_again(tmp_path, tiny_qwen2):
    port = free_port()
    command = [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        run(tmp_path, tiny_qwen2, port, actor_rollout_ref__rollout__agent__timeout_s=30)
        output, _ = program.communicate(timeout=60)
    [first, second] = metrics(tmp_path / "run")
    assert first["rollout/agent/failures/timeout"] == 2 and int(output) == 18
    assert "rollout/agent/samples_left_out" not in first and "rollout/agent/failures/timeout" not in second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent.timeout_s": "null"}, "set actor_rollout_ref.rollout.agent.timeout_s, seconds from its beginning"),
        ({"endpoint_port": 0}, "agents need the endpoint; set actor_rollout_ref.rollout.endpoint_port"),
    ],
)
def test_settings_with_which_no_program_could_end_an_episode_are_refused(
    tmp_path, tiny_qwen2, capsys, changes, message
):
    given = {"mode": "async", "endpoint_port": 8000, "agent.default_agent_loop": "outside_agent"}
    given |= {"agent.timeout_s": 10} | changes
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in given.items()]
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *words]) == 2
    assert message in capsys.readouterr().err
