# `make demo` and `make test` need Python 3.11+, make and a package registry, nothing else.
PYTHON ?= python3
BIN := .venv/bin/python -I
SOURCES := $(shell find . -path ./.venv -prune -o \( -name '*.py' -o -name '*.safetensors' -o -name '*.parquet' \
	-o -name '*.txt' -o -name '*.json' -o -name '*.json.gz' -o -name '*.xz' -o -name NOTICE \) -print | grep -E '^\./(errors|files|__init__)\.py$$|^\./(planner|profilers|runtime|solvers|traces|workers)/')

.PHONY: demo test test-engines check bench clean
demo: .venv/compiled
	@rm -rf moeplan-demo
	@$(BIN) -m moeplan.planner.cli demo -o moeplan-demo

# Half as many workers again as cores: many tests wait for processes. One thread each.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min((3 * ($(CORES)) + 1) // 2, 16))")
test: .venv/installed
	@.venv/bin/python tests/precompile.py
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests

# The exports, read by the engines' own code: wheels of 375 MB that nothing else needs; what cannot be had is skipped.
test-engines: .venv/installed
	@for wheel in msgspec sglang==0.5.23 vllm==0.33.0; do \
		ls -d .venv/engines/$$(echo $$wheel | sed 's/==/-/')*.dist-info >/dev/null 2>&1 || .venv/bin/python -m pip \
			install -q --disable-pip-version-check --no-deps --target .venv/engines $$wheel || true; done
	@MOEPLAN_ENGINES=.venv/engines .venv/bin/python -m pytest -q -rs tests/engines

check: .venv/installed
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/python -m mypy --explicit-package-bases tests benchmarks
	.venv/bin/python docs/generate.py --check
	.venv/bin/python -m mkdocs build --strict

# One subject or more with flags: make bench BENCH="netmoe recording --save"
bench: .venv/installed
	@.venv/bin/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv build *.egg-info

.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: about 2 GB, once"
	.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "setuptools>=77"
	rm -rf build *.egg-info
	test -t 1 || quiet=-q; .venv/bin/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt ".[dev]"
	rm -rf build *.egg-info
	mkdir -p .venv/src && ln -sfn ../.. .venv/src/moeplan
	touch $@

# A real install, not an editable one: tests see what users get.
.venv/installed: .venv/ready $(SOURCES) py.typed
	rm -rf build *.egg-info
	.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation .
	rm -rf build *.egg-info
	touch $@

# The solvers' inner loops, kept beside them: numba sees a change of their own file, none of another that they call.
.venv/compiled: $(shell find solvers -name '*.py') .venv/ready | .venv/installed
	@echo "compiling the solvers' inner loops: about a minute on 2 cores, once"
	find .venv/lib -path '*/moeplan/*' -name '*.nb[ci]' -delete
	$(BIN) -c "from moeplan.planner.demo.job import compile_solvers; compile_solvers()"
	touch $@
