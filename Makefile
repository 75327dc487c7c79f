# Everything the project needs is made here: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out/demo

# Orders of summation that other processors have, and plain PyTorch in place of the C library, as without a compiler.
PORTABLE := MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default RMM_BACKEND=torch

.PHONY: demo test check test-portable test-stack test-hosts test-heavy lint docs size clean

# Bytecode of what is imported is written on the way, where it was switched off too: nothing is imported once only.
demo: export PYTHONDONTWRITEBYTECODE :=
demo: $(VENV)/.demo
	$(BIN)/python -m glue_finetune --demo --output_dir $(OUT) --overwrite_output_dir

# Two processes of one thread each: twice as fast on two cores as one process of two. Files begin in the order of
# tests/conftest.py, the longest first: by default those of the fewest tests, often the longest, would come last.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# While you work: the linters, and at the same time the contracts that a folder has to keep, in plain PyTorch and C and in
# float32, and the tests of that folder.
FOLDER ?=
MODULES := tests/contracts/test_operations.py tests/contracts/test_modules.py tests/contracts/test_unwatched.py
CONTRACTS = $(if $(findstring planning,$(FOLDER)),tests/contracts/test_replay.py,$(MODULES))
QUICK := not triton and not compiled_code and not float16 and not float64 and not bfloat16
check: export OMP_NUM_THREADS := 1
check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/pyright & types=$$!; \
	$(BIN)/python -m pytest -q -n 2 tests/test_architecture.py $(CONTRACTS) -k "$(QUICK)" \
	&& { test -z "$(FOLDER)" || $(BIN)/python -m pytest -q -n 2 $(FOLDER); }; tests=$$?; \
	wait $$types && exit $$tests

# Four times as long as `make test`: not in CI. All settings run, whichever fails.
test-portable: $(VENV)/.test
	@failed=; \
	for setting in $(PORTABLE); do \
		echo "== $$setting"; \
		if env OMP_NUM_THREADS=1 $$setting $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder; \
		then echo "== $$setting: passed"; else echo "== $$setting: failed"; failed="$$failed $$setting"; fi; \
	done; \
	if [ -n "$$failed" ]; then echo "Failed with$$failed"; exit 1; fi

test-stack: $(VENV)/.test
	$(BIN)/python -m pytest -q -m stack

# Into a folder of their own: their requirements pin other versions of PyTorch, transformers and trl, with which the rest
# is not tested. Axolotl's imports need the trl that it pins.
HOSTS := torchao torchtitan axolotl axolotl-contribs-lgpl axolotl-contribs-mit trl==1.9.0
HOSTS += absl-py addict art colorama distro docstring_parser einops fastcore importlib-metadata llvmlite numba \
	opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions posthog protobuf python-dotenv spmd_types \
	tensorboard tensorboard-data-server termcolor torch_checkpointing torchdata typeguard tyro wandb werkzeug zipp
HOSTS += liger-kernel hjson py-cpuinfo msgpack ninja
# DeepSpeed is built by the setuptools and the wheel of this environment, without its kernels.
TO_HOSTS := --no-deps --upgrade --target out/hosts
RUN_HOSTS := PYTHONPATH=out/hosts DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m stack
test-hosts: $(VENV)/.test
	@$(PIP) $(TO_HOSTS) $(HOSTS)
	@$(PIP) wheel
	@DS_BUILD_OPS=0 $(PIP) $(TO_HOSTS) --no-build-isolation deepspeed
	$(RUN_HOSTS) tests/integrations/test_hosts.py
	DS_ACCELERATOR=cpu $(RUN_HOSTS) tests/integration/test_engines.py -k ZeRO

test-heavy: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "montecarlo or thorough"

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	@wc -l $$(git ls-files '*.py') | awk '$$1 > 500 && $$2 != "total" {print "warning: " $$2 " has " $$1 " lines"}'

# Fails on broken links, and on names in the API pages that the library does not have.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Of pip, errors alone are shown. torch first: resolved together with the rest, another version of it could win.
# Compiling all modules, most of which the demo never imports, would take as long as the rest of the installation.
PIP := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt

$(VENV)/.demo: pyproject.toml setup.py constraints.txt $(wildcard rmm_linear/backends/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version.split()[0] + ". Use make PYTHON=...") if sys.version_info < (3, 10) else None'
	@echo "Installing PyTorch and what the demo needs into $(VENV), about 1.5 GB ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e '.[demo]'
	@touch $@

# Compiled on all cores, which pip does not do; the files that do not compile are for other versions of Python.
$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) -e '.[test]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@$(PIP) -e '.[docs]'
	@touch $@

# Lines of Python per package: look at them in every change.
size:
	@git ls-files '*.py' | xargs wc -l | awk '$$2 != "total" {n = split($$2, path, "/"); \
		name = n == 1 ? "." : (path[1] == "rmm_linear" && n > 2 ? path[1] "/" path[2] : path[1]); \
		lines[name] += $$1; files[name]++; all += $$1} \
		END {for (name in lines) printf "%7d lines %4d files  %s\n", lines[name], files[name], name | "sort -k5"; \
		close("sort -k5"); printf "%7d lines in all\n", all}'

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache rmm_linear/backends/native/_library*
