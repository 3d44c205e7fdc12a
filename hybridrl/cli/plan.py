"""`hybridrl plan`: what a PPO job needs of its devices' memory, and settings that fit. Starts nothing."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

import hybridrl
from hybridrl import main_ppo
from hybridrl.cli.arguments import DEVICE_GIB
from hybridrl.config import PPOConfig, SFTConfig, load_config
from hybridrl.config.engines import engine_settings, supervised_engine_settings
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.planning.choices import ACTOR, SNAPSHOTS, Candidate, Devices, candidates
from hybridrl.planning.costs import DEVICES, Costs, Device, Model, stage_seconds, step_seconds
from hybridrl.planning.machine import copy_bandwidth, product_speed, this_machine
from hybridrl.planning.processes import Moment, PlannedProcess, snapshot_bytes
from hybridrl.trainer import ppo
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.ppo.step_settings import StepSettings, computes_old_log_probs
from hybridrl.workers.engine.hf_model import overridden_config, overrides_for, reads_images
from hybridrl.workers.engine.image_model import num_tower_params
from hybridrl.workers.engine.memory_plan import MemoryParts
from hybridrl.workers.engine.model_shape import ModelShape
from hybridrl.workers.images import load_processor

GIB = 2**30
USABLE = 0.92  # of a device; the rest is for its libraries, communication and fragments
MIN_SPEED_UP = 1.2  # of bfloat16, to be worth its rounding
BFLOAT16 = {f"{ACTOR}.fsdp_config.dtype": "bfloat16", "actor_rollout_ref.rollout.dtype": "bfloat16"}
CPU_EFFICIENCY = {"train_efficiency": 0.6, "decode_efficiency": 0.4}  # SmolLM2-135M: benchmarks/plan_against_run.py
CPU_PUSH = 0.6e9  # bytes per second: both ends hash the weights on one core
CLUSTER_OVERHEADS = ("update_overhead_s", "call_overhead_s", "push_overhead_s")  # of a job on several GPUs
IMAGE_SIDES = (224, 448, 896, 1792)  # pixels
PARTS = tuple(field.name for field in fields(MemoryParts))


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of the job that `arguments.settings` describe, and return 0 if it fits, else 1."""
    config = load_config(PPOConfig, arguments.settings, program="hybridrl plan", config_name="ppo_trainer")
    if config is None:  # --cfg job has shown the settings
        return 0
    main_ppo.validate_config(config, with_inputs=False)
    named = _device(config, arguments)
    device, memory = named.device, named.memory
    devices = Devices(read_shape=shape_reader(config), device=device, memory=memory, budget=USABLE * memory)
    processes = devices.plan(config)
    problem = devices.problem(config, processes)
    found = [*candidates(config, devices)]
    best = next((candidate for candidate in found if not candidate.problem), None)
    if arguments.apply:
        show(overrides(best) if best else f"nothing fits: {found[0].problem}\n")
        return 0 if best else 1
    shared = f", {devices.budget(config, processes) / GIB:.1f} GiB by each process" if device == "cpu" else ""
    note = f"of {memory / GIB:.0f} GiB {USABLE:.0%} may be used{shared}: {problem or 'the job fits as it is'}"
    lines = [named.text, "", *memory_table(processes), *snapshots_line(config, processes), "", note, ""]
    end = f"settings of the first that fits:\n{overrides(best)}" if best else "nothing fits; take more devices\n"
    show("\n".join([*lines, *layout_table(found), "", end]))
    show(tower_line(config))
    if not problem:
        show(expected_step(config, named))
    if named.device == "cpu" and named.is_here and (advice := faster_dtype(config, named.bfloat16)):
        show(advice)
    return 1 if problem else 0


def memory_table(processes: Iterable[PlannedProcess]) -> list[str]:
    """Return lines with the GiB of each moment of each process; parts that are always 0 have no column."""
    lines = []
    for process in processes:
        rows = {moment.name: _columns(moment) for moment in process.moments()}
        names = [name for name in next(iter(rows.values())) if any(row[name] for row in rows.values())]
        lines.append(f"{process.pool}: {process.count} processes, GiB of each")
        lines.append(f"  {'':24}" + "".join(f"{name:>12}" for name in names))
        lines += [f"  {name:24}" + "".join(f"{row[part] / GIB:12.2f}" for part in names) for name, row in rows.items()]
        if process.rollout is not None:
            lines.append(f"  keys and values of {process.rollout.cache_tokens:,.0f} tokens")
    return lines


def snapshots_line(config: PPOConfig, processes: Iterable[PlannedProcess]) -> Iterator[str]:
    """Yield a line with the GiB of a step's snapshots, if there are some."""
    if stored := snapshot_bytes(config, processes):
        most = f"{SNAPSHOTS * stored / GIB:.2f} GiB while the next one is stored"
        yield f"  a step's snapshot: {stored / GIB:.2f} GiB of each machine's memory, {most}"


def _columns(moment: Moment) -> dict[str, float]:
    parts = {name: getattr(moment.parts, name) for name in PARTS}
    return parts | {name: getattr(moment, name) for name in ("rollout", "buffers", "program", "total")}


