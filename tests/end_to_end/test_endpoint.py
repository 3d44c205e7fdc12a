"""The endpoint of a policy in training, and external agents whose responses are trained on."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl import cli, main_ppo
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from tests.support.end_to_end.ports import free_port
from tests.support.end_to_end.runs import assert_none_is_left, metrics, processes_with, settings, train

openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
pytestmark = pytest.mark.timeout(300)

TOY_ROLLOUT = f"{Path(__file__).parents[1] / 'support' / 'third_party' / 'toy_rollout.py'}:ToyRollout"

AGENTS = '''
import openai

from hybridrl.serving.agent_loop import AgentLoop, AgentLoopOutput, register_agent_loop

client = openai.AsyncOpenAI(base_url="http://127.0.0.1:{port}/v1", api_key="none")


@register_agent_loop("outside")
class Outside(AgentLoop):
    """An agent that generates through the endpoint only, like an external program."""

    async def run(self, sampling_params, **row):
        request = row["request"]
        answer = await client.completions.create(
            model="{model}",
            prompt=list(request.prompt_ids),
            max_tokens=sampling_params.max_new_tokens,
            seed=request.seed + request.sample,
            logprobs=0,
            extra_body={{"return_token_ids": True}},
        )
        [choice] = answer.choices
        return AgentLoopOutput(
            list(request.prompt_ids),
            choice.token_ids,
            [1] * len(choice.token_ids),
            choice.logprobs.token_logprobs,
            version=answer.weights_version,
            token_versions=choice.token_versions,
        )
'''


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("local", "hf"),
        pytest.param("ray", "hf", marks=pytest.mark.slow),
        pytest.param("ray", "vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
    ],
)
def test_a_policy_in_training_serves_requests_and_trains_on_an_external_agents_responses(
    tmp_path, tiny_qwen2, ray_cluster, backend, engine
):
    port = free_port()
    (tmp_path / "agents.py").write_text(AGENTS.format(port=port, model=tiny_qwen2.name))
    seen: dict[int, list[int]] = {}
    asked: dict[int, float] = {}  # version -> log-prob of the likeliest first token

    class AskingTrainer(RayPPOTrainer):
        def generate(self, ctx):
            super().generate(ctx)
            seen[self.global_steps] = ctx.batch.batch["weights_version"].tolist()

        def ask(self) -> None:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            question = [{"role": "user", "content": "How many?"}]
            answer = client.chat.completions.create(
                model=tiny_qwen2.name, messages=question, max_tokens=4, logprobs=True, extra_body={"top_k": 1}
            )
            asked[answer.weights_version] = answer.choices[0].logprobs.content[0].logprob

        def update_actor(self, ctx):
            if backend == "ray":  # the rollout has separate processes, which can serve while the actor trains
                self.ask()
            super().update_actor(ctx)

    pool = {"actor_rollout_ref__rollout__n_gpus_per_node": 1} if backend == "ray" else {}
    arguments = settings(
        tmp_path,
        tiny_qwen2,
        actor_rollout_ref__rollout__mode="async",
        actor_rollout_ref__rollout__endpoint_port=port,
        actor_rollout_ref__rollout__agent__path=tmp_path / "agents.py",
        actor_rollout_ref__rollout__agent__default_agent_loop="outside",
        actor_rollout_ref__rollout__name=engine,
        actor_rollout_ref__rollout__kv_cache_memory_mb=8,
        trainer__backend=backend,
        trainer__val_before_train="false",
        trainer__test_freq=-1,
        trainer__save_freq=-1,
        **pool,
    )
    assert main_ppo.main(arguments, trainer_cls=AskingTrainer) == 0
    assert seen == {1: [0] * 12, 2: [1] * 12}
    assert list(asked) == ([0, 1] if backend == "ray" else [])
    assert len(set(asked.values())) == len(asked)
    last = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row][-1]
    assert last["training/rollout_probs_diff_max"] < 1e-4
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0).models.list()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"endpoint_port": 8000},
            "rollout.endpoint_port=8000: has no effect without actor_rollout_ref.rollout.mode=async",
        ),
        (
            {"mode": "async", "endpoint_host": "0.0.0.0"},
            "has no effect without actor_rollout_ref.rollout.endpoint_port",
        ),
    ],
)
def test_invalid_endpoint_settings_are_refused(tmp_path, tiny_qwen2, capsys, changes, message):
    changed = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in changes.items()]
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *changed]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_stops_the_start_with_one_line(tmp_path, tiny_qwen2, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        changes = {"actor_rollout_ref.rollout.mode": "async", "actor_rollout_ref.rollout.endpoint_port": port}
        assert (
            main_ppo.main([*settings(tmp_path, tiny_qwen2), *(f"{key}={value}" for key, value in changes.items())]) == 2
        )
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.slow
def test_serve_answers_with_a_models_directory_until_ctrl_c(tiny_qwen2):
    command = [sys.executable, "-m", "hybridrl.cli", "serve", str(tiny_qwen2), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            [url] = re.findall(r"serving tiny_qwen2\d* at (http://127.0.0.1:\d+/v1)", process.stdout.readline())
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
            [model] = client.models.list().data
            asked = {
                "model": model.id,
                "prompt": "Tom buys",
                "max_tokens": 5,
                "seed": 2,
                "extra_body": {"ignore_eos": True},
            }
            first, second = client.completions.create(**asked), client.completions.create(**asked)
            assert first.choices == second.choices and first.usage.completion_tokens == 5
            assert model.max_model_len == 512  # the positions that the model has
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--port", "99999"], "--port=99999: must be from 0 (any free port) to 65535"),
        (["--replicas", "0"], "--replicas=0: must be 1 or more"),
        (["--max-length", "100000"], "--max-length=100000: must be from 2 to the 512 positions that the model has"),
    ],
)
def test_invalid_serve_arguments_are_refused_in_one_line(tiny_qwen2, capsys, words, message):
    assert cli.main(["serve", str(tiny_qwen2), "--device", "cpu", *words]) == 2
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vlm", "--engine='vlm' is not a known rollout; did you mean 'vllm'? Known: hf, vllm"),
        (TOY_ROLLOUT, f"--engine={TOY_ROLLOUT}: needs the capability requests, which it does not declare; use hf"),
    ],
)
def test_an_engine_that_serves_no_requests_is_refused(tiny_qwen2, capsys, engine, message):
    assert cli.main(["serve", str(tiny_qwen2), "--device", "cpu", "--engine", engine]) == 2
    assert capsys.readouterr().err.startswith(message)


def serving(model: Path, folder: Path, *words: str) -> subprocess.Popen:
    """Start `hybridrl serve` in a separate process group, with its files in `folder`."""
    folder.mkdir()
    command = [sys.executable, "-m", "hybridrl.cli", "serve", str(model), "--port", "0", "--device", "cpu", *words]
    environment = os.environ | {"TMPDIR": str(folder), "RAY_TMPDIR": "/tmp", "SERVED_FOR": str(folder)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def address_of(process: subprocess.Popen) -> str:
    for line in process.stdout:
        if found := re.search(r"serving \S+ at (http://127.0.0.1:\d+/v1)", line):
            return found[1]
    raise AssertionError(f"it ended with {process.wait()} before it answered")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_serve_by_two_vllm_processes_of_a_checkpoint_survives_the_loss_of_one_and_leaves_nothing(tmp_path, tiny_qwen2):
    train(
        tmp_path / "run",
        tiny_qwen2,
        trainer__total_training_steps=1,
        trainer__test_freq=-1,
        trainer__val_before_train="false",
    )
    checkpoint, folder = tmp_path / "run/run/global_step_1", tmp_path / "s"
    with serving(checkpoint, folder, "--engine", "vllm", "--replicas", "2", "--max-length", "64") as process:
        try:
            client = openai.OpenAI(base_url=address_of(process), api_key="none", max_retries=0, timeout=200)
            asked = {
                "model": "global_step_1",
                "prompt": "Tom buys",
                "max_tokens": 20,
                "seed": 2,
                "extra_body": {"ignore_eos": True},
            }
            whole = [client.completions.create(**asked, n=8).choices for _ in range(2)]
            assert [choice.text for choice in whole[0]] == [choice.text for choice in whole[1]]
            streamed = "".join(event.choices[0].text for event in client.completions.create(**asked, stream=True))
            assert streamed == whole[0][0].text
            [victim, _] = sorted(pid for pid in processes_with(f"SERVED_FOR={folder}") if is_replica(pid))
            os.kill(victim, signal.SIGKILL)
            after = client.completions.create(**asked, n=8).choices
            assert [choice.text for choice in after] == [choice.text for choice in whole[0]]
        finally:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 0
    assert_none_is_left(f"SERVED_FOR={folder}")
    assert list(folder.iterdir()) == []


def is_replica(process_id: int) -> bool:
    return "WorkerHost" in Path(f"/proc/{process_id}/cmdline").read_text()
