.PHONY: check test test-fast format

check:
	uv run ruff format --check .
	uv run ruff check .
	uv run mypy

test:
	uv run pytest

test-fast:
	uv run pytest -m "not slow"

format:
	uv run ruff format .
	uv run ruff check --fix .
