"""Speed and memory of the chess environment: prints a table and, with --json PATH, writes it.

    python benchmarks/env.py            # about a minute
    python benchmarks/env.py --quick

Nothing here is a test: numbers depend on the machine and on what else it runs.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import mujoco
import numpy as np

from chess_env.env import ChessPickEnv
from chess_env.expert import Expert
from chess_env.so101 import to_units

SEED = 7_700_003
FULL_BOARD = (15, 15)


def median_ms(call: Callable[[int], object], count: int) -> float:
    """Median time of `call(i)` [ms]."""
    times = []
    for i in range(count):
        begin = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def measure_resets(image_size: int | None, count: int) -> float:
    """A reset with a new scene of 16 pieces [ms], with its two images unless `image_size` is None."""
    arguments = {"observation": "state"} if image_size is None else {"image_size": image_size}
    env = ChessPickEnv(distractors=FULL_BOARD, **arguments)
    env.reset(seed=SEED)
    result = median_ms(lambda i: env.reset(options={"index": i + 1}), count)
    env.close()
    return result


def measure_chunks(episodes: int) -> dict[str, float]:
    """Chunks of 50 frames a second without images, 16 pieces: an arm at rest, and the expert at work."""
    env = ChessPickEnv(distractors=FULL_BOARD, observation="state")
    observation, _ = env.reset(seed=SEED)
    chunk = np.repeat(observation["agent_pos"][None], 50, axis=0)
    rest_ms = median_ms(lambda i: env.step(chunk), 12)
    expert = Expert(env.simulation.scene)
    seconds, frames = 0.0, 0
    for index in range(episodes):
        env.reset(seed=SEED, options={"index": index})
        plan = expert.plan(env.simulation.data, env.simulation.target_slot, np.random.default_rng(index))
        if plan is None:
            continue
        targets = to_units(plan).astype(np.float32)
        for start in range(0, len(targets) - 49, 50):
            begin = time.perf_counter()
            _, _, terminated, truncated, info = env.step(targets[start : start + 50])
            seconds += time.perf_counter() - begin
            frames += info["num_executed_frames"]
            if terminated or truncated:
                break
    env.close()
    return {"rest": 1e3 / rest_ms, "expert": frames / 50 / seconds}


def measure_images(size: int, count: int) -> dict[str, float]:
    """Time of one observation's two images [ms], and frames a second when every frame is observed."""
    env = gymnasium.make("chess_env:ChessPickStep-v0", image_size=size, distractors=FULL_BOARD).unwrapped
    assert isinstance(env, ChessPickEnv)
    observation, _ = env.reset(seed=SEED)
    images_ms = median_ms(lambda i: env.observe(), count)
    frame_ms = median_ms(lambda i: env.step(observation["agent_pos"]), count)
    env.close()
    return {"images_ms": images_ms, "frames_per_s": 1e3 / frame_ms}


def measure_workers(num_envs: int, size: int) -> dict[str, float]:
    """Memory of a worker process [MB]: its own (USS) and its share (PSS); and chunks a second of all workers."""
    envs = gymnasium.make_vec(
        "chess_env:ChessPick-v0", num_envs=num_envs, image_size=size, distractors=FULL_BOARD
    )
    begin = time.perf_counter()
    observation, _ = envs.reset(seed=SEED)
    start_s = time.perf_counter() - begin
    chunk = np.repeat(observation["agent_pos"][:, None], 50, axis=1)
    envs.step(chunk)
    step_ms = median_ms(lambda i: envs.step(chunk), 8)
    sizes = [memory_mb(process.pid) for process in envs.unwrapped.processes]  # type: ignore[attr-defined]
    envs.close()
    return {
        "uss_mb": float(np.mean([size["uss"] for size in sizes])),
        "pss_mb": float(np.mean([size["pss"] for size in sizes])),
        "rss_mb": float(np.mean([size["rss"] for size in sizes])),
        "first_reset_s": start_s,
        "chunks_per_s": num_envs * 1e3 / step_ms,
    }


def memory_mb(pid: int) -> dict[str, float]:
    """Private, shared-by-parts and resident memory of a process [MB], from Linux's smaps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {
        "uss": (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024,
        "pss": kilobytes["Pss"] / 1024,
        "rss": kilobytes["Rss"] / 1024,
    }


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    count = 10 if options.quick else 40
    chunks = measure_chunks(4 if options.quick else 12)
    results: dict[str, float] = {
        "reset, no images [ms]": measure_resets(None, count),
        "reset, 128 px [ms]": measure_resets(128, count),
        "reset, 256 px [ms]": measure_resets(256, count),
        "chunks/s, no images, arm at rest": chunks["rest"],
        "chunks/s, no images, expert": chunks["expert"],
    }
    for size in (128, 256):
        images = measure_images(size, count)
        results[f"two images of {size} px [ms]"] = images["images_ms"]
        results[f"frames/s with images of every frame, {size} px"] = images["frames_per_s"]
    for name, value in measure_workers(2, 256).items():
        results[f"2 workers, 256 px: {name}"] = value
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, MuJoCo {mujoco.__version__}, "
        f"Python {platform.python_version()}, 16 pieces"
    )
    for name, value in results.items():
        print(f"{name:50s} {value:9.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
