#!/usr/bin/env bash
# The quick start by FSDP on two data-parallel processes, and by Megatron-core on two tensor-parallel ones, with a plot of both.
# Both generate with vLLM and use the same model, data and seed.
#
#   bash examples/megatron/run.sh [directory]      STEPS=20 bash examples/megatron/run.sh      fewer steps of reinforcement learning
set -euo pipefail
OUT=${1:-outputs/megatron}
SEED=${SEED:-1}
STEPS=${STEPS:-40}
PYTHON=${PYTHON:-python3}
export HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=1

MADE_HERE="$OUT/.made_by_this_example"
if [ -d "$OUT" ] && [ -n "$(ls -A "$OUT")" ] && [ ! -e "$MADE_HERE" ]; then
  echo "$OUT is not empty and was not made by this example; name a new directory" >&2
  exit 1
fi
mkdir -p "$OUT"
touch "$MADE_HERE"
SFT="$OUT/sft/global_step_500/huggingface"
if [ ! -d "$SFT" ]; then # reused: another run needs only the second half
  rm -rf "$OUT"/{data,model,sft}
  $PYTHON -m data_preprocess.arithmetic --local_dir "$OUT/data" --seed "$SEED"
  # The quick start's own model has three heads, which two processes cannot share; this one has four.
  $PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED" --heads 4
  echo "== supervised fine-tuning: 500 steps, about two minutes"
  $PYTHON -m hybridrl.main_sft \
    data.train_files="$OUT/data/sft_train.parquet" \
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
    trainer.logger=[console,jsonl] \
    trainer.seed="$SEED" \
    trainer.num_threads=1 \
    trainer.default_local_dir="$OUT/sft"
fi

grpo() { # name of the run, then its own settings
  local name=$1
  shift
  rm -rf "${OUT:?}/$name"
  echo "== GRPO by $name: $STEPS steps"
  $PYTHON -m hybridrl.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$OUT/data/train.parquet" \
    data.val_files="$OUT/data/test.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=64 \
    data.max_response_length=26 \
    data.seed="$SEED" \
    actor_rollout_ref.model.path="$SFT" \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.kv_cache_memory_mb=32 \
    trainer.backend=ray \
    trainer.n_gpus_per_node=2 \
    trainer.total_training_steps="$STEPS" \
    trainer.test_freq=4 \
    trainer.logger=[console,jsonl] \
    trainer.seed="$SEED" \
    trainer.num_threads=1 \
    trainer.default_local_dir="$OUT/$name" \
    "$@"
}
grpo fsdp
grpo megatron actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
$PYTHON -m examples.megatron.compare "$OUT/fsdp" "$OUT/megatron" --out "$OUT/curves.png"
