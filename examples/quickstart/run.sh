#!/usr/bin/env bash
# The quick start: word problems, a new tiny model, SFT on imperfect demonstrations, then GRPO.
# It ends with the held-out accuracy before and after reinforcement learning, and the minutes of SFT and GRPO.
#
#   bash examples/quickstart/run.sh [directory]      SEED=2 bash examples/quickstart/run.sh    another seed
# UNTIL=sft ends after supervised fine-tuning; BACKEND=local runs without Ray, with the same numbers.
# FAMILY=qwen3_5_text or gpt_oss makes a model of that family. What follows the directory are settings of GRPO:
#   FAMILY=gpt_oss bash examples/quickstart/run.sh outputs/gpt_oss actor_rollout_ref.actor.router_replay.mode=R2
set -euo pipefail
OUT=${1:-outputs/quickstart}
SETTINGS=("${@:2}")
SEED=${SEED:-1}
BACKEND=${BACKEND:-ray}
PYTHON=${PYTHON:-python3}
export HF_HUB_DISABLE_PROGRESS_BARS=1

MADE_HERE="$OUT/.made_by_the_quick_start"
if [ -d "$OUT" ] && [ -n "$(ls -A "$OUT")" ] && [ ! -e "$MADE_HERE" ]; then
  echo "$OUT is not empty and was not made by the quick start; name a new directory" >&2
  exit 1
fi
if [ -d "$OUT/grpo" ]; then
  echo "== an earlier quick start in $OUT is moved to $OUT.earlier (replacing it)"
  rm -rf "$OUT.earlier"
  mv "$OUT" "$OUT.earlier"
fi
mkdir -p "$OUT"
touch "$MADE_HERE"
rm -rf "$OUT"/{data,model,sft,grpo}
$PYTHON -m data_preprocess.arithmetic --local_dir "$OUT/data" --seed "$SEED"
$PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED" --family "${FAMILY:-qwen2}"

minutes() { printf '%d:%02d minutes' $(($1 / 60)) $(($1 % 60)); }
SECONDS=0
echo "== supervised fine-tuning on imperfect demonstrations: 500 steps, about two minutes"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/data/sft_train.parquet" \
  data.val_files="$OUT/data/sft_val.parquet" \
  data.train_batch_size=64 \
  data.max_length=96 \
  data.seed="$SEED" \
  model.path="$OUT/model" \
  optim.lr=3e-3 \
  optim.lr_scheduler_type=cosine \
  optim.lr_warmup_steps=50 \
  optim.betas=[0.9,0.95] \
  trainer.total_training_steps=500 \
  trainer.save_freq=500 \
  trainer.test_freq=500 \
  trainer.logger=[console,jsonl,tensorboard] \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/sft"

SFT_SECONDS=$SECONDS
echo "== supervised fine-tuning took $(minutes "$SFT_SECONDS")"
[ "${UNTIL:-}" != sft ] || exit 0
echo "== reinforcement learning from the exact-match reward alone: 100 steps, about a minute"
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
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
  actor_rollout_ref.actor.use_prefix_grouper=true \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=8 \
  trainer.total_training_steps=100 \
  trainer.test_freq=25 \
  trainer.save_freq=50 \
  trainer.max_ckpt_to_keep=2 \
  trainer.logger=[console,jsonl,tensorboard] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.validation_data_dir="$OUT/grpo/validation" \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/grpo" \
  "${SETTINGS[@]}"
echo "== supervised fine-tuning took $(minutes "$SFT_SECONDS"), reinforcement learning $(minutes $((SECONDS - SFT_SECONDS)))"
