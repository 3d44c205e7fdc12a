"""Every block of code of DLRover's two guides, as written there, with these corrections and no others.

Guide of the first generation ("Reinforcement Learning Integration Guide"):

| block | correction | why |
|---|---|---|
| step 1, step 2 | `dlrover.python.rl.trainer.*` -> `hybridrl.sdk` | our name of the module |
| step 2 | `xxx` is defined by the test | the page leaves it open |
| BaseWorkload, BaseTrainer (a path) | `dlrover...::X` -> `hybridrl.sdk` and X | our name of the module |
| pre_func | a full-width comma -> `, ` | Python has no such comma |
| `RG_ACTOR.update`, `RG_ROLLOUT.generate` | none | the test defines `self` and the parameters |

Guide of the unified style ("Multi-Role Training (OpenRLHF)"):

| block | correction | why |
|---|---|---|
| main.py | `"{P}.ppo_re..."` -> `f"{P}.ppo_re..."` | the page forgets the f; such an entry is refused |
| remote_call.py (definitions) | none | |
| experience_maker.py | `from .. import` -> `import` | a relative import needs the example's folders |
| ppo_rollout.py | `...` -> one output per prompt, to be called | the page leaves it open |
| remote_call.py (orchestration) | none; the test defines `vllm_sleep` | the page leaves it out |
"""

import sys
import textwrap
import types
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch

from hybridrl import sdk
from hybridrl.sdk.first_generation.workload_handles import RoleGroupProxy
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.invocation import endpoints_of
from tests.support.sdk import first_generation
from tests.support.sdk.thread_group import ThreadWorkerGroup

