"""`hybridrl job graph`: the stages of a PPO job, or the roles of a job file. Starts nothing."""

import argparse
from pathlib import Path

from hybridrl import main_ppo, trainer
from hybridrl.cli.arguments import GRAPH_FORMATS
from hybridrl.config import PPOConfig, load_config
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.framework.graph import role_graph, stage_graph
from hybridrl.framework.graph.role_graph import RoleEdge, RoleGraph, RoleNode
from hybridrl.framework.graph.stage_graph import RolePlacement, StageGraph
from hybridrl.master.job_files.job_file import load_job_file, names_job_file
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.plan.spec import TRAINER, JobSpec
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.trainer import run

AUTO_DEVICE = "\ntrainer.device=auto: a GPU each where the cluster has any, else a CPU alone\n"


def show_graph(arguments: argparse.Namespace) -> None:
    """Print or write the graph of the settings or the job file in `arguments.settings`."""
    kind = arguments.format or _kind_of(arguments.output)
    settings, output = arguments.settings, arguments.output
    if settings and names_job_file(settings[0]):
        if len(settings) > 1:
            raise ConfigError(f"{' '.join(settings[1:])}: a job file takes no settings; change {settings[0]} itself")
        text = _roles_as(kind, settings[0])
    else:
        config = load_config(PPOConfig, settings, program="hybridrl job graph", config_name="ppo_trainer")
        if config is None:  # --cfg job has shown the settings
            return
        text = _stages_as(kind, config)
    if output is None:
        show(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another file") from error
    show(f"wrote {output}\n")


def _stages_as(kind: str, config: PPOConfig) -> str:
    """Return the stages of a PPO job; as text, also the job's placement groups and processes."""
    graph = job_graph(config)
    if kind == "svg":
        return stage_graph.to_picture(graph, title=config.trainer.experiment_name)
    note = AUTO_DEVICE if config.trainer.device == "auto" else ""
    return f"{stage_graph.to_text(graph)}\n{plan_table(job_plan(config))}{note}"


def _roles_as(kind: str, path: str) -> str:
    """Return the roles of a job file; as text, also the job's placement groups and processes."""
    file = load_job_file(path)
    graph = role_graph_of(file.job.spec)
    if kind == "svg":
        return role_graph.to_picture(graph, title=file.name)
    return f"{role_graph.to_text(graph)}\n{plan_table(file.job.plan(file.name))}"


def role_graph_of(spec: JobSpec) -> RoleGraph:
    """Return the graph of a job's roles."""
    roles = tuple(RoleNode(role.name, role.total, role.pool, role.entry) for role in spec.roles)
    trainer = None if spec.trainer is None else RoleNode(TRAINER, 1, "", spec.trainer.entry)
    edges = tuple(RoleEdge(edge.kind, edge.source, edge.target, edge.weight) for edge in spec.edges)
    return RoleGraph(roles, edges, trainer)


def _kind_of(output: Path | None) -> str:
    if output is None:
        return "text"
    ending = output.suffix.lstrip(".").lower()
    kind = "text" if ending == "txt" else ending
    if kind not in GRAPH_FORMATS:
        raise ConfigError(
            f"--output {output}: its suffix is no known format; add --format text or svg (a browser shows SVG, and "
            "Inkscape makes a PNG of it)"
        )
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
    stages = run.preview_stages([stage.spec for stage in step if stage.enabled], config)
    return stage_graph.stage_graph(stages, placements)


def job_plan(config: PPOConfig) -> Plan:
    """Return the placement plan that `main_ppo` would start; trainer.device=auto counts as a cluster with GPUs."""
    workers = main_ppo.worker_classes(config)
    manager = main_ppo.resource_pools(config, workers)
    pool_of_role = {str(role): manager.mapping[role] for role in workers}
    chosen = config.trainer
    return manager.plan(chosen.experiment_name, pool_of_role, colocate=chosen.colocate, use_gpu=chosen.device != "cpu")
