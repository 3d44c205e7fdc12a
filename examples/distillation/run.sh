#!/usr/bin/env bash
# On-policy distillation: the model that the quick start has trained teaches a new one, which has seen no answer at all.
# It ends with the student's held-out accuracy before and after. Run examples/quickstart/run.sh first.
#
#   bash examples/distillation/run.sh [directory of the quick start] [settings...]
set -euo pipefail
QUICKSTART=${1:-outputs/quickstart}
PYTHON=${PYTHON:-python3}
SEED=${SEED:-1}
OUT="$QUICKSTART/distillation"
TEACHER="$OUT/teacher"

if [ ! -d "$QUICKSTART/grpo/global_step_100" ]; then
  echo "$QUICKSTART/grpo/global_step_100 is not there; run examples/quickstart/run.sh $QUICKSTART first" >&2
  exit 1
fi
[ -d "$TEACHER" ] || $PYTHON -m hybridrl.cli export "$QUICKSTART/grpo/global_step_100" "$TEACHER"

$PYTHON -m hybridrl.main_distill \
  distillation.teacher_models.teacher_model.model_path="$TEACHER" \
  distillation.distillation_loss.loss_mode=forward_kl \
  distillation.distillation_loss.use_policy_gradient=false \
  data.train_files="$QUICKSTART/data/train.parquet" \
  data.val_files="$QUICKSTART/data/test.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=64 \
  data.max_response_length=26 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$QUICKSTART/model" \
  actor_rollout_ref.actor.optim.lr=3e-3 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
  actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.rollout.name=hf \
  trainer.total_training_steps=600 \
  trainer.total_epochs=100 \
  trainer.test_freq=50 \
  trainer.save_freq=600 \
  trainer.logger=[console,jsonl] \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend=local \
  trainer.default_local_dir="$OUT/student" \
  "${@:2}"
