# A fresh clone needs two commands: `make train` and `make test`.  Both make .venv first.
.PHONY: train test test-ci test-all test-gpu lint format benchmark clean

# The tests start many interpreters; each would compile everything anew where the environment forbids to keep bytecode.
unexport PYTHONDONTWRITEBYTECODE

SHARDWISE := .venv/bin/shardwise
PYTEST := .venv/bin/python -m pytest -n auto --maxprocesses=4 --dist=worksteal

train:
	@scripts/install.sh run
	@$(SHARDWISE) train $(ARGS)

test:
	@scripts/install.sh dev
	$(PYTEST) $(ARGS)

test-ci:
	@scripts/install.sh dev
	$(PYTEST) -m "not full" $(ARGS)

test-all:
	@scripts/install.sh dev
	$(PYTEST) -m "full or not full" --ignore=tests/scripts/test_sweep_sample.py $(ARGS)
	@.venv/bin/python -m pip install --quiet --no-deps --upgrade --target sweep/libraries -r scripts/sweeping/requirements.txt
	PYTHONPATH=sweep/libraries $(PYTEST) -m "full or not full" tests/scripts/test_sweep_sample.py

test-gpu:
	@scripts/install.sh dev
	.venv/bin/python -m pytest -m gpu tests/device $(ARGS)

lint:
	@scripts/install.sh dev
	.venv/bin/ruff check src tests benchmarks examples
	.venv/bin/ruff format --check src tests benchmarks examples
	.venv/bin/mypy
	.venv/bin/lint-imports

format:
	@scripts/install.sh dev
	.venv/bin/ruff format src tests benchmarks examples
	.venv/bin/ruff check --fix src tests benchmarks examples

benchmark:
	@scripts/install.sh dev
	.venv/bin/python benchmarks/data_parallel.py $(ARGS)

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
