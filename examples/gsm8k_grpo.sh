#!/usr/bin/env bash
# GRPO on GSM8K: verl's command line with hybridrl in its place.
#
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct NGPUS=8 bash examples/gsm8k_grpo.sh          a machine with GPUs
#   MODEL=outputs/quickstart/sft/global_step_500/huggingface bash examples/gsm8k_grpo.sh   a laptop: tests the whole path, learns nothing
#
# RAW: a directory with gsm8k_train.jsonl and gsm8k_test.jsonl, or a dataset name of the Hugging Face hub.
# Settings at the end of the command line take precedence: bash examples/gsm8k_grpo.sh trainer.total_training_steps=3
set -euo pipefail
RAW=${RAW:-openai/gsm8k}
DATA=${DATA:-outputs/gsm8k}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
NGPUS=${NGPUS:-1}
ROLLOUT=${ROLLOUT:-vllm}
PYTHON=${PYTHON:-python3}

[ -f "$DATA/train.parquet" ] || $PYTHON -m data_preprocess.gsm8k --data_source "$RAW" --local_dir "$DATA"

$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.rollout.name="$ROLLOUT" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=5 \
  trainer.critic_warmup=0 \
  trainer.logger=[console,jsonl] \
  trainer.project_name=hybridrl_grpo_gsm8k \
  trainer.experiment_name=gsm8k \
  trainer.n_gpus_per_node="$NGPUS" \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "$@"
