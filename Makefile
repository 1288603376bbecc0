# The targets of the project; `make help` lists them. `make demo` and `make test` are enough for a first visit.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# One thread per process: the models here are tiny, and several processes share few cores (see docs/performance.md).
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
# Without byte code, every process compiles the project again (1.7 s of CPU), and torch too in an environment made by uv.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo real real-prompt test test-zoo test-lab test-slow gpu oldest newest engines sglang quantized oracles bridges bench-peers envs estimators fuzz devices soak chaos pages bench lab docs prometheus slurm systemd containers browser trackers skypilot lint type protos clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## create the environment

$(STAMP): pyproject.toml constraints.txt scripts/environment.sh scripts/setup.sh
	@bash scripts/setup.sh $(VENV) $(PYTHON)
	@touch $(STAMP)

demo: $(STAMP) ## a student distils from a teacher over gRPC, end to end; about three minutes after the installation
	@$(BIN)/python examples/demo.py

SMOLLM2 := $(VENV)/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
real: $(SMOLLM2) ## a real model of 135M parameters loses three layers and wins back what it lost; about eleven minutes
	@$(BIN)/python examples/real.py pruned --gguf $(SMOLLM2)

real-prompt: $(SMOLLM2) ## the same model learns from its French self to answer in French unasked; about six minutes
	@$(BIN)/python examples/real.py french --gguf $(SMOLLM2) --run runs/real-prompt

$(SMOLLM2): $(STAMP) scripts/smollm2.sh
	@bash scripts/smollm2.sh $(VENV)/smollm2 $(VENV) $(PYTHON)
	@touch $@

PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal
test: $(STAMP) ## the CPU tests of the trunk, without those marked slow
	$(PYTEST) -m "not slow and not zoo" --ignore tests/opd_zoo --ignore tests/opd_lab

test-zoo: $(STAMP) ## the tests of opd_zoo, and what the trunk asks of every plug-in there, without those marked slow
	$(PYTEST) -m "zoo and not slow" tests/opd_zoo tests/student tests/end_to_end

test-lab: $(STAMP) ## the tests of opd_lab, without those marked slow
	$(PYTEST) -m "not slow" tests/opd_lab

test-slow: $(STAMP) ## the tests marked slow, most of them runs of several processes
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

gpu: ## on a GPU: tests, kernels, a teacher against vLLM, and the main job beside its plan, written to runs/gpu.json (PYTHON=python)
	$(PYTHON) benchmarks/gpu.py --json runs/gpu.json

gpu-%: ## one part of make gpu in at most eight minutes: gpu-tests, gpu-kernels, gpu-race or gpu-job
	$(PYTHON) benchmarks/gpu.py --parts $* --seconds 480 --json runs/gpu.json

oldest: .venv-oldest/.installed ## all CPU tests with the oldest versions that pyproject.toml admits (own environment)
	.venv-oldest/bin/python -m pytest -n 3 --dist worksteal

.venv-oldest/.installed: pyproject.toml scripts/environment.sh scripts/oldest.sh
	@bash scripts/oldest.sh .venv-oldest $(PYTHON)
	@touch $@

newest: ## all CPU tests with the newest versions that pyproject.toml admits, brought up to date each time (own environment)
	@bash scripts/newest.sh .venv-newest $(PYTHON)
	.venv-newest/bin/python -m pytest -n 3 --dist worksteal

# Threads are not bound to cores: otherwise vLLM puts every process that asks for binding on core 0.
engines: export VLLM_CPU_KVCACHE_SPACE ?= 1
engines: export VLLM_CPU_OMP_THREADS_BIND ?= nobind
engines: export VLLM_LOGGING_LEVEL ?= ERROR
engines: export HF_HUB_OFFLINE ?= 1
engines: .venv-vllm/.installed ## teacher engines, rollout engines and whole trainings with vLLM's CPU build (own environment)
	.venv-vllm/bin/python -m pytest tests/teacher_server/engines -m engine -rs
	.venv-vllm/bin/python -m pytest tests/student/rollout -m engine -rs
	.venv-vllm/bin/python -m pytest tests/end_to_end/test_vllm.py tests/end_to_end/test_servers.py -m engine -rs

.venv-vllm/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/engines.sh
	@bash scripts/engines.sh .venv-vllm $(PYTHON)
	@touch $@

