#!/usr/bin/env bash
# The quick start's word problems with a calculator: the model writes `<<3*4=`, a tool appends `12>>`, the model continues.
# Supervised fine-tuning teaches the format. GRPO then teaches which calculation the words ask for, from the answer's score alone.
#
#   bash examples/calculator_tool/run.sh [directory]
set -euo pipefail
OUT=${1:-outputs/calculator_tool}
SEED=${SEED:-1}
STEPS=${STEPS:-40}
PYTHON=${PYTHON:-python3}
HERE=$(dirname "$0")

mkdir -p "$OUT"
$PYTHON -m data_preprocess.arithmetic --local_dir "$OUT/data" --seed "$SEED"
$PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/data/sft_train.parquet" \
  data.train_batch_size=64 \
  data.max_length=96 \
  model.path="$OUT/model" \
  optim.lr=3e-3 \
  optim.lr_scheduler_type=cosine \
  optim.lr_warmup_steps=50 \
  optim.betas=[0.9,0.95] \
  trainer.total_training_steps=500 \
  trainer.save_freq=500 \
  trainer.logger=[console,jsonl] \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.default_local_dir="$OUT/sft"
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=64 \
  data.max_response_length=26 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$OUT/sft/global_step_500/huggingface" \
  actor_rollout_ref.actor.optim.lr=3e-4 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.agent.path="$HERE/calculator.py" \
  actor_rollout_ref.rollout.agent.default_agent_loop=calculator \
  actor_rollout_ref.rollout.multi_turn.function_tool_path="$HERE/calculator.py" \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
  trainer.total_training_steps="$STEPS" \
  trainer.test_freq=20 \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.default_local_dir="$OUT/grpo"
