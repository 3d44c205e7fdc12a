#!/usr/bin/env bash
# Pictures from nothing: a tiny vision-language model with random weights, drawn shapes, GRPO from rule rewards.
# It ends with the held-out accuracy, and with that for pictures which were swapped between rows: chance is 0.25.
#
#   bash examples/vision/run.sh [directory]      FAMILY=qwen2_5_vl bash examples/vision/run.sh    another family
# BACKEND=ray runs on Ray, with the same numbers.
set -euo pipefail
OUT=${1:-outputs/vision}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
rm -rf "$OUT"/{data,model,grpo}
$PYTHON -m examples.vision.make_data --out "$OUT/data" --kinds ${KINDS:-colour count}
$PYTHON -m examples.vision.build_model --out "$OUT/model" --family "${FAMILY:-qwen3_vl}"
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="[$OUT/data/test.parquet,$OUT/data/swapped.parquet]" \
  data.train_batch_size=32 \
  data.max_prompt_length=32 \
  data.max_response_length=1 \
  actor_rollout_ref.model.path="$OUT/model" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.actor.use_prefix_grouper=true \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.optim.lr=2e-3 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=16 \
  custom_reward_function.path=examples/vision/make_data.py \
  trainer.backend="${BACKEND:-local}" \
  trainer.num_threads=1 \
  trainer.total_training_steps="${STEPS:-400}" \
  trainer.test_freq=100 \
  trainer.logger=[console,jsonl] \
  trainer.default_local_dir="$OUT/grpo"