sglang: export HF_HUB_OFFLINE ?= 1
sglang: .venv-sglang/.installed ## an SGLang server on a CPU as teacher engine, as rollout engine and in whole trainings (own environment)
	.venv-sglang/bin/python -m pytest tests/teacher_server/engines/test_conformance.py -m engine -k sglang -rs
	.venv-sglang/bin/python -m pytest tests/student/rollout/servers/test_sglang_server.py tests/student/rollout/test_conformance.py -k sglang -rs
	.venv-sglang/bin/python -m pytest tests/end_to_end/test_servers.py -m engine -k sglang -rs

.venv-sglang/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/sglang.sh scripts/sglang.txt
	@bash scripts/sglang.sh .venv-sglang $(PYTHON)
	@touch $@

oracles: .venv-oracles/.installed ## our mathematics against TRL's and Liger's (own environment)
	.venv-oracles/bin/python -m pytest tests/opd/maths/test_oracles.py tests/student/rl/losses/test_oracles.py -rs

.venv-oracles/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/oracles.sh
	@bash scripts/oracles.sh .venv-oracles $(PYTHON)
	@touch $@

bridges: .venv-bridges/.installed ## TRL trains with a teacher of ours, over HTTP and as its teacher model (own environment)
	.venv-bridges/bin/python -m pytest tests/end_to_end/test_trl.py -rs

.venv-bridges/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/bridges.sh
	@bash scripts/bridges.sh .venv-bridges $(PYTHON)
	@touch $@

bench-peers: .venv-oracles/.installed ## a distillation step against TRL's, with tiny and mid-sized models (environment of make oracles)
	.venv-oracles/bin/python benchmarks/peers.py
	.venv-oracles/bin/python benchmarks/peers.py --world mid --rounds 2 --steps 7

quantized: $(VENV)/.quantized ## 4-bit base models and 8-bit optimizer moments, with bitsandbytes, which it adds to the environment
	$(BIN)/python -m pytest tests/student/model/test_quantized.py tests/student/model/test_adamw_8bit.py \
		tests/end_to_end/test_quantized.py -rs

$(VENV)/.quantized: $(STAMP) scripts/environment.sh scripts/quantized.sh
	@bash scripts/quantized.sh $(VENV) $(PYTHON)
	@touch $@

estimators: $(STAMP) ## regenerate docs/estimators.md, every figure by enumeration; about a minute
	$(BIN)/python benchmarks/estimators.py docs/estimators.md

envs: .venv-envs/.installed ## TextWorld, ALFWorld, ScienceWorld and Gymnasium, played and trained in (own environment)
	.venv-envs/bin/python -m pytest tests/end_to_end/test_textworld.py tests/end_to_end/test_alfworld.py \
		tests/end_to_end/test_scienceworld.py tests/opd_zoo/environments/test_scienceworld.py tests/opd/tasks/environments/test_gymnasium.py \
		tests/examples/test_recipes.py -rsP

.venv-envs/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/envs.sh
	@bash scripts/envs.sh .venv-envs $(PYTHON)
	@touch $@

fuzz: $(STAMP) ## hostile requests and answers (at least 10,000 cases of each kind), properties and 300 drawn recipes; half an hour
	OPD_FUZZ_CASES=10000 $(BIN)/python -m pytest tests/teacher_server/test_fuzz.py \
	    tests/teacher_server/http/test_fuzz.py --timeout 3000
	$(BIN)/python -m pytest tests/opd/maths tests/teacher_server/engines/test_plan.py --hypothesis-profile thorough --timeout 3000
	OPD_FUZZ_RECIPES=300 $(BIN)/python -m pytest tests/student/test_compositions.py --timeout 3000

devices: $(STAMP) ## a teacher's engine and 60 drawn recipes on a pretend accelerator, which refuses tensors left on the CPU
	PYTHONPATH=tests/support OPD_FUZZ_RECIPES=60 $(BIN)/python -m pytest -n 3 --dist worksteal -p pretend_device \
	    tests/teacher_server/engines/test_conformance.py tests/student/test_compositions.py --timeout 3000

soak: $(STAMP) ## a server under load and abuse for 15 minutes, then a leaking one, which must be caught
	$(BIN)/python benchmarks/server_soak.py
	$(BIN)/python benchmarks/server_soak.py --minutes 2 --leak

