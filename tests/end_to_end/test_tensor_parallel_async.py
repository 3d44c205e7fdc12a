"""`rollout.mode=async` with tensor-parallel vLLM: one replica in two processes.

The first test is a training run with actor and rollout in the same processes. After it the processes are shared: an
actor of one process, and an engine of two.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import PPOConfig, load_config
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.manager import AgentLoopManager
from hybridrl.serving.continuation import generate_in_chunks, join_chunks
from hybridrl.serving.router import ReplicaRouter
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.local_worker_group import launch_locally
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import BatchedGenerator, RolloutPipeline
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import sampling_params
from tests.support.end_to_end.ports import free_port
from tests.support.end_to_end.runs import settings, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]
openai = pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")

PROMPT, RESPONSE, NUM_PROMPTS = 16, 200, 5
ROLLOUT = "actor_rollout_ref__rollout__"
TWO_RANKS = {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}tensor_model_parallel_size": 2, f"{ROLLOUT}mode": "async"}
SMALL_CACHE = {f"{ROLLOUT}kv_cache_memory_mb": 8, f"{ROLLOUT}max_num_seqs": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_qwen2, tiny_tokenizer):
    """The tiny model with larger weights, so that the likeliest token is clear of the second."""
    path = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.from_pretrained(tiny_qwen2, initializer_range=0.2)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def config_for(folder, model, **changes: object) -> PPOConfig:
    values = {
        "data__max_prompt_length": PROMPT,
        "data__max_response_length": RESPONSE,
        f"{ROLLOUT}n": 2,
        f"{ROLLOUT}ignore_eos": True,
        f"{ROLLOUT}dtype": "float32",
        **changes,
    }
    return load_config(PPOConfig, settings(folder, model, **values), program="main_ppo", config_name="ppo_trainer")


def prompts_of(*, greedy: bool) -> DataProto:
    ids = torch.randint(3, 300, (NUM_PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(PROMPT) >= torch.arange(NUM_PROMPTS)[:, None]).long()
    columns = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(NUM_PROMPTS) + 7,
    }
    return DataProto.from_dict(tensors=columns, meta_info={"greedy": greedy})


AGENT = """
from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop


@register_agent_loop("second_thought")
class SecondThought(AgentLoop):
    async def run(self, sampling_params, **row):
        response = self.respond(row)
        await response.sample(replace(sampling_params, max_new_tokens=7))
        if response.observe(self.tokenizer.encode(" Are you sure?")):
            await response.sample(sampling_params)
        return response.output()
"""


def test_two_steps_of_actor_and_rollout_in_the_same_two_processes_are_those_of_one_process(
    tmp_path, model, ray_cluster
):
    (tmp_path / "agents.py").write_text(f"from dataclasses import replace\n{AGENT}")
    agent = {
        f"{ROLLOUT}mode": "async",
        f"{ROLLOUT}agent__path": tmp_path / "agents.py",
        f"{ROLLOUT}agent__default_agent_loop": "second_thought",
        f"{ROLLOUT}ignore_eos": True,
        f"{ROLLOUT}dtype": "float32",
        "trainer__test_freq": -1,
        "data__max_response_length": 40,
    }
    both = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    found = train(tmp_path / "two", model, **agent | TWO_RANKS | SMALL_CACHE | both)
    expected = train(tmp_path / "one", model, **agent)
    for row, other in zip(found, expected, strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "rollout/num_turns/mean"):
            assert (name in row) == (name in other)
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), abs=1e-4, rel=1e-3), name
    assert found[-1]["rollout/num_turns/mean"] == 4.0  # user, policy, user, policy


@dataclass
class Started:
    """A policy with a rollout of one replica, and the port of its endpoint."""

    pipeline: RolloutPipeline
    manager: AgentLoopManager
    config: PPOConfig
    port: int

    @property
    def rollout(self) -> Any:
        return self.pipeline.workers.rollout

    @property
    def router(self) -> ReplicaRouter:
        return self.manager._service.router

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the processes answer batched calls in the block."""
        self.manager._service.call(self.router.pause())
        try:
            yield
        finally:
            self.manager._service.call(self.manager._service.resume(self.pipeline.version))

    def request(self, number: int) -> Request:
        sampling = replace(sampling_params(self.config, validate=False, seed=0), n=1)
        return Request(f"own{number}", tuple(range(40 + number, 52 + number)), sampling, seed=number)


@pytest.fixture(scope="module")
def started(model, tmp_path_factory, tiny_tokenizer, ray_cluster) -> Iterator[Started]:
    folder, port = tmp_path_factory.mktemp("started"), free_port()
    more = {"trainer__backend": "ray", f"{ROLLOUT}n_gpus_per_node": 2, f"{ROLLOUT}endpoint_port": port}
    config = config_for(folder, model, **TWO_RANKS, **SMALL_CACHE, **more)
    mapping = {Role.Actor: "train_pool", Role.Rollout: "rollout_pool"}
    manager = ResourcePoolManager({"train_pool": [1], "rollout_pool": [2]}, mapping, use_gpu=False)
    manager.create_resource_pool(job=folder.name)
    classes = {str(role): RayClassWithInitArgs(ActorRolloutRefWorker, config, str(role)) for role in mapping}
    groups = {}
    loops = AgentLoopManager(config, tiny_tokenizer)
    try:
        plan = manager.plan(folder.name, {str(role): pool for role, pool in mapping.items()}, colocate="process")
        groups = launch(plan, classes, manager.resource_pool_dict)
        for group in groups.values():
            group.init_model()
        pipeline = RolloutPipeline(PolicyWorkers(groups), config, loops)
        pipeline.push_weights(1)
        yield Started(pipeline, loops, config, port)
    finally:
        loops.close()
        for group in groups.values():
            group.shutdown()
        manager.release()


