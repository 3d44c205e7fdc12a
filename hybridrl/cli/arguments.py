"""The commands and arguments of `hybridrl`.

Each command names the function of `hybridrl.cli` that runs it. Reading the arguments loads none of these functions.
"""

import argparse
from pathlib import Path

from hybridrl import __version__, main_job
from hybridrl.errors import ConfigError

GRAPH_FORMATS = ("text", "svg")
DEVICE_GIB = {"h100": 79, "h800": 79, "h200": 139, "h20": 95, "a100": 79}


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `run_command` of what it reads is a name in `hybridrl.cli`."""
    parser = argparse.ArgumentParser(prog="hybridrl", description="Tools around hybridrl jobs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("job", help="submit, inspect, stop or resume a job")
    jobs = job.add_subparsers(dest="what", required=True)
    for add in (_add_graph, _add_submit, _add_running, _add_resume, _add_states):
        add(jobs)
    first = (_add_trace, _add_view, _add_export, _add_serve, _add_serve_training, _add_doctor, _add_replay, _add_eval)
    for add in (*first, _add_chat, _add_train, _add_init, _add_data, _add_plan, _add_import_verl):
        add(commands)
    return parser


def check_port(port: int) -> None:
    """Raise ConfigError if no server can listen at a port."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port={port}: must be from 0 (any free port) to 65535")


def _command(
    commands: argparse._SubParsersAction, name: str, run: str, what: str, usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a command, and return its parser; `run` is its function's name in `hybridrl.cli`."""
    command = commands.add_parser(name, help=what, description=what, usage=usage)
    command.set_defaults(run_command=run)
    return command


def _add_submit(commands: argparse._SubParsersAction) -> None:
    main_job.add_arguments(_command(commands, "submit", "submit", main_job.WHAT))


def _add_running(commands: argparse._SubParsersAction) -> None:
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the Ray cluster; default: RAY_ADDRESS, or this machine's only cluster",
    )
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "job", metavar="JOB", help="a run, a job's name, or the directory of its journal or of a run of main_ppo"
    )

    def add(name: str, what: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=what, parents=[*parents, cluster])
        command.set_defaults(run_command="show_or_stop")
        return command

    add("ls", "list the jobs that run on a Ray cluster")
    add("status", "show a job's state, processes, last commit and failures", which)
    logs = add("logs", "show the events of a job, or what one of its processes has printed", which)
    logs.add_argument(
        "--process",
        metavar="PROCESS",
        help="the end of what this process has printed, as `job status` names it: actor-0; actor-0.2 is the second "
        "process of this slot",
    )
    logs.add_argument(
        "--lines", type=int, default=1000, metavar="N", help="lines of each of its files (default: %(default)d)"
    )
    stop = add("stop", "stop a job as SIGTERM would, and wait until it has ended", which)
    stop.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="maximum wait for its end (default: %(default)g)",
    )


def _add_graph(commands: argparse._SubParsersAction) -> None:
    what = "show a PPO job's stages and the columns between them, or a job file's roles, and placement; starts nothing"
    usage = "hybridrl job graph [-h] [--format F] [--output FILE] (JOB_FILE | key=value ...)"
    graph = _command(commands, "graph", "show_graph", what, usage)
    graph.epilog = (
        "JOB_FILE: as for hybridrl job submit. key=value: as for python -m hybridrl.main_ppo, --config-name too; "
        "neither data nor a model is needed"
    )
    graph.add_argument("--format", choices=GRAPH_FORMATS, help="default: the suffix of FILE, or text")
    graph.add_argument("--output", metavar="FILE", type=Path, help="where to write; default: standard output")


def _add_resume(commands: argparse._SubParsersAction) -> None:
    what = (
        "resume a run that ended or died from its last checkpoint: repeat main_ppo's command, or submit the job again"
    )
    resume = _command(commands, "resume", "resume", what)
    resume.add_argument(
        "run", metavar="RUN", help="a directory of a run of main_ppo, or the run or the journal of a submitted job"
    )
    resume.add_argument(
        "changes", nargs="*", metavar="key=value", help="settings of main_ppo to change, for instance trainer.nnodes=2"
    )
    resume.add_argument("--print", action="store_true", help="print main_ppo's command without running it")
    resume.add_argument("--no-wait", action="store_true", help="return when the submitted job has started")
    resume.add_argument(
        "--address", metavar="HOST:PORT", help="Ray cluster for a submitted job; default: RAY_ADDRESS, or a local one"
    )


def _add_states(commands: argparse._SubParsersAction) -> None:
    what = "print the tables: states of a job, a role and a worker, the events between them, and what follows a failure"
    _command(commands, "states", "print_states", what)


def _add_trace(commands: argparse._SubParsersAction) -> None:
    what = "make a timeline of a run with trainer.trace=true, for https://ui.perfetto.dev and chrome://tracing"
    trace = _command(commands, "trace", "write_trace", what)
    trace.add_argument("run", help="the directory the run wrote to, or one of the jobs in its trace/", type=Path)
    trace.add_argument("--output", metavar="FILE", type=Path, help="default: trace.json in that directory")


