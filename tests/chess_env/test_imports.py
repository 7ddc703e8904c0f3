"""The direction of dependencies between the packages."""

import ast
from pathlib import Path

import pytest
from python_process import run_python

import chess_env

PACKAGES = Path(__file__).parents[2] / "packages"


def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "import_module",
            "__import__",
        ):
            names |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return names


def test_making_and_stepping_an_environment_loads_no_learning_library():
    code = """
import sys, gymnasium
env = gymnasium.make("chess_env:ChessPick-v0", image_size=32)
env.reset(seed=0, options={"check_expert": True})
env.step(env.action_space.sample())
env.close()
print([name for name in ("torch", "lerobot", "flowrl", "transformers") if name in sys.modules])
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_importing_chess_env_loads_no_simulator():
    code = "import sys, chess_env, chess_env as again; print('mujoco' in sys.modules)"
    result = run_python(code)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "False", "")


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("flowrl", {"chess_env", "mujoco"}), ("chess_env", {"torch", "flowrl", "transformers", "chess_apps"})],
)
def test_sources_import_only_what_their_package_may(package, forbidden):
    for path in (PACKAGES / package / "src").rglob("*.py"):
        assert not imported_modules(path) & forbidden, path


def test_chess_env_imports_lerobot_only_in_its_plugin():
    for path in (PACKAGES / "chess_env" / "src" / "chess_env").rglob("*.py"):
        if path.name != "lerobot.py":
            assert "lerobot" not in imported_modules(path), path


def test_public_names_exist():
    for name in chess_env.__all__:
        assert getattr(chess_env, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = chess_env.nonsense


def test_registering_twice_changes_nothing():
    import gymnasium

    before = gymnasium.spec(chess_env.CHESS_PICK_ID)
    chess_env.register_environments()
    assert gymnasium.spec(chess_env.CHESS_PICK_ID) is before