def layout_table(found: Iterable[Candidate]) -> list[str]:
    """Return lines with what the same devices can hold in other layouts."""
    lines = [f"{'layout':34}{'GiB':>8}  {'micro-batch':>12}"]
    for candidate in found:
        fits = f"{candidate.tokens:>5} tokens" if not candidate.problem else f"does not fit: {candidate.problem}"
        lines.append(f"{candidate.layout:34}{candidate.peak.total / GIB:8.1f}  {fits}")
    return lines


def overrides(candidate: Candidate) -> str:
    """Return the changes of a layout as words of a command line."""
    return " \\\n".join(f"{name}={word(value)}" for name, value in candidate.changes.items()) + "\n"


@dataclass(frozen=True)
class PlannedDevice:
    """The device that a plan is for.

    Attributes:
        text: What it is, for people.
        device: "cuda" or "cpu".
        memory: Bytes of one device.
        known: Its speeds by the makers' data sheets; None: those of this machine, if it is this machine.
        is_here: Whether it is this machine.
        bfloat16: The CPU's instructions for products in bfloat16; "" without them.
    """

    text: str
    device: str
    memory: float
    known: Device | None = None
    is_here: bool = False
    bfloat16: str = ""

    def speeds(self, dtype: str) -> Device | None:
        """Return the device's speeds in this dtype; None if they are unknown."""
        if self.known is not None or not self.is_here:
            return self.known
        speed, bandwidth = product_speed(self.device, dtype), copy_bandwidth(self.device)
        return Device(speed, bandwidth, link=bandwidth if self.device == "cuda" else CPU_PUSH)


def training_dtype(config: PPOConfig, device: str) -> str:
    """Return the dtype in which the policy is trained."""
    return _dtype(engine_settings(config.actor_rollout_ref.actor).dtype, device)


def _dtype(chosen: str, device: str) -> str:
    return chosen if chosen != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]


def bfloat16_speed_up(speed: Callable[[str, str], float] = product_speed) -> float:
    """Return how much faster products are in bfloat16 than in float32 on this machine's CPU."""
    return speed("cpu", "bfloat16") / speed("cpu", "float32")


def faster_dtype(config: PPOConfig, instructions: str, *, speed: Callable[[str, str], float] = product_speed) -> str:
    """Return the settings of the dtype that is faster on this machine's CPU, with its measured speed-up.

    "" if the job has it or the gain is small.

    Args:
        config: The job.
        instructions: The CPU's instructions for products in bfloat16, "" without them.
        speed: Measures products.
    """
    dtype = training_dtype(config, "cpu")
    if dtype not in ("float32", "bfloat16") or (dtype == "float32" and not instructions):
        return ""
    speed_up = bfloat16_speed_up(speed)
    if dtype == "float32" and speed_up >= MIN_SPEED_UP:
        return f"\n{instructions}: products in bfloat16 are {speed_up:.1f} times as fast here: {_words(BFLOAT16)}\n"
    if dtype == "bfloat16" and speed_up <= 1 / MIN_SPEED_UP:
        slower = dict.fromkeys(BFLOAT16, "float32")
        return f"\nproducts in float32 are {1 / speed_up:.1f} times as fast as in bfloat16 here: {_words(slower)}\n"
    return ""


