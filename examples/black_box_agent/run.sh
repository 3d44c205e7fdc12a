#!/usr/bin/env bash
# An agent of PyPI, unchanged: mini-swe-agent answers questions about files with shell commands; a tiny model drives it.
# Supervised fine-tuning on imperfect demonstrations teaches the two turns. GRPO then teaches which command to run.
# It ends with the held-out share of right answers before and after reinforcement learning.
#
#   bash examples/black_box_agent/run.sh [directory]
# FORM=outside (default): one program runs the agent in threads, and asks for rows. FORM=command: a process per episode.
# AGENT_PYTHON names an interpreter with mini-swe-agent; without it the directory gets a virtual environment.
set -euo pipefail
OUT=${1:-outputs/black_box_agent}
SEED=${SEED:-1}
SFT_STEPS=${SFT_STEPS:-200}
STEPS=${STEPS:-30}
BATCH=${BATCH:-8}
NUM_TEST=${NUM_TEST:-32}
BACKEND=${BACKEND:-ray}
FORM=${FORM:-outside}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")" && pwd)
case $FORM in outside | command) ;; *) echo "FORM=$FORM: say outside or command" >&2 && exit 1 ;; esac

mkdir -p "$OUT/bin"
OUT=$(cd "$OUT" && pwd)
if [ -z "${AGENT_PYTHON:-}" ]; then
  AGENT_PYTHON=$OUT/agent/bin/python
  [ -x "$AGENT_PYTHON" ] || $PYTHON -m venv "$OUT/agent"
  "$AGENT_PYTHON" -m pip install -q -r "$HERE/../../requirements/mini-swe-agent.txt"
fi
$PYTHON -m examples.black_box_agent.make_data --local_dir "$OUT/data" --seed "$SEED" --num_test "$NUM_TEST"
$PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --seed "$SEED" \
  --chat-template "$HERE/chat_template.jinja"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/data/sft_train.parquet" \
  data.train_batch_size=32 \
  data.max_length=128 \
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

# What the policy writes is run: give it these programs alone, and no settings of yours.
for program in cat expr grep head sort tail uniq wc; do ln -sf "$(command -v $program)" "$OUT/bin/$program"; done
AGENT=(env "PATH=$OUT/bin" "HOME=$OUT" LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 "$AGENT_PYTHON")
PORT=${PORT:-$($PYTHON -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
if [ "$FORM" = outside ]; then
  LOOP=(actor_rollout_ref.rollout.agent.default_agent_loop=outside_agent)
  "${AGENT[@]}" "$HERE/play.py" "http://127.0.0.1:$PORT" >"$OUT/play.log" 2>&1 &
  trap 'kill $!' EXIT
else
  LOOP=(actor_rollout_ref.rollout.agent.default_agent_loop=http_agent
    "actor_rollout_ref.rollout.agent.program=\"${AGENT[*]} $HERE/command.py\"")
fi
$PYTHON -m hybridrl.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size="$BATCH" \
  data.max_prompt_length=64 \
  data.max_response_length=128 \
  data.seed="$SEED" \
  actor_rollout_ref.model.path="$OUT/sft/global_step_$SFT_STEPS/huggingface" \
  actor_rollout_ref.actor.optim.lr=5e-4 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.ppo_mini_batch_size="$BATCH" \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.endpoint_port="$PORT" \
  actor_rollout_ref.rollout.agent.timeout_s=120 \
  "${LOOP[@]}" \
  trainer.total_training_steps="$STEPS" \
  trainer.test_freq="$STEPS" \
  trainer.logger=[console,jsonl] \
  trainer.rollout_data_dir="$OUT/grpo/rollouts" \
  trainer.seed="$SEED" \
  trainer.num_threads=1 \
  trainer.backend="$BACKEND" \
  trainer.default_local_dir="$OUT/grpo"