@pytest.fixture(scope="module")
def of_one_process(model, tmp_path_factory) -> dict[bool, DataProto]:
    """The responses of an engine in one process, greedy or not."""
    folder = tmp_path_factory.mktemp("one")
    config = config_for(folder, model)
    groups = launch_locally(
        {"actor_rollout": RayClassWithInitArgs(ActorRolloutRefWorker, config, "actor_rollout")}, {"actor_rollout": None}
    )
    groups["actor_rollout"].init_model()
    pipeline = RolloutPipeline(PolicyWorkers(groups), config)
    pipeline.push_weights(1)
    return {greedy: pipeline.generate(prompts_of(greedy=greedy)) for greedy in (True, False)}


def assert_same(found: DataProto, expected: DataProto, *, log_probs_within: float) -> None:
    assert torch.equal(found.batch["responses"], expected.batch["responses"])
    assert torch.equal(found.batch["response_mask"], expected.batch["response_mask"])
    difference = found.batch["rollout_log_probs"] - expected.batch["rollout_log_probs"]
    assert difference.abs().max() <= log_probs_within


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_requests_get_the_tokens_of_a_batched_call_and_of_an_engine_in_one_process(started, of_one_process, greedy):
    prompts = prompts_of(greedy=greedy)
    served = started.pipeline.generate(prompts)
    assert started.router.table.load(0) == 0 and started.router.replicas.num_replicas == 1
    batched = BatchedGenerator()
    batched.open(started.rollout, resync=None, concurrent=False)
    with started.paused():
        assert_same(served, batched.submit(prompts, version=1).get(), log_probs_within=1e-5)
    assert_same(served, of_one_process[greedy], log_probs_within=1e-4)
    assert len(set(served.batch["responses"].flatten().tolist())) > 20


def test_a_response_goes_on_with_the_weights_of_a_push_in_its_middle(started):
    router, request = started.router, started.request(1)

    async def respond() -> list[TokenOutput]:
        return [chunk async for chunk in generate_in_chunks(router, request)]

    response = started.manager._service.submit(respond())
    until_some_are_open(router)
    started.pipeline.push_weights(2)  # pauses the router, and compares the fingerprints of both ranks
    whole = join_chunks(request.request_id, response.result(120))
    before = whole.token_versions.count(1)
    assert whole.token_versions == [1] * before + [2] * (RESPONSE - before) and 0 < before < RESPONSE
    healths = started.rollout.rollout_health()
    assert [health.version for health in healths] == [2, 2] and len({health.fingerprint for health in healths}) == 1


def test_an_openai_client_gets_the_policys_tokens_from_the_endpoint(started):
    request = started.request(2)
    expected = started.manager._service.call(started.router.generate(request))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{started.port}/v1", api_key="none", max_retries=0, timeout=120)
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=list(request.prompt_ids),
        max_tokens=RESPONSE,
        seed=request.seed,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert answer.choices[0].token_ids == expected.token_ids
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-5)


def test_a_killed_rank_is_a_lost_replica_which_is_restarted_whole_and_repeats_its_tokens(started):
    version = started.pipeline.version
    request, router = started.request(3), started.router
    expected = started.manager._service.call(router.generate(request))
    before, addresses = list(started.rollout.process_ids), address_of(started.rollout)

    async def again() -> TokenOutput:
        return await router.generate(replace(request, request_id="again"))

    answer = started.manager._service.submit(again())
    until_some_are_open(router)
    os.kill(before[1], signal.SIGKILL)
    assert answer.result(600).token_ids == expected.token_ids
    assert not shared_memory_of(started.rollout.process_ids)
    [outage] = router.outages
    assert "rollout-1" in outage.cause and outage.num_retried == 1 and outage.restored_at is not None
    assert not set(started.rollout.process_ids) & set(before)
    assert address_of(started.rollout) != addresses
    assert [health.version for health in started.rollout.rollout_health()] == [version, version]


def until_some_are_open(router: ReplicaRouter) -> None:
    """Wait until the replica has worked on a request for a moment."""
    until = time.monotonic() + 60
    while not router.table.load(0):
        assert time.monotonic() < until, "no request was opened"
        time.sleep(0.002)
    time.sleep(0.1)


def shared_memory_of(process_ids: list[int]) -> set[str]:
    """Return the shared memory of these processes that would stay if they were killed."""
    mapped = "".join(Path(f"/proc/{process_id}/maps").read_text() for process_id in process_ids)
    return {path.name for path in Path("/dev/shm").iterdir() if str(path) in mapped}


def address_of(group: Any) -> tuple[str, int]:
    return group.master_address, group.master_port