def _words(settings: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def expected_step(config: PPOConfig, device: PlannedDevice, *, prompt: int = 0, response: int = 0) -> str:
    """Return a line with the expected seconds of a step's stages; "" if the device's speeds are unknown.

    prompt, response: Mean tokens; 0: the longest prompts, and half of the longest response.
    """
    tokens = response or -(-config.data.max_response_length // 2)
    seconds = planned_seconds(config, device, tokens=tokens, prompt_tokens=prompt)
    if seconds is None:
        return ""
    stages = ", ".join(f"{name} {_rounded(taken)}" for name, taken in seconds.items())
    return (
        f"\nexpected step on {device.text.partition(', ')[0]}: {_rounded(step_seconds(config, seconds))} s ({stages}), "
        f"if responses have {tokens} tokens; docs/simulation.md says what this leaves out\n"
    )


def expected_sft_step(config: SFTConfig, device: PlannedDevice, *, tokens: int) -> str:
    """Return a line with the expected seconds of a step of fine-tuning, "" without speeds.

    tokens: Mean of a conversation.
    """
    dtype = _dtype(supervised_engine_settings(config).dtype, device.device)
    if (speeds := device.speeds(dtype)) is None:
        return ""
    own: dict[str, Any] = CPU_EFFICIENCY if device.device == "cpu" else {}
    model = config.model
    shape = read_shape(str(model.path), model.override_config, trust_remote_code=model.trust_remote_code)
    costs = Costs(speeds, _model(shape, dtype), prompt_tokens=0, **own)
    rows = -(-config.data.train_batch_size // (config.trainer.n_gpus_per_node * config.trainer.nnodes))
    seconds = _rounded(costs.update_s(np.full(rows, tokens)))
    return f"\nexpected step: {seconds} s, {config.data.train_batch_size} conversations of {tokens} tokens\n"


def _rounded(seconds: float) -> str:
    return f"{seconds:{'.1f' if seconds >= 1 else '.2g'}}"


def planned_seconds(
    config: PPOConfig, device: PlannedDevice, *, tokens: int, prompt_tokens: int = 0
) -> dict[str, float] | None:
    """Return stage -> expected seconds, if responses have so many tokens; None if the device's speeds are unknown.

    prompt_tokens: Mean of a prompt; 0: the most that it may have.
    """
    dtype = training_dtype(config, device.device)
    if (speeds := device.speeds(dtype)) is None:
        return None
    policy = config.actor_rollout_ref
    own: dict[str, Any] = {} if device.known is not None else dict.fromkeys(CLUSTER_OVERHEADS, 0.0)
    own |= CPU_EFFICIENCY if device.device == "cpu" else {}
    costs = Costs(
        speeds,
        _model(shape_reader(config)(str(policy.model.path)), dtype),
        max_num_seqs=policy.rollout.max_num_seqs,
        prompt_tokens=prompt_tokens or config.data.max_prompt_length,
        samples=policy.rollout.n,
        shared_rows=policy.rollout.n if policy.actor.use_prefix_grouper else 1,
        **own,
    )
    return stage_seconds(config, costs, tokens=tokens, stages=_model_stages(config))


def _model(shape: ModelShape, dtype: str) -> Model:
    element = 4 if dtype == "float32" else 2
    return Model(shape.params, shape.layers, shape.hidden, shape.kv_width, element, shape.inactive_params)


def _model_stages(config: PPOConfig) -> set[str]:
    """Return the stages of the job, besides generation and push, in which a model computes."""
    roles = set(main_ppo.worker_classes(config))
    settings = StepSettings(config, roles, hybridrl.RayPPOTrainer)
    found = {"update_actor"} | ({"old_log_prob"} if computes_old_log_probs(settings) else set())
    found |= {"ref"} if ppo.uses_reference(config) else set()
    return found | ({"values", "update_critic"} if ppo.uses_critic(config) else set())


def _device(config: PPOConfig, arguments: argparse.Namespace) -> PlannedDevice:
    """Return the device that the command line names; without a name, this machine."""
    given = None if arguments.memory is None else arguments.memory * GIB
    if arguments.device is not None:
        known, count = DEVICES[arguments.device], config.trainer.n_gpus_per_node * config.trainer.nnodes
        memory = DEVICE_GIB[arguments.device] * GIB if given is None else given
        return PlannedDevice(f"{count} x {arguments.device}, {memory / GIB:.0f} GiB each", "cuda", memory, known)
    here = this_machine()
    device = "cpu" if config.trainer.device == "cpu" else here.device
    if given is not None:
        return PlannedDevice(f"a device of {given / GIB:.0f} GiB ({device})", device, given, is_here=True)
    fast = here.bfloat16 if device == "cpu" else ""
    return PlannedDevice(str(here), device, here.memory, is_here=True, bfloat16=fast)


def shape_reader(config: PPOConfig) -> Callable[[str], ModelShape]:
    """Return a function like `read_shape` for the models of a run, as its engines load them."""
    policy = config.actor_rollout_ref.model

    @cache
    def read(path: str) -> ModelShape:
        own = overrides_for(path, policy.path, policy.override_config)
        return read_shape(path, own, trust_remote_code=policy.trust_remote_code)

    return read


def read_shape(
    path: str, override_config: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False
) -> ModelShape:
    """Return the shape of a model by its directory or hub name.

    Args:
        path: Directory or hub name.
        override_config: Values that replace entries of its config.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ConfigError: Its config cannot be read, or lacks an entry.
    """
    found = overridden_config(path, dict(override_config or {}), trust_remote_code=trust_remote_code)
    try:
        tower = num_tower_params(found) if reads_images(found) else 0
        return replace(ModelShape.of(found), tower=tower)
    except (ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path}: the model's config.json cannot be used ({text}); correct the path") from error


def tower_line(config: PPOConfig) -> str:
    """Return a line about the vision tower and the tokens of images, "" without one."""
    model, limit = config.actor_rollout_ref.model, config.data.max_prompt_length
    shape = shape_reader(config)(str(model.path))
    if not shape.tower:
        return ""
    processor = load_processor(model, load_tokenizer(str(model.path), key="actor_rollout_ref.model.path"), config.data)
    assert processor is not None, "a model with a tower reads images"
    tokens = {side: processor.num_tokens([processor.blank(side)]) for side in IMAGE_SIDES}
    shown = ", ".join(f"{side}x{side} pixels {number}" for side, number in tokens.items())
    frozen = "frozen" if config.actor_rollout_ref.actor.freeze_vision_tower else "trained"
    return (
        f"\nvision tower: {shape.tower / 1e6:,.1f} M of {shape.params / 1e6:,.1f} M parameters, {frozen}; tokens of an "
        f"image: {shown}, of data.max_prompt_length={limit}. Its own activations are not in the table; "
        "`hybridrl data inspect FILE --model` counts the tokens of your images\n"
    )


def word(value: Any) -> str:
    """Return a value as a word of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
