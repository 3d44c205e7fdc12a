#!/usr/bin/env bash
# A tiny model learns to write functions from descriptions: its programs run in a sandbox, and tests give the reward.
# Supervised fine-tuning on imperfect demonstrations teaches programs that run. GRPO then teaches the right ones.
# It ends with the held-out share of right programs before and after reinforcement learning.
#
#   bash examples/code_task/run.sh [directory]
set -euo pipefail
OUT=${1:-outputs/code_task}
SEED=${SEED:-1}
SFT_STEPS=${SFT_STEPS:-300}
STEPS=${STEPS:-25}
BATCH=${BATCH:-16}
BACKEND=${BACKEND:-ray}
PYTHON=${PYTHON:-python3}

mkdir -p "$OUT"
$PYTHON -m examples.code_task.make_data --local_dir "$OUT/data" --seed "$SEED" --num_test "${NUM_TEST:-100}"
$PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/data/sft_train.parquet" \
  data.train_batch_size=64 \
  data.max_length=80 \
  model.path="$OUT/model" \
  optim.lr=3e-3 \
  optim.lr_scheduler_type=cosine \
  optim.lr_warmup_steps=$((SFT_STEPS / 10)) \
  optim.betas=[0.9,0.95] \
  trainer.total_training_steps="$SFT_STEPS" \
  trainer.save_freq="$SFT_STEPS" \
  trainer.logger=[console,jsonl] \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/sft"
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size="$BATCH" \
  data.max_prompt_length=48 \
  data.max_response_length=40 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$OUT/sft/global_step_$SFT_STEPS/huggingface" \
  actor_rollout_ref.actor.optim.lr=5e-4 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.ppo_mini_batch_size="$BATCH" \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=8 \
  trainer.total_training_steps="$STEPS" \
  trainer.test_freq="$STEPS" \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/grpo"
