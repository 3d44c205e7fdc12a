"""`hybridrl plan`: what a PPO job needs of its devices' memory, and settings that fit. Starts nothing."""

import argparse
import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from hybridrl import main_ppo
from hybridrl.cli.arguments import DEVICE_GIB
from hybridrl.config import PPOConfig, load_config
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.planning.choices import Candidate, Devices, candidates
from hybridrl.planning.processes import Moment, PlannedProcess
from hybridrl.workers.engine.memory_plan import MemoryParts
from hybridrl.workers.engine.model_shape import ModelShape

GIB = 2**30
USABLE = 0.92  # of a device; the rest is for its libraries, communication and fragments
PARTS = tuple(field.name for field in fields(MemoryParts))


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of the job that `arguments.settings` describe, and return 0 if it fits, else 1."""
    config = load_config(PPOConfig, arguments.settings, program="hybridrl plan", config_name="ppo_trainer")
    if config is None:  # --cfg job has shown the settings
        return 0
    main_ppo.validate_config(config, with_inputs=False)
    device = "cpu" if config.trainer.device == "cpu" else "cuda"
    memory = _memory(arguments, device)
    devices = Devices(read_shape=read_shape, device=device, memory=memory, budget=USABLE * memory)
    processes = devices.plan(config)
    problem = devices.problem(config, processes)
    found = [*candidates(config, devices)]
    best = next((candidate for candidate in found if not candidate.problem), None)
    if arguments.apply:
        show(overrides(best) if best else f"nothing fits: {found[0].problem}\n")
        return 0 if best else 1
    note = f"of {memory / GIB:.0f} GiB {USABLE:.0%} may be used: "
    show(
        "\n".join([*memory_table(processes), "", note + (problem or "the job fits as it is"), "", *layout_table(found)])
        + f"\n\n{'nothing fits; take more devices' if best is None else 'settings of the first that fits:'}\n"
        + (overrides(best) if best else "")
    )
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


def _columns(moment: Moment) -> dict[str, float]:
    parts = {name: getattr(moment.parts, name) for name in PARTS}
    return {**parts, "rollout": moment.rollout, "buffers": moment.buffers, "total": moment.total}


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


def _memory(arguments: argparse.Namespace, device: str) -> float:
    """Return the bytes of one device; without one, those of this machine."""
    if arguments.memory is not None:
        return arguments.memory * GIB
    if device == "cuda":
        return DEVICE_GIB[arguments.device] * GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def read_shape(path: str) -> ModelShape:
    """Return the shape of a model by its directory or hub name.

    Raises:
        ConfigError: Its config cannot be read, or lacks an entry.
    """
    from transformers import AutoConfig

    try:
        return ModelShape.of(AutoConfig.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{path}: the model's config.json cannot be used ({text}); correct the path") from error


def word(value: Any) -> str:
    """Return a value as a word of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
