#!/usr/bin/env bash
# Preferences of HH-RLHF: a new tiny model, SFT on both answers, then DPO, and a reward model. On the CPU, without Ray.
# It ends with a figure of the held-out accuracies: $OUT/preference_curves.png.
#
#   bash examples/dpo/run.sh SOURCE [directory]      SOURCE: Anthropic's pairs, such as hh_rlhf_test.jsonl.gz
set -euo pipefail
SOURCE=${1:?name a file with pairs of HH-RLHF, or Dahoas/full-hh-rlhf}
OUT=${2:-outputs/dpo}
PYTHON=${PYTHON:-python3}
export HF_HUB_DISABLE_PROGRESS_BARS=1

if [ -d "$OUT" ] && [ -n "$(ls -A "$OUT")" ]; then
  echo "$OUT is not empty; name a new directory" >&2
  exit 1
fi
for split in sft rm; do
  $PYTHON -m data_preprocess.full_hh_rlhf --split "$split" --data_source "$SOURCE" --local_dir "$OUT/data"
done
cp "$OUT/data/sft/train.parquet" "$OUT/data/sft_train.parquet"
$PYTHON -m examples.quickstart.build_model --data "$OUT/data" --out "$OUT/model" --vocabulary 2048

COMMON=(
  data.truncation=filter data.max_length=192 data.train_batch_size=32 data.max_token_len_per_gpu=8192
  optim.lr_scheduler_type=cosine optim.lr_warmup_steps=10 optim.betas=[0.9,0.95]
  trainer.backend=local trainer.device=cpu trainer.num_threads=1
)
echo "== supervised fine-tuning on the answers of all pairs"
$PYTHON -m hybridrl.main_sft "${COMMON[@]}" \
  data.train_files="$OUT/data/sft/train.parquet" \
  model.path="$OUT/model" \
  optim.lr=3e-3 \
  trainer.total_epochs=2 \
  trainer.save_freq=1000 \
  trainer.default_local_dir="$OUT/sft"
SFT=$(echo "$OUT"/sft/global_step_*/huggingface)

PAIRS=(data.train_files="$OUT/data/rm/train.parquet" data.val_files="$OUT/data/rm/test.parquet" model.path="$SFT")
PAIRS+=(trainer.test_freq=10 trainer.save_freq=1000)
echo "== direct preference optimization"
$PYTHON -m hybridrl.main_dpo "${COMMON[@]}" "${PAIRS[@]}" \
  loss.beta=0.1 \
  optim.lr=3e-4 \
  trainer.total_epochs=4 \
  trainer.default_local_dir="$OUT/dpo"
echo "== a reward model of the same pairs"
$PYTHON -m hybridrl.main_rm "${COMMON[@]}" "${PAIRS[@]}" \
  optim.lr=3e-4 \
  trainer.total_epochs=2 \
  trainer.default_local_dir="$OUT/rm"
$PYTHON -m examples.dpo.curves "$OUT" "$OUT/preference_curves.png"