STEP_1 = """
import ray
from dlrover.python.rl.trainer.workload import BaseWorkload


@ray.remote
class UserActorModel(BaseWorkload):
    
    def __init__(self, master_handle, config):
        super().__init__(master_handle, config)
        
        # define your actor property
        ...
    
    def init_model(self):
        # preparation before training
        ...
    
    def update_actor(self):
        # policy updating
        ...
    
     # other implement
    ...
"""
STEP_2 = """
from dlrover.python.rl.trainer.trainer import BaseTrainer


class UserTrainer(BaseTrainer):

    def __init__(self, actor_handles, actor_classes, config):
        super().__init__(actor_handles, actor_classes, config)
        
        # define your trainer property
        self.field0 = xxx
        self.field1 = xxx
        ...  
    
    def init(self):
        # define process logic for training preparation, 
        # such as: tokenizer, dataloader
        ...
    
    def fit(self):
        # define the main process logic for training
        # operate the multi workloads of different roles defined above
        ...
    
    # other implement
    ...
"""
WITHOUT_WAITING = """
@trainer_invocation(blocking=False)
def a(xxx):
      xxx
"""
WITH_TIMEOUT = """
@trainer_invocation(is_async=True,timeout=30)
def a(xxx):
      xxx
"""
WITH_FILTER = """
def filter_func(input: int):
      if input < -1:
              return 0
      return input

@trainer_invocation(is_async=True,timeout=30\uff0cpre_function=filter_func)
def a(input: int):
      return input + 1
"""
MAIN = """
# examples/unified/rl/openrlhf/ppo/main.py
# Inside submit()

# 1. Create a job builder
builder = RLJobBuilder().config(args_2_omega_conf(args))

# 2. Define workloads / roles
builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=4)
(
    builder.actor(f"{P}.ppo_actor.PolicyModelActor")
    .resource(accelerator=1)
    .nnodes(args.actor_num_nodes)
    .nproc_per_node(args.actor_num_gpus_per_node)
)
(
    builder.critic(f"{P}.ppo_critic.CriticModelRayActor")
    .resource(accelerator=0.4)
    .nnodes(args.critic_num_nodes)
    .nproc_per_node(args.critic_num_gpus_per_node)
)
(
    builder.rollout(f"{P}.ppo_rollout.VLLMActor")
    .resource(accelerator=1)
    .total(args.vllm_num_engines)
)
# optional reference role
if args.init_kl_coef != 0:
    (
        builder.role(RLRoleType.REFERENCE.name)
        .train("{P}.ppo_reference.PPOReferenceActor")
        .resource(accelerator=0.4)
        .nnodes(args.ref_num_nodes)
        .nproc_per_node(args.ref_num_gpus_per_node)
    )
(
    builder.role(RLRoleType.REWARD.name)
    .train("{P}.ppo_reward.RewardModelRayActor")
    .resource(accelerator=0.4)
    .nnodes(args.reward_num_nodes)
    .nproc_per_node(args.reward_num_gpus_per_node)
)

# 3. Build and submit
job = builder.build()
# optional modifications before submission
if args.skip_node_check:
    for workload in job.workloads.values():
        if workload.backend == "elastic":
            workload.comm_pre_check = False
print(job.model_dump_json(indent=2))
if not args.dry_run:
  job.submit(args.job_name)
"""
DEFINITIONS = """
# remote_call.py
def vllm_wakeup() -> None:...

def vllm_generate(
    prompt_token_ids: Sequence[List[int]], params: "SamplingParams"
) -> FutureSequence["RequestOutput"]: ...

def actor_forward(
    sequences: Sequence[torch.Tensor],
    action_mask: Sequence[torch.BoolTensor],
    attention_mask: Sequence[torch.LongTensor],
) -> Sequence[torch.Tensor]:...
"""
USE = """
# utils/experience_maker.py
from .. import remote_call
class SamplesGenerator:
  def __generate_vllm(self, *args, **kwargs):
    #...
    all_outputs = remote_call.vllm_generate(
      all_prompt_token_ids, sampling_params
    )
    #...
"""
ROLLOUT = """
# ppo_rollout.py
class VLLMActor:
  @rpc(remote_call.vllm_wakeup)
  def wake_up(self):
      self.llm.wake_up()

  @rpc(remote_call.vllm_generate)
  def generate(self, prompt_token_ids, params):
      ...
"""
ORCHESTRATION = '''
# remote_call.py
# 1. Simple and Blocking call
def vllm_wakeup() -> None:
    group(RLRoleType.ROLLOUT).call(vllm_wakeup).result()

# 2. Async broadcast call, return Future
def reference_init(strategy, model_path: str) -> Future:
  return group(RLRoleType.REFERENCE).call(
      reference_init, strategy, model_path
  )

# 3. Batch call, return FutureSequence(subclass of Sequence)
def vllm_generate(
    prompt_token_ids: Sequence[List[int]], params: "SamplingParams"
) -> Sequence["RequestOutput"]: 
    return group(RLRoleType.ROLLOUT).call_batch(
        vllm_generate,
        len(prompt_token_ids),
        prompt_token_ids,
        params,
    )

# 4. Call multiple roles in parallel, and wait
def end_job() -> None:
  """End the job by calling the end_job method on the group."""
  futures = [
      group(role).call(end_job)
      for role in [
          RLRoleType.ROLLOUT,
          RLRoleType.REFERENCE,
          RLRoleType.REWARD,
          RLRoleType.ACTOR,
          RLRoleType.CRITIC,
      ]
  ]
  for future in futures:
      future.result()

# 4. Utility to cache RoleGroup
@lru_cache(maxsize=None)
def group(role: RLRoleType) -> RoleGroup:
    """Get the role group for the given role."""
    return RoleGroup(role.name)

# 5. Also, you could add any custom remote_call utilities here
@contextmanager
def vllm_running(enable_sleep: bool):
    """Context manager to handle vLLM sleep and wakeup."""
    if enable_sleep:
        vllm_wakeup()
    try:
        yield
    finally:
        if enable_sleep:
            vllm_sleep()
'''
NAMES = {name: getattr(sdk, name) for name in sdk.__all__}
LIBRARIES = {"Sequence": Sequence, "List": list, "torch": torch, "Future": Future}
LIBRARIES |= {"lru_cache": lru_cache, "contextmanager": contextmanager}


