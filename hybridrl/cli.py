"""The `hybridrl` command: inspect, stop and resume jobs, draw graphs and timelines, export and serve models.

    hybridrl job graph key=value ...          the stages of a PPO job, their columns and placement; starts nothing
    hybridrl job ls                           the jobs that run on a Ray cluster
    hybridrl job status JOB                   a job's state, processes, last commit and failures
    hybridrl job logs JOB                     the events of a job, from its master's journal
    hybridrl job stop JOB                     stop a job as SIGTERM would
    hybridrl job resume DIRECTORY             resume a run from its last checkpoint, by the command that started it
    hybridrl job states                       states of a job, its roles and workers; what follows a failure
    hybridrl trace RUN [--output FILE]        the timeline of a run with trainer.trace=true, for Perfetto
    hybridrl export CHECKPOINT DIRECTORY      a checkpoint's policy as Hugging Face safetensors, verified
    hybridrl serve MODEL                      a model, or a checkpoint's policy, behind an OpenAI-compatible endpoint

JOB is a run, a job's name, or a run's directory. Modules that import torch are imported by the commands that need them:
torch takes seconds, and `--help`, `trace` and a mistake should not.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config import PPOConfig, load_config
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.ray_cluster import start_ray
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.failure_policy import to_text as policy_text
from hybridrl.framework.graph.drawing import draw_graph
from hybridrl.framework.graph.stage_graph import RolePlacement, StageGraph, stage_graph, to_dot, to_text
from hybridrl.framework.graph.timeline import newest_trace, read_spans, summarize, trace_events
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.state.tables import to_text as states_text
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.trainer.checkpoint.store import MANIFEST, CheckpointStore, settings_for_export, verify_manifest

if TYPE_CHECKING:
    from hybridrl.serving.openai.server import Endpoint

TEXTS = {"text": to_text, "dot": to_dot}
AUTO_DEVICE = "\ntrainer.device=auto: a GPU each where the cluster has any, else a CPU alone\n"
PICTURES = ("svg", "png")
SUFFIXES = {"txt": "text", "gv": "dot"}  # file suffixes that are not the format's name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the command line's by default) and return its exit code."""
    parser = argparse.ArgumentParser(prog="hybridrl", description="Tools around hybridrl jobs.")
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("job", help="inspect, stop or resume a job").add_subparsers(dest="what", required=True)
    _add_graph(job)
    _add_running(job)
    _add_resume(job)
    _add_states(job)
    _add_trace(commands)
    _add_export(commands)
    _add_serve(commands)
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.run_command is not _graph:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    set_up_logging()
    return run_program(lambda: arguments.run_command(arguments), log_directory=lambda: None)


# -- hybridrl job graph


def _add_graph(job: argparse._SubParsersAction) -> None:
    what = "show a PPO job's stages, the columns between them and their placement; starts nothing"
    graph = job.add_parser(
        "graph", help=what, description=what, usage="hybridrl job graph [-h] [--format F] [--output FILE] key=value ..."
    )
    graph.epilog = (
        "key=value: as for python -m hybridrl.main_ppo, --config-name too; neither data nor a model is needed"
    )
    graph.add_argument("--format", choices=[*TEXTS, *PICTURES], help="default: the suffix of FILE, or text")
    graph.add_argument(
        "--output", metavar="FILE", type=Path, help="where to write; default: standard output; required for a picture"
    )
    graph.set_defaults(run_command=_graph)


def _graph(arguments: argparse.Namespace) -> None:
    kind = arguments.format or _kind_of(arguments.output)
    if kind in PICTURES and arguments.output is None:
        raise ConfigError(f"--format {kind}: a picture needs a file; add --output graph.{kind}")
    config = load_config(PPOConfig, arguments.settings, program="hybridrl job graph", config_name="ppo_trainer")
    if config is None:  # --cfg job has shown the settings
        return
    graph = job_graph(config)
    if arguments.output is None:
        sys.stdout.write(_text(graph, config, kind=kind))
        return
    try:
        _write_graph(graph, arguments.output, config, kind=kind)
    except OSError as error:
        raise ConfigError(
            f"--output {arguments.output}: cannot be written ({error.strerror}); choose another file"
        ) from error
    sys.stdout.write(f"wrote {arguments.output}\n")


