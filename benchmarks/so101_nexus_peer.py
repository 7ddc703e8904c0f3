"""so101-nexus on its own pick task, measured on request: the other side of `benchmarks/env.py --peer-python`.

Runs in an interpreter of its own that has so101-nexus and so101-nexus-mujoco (and not chess_env):

    uv venv peer && uv pip install --python peer/bin/python so101-nexus so101-nexus-mujoco

Each line of standard input is a request, `{"kind": ..., "count": ..., "size": [height, width]}`; each answer is one
line of JSON; times are processor time, as in `env.py`. The task is `MuJoCoPickLift-v1` with its default, one cube; 50 control steps a second.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import gymnasium
import mujoco
import numpy as np
import so101_nexus_mujoco  # noqa: F401 - registers the task
from so101_nexus_core.config import PickConfig
from so101_nexus_core.observations import JointPositions, OverheadCamera, WristCamera

TASK = "MuJoCoPickLift-v1"
CONTROL_HZ = 50
PERIOD_S = 4.0
AMPLITUDE = 0.1  # of each joint's range


def make(size: tuple[int, int] | None, quality: str = "plain") -> gymnasium.Env:
    """The task with its own state, or with both cameras; "plain" turns shadows and anti-aliasing off, as ours are."""
    if size is None:
        return gymnasium.make(TASK, max_episode_steps=10**9)
    cameras = [JointPositions(), WristCamera(size[1], size[0]), OverheadCamera(size[1], size[0])]
    if quality == "default":
        return gymnasium.make(TASK, config=PickConfig(observations=cameras), max_episode_steps=10**9)
    load = mujoco.MjModel.from_xml_path

    def load_plain(*args: Any, **kwargs: Any) -> mujoco.MjModel:
        model = load(*args, **kwargs)
        model.vis.quality.offsamples = 0
        return model

    mujoco.MjModel.from_xml_path = load_plain
    try:
        env = gymnasium.make(TASK, config=PickConfig(observations=cameras), max_episode_steps=10**9)
    finally:
        mujoco.MjModel.from_xml_path = load
    task: Any = env.unwrapped
    for renderer in (task._wrist_renderer, task._overhead_obs_renderer):
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
    return env


def target(task: Any, start: np.ndarray, step: int, moving: bool) -> np.ndarray:
    """Joint targets [rad]: the start pose, or a slow sine of all joints about it."""
    if not moving:
        return start
    reach = AMPLITUDE * (task.action_space.high - task.action_space.low)
    wave = np.sin(2 * np.pi * step / CONTROL_HZ / PERIOD_S + np.arange(6))
    return (start + reach * (wave - np.sin(np.arange(6)))).astype(np.float32)


def measure(request: dict[str, Any], envs: dict[str, gymnasium.Env]) -> dict[str, float]:
    """One request: rate of control steps, of pairs of images, or the time of a reset."""
    kind, count, size = request["kind"], int(request["count"]), request.get("size")
    key = json.dumps([size, kind == "images_default"])
    if key not in envs:
        quality = "default" if kind == "images_default" else "plain"
        envs[key] = make(None if size is None else (size[0], size[1]), quality)
    env = envs[key]
    env.reset(seed=0)
    task: Any = env.unwrapped
    if kind == "reset":
        begin = time.process_time()
        for seed in range(count):
            env.reset(seed=seed)
        return {"ms": 1e3 * (time.process_time() - begin) / count}
    if kind in ("images", "images_default"):
        task._get_obs()
        begin = time.process_time()
        for _ in range(count):
            task._get_obs()
        return {"pairs_per_s": count / (time.process_time() - begin)}
    start = task._get_current_qpos().astype(np.float32)
    begin = time.process_time()
    for step in range(count):
        env.step(target(task, start, step, moving=kind == "move"))
    return {"steps_per_s": count / (time.process_time() - begin)}


def main() -> None:
    """Answer requests until the input ends."""
    facts = {
        name: version(name) for name in ("so101-nexus", "so101-nexus-mujoco", "so101-nexus-core", "mujoco")
    }
    print(json.dumps({"versions": facts, "control_hz": CONTROL_HZ, "task": TASK}), flush=True)
    envs: dict[str, gymnasium.Env] = {}
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line), envs)), flush=True)
    for env in envs.values():
        env.close()


if __name__ == "__main__":
    main()