def run(block, *corrections, **names):
    """Execute a block with its corrections; return its namespace."""
    for page, ours in corrections:
        assert page in block, f"the page has no {page!r}"
        block = block.replace(page, ours)
    namespace = {"__name__": "guide", **NAMES, **LIBRARIES, **names}
    exec(compile(textwrap.dedent(block), "guide", "exec"), namespace)
    return namespace


# -- first generation


def test_step_1_a_workload_is_constructed_as_the_job_does_it(monkeypatch):
    monkeypatch.setenv("ROLE", "ACTOR")
    made = run(STEP_1, ("dlrover.python.rl.trainer.workload", "hybridrl.sdk"))["UserActorModel"]
    workload = made.__ray_metadata__.modified_class("the master's handle", {"optim": {"lr": 0.5}})
    assert workload.master_handle == "the master's handle" and workload.config.optim.lr == 0.5
    assert workload.is_actor_role() and workload.role is sdk.RLRoleType.ACTOR and workload.init_model() is None


def test_a_class_that_ray_decorated_is_an_entry_under_its_own_name():
    job = sdk.RLJobBuilder().trainer("m:T").actor(first_generation.UserActor).resource(cpu=1).build()
    assert job.spec.role("actor").entry == "tests.support.sdk.first_generation:UserActor"


def test_step_2_a_trainer_is_constructed_with_three_arguments():
    made = run(STEP_2, ("dlrover.python.rl.trainer.trainer", "hybridrl.sdk"), xxx=5)["UserTrainer"]
    trainer = made({}, {}, {"steps": 2})
    assert trainer.field1 == 5 and trainer.config.steps == 2 and trainer.init() is trainer.fit() is None


@pytest.mark.parametrize(
    "path", ["dlrover.python.rl.trainer.trainer::BaseWorkload", "dlrover.python.rl.trainer.trainer::BaseTrainer"]
)
def test_the_abstract_classes_have_one_module(path):
    module, _, name = path.replace("dlrover.python.rl.trainer.trainer", "hybridrl.sdk").partition("::")
    assert isinstance(getattr(sys.modules[module], name), type)


@pytest.mark.parametrize(("block", "blocking", "timeout_s"), [(WITHOUT_WAITING, False, 3600), (WITH_TIMEOUT, True, 30)])
def test_the_decorators_examples_set_what_they_say(block, blocking, timeout_s):
    record = run(block)["a"].__hybridrl_invocation__
    assert (record.blocking, record.timeout_s, record.dispatch) == (blocking, timeout_s, "AUTO_SHARD")


def test_the_filter_of_the_guide_runs_before_the_method():
    function = run(WITH_FILTER, ("\uff0c", ", "))["a"]
    methods = {"a": lambda self, input: function(input)}
    methods["a"].__hybridrl_invocation__ = function.__hybridrl_invocation__
    group = ThreadWorkerGroup(type("B", (), methods), role="actor", world_size=2)
    assert RoleGroupProxy(group).a(-5) == [1, 1] and RoleGroupProxy(group).a(5) == [6, 6]
    group.shutdown()


class Counts:
    """Four actors, two rollouts."""

    def __init__(self):
        self.updates = []

    def update(self, parameter):
        self.updates.append(parameter)
        return self.number

    def generate(self, *parameters):
        return self.number, parameters


def test_a_role_group_calls_all_processes_of_its_role():
    actors, rollouts = (
        ThreadWorkerGroup(Counts, role=role, world_size=size) for role, size in (("actor", 4), ("rollout", 2))
    )
    trainer = Namespace(RG_ACTOR=RoleGroupProxy(actors), RG_ROLLOUT=RoleGroupProxy(rollouts))
    run("self.RG_ACTOR.update(parameter_x)", self=trainer, parameter_x="x")
    assert [worker.updates for worker in actors.workers] == [["x"]] * 4
    call = "answer = self.RG_ROLLOUT.generate(parameter_0, parameter_1)"
    assert run(call, self=trainer, parameter_0=0, parameter_1=1)["answer"] == [(0, (0, 1)), (1, (0, 1))]
    for group in (actors, rollouts):
        group.shutdown()


