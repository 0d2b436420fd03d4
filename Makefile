# These set everything up on a fresh machine: `make demo`, `make test`, and `make test-all`, which takes longer.
PYTHON ?= python3
BIN := .venv/bin
# Tests start many processes; without compiled files each of them would compile every source anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all docs bench format clean

demo: .venv/ready
	$(BIN)/selfmask demo

test: .venv/ready-dev
	$(call checked,-m "not heavy")

# What is heavy by nature, too: every command of the docs, long fuzzing, many processes.
test-all: .venv/ready-dev
	$(call checked,)

# Tests come in an order drawn by a seed that is told at the end; `make test ORDER=7` repeats one.
define checked
	@start=$$(date +%s); set -x; \
	$(BIN)/ruff check . && \
	$(BIN)/ruff format --check . && \
	$(BIN)/mypy src && \
	$(BIN)/lint-imports && \
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ORDER:%=--randomly-seed=%) $(1); \
	status=$$?; set +x; echo "$@ took $$(($$(date +%s) - start)) seconds"; exit $$status
endef

bench: .venv/ready-dev
	status=0; \
	$(BIN)/python -m benchmarks || status=1; \
	$(BIN)/python -m benchmarks.adapting || status=1; \
	$(BIN)/python -m benchmarks.evaluating || status=1; \
	$(BIN)/python -m benchmarks.cascading || status=1; \
	exit $$status

# The site, in build/site: no warnings, no broken links, and every notebook run.
docs: .venv/ready-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html, or, to search in it: python3 -m http.server --directory build/site"

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
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,clip,lora,parquet,streams,launch,export,heic,video,serve,search,ray,tensorboard,docs,bench]'
	touch $@ .venv/ready

clean:
	rm -rf .venv runs dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