def _write_graph(graph: StageGraph, path: Path, config: PPOConfig, *, kind: str) -> None:
    if kind in PICTURES:
        draw_graph(graph, path, title=config.trainer.experiment_name, picture=kind)
    else:
        path.write_text(_text(graph, config, kind=kind), encoding="utf-8")


def _text(graph: StageGraph, config: PPOConfig, *, kind: str) -> str:
    """Return the graph in a text format; format text also has the job's placement groups and processes."""
    if kind != "text":
        return TEXTS[kind](graph)
    note = AUTO_DEVICE if config.trainer.device == "auto" else ""
    return f"{to_text(graph)}\n{plan_table(job_plan(config))}{note}"


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
    from hybridrl.main_ppo import validate_config, worker_classes
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer
    from hybridrl.trainer.run.middleware import preview_stages

    validate_config(config, with_inputs=False)
    plan = job_plan(config)
    placements = {
        role: RolePlacement(process.pool, len(plan.pool(process.pool).slots), process.label)
        for process in plan.processes
        for role in process.roles
    }
    step = RayPPOTrainer.step(config, worker_classes(config))
    return stage_graph(preview_stages([stage.spec for stage in step if stage.enabled], config), placements)


def job_plan(config: PPOConfig) -> Plan:
    """Return the placement plan that `main_ppo` would start; trainer.device=auto counts as a cluster with GPUs."""
    from hybridrl.main_ppo import resource_pools, worker_classes

    workers = worker_classes(config)
    manager = resource_pools(config, workers)
    pool_of_role = {str(role): manager.mapping[role] for role in workers}
    trainer = config.trainer
    return manager.plan(
        trainer.experiment_name, pool_of_role, colocate=trainer.colocate, use_gpu=trainer.device != "cpu"
    )


# -- hybridrl job ls, status, logs, stop


def _add_running(job: argparse._SubParsersAction) -> None:
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster; default: RAY_ADDRESS, or this machine's only cluster",
    )
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "job", metavar="JOB", help="a run, the name of a job with one run on the cluster, or a run's directory"
    )

    def add(name: str, what: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = job.add_parser(name, help=what, description=what, parents=[*parents, cluster])
        command.set_defaults(run_command=_running)
        return command

    add("ls", "list the jobs that run on a Ray cluster")
    add("status", "show a job's state, processes, last commit and failures", which)
    add("logs", "show the events of a job, from its master's journal", which)
    stop = add("stop", "stop a job as SIGTERM would, and wait until it has ended", which)
    stop.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="maximum wait for its end (default: %(default)g)",
    )


def _running(arguments: argparse.Namespace) -> None:
    from hybridrl.master.service import console

    if arguments.what == "ls":
        console.connect(arguments.address)
        sys.stdout.write(console.list_jobs())
    elif arguments.what == "status":
        sys.stdout.write(console.status(arguments.job, arguments.address))
    elif arguments.what == "logs":
        sys.stdout.write(console.logs(arguments.job, arguments.address))
    else:
        sys.stdout.write(console.stop(arguments.job, arguments.address, timeout_s=arguments.timeout))


# -- hybridrl job resume


def _add_resume(job: argparse._SubParsersAction) -> None:
    what = "resume a run that ended or died from its last checkpoint, by the command that started it"
    resume = job.add_parser("resume", help=what, description=what)
    resume.add_argument("directory", help="the directory the run wrote to")
    resume.add_argument(
        "changes", nargs="*", metavar="key=value", help="settings to change, for instance trainer.nnodes=2"
    )
    resume.add_argument("--print", action="store_true", help="print the command without running it")
    resume.set_defaults(run_command=_resume)