# -- unified style


def arguments(**changes):
    counts = ("actor_num_nodes", "critic_num_nodes", "ref_num_nodes", "reward_num_nodes", "vllm_num_engines")
    per_node = (
        "actor_num_gpus_per_node",
        "critic_num_gpus_per_node",
        "ref_num_gpus_per_node",
        "reward_num_gpus_per_node",
    )
    given = dict.fromkeys((*counts, *per_node), 1) | {"init_kl_coef": 0.1, "skip_node_check": False, "dry_run": True}
    return Namespace(**{**given, "job_name": "openrlhf", **changes})


def test_main_describes_the_six_roles(capsys):
    corrected = ('"{P}.ppo_re', 'f"{P}.ppo_re')
    for kl, roles in ((0.1, {"actor", "critic", "rollout", "reference", "reward"}), (0, None)):
        args = arguments(init_kl_coef=kl, skip_node_check=True)
        names = {"P": "examples.ppo", "args_2_omega_conf": vars, "args": args}
        job = run(MAIN, corrected, **names)["job"]
        assert {role.name for role in job.spec.roles} == (roles or {"actor", "critic", "rollout", "reward"})
        assert '"init_kl_coef"' in capsys.readouterr().out and job.spec.trainer.resource.cpu == 4


@pytest.fixture
def remote_call():
    """The module remote_call.py of the guide, with its definitions or its orchestration."""
    module = types.ModuleType("remote_call")
    sys.modules["remote_call"] = module
    yield module
    del sys.modules["remote_call"]
    endpoints.clear()


def test_definitions_name_the_endpoints_of_the_rollout(remote_call):
    vars(remote_call).update(run(DEFINITIONS))
    found = endpoints_of(run(ROLLOUT, remote_call=remote_call)["VLLMActor"])
    assert {name: attribute for name, (attribute, _) in found.items()} == {
        "vllm_wakeup": "wake_up",
        "vllm_generate": "generate",
    }


class Other:
    """The roles beside the rollout."""

    def __init__(self):
        self.ended = 0

    @sdk.rpc()
    def reference_init(self, strategy, model_path):
        return f"{strategy} {model_path} on {self.number}"

    @sdk.rpc()
    def end_job(self):
        self.ended += 1


class Engine:
    awake = 0

    def wake_up(self):
        self.awake += 1


def test_orchestration_calls_the_roles_through_plain_functions(make_job, remote_call):
    slept = []
    vars(remote_call).update(run(ORCHESTRATION, vllm_sleep=lambda: slept.append(True)))
    answers = ("      ...\n", "      return [(ids, params) for ids in prompt_token_ids]\n")
    page = run(ROLLOUT, answers, remote_call=remote_call)["VLLMActor"]

    class VLLMActor(page):
        def __init__(self):
            self.llm, self.ended = Engine(), 0

        @sdk.rpc()
        def end_job(self):
            self.ended += 1

    others = {role: (Other, 2) for role in ("reference", "reward", "actor", "critic")}
    job = make_job(rollout=(VLLMActor, 2), **others)

    remote_call.vllm_wakeup()
    with remote_call.vllm_running(enable_sleep=True):
        assert not slept
    assert slept and [worker.llm.awake for worker in job.group("rollout").workers] == [2, 2]
    future = remote_call.reference_init("zero", "/model")
    assert isinstance(future, Future) and future.result() == ["zero /model on 0", "zero /model on 1"]

    outputs = remote_call.vllm_generate([[1], [2], [3]], "params")
    assert isinstance(outputs, sdk.FutureSequence) and len(outputs) == 3
    assert [outputs[i] for i in range(len(outputs))] == [([1], "params"), ([2], "params"), ([3], "params")]

    use = run(USE, ("from .. import", "import"), all_prompt_token_ids=[[1]], sampling_params=None)
    use["SamplesGenerator"]()._SamplesGenerator__generate_vllm()

    remote_call.end_job()
    ended = [worker.ended for role in (*others, "rollout") for worker in job.group(role).workers]
    assert ended == [1] * 10
