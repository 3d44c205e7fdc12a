#!/usr/bin/env bash
# A real model learns on two cores: SmolLM2-135M-Instruct, word problems in its own chat template, GRPO.
# It ends with answers and held-out accuracy before and after, the minutes, and a picture of the run.
#
#   bash examples/smollm/run.sh [directory] [settings...]      SEED=2 bash examples/smollm/run.sh    another seed
# Needs `pip install 'hybridrl[gguf]'`, for the picture matplotlib, and 12 GB of memory. BACKEND=ray runs on Ray.
set -euo pipefail
SEED=${SEED:-1}
OUT=${1:-outputs/smollm/seed$SEED}
BACKEND=${BACKEND:-local}
PYTHON=${PYTHON:-python3}
export PYTHON

MODEL=${MODEL:-$(bash examples/smollm/get_model.sh)}
DTYPE=${DTYPE:-$($PYTHON -c 'from hybridrl.planning.machine import this_machine as here; print("bfloat16" if here().gpus or here().bfloat16 else "float32")')}
mkdir -p "$OUT"
[ -f "$OUT/data/train.parquet" ] || $PYTHON -m examples.smollm.make_data --local_dir "$OUT/data" --seed "$SEED"

SECONDS=0
echo "== reinforcement learning: 40 steps"
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=8 \
  data.max_prompt_length=80 \
  data.max_response_length=48 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
  actor_rollout_ref.actor.use_prefix_grouper=true \
  actor_rollout_ref.actor.fsdp_config.dtype="$DTYPE" \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype="$DTYPE" \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=0.6 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
  actor_rollout_ref.rollout.val_kwargs.n=2 \
  custom_reward_function.path=examples/smollm/reward.py \
  trainer.total_training_steps=40 \
  trainer.test_freq=20 \
  trainer.save_freq=20 \
  trainer.max_ckpt_to_keep=1 \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.validation_data_dir="$OUT/grpo/validation" \
  trainer.seed="$SEED" \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/grpo" \
  "${@:2}"
echo "== it took $((SECONDS / 60)):$(printf '%02d' $((SECONDS % 60))) minutes"
PYTHONPATH=. $PYTHON benchmarks/learning_curve.py "$OUT/grpo" --out "$OUT/learning_curve.png"
