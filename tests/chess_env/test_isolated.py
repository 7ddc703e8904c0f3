"""chess_env with nothing installed but what it declares: no torch, no LeRobot, no flowrl."""

import importlib.metadata as metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[2] / "packages" / "chess_env" / "src" / "chess_env"

PROGRAM = """
import hashlib, importlib.util, sys
import gymnasium, numpy as np
import chess_env

def digest(observation):
    parts = [observation["pixels"]["top"], observation["pixels"]["wrist"], observation["agent_pos"]]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()

def main():
    missing = [n for n in ("torch", "lerobot", "flowrl", "transformers") if importlib.util.find_spec(n) is None]
    assert missing == ["torch", "lerobot", "flowrl", "transformers"], missing
    env = gymnasium.make("ChessPick-v0", image_size=64)
    observation, info = env.reset(seed=5, options={"index": 2})
    env.step(env.action_space.sample())
    env.close()
    envs = gymnasium.make_vec("ChessPick-v0", num_envs=2, image_size=64)
    batch, _ = envs.reset(seed=[5, 5], options={"index": np.array([1, 2])})
    row = {"pixels": {k: v[1] for k, v in batch["pixels"].items()}, "agent_pos": batch["agent_pos"][1]}
    envs.close()
    print(digest(observation), digest(row), info["task"])

if __name__ == "__main__":
    main()
"""


def declared_distributions(name: str, found: dict[str, metadata.Distribution] | None = None):
    """The distribution and everything that it needs, by the declared requirements."""
    found = {} if found is None else found
    if name.lower() not in found:
        found[name.lower()] = metadata.distribution(name)
        for text in found[name.lower()].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                declared_distributions(requirement.name, found)
    return found


@pytest.fixture
def isolated_site(tmp_path):
    """A site-packages folder of links to the declared distributions and to chess_env's source, and nothing else."""
    site = tmp_path / "site"
    site.mkdir()
    for name, distribution in declared_distributions("chess-env").items():
        if name == "chess-env":
            continue
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            target = Path(str(distribution.locate_file(top)))
            if top not in ("__pycache__", "bin") and target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    (site / "chess_env").symlink_to(SOURCE)
    return site


def test_make_and_make_vec_work_with_the_declared_requirements_alone(isolated_site, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-S", str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(isolated_site)},
    )
    assert result.returncode == 0, result.stderr
    single, vector, task = result.stdout.strip().split(" ", 2)
    assert single == vector
    assert task == "Pick up the white chess piece."
