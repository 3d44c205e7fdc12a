#!/usr/bin/env bash
# Make what is missing, then train. Settings may follow: bash run.sh trainer.total_training_steps=100
#   AGENT=1 bash run.sh      responses by agent_loop.py
#   MODEL=... bash run.sh    a model of yours: a directory, or a name of the Hugging Face hub
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-model}

[ -f data/train.parquet ] || $PYTHON make_data.py
[ "$MODEL" != model ] || [ -d model ] || $PYTHON make_model.py
AGENT_SETTINGS=()
if [ -n "${AGENT:-}" ]; then
  AGENT_SETTINGS=(
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.agent.path=agent_loop.py
    actor_rollout_ref.rollout.agent.default_agent_loop=second_try
  )
fi
$PYTHON -m hybridrl.main_ppo --config-path . --config-name config \
  actor_rollout_ref.model.path="$MODEL" ${AGENT_SETTINGS[@]+"${AGENT_SETTINGS[@]}"} "$@"
