#!/usr/bin/env bash
# Tinker's cookbook, as it comes, against hybridrl serve-training: `math_rl env=arithmetic` on a tiny model that knows some sums.
#
#   CLIENT=.venv-tinker/bin/python bash examples/training_service/run.sh [directory] [arguments of math_rl...]
# `make environments` makes .venv-tinker: tinker 0.38 and tinker-cookbook 0.6.1. It ends with a picture of the curve.
# A short try, which learns nothing: SFT_STEPS=40 LEAST=0 bash examples/training_service/run.sh DIRECTORY max_steps=20
set -euo pipefail
OUT=$(realpath -m "${1:-outputs/training_service}")
PYTHON=${PYTHON:-python3}
CLIENT=${CLIENT:-.venv-tinker/bin/python}
PORT=${PORT:-8010}
SFT_STEPS=${SFT_STEPS:-900}
LEAST=${LEAST:-0.2}

$PYTHON -m examples.training_service.base_model --out "$OUT"
echo "== supervised fine-tuning: $SFT_STEPS steps, of which the first checkpoint is taken that is right in $LEAST of its samples"
$PYTHON -m hybridrl.main_sft \
  data.train_files="$OUT/sft_train.parquet" \
  data.val_files="$OUT/sft_val.parquet" \
  data.train_batch_size=32 \
  data.max_length=192 \
  data.seed=1 \
  model.path="$OUT/model" \
  optim.lr=3e-3 \
  optim.lr_warmup_steps=50 \
  optim.betas=[0.9,0.95] \
  trainer.total_training_steps="$SFT_STEPS" \
  trainer.save_freq="$((SFT_STEPS / 10))" \
  trainer.logger=[console,jsonl] \
  trainer.seed=1 \
  trainer.num_threads=1 \
  trainer.backend=local \
  trainer.default_local_dir="$OUT/sft"

MODEL=$($PYTHON -m examples.training_service.right_answers "$OUT/sft" --least "$LEAST")

echo "== the server, and the cookbook's loop as its client"
$PYTHON -m hybridrl.cli serve-training "$MODEL" --name "$MODEL" --store "$OUT/store" --port "$PORT" >"$OUT/server.log" &
trap 'kill $!' EXIT
until grep -q "^training" "$OUT/server.log"; do sleep 1 && kill -0 $!; done
TINKER_API_KEY=tml-local TINKER_TELEMETRY=0 HF_HUB_OFFLINE=1 $CLIENT -m tinker_cookbook.recipes.math_rl.train \
  env=arithmetic model_name="$MODEL" renderer_name=role_colon max_tokens=8 base_url="http://127.0.0.1:$PORT" \
  loss_fn=importance_sampling group_size=16 groups_per_batch=16 learning_rate=1e-3 max_steps=60 eval_every=0 \
  log_path="$OUT/math_rl" behavior_if_log_dir_exists=delete "${@:2}"
$PYTHON -m examples.training_service.plot_curve "$OUT/curve.png" "importance_sampling=$OUT/math_rl"