def _add_view(commands: argparse._SubParsersAction) -> None:
    what = "show runs on a web page: curves, samples, settings, timeline, failures; read only, until Ctrl-C"
    view = _command(commands, "view", "view_runs", what)
    view.add_argument(
        "runs", nargs="*", metavar="RUN", help="a run's directory, or one with runs in it; also a URL that fsspec knows"
    )
    view.add_argument("--port", type=int, default=6070, help="0: any free port (default: %(default)d)")
    view.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0: all of the machine's; the link then has a token that is needed"
    )
    view.add_argument("--demo", action="store_true", help="show recorded runs that come with the package")


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = _command(commands, "export", "export", "write a checkpoint's policy as Hugging Face safetensors")
    export.add_argument("checkpoint", help="a global_step_N directory")
    export.add_argument("directory", help="where the model goes; it appears complete or not at all")
    export.add_argument("--adapter", action="store_true", help="write the LoRA adapters alone, in peft's format")
    _add_trust(export)


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the model or that the checkpoint's settings name; read it first",
    )


def _add_serve(commands: argparse._SubParsersAction) -> None:
    what = "serve a model or a checkpoint's policy to OpenAI clients, until Ctrl-C"
    serve = _command(commands, "serve", "serve", what)
    serve.add_argument(
        "model", help="a model's directory, Hugging Face name or GGUF file, or a global_step_N directory"
    )
    serve.add_argument("--port", type=int, default=8000, help="0: any free port")
    serve.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all of the machine's; HYBRIDRL_API_KEY sets a key")
    serve.add_argument("--replicas", type=int, default=1, help="number of serving processes; one needs no Ray")
    _add_engine(serve)


def _add_serve_training(commands: argparse._SubParsersAction) -> None:
    what = "let clients of Tinker's API train and sample a model, until Ctrl-C"
    serve = _command(commands, "serve-training", "serve_training", what)
    serve.add_argument("model", help="the base model's directory or Hugging Face name")
    serve.add_argument("--port", type=int, default=8010, help="0: any free port")
    serve.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all of the machine's; needs --keys")
    serve.add_argument("--strategy", choices=("fsdp", "megatron"), default="fsdp", help="megatron: with --max-rank 0")
    serve.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="what samples")
    serve.add_argument("--backend", choices=("local", "ray"), default="local", help="local: all in this process")
    serve.add_argument("--trainers", type=int, default=1, help="processes on Ray that share the training")
    serve.add_argument("--replicas", type=int, default=1, help="processes on Ray that sample")
    serve.add_argument("--name", help="what clients call the base model; default: MODEL as written")
    serve.add_argument("--store", default="training_service", help="directory of sessions and weights")
    serve.add_argument("--keys", help="JSON file with the keys of the tenants; see docs/training_service.md")
    serve.add_argument("--max-rank", type=int, default=32, help="highest rank of adapters; 0: train all weights")
    serve.add_argument("--max-length", type=int, help="tokens of a sequence; default: the model's, at most 4096")
    serve.add_argument("--micro-batch-tokens", type=int, default=16384, help="tokens that are computed together")
    serve.add_argument("--session-timeout-s", type=float, default=300.0, help="a silent client's session ends")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _add_trust(serve)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engine", default="hf", help="hf, vllm, or a rollout of your own: package.module:Name")
    command.add_argument(
        "--max-length", type=int, help="tokens of prompt and response; default: the model's limit, at most 4096"
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _add_trust(command)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    what = "look for what is wrong with a run, or with this machine, and name the setting to change"
    doctor = _command(commands, "doctor", "examine", what)
    doctor.add_argument("run", nargs="?", metavar="RUN", help="a run's directory, or a URL; default: this machine")


def _add_replay(commands: argparse._SubParsersAction) -> None:
    what = "repeat a step that a run has kept, in one process on the CPU, and print what differs at each stage"
    usage = "hybridrl replay [-h] [--stage S] [--rank R] [--pdb] [--trust-remote-code] RUN STEP [key=value ...]"
    command = _command(commands, "replay", "replay", what, usage)
    command.add_argument("run", metavar="RUN", help="a run's directory; trainer.record_steps says what it keeps")
    command.add_argument("step", metavar="STEP", type=int, help="number of the step")
    command.add_argument("--stage", metavar="S", help="repeat this stage only, for instance update_actor")
    command.add_argument("--rank", metavar="R", type=int, help="with --pdb: whose part; default: 0")
    command.add_argument("--pdb", action="store_true", help="stop in the debugger before each stage, and rank R's part")
    _add_trust(command)
    command.epilog = "key=value: settings to change, such as actor_rollout_ref.model.path=/models/mine"


def _add_eval(commands: argparse._SubParsersAction) -> None:
    what = "measure how often a model answers right: avg@n, pass@k and maj@n with 95 percent confidence intervals"
    usage = "hybridrl eval [-h] [--n N] [--output DIR] [...] TASK MODEL [key=value ...]"
    run = _command(commands, "eval", "evaluate", what, usage)
    run.add_argument("task", metavar="TASK", help="gsm8k, math, arithmetic, or rows as for data.val_files")
    _add_model(run)
    run.add_argument("--n", type=int, default=1, help="samples per prompt; one is greedy (default: %(default)s)")
    run.add_argument("--output", metavar="DIR", help="where samples and metrics go; default: outputs/eval/TASK")
    _add_endpoint_options(run)
    run.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="URL: open requests (default: %(default)s)"
    )
    run.epilog = "key=value: settings of python -m hybridrl.main_ppo, such as data.max_response_length=2048"


