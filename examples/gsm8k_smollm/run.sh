#!/usr/bin/env bash
# GSM8K with SmolLM2-135M-Instruct: SFT with LoRA, then GRPO; avg@8 and pass@k of the model, after SFT and after GRPO.
# The model answers almost none of the questions at first. On two cores this takes hours; it resumes where it was stopped.
# The learning rate of SFT is that of the model's own (huggingface/alignment-handbook, recipes/smollm2/sft/config_smol.yaml).
#
#   RAW=DIRECTORY bash examples/gsm8k_smollm/run.sh [directory] [settings of GRPO...]
# RAW has gsm8k_train.jsonl and gsm8k_test.jsonl; without it the Hugging Face hub is asked. A small trial of every command:
#   SFT_STEPS=2 STEPS=2 QUESTIONS=4 SAMPLES=2 RAW=... bash examples/gsm8k_smollm/run.sh outputs/trial \
#     data.train_batch_size=2 actor_rollout_ref.actor.ppo_mini_batch_size=2
set -euo pipefail
OUT=${1:-outputs/gsm8k_smollm}
RAW=${RAW:-openai/gsm8k}
SFT_STEPS=${SFT_STEPS:-460} # one pass in batches of 16
STEPS=${STEPS:-400}
QUESTIONS=${QUESTIONS:-256} # of the test split, measured three times
SAMPLES=${SAMPLES:-8}
SEED=${SEED:-1}
PYTHON=${PYTHON:-python3}
export PYTHON

MODEL=${MODEL:-$(bash examples/smollm/get_model.sh)}
DTYPE=${DTYPE:-$($PYTHON -c 'from hybridrl.planning.machine import this_machine as here; print("bfloat16" if here().gpus or here().bfloat16 else "float32")')}
[ -f "$OUT/data/test.parquet" ] || $PYTHON -m data_preprocess.gsm8k --data_source "$RAW" --local_dir "$OUT/data"
[ -f "$OUT/data/sft_train.parquet" ] || $PYTHON -m examples.gsm8k_smollm.make_sft_data --data "$OUT/data"

measure() { # name, model
  ! compgen -G "$OUT/eval_$1/samples/*.jsonl" >/dev/null || return 0
  echo "== $SAMPLES answers to each of $QUESTIONS questions of the test split: $1"
  $PYTHON -m hybridrl.cli eval "$OUT/data/test.parquet" "$2" --n "$SAMPLES" --output "$OUT/eval_$1" \
    data.val_max_samples="$QUESTIONS" \
    data.max_prompt_length=320 \
    data.max_response_length=200 \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.rollout.dtype="$DTYPE" \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    trainer.num_threads="$(nproc)" | tee "$OUT/eval_$1.txt"
}

measure model "$MODEL"
echo "== supervised fine-tuning of adapters on the solutions: $SFT_STEPS steps"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/data/sft_train.parquet" \
  data.val_files="$OUT/data/sft_val.parquet" \
  data.train_batch_size=16 \
  data.max_length=512 \
  data.truncation=filter \
  data.max_token_len_per_gpu=2048 \
  data.seed="$SEED" \
  model.path="$MODEL" \
  model.use_remove_padding=true \
  model.lora_rank=16 \
  model.lora_alpha=32 \
  optim.lr=1e-3 \
  optim.lr_scheduler_type=cosine \
  optim.lr_warmup_steps_ratio=0.03 \
  fsdp_config.dtype="$DTYPE" \
  trainer.total_epochs=8 \
  trainer.total_training_steps="$SFT_STEPS" \
  trainer.save_freq=100 \
  trainer.max_ckpt_to_keep=1 \
  trainer.test_freq="$SFT_STEPS" \
  trainer.logger=[console,jsonl] \
  trainer.seed="$SEED" \
  trainer.backend=local \
  trainer.default_local_dir="$OUT/sft"
TUNED="$OUT/sft/global_step_$SFT_STEPS/huggingface"
measure sft "$TUNED"
echo "== reinforcement learning from the exact-match reward: $STEPS steps"
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=320 \
  data.max_response_length=200 \
  data.filter_overlong_prompts=true \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$TUNED" \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
  actor_rollout_ref.actor.use_prefix_grouper=true \
  actor_rollout_ref.actor.fsdp_config.dtype="$DTYPE" \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype="$DTYPE" \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=0.6 \
  trainer.total_epochs=8 \
  trainer.total_training_steps="$STEPS" \
  trainer.save_freq=20 \
  trainer.test_freq=-1 \
  trainer.max_ckpt_to_keep=1 \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.seed="$SEED" \
  trainer.backend=local \
  trainer.default_local_dir="$OUT/grpo" \
  "${@:2}"
measure grpo "$OUT/grpo/global_step_$STEPS"
for name in model sft grpo; do echo "== $name" && grep "±" "$OUT/eval_$name.txt"; done