def _resume(arguments: argparse.Namespace) -> None:
    from hybridrl.driver.resume_command import resume_arguments, resume_run

    if arguments.print:
        command, directory = resume_arguments(arguments.directory, arguments.changes)
        sys.stdout.write(f"cd {shlex.quote(directory)} && {shlex.join(command)}\n")
    else:
        resume_run(arguments.directory, arguments.changes)


# -- hybridrl job states


def _add_states(job: argparse._SubParsersAction) -> None:
    what = "print the tables: states of a job, a role and a worker, the events between them, and what follows a failure"
    states = job.add_parser("states", help=what, description=what)
    states.set_defaults(run_command=lambda arguments: sys.stdout.write(f"{states_text()}\n{policy_text()}"))


# -- hybridrl trace


def _add_trace(commands: argparse._SubParsersAction) -> None:
    what = "make a timeline of a run with trainer.trace=true, for https://ui.perfetto.dev and chrome://tracing"
    trace = commands.add_parser("trace", help=what, description=what)
    trace.add_argument("run", help="the directory the run wrote to, or one of the jobs in its trace/", type=Path)
    trace.add_argument("--output", metavar="FILE", type=Path, help="default: trace.json in that directory")
    trace.set_defaults(
        run_command=lambda arguments: write_timeline(arguments.run, arguments.output or arguments.run / "trace.json")
    )


def write_timeline(run: Path, output: Path) -> None:
    """Write the timeline of a run's newest job, and print a summary of its times; the run may still be running."""
    trace = newest_trace(run)
    spans = read_spans(trace)
    try:
        output.write_text(json.dumps(trace_events(spans)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another file") from error
    sys.stdout.write(
        f"{summarize(spans)}\nwrote {output}, from {trace}; open it in https://ui.perfetto.dev or chrome://tracing\n"
    )


# -- hybridrl export


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser("export", help="write a checkpoint's policy as Hugging Face safetensors")
    export.add_argument("checkpoint", help="a global_step_N directory")
    export.add_argument("directory", help="where the model goes; it appears complete or not at all")
    _add_trust(export)
    export.set_defaults(
        run_command=lambda arguments: export_checkpoint(
            arguments.checkpoint, arguments.directory, trust_remote_code=arguments.trust_remote_code
        )
    )


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model; read it first"
    )


def export_checkpoint(checkpoint: str, directory: str, *, trust_remote_code: bool = False) -> None:
    """Write the policy of a PPO checkpoint of any world size as a Hugging Face model.

    Args:
        checkpoint: A `global_step_N` directory.
        directory: Where the model goes.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        CheckpointError: There is no complete PPO checkpoint.
        ConfigError: `directory` is not new or empty, or the model brings code that is not trusted.
    """
    from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
    from hybridrl.single_controller.worker_group import ClassWithInitArgs
    from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
    from hybridrl.workers.export import check_new_directory

    check_new_directory(directory)
    _check_is_ppo_checkpoint(checkpoint)
    verify_manifest(checkpoint)
    settings = settings_for_export(checkpoint, trust_remote_code=trust_remote_code)
    group = LocalWorkerGroup(None, ClassWithInitArgs(ActorRolloutRefWorker, settings, "actor"), role="actor")
    group.calls.init_model(1)
    group.calls.load_checkpoint(os.path.join(checkpoint, "actor"))
    group.calls.export_hf(directory)
    sys.stdout.write(f"exported {checkpoint} to {directory}\n")


def _check_is_ppo_checkpoint(path: str) -> None:
    """Raise CheckpointError that names the nearest checkpoint unless `path` is one of PPO."""
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        raise CheckpointError(f"{path} is not a checkpoint; {_nearest_checkpoint(path)}")
    if os.path.isdir(os.path.join(path, "huggingface")):
        raise CheckpointError(
            f"{path} is of supervised fine-tuning, which exports with every checkpoint: use {path}/huggingface"
        )
    if not os.path.isdir(os.path.join(path, "actor")):
        raise CheckpointError(f"{path} has no actor/, the policy of a PPO run; give another global_step_N")


def _nearest_checkpoint(path: str) -> str:
    for run in (path, os.path.dirname(os.path.abspath(path))):
        if newest := CheckpointStore(run).latest():
            return f"the newest in {run} is {newest}"
    return "give the global_step_N directory of a run with trainer.save_freq above 0"


# -- hybridrl serve


def _add_serve(commands: argparse._SubParsersAction) -> None:
    what = "serve a model or a checkpoint's policy to OpenAI clients, until Ctrl-C"
    serve = commands.add_parser("serve", help=what, description=what)
    serve.add_argument("model", help="a model's directory or Hugging Face name, or a global_step_N directory")
    serve.add_argument("--port", type=int, default=8000, help="0: any free port")
    serve.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0: all addresses of the machine; there is no authentication"
    )
    serve.add_argument("--engine", default="hf", help="hf, vllm, or a rollout of your own: package.module:Name")
    serve.add_argument("--replicas", type=int, default=1, help="number of serving processes; one needs no Ray")
    serve.add_argument(
        "--max-length", type=int, help="tokens of prompt and response; default: the model's limit, at most 4096"
    )
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _add_trust(serve)
    serve.set_defaults(run_command=_serve)


