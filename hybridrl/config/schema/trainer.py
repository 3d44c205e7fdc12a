"""Settings of the driver: how long, where, what is kept and who is told."""

from dataclasses import dataclass

from hybridrl.config.fields import section, setting

LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class ReplayConfig:
    groups: int = setting(
        0, "Groups (the samples of one prompt) of earlier steps that are added to every batch; 0 is none.", ge=0
    )
    size: int = setting(1024, "Groups kept; the oldest make room.", ge=1)
    max_uses: int = setting(1, "How often a group may be replayed.", ge=1)


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str = setting("hybridrl", "Project under which runs are recorded.")
    experiment_name: str = setting("run", "Name of this run.")
    total_epochs: int = setting(1, "Passes over the training data.", ge=1)
    total_training_steps: int | None = setting(None, "Steps of the whole run; null means total_epochs of data.", ge=1)
    nnodes: int = setting(1, "Number of machines.", ge=1)
    n_gpus_per_node: int = setting(
        1, "Worker processes per machine, each with one device (a CPU slot without GPUs).", ge=1
    )
    backend: str = setting(
        "ray",
        "Run workers on Ray, or in this process (local: one process, no Ray, pdb works).",
        choices=("ray", "local"),
    )
    master: bool = setting(
        True,
        "On Ray, have a process see the job's deaths, freezes, hangs (`hybridrl job status`), and start a "
        "lost driver again.",
    )
    device: str = setting(
        "auto", "Device of the workers; auto is cuda where there is one.", choices=("auto", "cpu", "cuda")
    )
    call_timeout_s: float = setting(
        3600.0,
        "Longest wait for one call of workers, in seconds: a step's generation, a validation, an update, a save.",
        gt=0,
    )
    colocate: str = setting(
        "process", "Roles on one device share a process, or only the device.", choices=("process", "device")
    )
    num_threads: int | None = setting(
        None, "CPU threads per worker process; null means cores divided by workers.", ge=1
    )
    seed: int = setting(1, "Seed of everything but the order of prompts.", ge=0)
    balance_batch: bool = setting(True, "Give every rank about the same number of tokens.")
    overlap: bool = setting(
        True, "Run stages side by side that do not need each other's columns or devices; results are the same."
    )
    lag: int = setting(
        0, "Batches that are generated ahead, each by weights that many versions old; 0 is synchronous.", ge=0
    )
    partial_rollout: bool = setting(
        False, "With lag 2 or more: give a batch a share of its tokens from each version's weights."
    )
    staleness: int | None = setting(
        None, "Largest age in versions of a token that is trained on; null means lag.", ge=0
    )
    stale_tokens: str = setting(
        "wait", "Keep within staleness by running less ahead, or by dropping tokens.", choices=("wait", "drop")
    )
    replay: ReplayConfig = section(ReplayConfig, "Samples used again, up to trainer.staleness versions old.")
    middleware: list[str] = setting(
        [], "Functions path.py:fn that change the stages of the loop; see docs/framework.md."
    )
    critic_warmup: int = setting(0, "Steps that train only the critic.", ge=0)
    val_before_train: bool = setting(True, "Validate before the first step.")
    val_only: bool = setting(False, "Validate and stop.")
    test_freq: int = setting(-1, "Validate every so many steps and at the end; -1 means never.", ge=-1)
    eval_n_gpus: int = setting(
        0, "Processes of their own that validate beside training; 0: the rollout validates, training waits.", ge=0
    )
    save_freq: int = setting(-1, "Commit a checkpoint every so many steps and at the end; -1 means never.", ge=-1)
    max_ckpt_to_keep: int | None = setting(None, "Checkpoints kept; null means all.", ge=1)
    save_failure: str = setting(
        "continue",
        "When storage does not take a checkpoint (full, not writable, slow): train on and try again at "
        "the next one, or stop.",
        choices=("continue", "stop"),
    )
    nonfinite: str = setting(
        "skip",
        "An update whose loss or gradient is NaN or infinite is never applied: go on without it, go back "
        "to the last commit, or stop.",
        choices=("skip", "rollback", "stop"),
    )
    grace_s: float = setting(
        120.0,
        "SIGTERM: finish the step, commit and leave within so many seconds; leave without it where that takes longer.",
        gt=0,
    )
    snapshot_freq: int = setting(
        1,
        "Steps from one snapshot in memory to the next, from which a run goes on when it loses a process; "
        "0: none, it ends.",
        ge=0,
    )
    default_local_dir: str | None = setting(
        None, "Where the run writes; null means checkpoints/{project}/{experiment}."
    )
    resume_mode: str = setting(
        "auto",
        "Continue from the newest commit, start anew, or continue from resume_from_path.",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(None, "The global_step_N directory for resume_mode=resume_path.")
    logger: list[str] = setting(["console", "jsonl"], "Where metrics go.", choices=LOGGERS)
    trace: bool = setting(
        False, "Record when every stage, worker call and wait began and ended; `hybridrl trace` makes a timeline of it."
    )
    rollout_data_dir: str | None = setting(None, "Write every step's rollouts there as JSONL.")
    validation_data_dir: str | None = setting(None, "Write every validation's samples there as JSONL.")
