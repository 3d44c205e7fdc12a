#!/usr/bin/env bash
# A game for two: Nim. The policy learns by playing against itself, and is tested against the best player.
# Supervised fine-tuning on random games teaches the moves. GRPO then teaches which of them win.
#
#   bash examples/two_agent_game/run.sh [directory]        OPPONENT=script: training plays the best player, too
# An existing supervised model in the directory is used again. ENVIRONMENTS names another list, RUN another folder of GRPO.
set -euo pipefail
OUT=${1:-outputs/two_agent_game}
SEED=${SEED:-1}
STEPS=${STEPS:-40}
SFT_STEPS=${SFT_STEPS:-150}
BACKEND=${BACKEND:-ray}
OPPONENT=${OPPONENT:-itself}
PYTHON=${PYTHON:-python3}
HERE=$(dirname "$0")
ENVIRONMENTS=${ENVIRONMENTS:-$HERE/environments.yaml}
RUN=${RUN:-grpo}
SFT="$OUT/sft/global_step_$SFT_STEPS/huggingface"

mkdir -p "$OUT"
$PYTHON -m examples.two_agent_game.make_data --local_dir "$OUT/data" --seed "$SEED" --opponent "$OPPONENT"
if [ ! -d "$SFT" ]; then
  $PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED"
  $PYTHON -m hybridrl.main_sft \
    data.train_files="$OUT/data/sft_train.parquet" \
    data.train_batch_size=16 \
    data.max_length=128 \
    model.path="$OUT/model" \
    optim.lr=3e-3 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps=20 \
    optim.betas=[0.9,0.95] \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.save_freq="$SFT_STEPS" \
    trainer.logger=[console,jsonl] \
    trainer.seed="$SEED" \
    trainer.num_threads=1 \
    trainer.backend="$BACKEND" \
    trainer.default_local_dir="$OUT/sft"
fi
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=64 \
  data.max_response_length=64 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$SFT" \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.agent.path="$HERE/self_play.py" \
  actor_rollout_ref.rollout.agent.default_agent_loop=environment_agent \
  actor_rollout_ref.rollout.multi_turn.interaction_config_path="$ENVIRONMENTS" \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.n=8 \
  trainer.total_training_steps="$STEPS" \
  trainer.test_freq=20 \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/$RUN/rollouts" \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/$RUN"