chaos: $(STAMP) ## servers killed, frozen, cut off or giving wrong answers during a training run; about ten minutes
	$(BIN)/python -m pytest tests/chaos -m "chaos or not chaos" -rs

pages: $(STAMP) ## every command in the documentation, including those that take minutes; about an hour
	$(BIN)/python -m pytest tests/docs -m "pages or not pages" -rs

bench: $(STAMP) ## all benchmarks, as ratios within one run
	@for file in $(filter-out benchmarks/constant_engine.py benchmarks/fleet_servers.py benchmarks/server_soak.py,$(wildcard benchmarks/*_*.py)); do \
		echo "== $$file"; $(BIN)/python $$file || exit 1; done

lab: $(STAMP) ## reproduce the papers' claims in the tiny world, resumable; hours on two cores
	$(BIN)/opd lab run
	$(BIN)/opd lab report

docs: .venv-docs/.installed ## build the documentation site into site/, strictly and without the network
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip install --quiet 'mkdocs-material>=9.7' 'mkdocstrings[python]>=1'
	@touch $@

# Debian's package, unpacked inside the environment's folder: nothing is installed into the system.
PROMETHEUS := $(VENV)/prometheus/usr/bin/prometheus
prometheus: $(PROMETHEUS) $(STAMP) ## a real Prometheus scrapes a run, evaluates alerts and dashboards (Debian, Ubuntu)
	$(BIN)/python -m pytest tests/deploy -rs

$(PROMETHEUS):
	@bash scripts/prometheus.sh $(VENV)/prometheus

trackers: .venv-trackers/.installed ## TensorBoard, Trackio, Weights & Biases and MLflow receive what a run writes (own environment)
	.venv-trackers/bin/python -m pytest tests/student/report/test_trackers.py -rs

.venv-trackers/.installed: pyproject.toml constraints.txt scripts/environment.sh scripts/trackers.sh
	@bash scripts/trackers.sh .venv-trackers $(PYTHON)
	@touch $@

slurm: $(STAMP) ## the job of deploy/slurm under a real Slurm of two nodes on this machine (Debian, Ubuntu; as root)
	@command -v slurmctld >/dev/null || bash scripts/slurm.sh
	$(BIN)/python -m pytest tests/deploy/test_slurm.py -rs

systemd: $(STAMP) ## the units of deploy/systemd under a real systemd, which boots a container (Debian, Ubuntu; as root)
	@command -v systemd-nspawn >/dev/null || bash scripts/systemd.sh
	$(BIN)/python -m pytest tests/deploy/test_systemd.py -rs

containers: .venv-containers/.installed $(STAMP) ## the Compose file of deploy/containers, built and run by Podman on CPU (Debian, Ubuntu; as root)
	PATH="$(CURDIR)/.venv-containers/bin:$$PATH" $(BIN)/python -m pytest tests/deploy/test_containers.py -rs

.venv-containers/.installed: scripts/environment.sh scripts/containers.sh
	@bash scripts/containers.sh .venv-containers $(PYTHON)
	@touch $@

CHROMIUM := $(VENV)/chromium/chromium
browser: $(CHROMIUM) $(STAMP) ## a real Chromium draws a run's report in light and dark (Debian, Ubuntu)
	$(BIN)/python -m pytest tests/student/run/report -rs

$(CHROMIUM):
	@bash scripts/chromium.sh $(VENV)/chromium

skypilot: .venv-skypilot/.installed ## SkyPilot's own parser reads deploy/skypilot/opd.yaml (own environment)
	.venv-skypilot/bin/python -c "import sky; print(sky.Task.from_yaml('deploy/skypilot/opd.yaml'))"

.venv-skypilot/.installed:
	@$(PYTHON) -m venv .venv-skypilot && .venv-skypilot/bin/python -m pip install --quiet 'skypilot>=0.14'
	@touch $@

lint: $(STAMP) ## ruff, and buf on the protos if it is installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@if command -v buf >/dev/null; then cd protos && buf lint; else echo "buf is not installed: protos not linted"; fi

type: $(STAMP) ## mypy
	$(BIN)/mypy

protos: $(STAMP) ## regenerate the gRPC stubs
	$(BIN)/python scripts/protos.py

clean: ## remove the environment and all runs
	rm -rf $(VENV) runs