def _add_model(command: argparse.ArgumentParser) -> None:
    what = "a model's directory, hub name or GGUF file, a global_step_N of a run, or http://HOST:PORT/v1"
    command.add_argument("model", metavar="MODEL", help=what)


def _add_endpoint_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model-name", metavar="NAME", help="URL: the model, if the endpoint has several")
    command.add_argument(
        "--key-variable",
        default="HYBRIDRL_API_KEY",
        metavar="VARIABLE",
        help="URL: environment variable with the key to send (default: %(default)s)",
    )


def _add_chat(commands: argparse._SubParsersAction) -> None:
    what = "talk to a model in the terminal, until Ctrl-D"
    chat = _command(commands, "chat", "chat", what)
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    chat.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)g)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: what the model has room for")
    _add_endpoint_options(chat)
    _add_engine(chat)


def _add_train(commands: argparse._SubParsersAction) -> None:
    what = "train a model on a task or a file: choose settings for this machine, print the command, and run it"
    usage = "hybridrl train [-h] [--print] DATA MODEL [key=value ...]"
    train = _command(commands, "train", "train", what, usage)
    train.add_argument(
        "data",
        metavar="DATA",
        help="gsm8k, math, arithmetic, a parquet or .jsonl file, or ORG/NAME[:SPLIT] of the hub; prompts are trained "
        "by GRPO, conversations by SFT, pairs by DPO",
    )
    train.add_argument("model", metavar="MODEL", help="a model's directory, hub name or GGUF file")
    train.add_argument(
        "--data-source",
        metavar="SOURCE",
        help="raw data of a known task, if they are made now: a .jsonl file, or a directory",
    )
    train.add_argument("--print", action="store_true", help="print the command without running it")
    train.epilog = "key=value: settings of the program, such as trainer.total_training_steps=100"


def _add_init(commands: argparse._SubParsersAction) -> None:
    what = "make a directory with a reward function, an agent loop, a stage, data, a run and tests to change"
    init = _command(commands, "init", "create_project", what)
    init.add_argument("name", metavar="NAME", help="the directory; it does not exist yet")


def _add_data(commands: argparse._SubParsersAction) -> None:
    data = commands.add_parser("data", help="list known tasks, or inspect a file").add_subparsers(required=True)
    what = "list the known tasks, where their data are, and how to make them"
    _command(data, "list", "list_tasks", what)
    what = "show a file's rows, columns and lengths, and what a program would refuse"
    inspect = _command(data, "inspect", "inspect_file", what)
    inspect.add_argument("file", metavar="FILE", help="parquet, .jsonl, or ORG/NAME[:SPLIT] of the hub")
    inspect.add_argument("--model", help="a model's directory, hub name or GGUF file: lengths in its tokens")
    inspect.epilog = "key=value: columns of your own, data.prompt_key=question data.ground_truth_key=answer"


def _add_plan(commands: argparse._SubParsersAction) -> None:
    what = "predict the memory of a PPO job's processes, and print settings that fit its devices; starts nothing"
    usage = "hybridrl plan [-h] [--device NAME | --memory GIB] [--apply] key=value ..."
    plan = _command(commands, "plan", "plan", what, usage)
    plan.epilog = "key=value: as for python -m hybridrl.main_ppo; needs the model's config.json, no weights and no data"
    plan.add_argument("--device", choices=DEVICE_GIB, help="another machine's; default: this machine")
    plan.add_argument("--memory", type=float, metavar="GIB", help="of one device, instead of its own")
    plan.add_argument("--apply", action="store_true", help="print the settings that fit, and nothing else")


def _add_import_verl(commands: argparse._SubParsersAction) -> None:
    what = "turn a launch script or a command line of verl into ours; explains every change, and runs nothing"
    usage = "[VARIABLE=value ...] hybridrl import-verl (SCRIPT [key=value ...] | COMMAND ...)"
    imported = _command(commands, "import-verl", "import_verl", what, usage)
    imported.add_argument(
        "verl",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT_OR_COMMAND",
        help="a bash script, or the words of the command; variables of a script are those of this shell. Exits with 1 "
        "if something has to be decided first",
    )