def _serve(arguments: argparse.Namespace) -> None:
    from hybridrl.serving.openai.standalone import StandaloneModel, one_replica, replicas_on_ray, serve_forever
    from hybridrl.trainer.data.tokenizer import load_tokenizer
    from hybridrl.workers.rollout.base import rollout_class

    if not rollout_class(arguments.engine, setting="--engine").capabilities.requests:
        raise ConfigError(
            f"--engine={arguments.engine}: needs the capability requests, which it does not declare; use hf"
        )
    if arguments.replicas < 1:
        raise ConfigError(f"--replicas={arguments.replicas}: must be 1 or more")
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port={arguments.port}: must be from 0 (any free port) to 65535")
    trust = arguments.trust_remote_code
    with _model_directory(arguments.model, trust_remote_code=trust) as path:
        model = StandaloneModel(
            path=path,
            name=os.path.basename(os.path.normpath(arguments.model)),
            tokenizer=load_tokenizer(path, key="model", trust_remote_code=trust),
            trust_remote_code=trust,
            engine=arguments.engine,
            max_length=arguments.max_length,
            device=arguments.device,
        )
        if arguments.replicas > 1:
            start_ray()
        replicas = one_replica(model) if arguments.replicas == 1 else replicas_on_ray(model, arguments.replicas)
        serve_forever(
            model,
            replicas,
            host=arguments.host,
            port=arguments.port,
            on_start=_print_address,
        )


def _print_address(endpoint: "Endpoint") -> None:
    sys.stdout.write(f"serving {endpoint.served.name} at http://{endpoint.host}:{endpoint.port}/v1\n")
    sys.stdout.flush()


@contextmanager
def _model_directory(path: str, *, trust_remote_code: bool) -> Iterator[str]:
    """Yield a model's directory; for a checkpoint, its policy as Hugging Face files while the block runs."""
    if os.path.isfile(os.path.join(path, MANIFEST)) and os.path.isdir(os.path.join(path, "huggingface")):
        yield os.path.join(path, "huggingface")
    elif os.path.isfile(os.path.join(path, MANIFEST)):
        with tempfile.TemporaryDirectory(prefix="hybridrl-serve-") as folder:
            export_checkpoint(path, os.path.join(folder, "policy"), trust_remote_code=trust_remote_code)
            yield os.path.join(folder, "policy")
    else:
        yield path


if __name__ == "__main__":
    sys.exit(main())
