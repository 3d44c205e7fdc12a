"""`hybridrl job graph`: the stages of a PPO job, or the roles of a job file. Starts nothing."""

import argparse
import sys
from pathlib import Path
from typing import Protocol

from hybridrl import main_ppo, trainer
from hybridrl.cli.arguments import PICTURES
from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import ConfigError
from hybridrl.framework.graph import role_graph
from hybridrl.framework.graph.drawing import draw_graph
from hybridrl.framework.graph.role_graph import RoleEdge, RoleGraph, RoleNode
from hybridrl.framework.graph.stage_graph import RolePlacement, StageGraph, stage_graph, to_dot, to_text
from hybridrl.master.job_files.job_file import JobFile, load_job_file, names_job_file
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.plan.spec import TRAINER, JobSpec
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.trainer import run

TEXTS = {"text": to_text, "dot": to_dot}  # by the names of `arguments.TEXTS`
AUTO_DEVICE = "\ntrainer.device=auto: a GPU each where the cluster has any, else a CPU alone\n"
SUFFIXES = {"txt": "text", "gv": "dot"}  # file suffixes that are not the format's name


def show_graph(arguments: argparse.Namespace) -> None:
    """Print or write the graph of the settings or the job file in `arguments.settings`."""
    kind = arguments.format or _kind_of(arguments.output)
    if kind in PICTURES and arguments.output is None:
        raise ConfigError(f"--format {kind}: a picture needs a file; add --output graph.{kind}")
    settings = arguments.settings
    if settings and names_job_file(settings[0]):
        if len(settings) > 1:
            raise ConfigError(f"{' '.join(settings[1:])}: a job file takes no settings; change {settings[0]} itself")
        _show(FileGraph(load_job_file(settings[0])), arguments.output, kind)
        return
    config = load_config(PPOConfig, settings, program="hybridrl job graph", config_name="ppo_trainer")
    if config is None:  # --cfg job has shown the settings
        return
    _show(StepGraph(config), arguments.output, kind)


class Shown(Protocol):
    """A graph that can be shown: as text in a format of `TEXTS`, or drawn in a file as a picture."""

    def text(self, kind: str) -> str:
        """Return the graph in this format."""

    def draw(self, path: Path, picture: str) -> None:
        """Write the picture to the file."""


class StepGraph:
    """The stages of a PPO job; format text also has the job's placement groups and processes."""

    def __init__(self, config: PPOConfig) -> None:
        self._config, self._graph = config, job_graph(config)

    def text(self, kind: str) -> str:
        if kind != "text":
            return TEXTS[kind](self._graph)
        note = AUTO_DEVICE if self._config.trainer.device == "auto" else ""
        return f"{to_text(self._graph)}\n{plan_table(job_plan(self._config))}{note}"

    def draw(self, path: Path, picture: str) -> None:
        draw_graph(self._graph, path, title=self._config.trainer.experiment_name, picture=picture)


class FileGraph:
    """The roles of a job file; format text also has the job's placement groups and processes."""

    def __init__(self, file: JobFile) -> None:
        self._file, self._graph = file, role_graph_of(file.job.spec)

    def text(self, kind: str) -> str:
        if kind != "text":
            return role_graph.to_dot(self._graph)
        return f"{role_graph.to_text(self._graph)}\n{plan_table(self._file.job.plan(self._file.name))}"

    def draw(self, path: Path, picture: str) -> None:
        role_graph.draw_roles(self._graph, path, title=self._file.name, picture=picture)


def role_graph_of(spec: JobSpec) -> RoleGraph:
    """Return the graph of a job's roles."""
    roles = tuple(RoleNode(role.name, role.total, role.pool, role.entry) for role in spec.roles)
    trainer = None if spec.trainer is None else RoleNode(TRAINER, 1, "", spec.trainer.entry)
    edges = tuple(RoleEdge(edge.kind, edge.source, edge.target, edge.weight) for edge in spec.edges)
    return RoleGraph(roles, edges, trainer)


def _show(graph: Shown, output: Path | None, kind: str) -> None:
    if output is None:
        sys.stdout.write(graph.text(kind))
        return
    try:
        if kind in PICTURES:
            graph.draw(output, kind)
        else:
            output.write_text(graph.text(kind), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another file") from error
    sys.stdout.write(f"wrote {output}\n")


def _kind_of(output: Path | None) -> str:
    if output is None:
        return "text"
    ending = output.suffix.lstrip(".").lower()
    kind = SUFFIXES.get(ending, ending)
    if kind not in (*TEXTS, *PICTURES):
        raise ConfigError(f"--output {output}: its suffix is no known format; add --format text, dot, svg or png")
    return kind


def job_graph(config: PPOConfig) -> StageGraph:
    """Return the stage graph that `main_ppo` would run, with its workers and pools."""
    main_ppo.validate_config(config, with_inputs=False)
    plan = job_plan(config)
    placements = {
        role: RolePlacement(process.pool, len(plan.pool(process.pool).slots), process.label)
        for process in plan.processes
        for role in process.roles
    }
    step = trainer.RayPPOTrainer.step(config, main_ppo.worker_classes(config))
    return stage_graph(run.preview_stages([stage.spec for stage in step if stage.enabled], config), placements)


def job_plan(config: PPOConfig) -> Plan:
    """Return the placement plan that `main_ppo` would start; trainer.device=auto counts as a cluster with GPUs."""
    workers = main_ppo.worker_classes(config)
    manager = main_ppo.resource_pools(config, workers)
    pool_of_role = {str(role): manager.mapping[role] for role in workers}
    chosen = config.trainer
    return manager.plan(chosen.experiment_name, pool_of_role, colocate=chosen.colocate, use_gpu=chosen.device != "cpu")
