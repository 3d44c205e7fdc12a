# `make train` and `make test` do all the set-up themselves; it is done once and again when what is required changes.
PYTHON := .venv/bin/python
QUICK := tests/algos tests/config tests/master/state tests/master/plan tests/framework/graph tests/framework/test_stage.py \
	tests/system tests/trainer/run tests/trainer/ppo tests/test_registry.py tests/test_architecture.py tests/test_failure_policy.py \
	tests/sdk/test_future_sequence.py tests/sdk/first_generation/test_workload_handles.py tests/sdk/test_rpc_endpoints.py tests/sdk/test_role_group.py
REQUIRED := setup.py requirements/install.sh requirements/vllm-cpu.txt

.PHONY: help train real test quick lint types rules format docs notebooks fuzz slow chaos environments cuda lock drill soak learn bench clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

train: .venv/train.stamp ## set up, then watch a tiny model learn: SFT, then GRPO; 4 to 7 minutes
	PYTHON=$(PYTHON) bash examples/quickstart/run.sh

# What lint needs has the packages that read a GGUF file, and matplotlib.
real: .venv/lint.stamp ## SEED=1: set up, then a real model learns: SmolLM2-135M, GRPO, 40 steps
	SEED=$(SEED) PYTHON=$(PYTHON) bash examples/smollm/run.sh

# Tests often wait for processes, so four files at a time, each with a Ray cluster of its own, keep two cores at work. The longest
# begin first: tests/conftest.py has their order, which --loadscope-reorder would replace by the number of tests.
test: .venv/test.stamp lint ## set up (vLLM, too), lint, and run the tests
	$(PYTHON) -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

quick: .venv/lint.stamp ## the pure tests: no Ray, no vLLM, two minutes
	$(PYTHON) -m pytest -q $(QUICK)

lint: .venv/lint.stamp ## ruff, types, the import arrows, and the sizes of .ci/limits.toml
	@$(MAKE) --no-print-directory --jobs=2 types rules

types: .venv/lint.stamp
	$(PYTHON) -m mypy

rules: .venv/lint.stamp
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/lint-imports
	$(PYTHON) .ci/limits.py
	$(PYTHON) .ci/core_size.py

format: .venv/lint.stamp ## lay the code out as `make lint` wants it
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

docs: .venv/docs.stamp ## the documentation as a site in build/docs; fails on a broken link
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo "built: build/docs/index.html; with search: $(PYTHON) -m http.server --directory build/docs"

notebooks: .venv/docs.stamp ## run the notebooks of docs/notebooks, and store their outputs in them
	$(PYTHON) docs/site/execute.py

fuzz: .venv/test.stamp ## random batches through random operations, for half an hour
	HYPOTHESIS_PROFILE=thorough $(PYTHON) -m pytest -q --hypothesis-show-statistics tests/data_plane/test_fuzz.py

slow: .venv/test.stamp ## the tests that take too long for every change
	$(PYTHON) -m pytest -q -m slow --ignore=tests/test_learning.py

chaos: .venv/test.stamp ## kill processes in the middle of a run, and resume
	$(PYTHON) -m pytest -q -m chaos

# openenv, verifiers and vLLM need different versions of the same packages, and harbor another Python. Agents are programs of their own.
# PYTHON312=... where it is elsewhere. It is run, because pyenv puts files of that name on the PATH that only print an error.
PYTHON312 = $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null))
PACKAGES = openenv verifiers agents tinker $(if $(PYTHON312),harbor)
SITE = -c 'import site; print(site.getsitepackages()[0])'
environments: .venv/test.stamp ## the adapters of openenv, verifiers and harbor, agents of PyPI, Tinker's SDK, in environments of their own
	$(if $(PYTHON312),,@echo "no Python 3.12: the tests with harbor are skipped; PYTHON312=... names one")
	@for package in $(PACKAGES); do \
	  echo "set-up: .venv-$$package"; \
	  python=$(PYTHON); if [ $$package = harbor ]; then python=$(PYTHON312); fi; \
	  test -x .venv-$$package/bin/pip || $$python -m venv .venv-$$package || exit 1; \
	  if [ $$package = tinker ]; then $(PYTHON) $(SITE) >"$$(.venv-tinker/bin/python $(SITE))/parent.pth"; fi; \
	  .venv-$$package/bin/pip install -q -r requirements/$$package.txt || exit 1; \
	done
	.venv-tinker/bin/pip install -q --no-deps tinker-cookbook==0.6.1
	HYBRIDRL_HARBOR_PYTHON=$(if $(PYTHON312),$(CURDIR)/.venv-harbor/bin/python) \
	HYBRIDRL_OPENENV_PYTHON=$(CURDIR)/.venv-openenv/bin/python HYBRIDRL_VERIFIERS_PYTHON=$(CURDIR)/.venv-verifiers/bin/python \
	HYBRIDRL_AGENTS_PYTHON=$(CURDIR)/.venv-agents/bin/python HYBRIDRL_TINKER_PYTHON=$(CURDIR)/.venv-tinker/bin/python \
	  $(PYTHON) -m pytest -q -m "slow or not slow" tests/training_service/test_program.py tests/training_service/test_messages.py \
	  tests/serving/environments tests/serving/sessions/test_pypi_agents.py tests/examples/test_black_box_agent.py

cuda: .venv/lint.stamp ## tests/gpu on a simulated CUDA device, in an environment with torch for CUDA (5 GB) and g++ (docs/gpu.md)
	test -x .venv-cuda/bin/pip || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install -q -r requirements/simulated-cuda.txt -e .
	.venv-cuda/bin/python -m pytest -q -p tests.support.simulated_cuda.plugin -m gpu \
	  tests/gpu/test_cuda.py tests/gpu/test_memory_phases.py tests/gpu/test_shared_prefixes.py

lock: .venv/lint.stamp ## resolve requirements/cuda.txt again: versions for Linux with an NVIDIA driver; installs nothing else
	requirements/lock.sh

N := 10
SEED := 1
drill: .venv/test.stamp ## N=10 SEED=1 KIND=: harm random processes of tiny runs at random times, and compare how they end
	$(PYTHON) -m tests.support.blind --n $(N) --seed $(SEED) $(if $(KIND),--kind $(KIND))

HOURS := 1
soak: .venv/test.stamp ## HOURS=1 SEED=1: a run with a fault every minute; nothing may grow, and no step may become slower
	$(PYTHON) -m tests.support.soak --hours $(HOURS) --seed $(SEED)

learn: .venv/lint.stamp ## the quick start for three seeds: does accuracy rise?
	$(PYTHON) -m pytest -q -s -m slow tests/test_learning.py

bench: .venv/test.stamp ## every published figure
	@for file in benchmarks/[!_]*.py; do echo "== $$file"; $(PYTHON) $$file || exit 1; done

clean: ## remove what set-up and tests made; outputs/ and checkpoints/ stay
	rm -rf .venv .venv-openenv .venv-verifiers .venv-agents .venv-harbor .venv-cuda build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# VERSIONS=newest or lowest, in an empty checkout: other versions than those of set-up (docs/versions.md)
.venv/%.stamp: $(REQUIRED)
	@requirements/install.sh $(or $(VERSIONS),$*)
	@touch $@ $(if $(filter test,$*),.venv/lint.stamp .venv/docs.stamp)
