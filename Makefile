# Both commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test bench format clean

demo: .venv/ready
	$(BIN)/selfmask demo

test: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src
	$(BIN)/python -m pytest -n 2 --dist worksteal

bench: .venv/ready-dev
	status=0; \
	$(BIN)/python -m benchmarks || status=1; \
	$(BIN)/python -m benchmarks.adapting || status=1; \
	$(BIN)/python -m benchmarks.evaluating || status=1; \
	$(BIN)/python -m benchmarks.cascading || status=1; \
	exit $$status

format: .venv/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The stamps are remade only when what they install changes, so that a second run starts at once.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/ready-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,clip,lora,parquet,bench]'
	touch $@ .venv/ready

clean:
	rm -rf .venv runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
