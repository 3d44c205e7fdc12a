"""The runs that blind drills harm: tiny, real, on Ray, each with a cluster of its own."""

import hashlib
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hybridrl.trainer.checkpoint.ledger_audit import PromptCount, audit
from hybridrl.trainer.checkpoint.step_ledger import FILE as LEDGER_FILE
from hybridrl.trainer.checkpoint.step_ledger import read_ledger
from tests.support.chaos.machines import can_simulate
from tests.support.end_to_end.runs import settings, weights

ROOT = Path(__file__).parents[3]
STEPS = 16
NUM_MACHINES = {"nodes": 3}  # kind of run -> simulated machines of its cluster
ON_RAY = {
    "trainer__backend": "ray",
    "trainer__master": True,
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 3,
    "trainer__test_freq": -1,
    "trainer__val_before_train": False,
    "trainer__logger": "[console,jsonl]",
    "actor_rollout_ref__actor__shuffle": True,
}
CRITIC = {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True}
ROLLOUT = "actor_rollout_ref__rollout__"
SEPARATED = {"trainer__n_gpus_per_node": 1, f"{ROLLOUT}n_gpus_per_node": 2}
AHEAD = {"trainer__lag": 2, "trainer__partial_rollout": True, f"{ROLLOUT}mode": "async"}
CHANGES = {
    "ppo": CRITIC | {"trainer__n_gpus_per_node": 2, "trainer__colocate": "device"},
    "lag": SEPARATED | AHEAD,
    "async": SEPARATED | {"trainer__lag": 1, f"{ROLLOUT}mode": "async", f"{ROLLOUT}ignore_eos": True},
    "megatron": {
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__actor__strategy": "megatron",
        "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
    },
}
CHANGES["lag 4"] = SEPARATED | AHEAD | {"trainer__lag": 4}
CHANGES["dynamic"] = {"algorithm__filter_groups__enable": True, "data__gen_batch_size": 5}
CHANGES["tail"] = {
    f"{ROLLOUT}mode": "async",
    "algorithm__filter_groups__order": "tail_batching",
    "data__gen_batch_size": 6,
    f"{ROLLOUT}stop_token_ids": [*range(60, 100)],  # lengths differ: a token in ten or so ends a response
}
CHANGES["replay"] = {
    "trainer__replay__groups": 2,
    "trainer__staleness": 3,
    "algorithm__rollout_correction__rollout_is": "token",
    f"{ROLLOUT}calculate_log_probs": True,
}
CHANGES["nodes"] = {"trainer__n_gpus_per_node": 1, "trainer__nnodes": 2}  # one machine is spare
SFT_ROWS = 10
JOB_ARGUMENTS = ["--rollout_batch_size", "32", "--train_batch_size", "16", "--hidden_size", "32"]


def available_kinds() -> list[str]:
    """Return the kinds of runs that this machine can do."""
    others = {"megatron": find_spec("megatron") is not None, "nodes": can_simulate()}
    always = ("ppo", "lag", "lag 4", "async", "dynamic", "tail", "replay", "sft", "job")
    return [*always, *(kind for kind, is_possible in others.items() if is_possible)]


def make_model(folder: Path) -> Path:
    """Write the tiny model of the tests, with two key-value heads, so that two processes can share its attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.conftest import make_tiny_qwen2

    make_tiny_qwen2(folder)
    config = AutoConfig.from_pretrained(folder, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def command(kind: str, folder: Path, model: Path) -> list[str]:
    """Return the command of a run, and write its data into `folder`. The run writes into `folder/disk`."""
    run = folder / "disk" / "run"
    if kind == "job":
        program = [sys.executable, "-m", "examples.openrlhf_ppo.main", "--num_steps", str(STEPS), *JOB_ARGUMENTS]
        return [*program, "--save_path", str(run), "--journal", str(folder / "disk" / "journal")]
    if kind == "sft":
        return [sys.executable, "-m", "hybridrl.main_sft", *_sft_settings(folder, model, run)]
    changes = {**ON_RAY, **CHANGES[kind], "trainer__default_local_dir": run}
    return [sys.executable, "-m", "hybridrl.main_ppo", *settings(folder, model, **changes)]


def _sft_settings(folder: Path, model: Path, run: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How much is {i} and 2?"},
                {"role": "assistant", "content": f"#### {i + 2}"},
            ]
        }
        for i in range(SFT_ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")
    values = {
        "data.train_files": folder / "sft.parquet",
        "data.train_batch_size": 4,
        "data.max_length": 96,
        "model.path": model,
        "optim.lr": 3e-3,
        "trainer.backend": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 3,
        "trainer.logger": "[console,jsonl]",
        "trainer.default_local_dir": run,
    }
    return [f"{key}={value}" for key, value in values.items()]


def prompt_count(run: Path) -> PromptCount | None:
    """Return what became of the prompts of a run, None if it has no step ledger."""
    path = run / LEDGER_FILE
    return audit(read_ledger(str(path))).prompt_count() if path.exists() else None


def digest(kind: str, run: Path) -> str:
    """Return the committed step and a hash of the parameters at the end of a run.

    A sentence if there is no end.
    """
    end = run / f"global_step_{STEPS}"
    if not end.is_dir():
        return f"{STEPS} steps were not committed, only {sorted(path.name for path in run.glob('global_step_*'))}"
    return f"step {STEPS}, {_hash(kind, end)}"


def _hash(kind: str, end: Path) -> str:
    import torch
    from safetensors.torch import load_file

    if kind == "job":
        tensors = {}
        for role in ("actor", "critic"):
            tensors |= _flat(torch.load(end / role / "rank_0.pt", weights_only=False), role)
    elif kind == "sft":
        tensors = load_file(end / "huggingface" / "model.safetensors")
    else:
        with tempfile.TemporaryDirectory() as folder:
            tensors = weights(end, Path(folder) / "hf")
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes() if tensors[name].ndim else b"")
        whole.update(str(tensors[name].tolist()).encode() if not tensors[name].ndim else b"")
    return whole.hexdigest()[:16]


def _flat(value: object, name: str) -> dict:
    """Return the tensors in nested dictionaries and lists by their path."""
    import torch

    if isinstance(value, torch.Tensor):
        return {name: value.detach()}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: tensor for part, inner in items for key, tensor in _flat(inner, f"{name}.{part}").items()}
