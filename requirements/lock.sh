#!/usr/bin/env bash
# Writes requirements/cuda.txt: the versions that setup.py's ranges, with vLLM, resolve to on Linux with an NVIDIA driver.
# uv reads metadata only; nothing is installed. UV names it; default: the one of the virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-.venv/bin/python -m uv}
${UV} --version >/dev/null 2>&1 || .venv/bin/python -m pip install -q uv
{
  echo "# Python 3.12 on Linux with an NVIDIA driver; made by: make lock"
  ${UV} pip compile setup.py --extra vllm --python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-header --no-annotate --quiet
} >requirements/cuda.txt.new
mv requirements/cuda.txt.new requirements/cuda.txt
echo "requirements/cuda.txt: $(grep -c == requirements/cuda.txt) packages"
