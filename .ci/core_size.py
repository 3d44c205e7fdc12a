"""Print the size of the core: the code that `main_ppo` loads for a run with trainer.backend=local.

    python .ci/core_size.py

Trains a tiny model for one step in a process of its own. Then counts the lines of every loaded module of `hybridrl`
without blank lines, comments, docstrings and imports. Exits with 1 above `core_lines` of `limits.toml`, or if an
optional room was loaded.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.source.counts import code_lines, compared, limits_of  # noqa: E402 - the path must be set before

LIMITS = Path(__file__).with_name("limits.toml")
OPTIONAL_ROOMS = (
    "hybridrl.algos.advantages.rejection",
    "hybridrl.algos.advantages.temporal",
    "hybridrl.algos.advantages.token_baseline",
    "hybridrl.algos.policy_losses.bypass",
    "hybridrl.algos.policy_losses.covariance",
    "hybridrl.algos.policy_losses.smooth",
    "hybridrl.algos.policy_losses.weighted",
    "hybridrl.algos.reward_moments",
    "hybridrl.algos.rollout_correction.rejection",
    "hybridrl.algos.sample_selection",
    "hybridrl.cli",
    "hybridrl.config.checks.generation",
    "hybridrl.config.checks.megatron",
    "hybridrl.config.checks.preference",
    "hybridrl.config.checks.sampling",
    "hybridrl.config.reference",
    "hybridrl.config.schema.generation",
    "hybridrl.config.schema.preference",
    "hybridrl.config.unknown_keys",
    "hybridrl.driver.cluster.ray_cluster",
    "hybridrl.driver.resume_command",
    "hybridrl.driver.supervisor",
    "hybridrl.evaluation",
    "hybridrl.failure_policy",
    "hybridrl.framework.graph.timeline",
    "hybridrl.framework.parallel",
    "hybridrl.master.health",
    "hybridrl.master.jobs",
    "hybridrl.master.plan",
    "hybridrl.master.service",
    "hybridrl.master.state",
    "hybridrl.serving",
    "hybridrl.single_controller.awaiting",
    "hybridrl.single_controller.launch",
    "hybridrl.single_controller.monitoring.heartbeat_client",
    "hybridrl.single_controller.placement.resource_pool",
    "hybridrl.single_controller.processes",
    "hybridrl.single_controller.ray_worker_group",
    "hybridrl.trainer.data.other_sources",
    "hybridrl.trainer.ppo.distillation",
    "hybridrl.trainer.ppo.extra_rewards",
    "hybridrl.trainer.ppo.policy.cross_process_sync",
    "hybridrl.trainer.ppo.sampling.branches",
    "hybridrl.trainer.ppo.sampling.group_filter",
    "hybridrl.trainer.ppo.sampling.tail_batching",
    "hybridrl.trainer.ppo.token_record",
    "hybridrl.trainer.recovery.elastic",
    "hybridrl.trainer.recovery.master_link",
    "hybridrl.trainer.recovery.nonfinite",
    "hybridrl.trainer.recovery.snapshots",
    "hybridrl.trainer.recovery.step_retry",
    "hybridrl.trainer.run.column_check",
    "hybridrl.trainer.run.page",
    "hybridrl.trainer.run.tensorboard",
    "hybridrl.trainer.run.tracking_services",
    "hybridrl.trainer.supervised",
    "hybridrl.view",
    "hybridrl.workers.critic",
    "hybridrl.workers.engine.lora",
    "hybridrl.workers.engine.megatron",
    "hybridrl.workers.engine.memory_plan",
    "hybridrl.workers.engine.snapshot",
    "hybridrl.workers.engine.export",
    "hybridrl.workers.preference",
    "hybridrl.workers.reward_model",
    "hybridrl.workers.rollout.request_engine",
    "hybridrl.workers.rollout.sampling.logits",
    "hybridrl.workers.rollout.vllm",
)


RUN = """
import json, sys
from hybridrl.main_ppo import main
code = main(sys.argv[2:])
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "hybridrl"}
json.dump(loaded, open(sys.argv[1], "w"))
sys.exit(code)
"""


def loaded_modules(folder: Path) -> dict[str, Path]:
    """Return module name -> file of every module of hybridrl that a local run of one step loads."""
    from hybridrl.trainer.run.setup import CHECK_VARIABLE
    from tests.conftest import make_tiny_qwen2
    from tests.support.end_to_end.runs import settings

    plain: dict[str, object] = {"reward_model.num_processes": "null", "trainer.total_training_steps": 1}
    words = settings(folder, make_tiny_qwen2(folder / "model"), **plain)
    command = [sys.executable, "-c", RUN, str(folder / "loaded.json"), *words]
    user = {name: value for name, value in os.environ.items() if name != CHECK_VARIABLE}  # the tests set it
    done = subprocess.run(command, cwd=ROOT, env=user, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"the run failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    loaded = json.loads((folder / "loaded.json").read_text())
    return {name: Path(file) for name, file in sorted(loaded.items()) if file}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        modules = loaded_modules(Path(folder))
    per_room: Counter[str] = Counter()
    for name, file in modules.items():
        per_room[name.split(".")[1] if "." in name else "hybridrl"] += code_lines(
            file.read_text(encoding="utf-8"), with_imports=False
        )
    for room, lines in per_room.most_common():
        sys.stdout.write(f"{room:<20}{lines:>7,}\n")
    limits = limits_of(tomllib.loads(LIMITS.read_text(encoding="utf-8")))
    lines, fits = compared({"core_lines": sum(per_room.values())}, limits)
    sys.stdout.write(f"{lines[0]}\nmodules loaded: {len(modules)}\n")
    extra = sorted({room for name in modules for room in OPTIONAL_ROOMS if (name + ".").startswith(room + ".")})
    sys.stdout.write(f"optional rooms loaded: {', '.join(extra) or 'none'}\n")
    return 0 if fits and not extra else 1


if __name__ == "__main__":
    sys.exit(main())
