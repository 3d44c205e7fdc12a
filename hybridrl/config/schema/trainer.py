"""Settings of the driver: duration, machines, checkpoints, recovery, logging."""

from dataclasses import dataclass

from hybridrl.config.fields import MAX_NODES, MAX_SEED, MAX_SLOTS, plug, section, setting
from hybridrl.config.plugs import TRACKERS


@dataclass(frozen=True)
class ReplayConfig:
    groups: int = setting(
        0, "Groups (the samples of one prompt) from earlier steps that are added to every batch; 0 means none.", ge=0
    )
    size: int = setting(1024, "Capacity in groups; the oldest are dropped.", ge=1)
    max_uses: int = setting(1, "How often a group may be replayed.", ge=1)


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str = setting("hybridrl", "Project under which runs are recorded.")
    experiment_name: str = setting("run", "Name of this run.")
    total_epochs: int = setting(1, "Passes over the training data.", ge=1)
    total_training_steps: int | None = setting(None, "Steps of the whole run; null means total_epochs of data.", ge=1)
    nnodes: int = setting(1, "Number of machines.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = setting(
        1, "Worker processes per machine, each with one device (a CPU slot without GPUs).", ge=1, le=MAX_SLOTS
    )
    min_ranks: int = setting(
        0,
        "Go on with at least so many worker processes while machines are missing, and take the others back when they "
        "return; 0: never with fewer.",
        ge=0,
    )
    placement_timeout_s: float = setting(
        90.0,
        "Seconds in which processes of a lost machine must find another one; then the run goes on with fewer "
        "(min_ranks), or ends.",
        gt=0,
    )
    backend: str = setting(
        "ray",
        "Run workers on Ray, or in this process (local: one process, no Ray, pdb works).",
        choices=("ray", "local"),
    )
    master: bool = setting(
        True,
        "On Ray, run a master that detects dead, frozen and hanging workers (`hybridrl job status`), and restart a "
        "lost driver.",
    )
    device: str = setting(
        "auto", "Device of the workers; auto is cuda where there is one.", choices=("auto", "cpu", "cuda")
    )
    call_timeout_s: float = setting(
        3600.0,
        "Timeout of one worker-group call in seconds, such as a step's generation or an update; collectives wait twice "
        "as long.",
        gt=0,
    )
    colocate: str = setting(
        "process", "Roles on one device share a process, or only the device.", choices=("process", "device")
    )
    num_threads: int | None = setting(
        None, "CPU threads per worker process; null means cores divided by workers.", ge=1, le=1024
    )
    seed: int = setting(1, "Seed of everything but the order of prompts.", ge=0, le=MAX_SEED)
    balance_batch: bool = setting(True, "Give every rank about the same number of tokens.")
    overlap: bool = setting(
        True,
        "Scoring and the critic's update run beside stages that need neither their columns nor their devices; results "
        "are the same.",
    )
    lag: int = setting(
        0, "Number of batches generated ahead, and age of their weights in versions; 0 is synchronous.", ge=0
    )
    partial_rollout: bool = setting(
        False,
        "With lag 2 or more and rollout.mode=async: generate each batch in parts, one by each version of the weights.",
    )
    staleness: int | None = setting(None, "Maximum age of a trained token, in weight versions; null means lag.", ge=0)
    stale_tokens: str = setting(
        "wait",
        "Stay within staleness by generating fewer batches ahead (wait), or by dropping tokens.",
        choices=("wait", "drop"),
    )
    parity_limit: float | str = setting(
        "auto",
        "Largest mean difference between log-probs of rollout and trainer for a few tokens before step 1; above, the "
        "run stops. auto: 1e-4 in float32 (1e-3 on CUDA), 0.08 with 16 bits, 0.3 quantised; off: no check.",
    )
    parity_freq: int = setting(50, "Repeat this check every so many pushes; 0 means never.", ge=0)
    replay: ReplayConfig = section(ReplayConfig, "Replay of samples that are up to trainer.staleness versions old.")
    middleware: list[str] = setting(
        [], "Functions path.py:fn of (task, trainer) that change the loop's stages; see examples/middleware.py."
    )
    critic_warmup: int = setting(0, "Steps that train only the critic.", ge=0)
    val_before_train: bool = setting(True, "Validate before the first step.")
    val_only: bool = setting(False, "Validate and stop.")
    test_freq: int = setting(-1, "Validate every so many steps and at the end; -1 means never.", ge=-1)
    eval_n_gpus: int = setting(
        0,
        "Dedicated processes that validate concurrently with training; 0: the rollout validates and training waits.",
        ge=0,
        le=MAX_SLOTS,
    )
    save_freq: int = setting(-1, "Commit a checkpoint every so many steps and at the end; -1 means never.", ge=-1)
    max_ckpt_to_keep: int | None = setting(None, "Checkpoints kept; null means all.", ge=1)
    save_failure: str = setting(
        "continue",
        "If a checkpoint cannot be stored (disk full, not writable, slow): continue and retry at the next one, or "
        "stop.",
        choices=("continue", "stop"),
    )
    nonfinite: str = setting(
        "skip",
        "After an update with a NaN or infinite loss or gradient, which is never applied: continue (skip), return "
        "to the newest checkpoint, or stop.",
        choices=("skip", "rollback", "stop"),
    )
    grace_s: float = setting(
        120.0,
        "After SIGTERM or Ctrl-C: seconds to finish the step, commit a checkpoint and exit; if they are too few, exit "
        "without it.",
        gt=0,
    )
    snapshot_freq: int = setting(
        1,
        "Steps between two in-memory snapshots, from which a run recovers when it loses a process; at least "
        "trainer.lag. 0: none, the run ends.",
        ge=0,
    )
    record_steps: list[str] | None = setting(
        None,
        "Steps that are kept in recorded/ for `hybridrl replay`: numbers, first, last, nonfinite (a NaN, or a skipped "
        "update), spike (of the mean score), refused (a check ended the run); null: the last three, with backend=ray.",
    )
    record_max_gb: float = setting(
        20.0, "Limit of recorded/ in GB; a step that would exceed it is not kept, and that is logged.", ge=0
    )
    default_local_dir: str | None = setting(
        None, "Output directory of the run; null means checkpoints/{project}/{experiment}."
    )
    resume_mode: str = setting(
        "auto",
        "Resume from the newest checkpoint, start a new run, or resume from resume_from_path.",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(None, "The global_step_N directory for resume_mode=resume_path.")
    logger: list[str] = plug(["console", "jsonl"], "Where metrics go.", TRACKERS)
    trace: bool = setting(
        False, "Record start and end of every stage, worker call and wait; `hybridrl trace` makes a timeline of them."
    )
    page_port: int | None = setting(
        None,
        "Port of this machine at which the web page about the run is served while it runs (`hybridrl view`), on "
        "loopback; 0: any free one.",
        ge=0,
        le=65535,
    )
    rollout_data_dir: str | None = setting(
        None,
        "Write every step's rollouts there as JSONL, also those that algorithm.filter_groups drops; and of some "
        "the tokens. null: with jsonl in trainer.logger a few samples of each step, in the run's directory.",
    )
    validation_data_dir: str | None = setting(None, "Write every validation's samples there as JSONL.")

    @property
    def rollout_lag(self) -> int:
        """By how many steps generation is ahead: `lag`, unless `staleness` rejects older responses."""
        return self.lag if self.staleness is None or self.stale_tokens == "drop" else min(self.lag, self.staleness)

    @property
    def recorded_kinds(self) -> tuple[str, ...]:
        """The kinds and numbers of the steps that are kept for `hybridrl replay`."""
        own = ("nonfinite", "spike", "refused") if self.backend == "ray" else ()
        return own if self.record_steps is None else tuple(self.record_steps)
