#!/usr/bin/env bash
# Start the example with its defaults; further arguments go to main.py: bash examples/openrlhf_ppo/run.sh --dry-run
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python}" -m examples.openrlhf_ppo.main "$@"
