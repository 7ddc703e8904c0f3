"""Speed and memory of the chess environment, 16 pieces on the board: prints tables and, with --json PATH, writes all numbers.

    python benchmarks/env.py --json env.json          # five minutes on two free cores
    python benchmarks/env.py --quick
    python benchmarks/env.py --peer-python peer/bin/python      # beside so101-nexus, see so101_nexus_peer.py

Rates of one process are per second of processor time, all its threads together: so they are rates per core, and other
programs on the machine disturb them little. Workers and first steps are timed by the clock. Of repeats the best counts,
since other programs can only slow a machine down. Nothing here is a test.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import mujoco
import numpy as np

from chess_env.config import CONTROL_HZ
from chess_env.env import ChessPickEnv
from chess_env.expert import Expert
from chess_env.so101 import to_units

SEED = 7_700_003
FULL_BOARD = (15, 15)
CHUNK = 50
SIZES: dict[str, tuple[int, int] | None] = {
    "none": None,
    "128x128": (128, 128),
    "256x256": (256, 256),
    "640x480": (480, 640),
}
FIRST_STEP = """
import time; begin = time.perf_counter()
import gymnasium
env = gymnasium.make("chess_env:ChessPick-v0", distractors=(15, 15), {arguments})
made = time.perf_counter()
env.reset(seed=0)
reset = time.perf_counter()
env.step(env.action_space.sample())
print(made - begin, reset - made, time.perf_counter() - begin)
"""
PERIOD_S = 4.0  # of the slow sine that the arm follows in "moving"
AMPLITUDE = 0.1  # of each joint's range


def arguments_of(size: tuple[int, int] | None) -> dict[str, Any]:
    """Arguments of an environment with this image size, None for the state vector."""
    return {
        "distractors": FULL_BOARD,
        **({"observation": "state"} if size is None else {"image_size": size}),
    }


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Processor time of one call [s], or what another `clock` says."""
    begin = clock()
    call()
    return clock() - begin


def median_ms(call: Callable[[int], object], count: int) -> float:
    """Median time of `call(i)` [ms]."""
    return float(np.median([seconds_of(lambda i=i: call(i)) for i in range(count)])) * 1e3  # type: ignore[misc]


def sine(start: np.ndarray, low: np.ndarray, high: np.ndarray, frames: range) -> np.ndarray:
    """Joint targets [units] of a slow sine about `start`, shape (len(frames), 6), float32."""
    phase = 2 * np.pi * np.array(frames)[:, None] / CONTROL_HZ / PERIOD_S + np.arange(6)
    return (start + AMPLITUDE * (high - low) * (np.sin(phase) - np.sin(np.arange(6)))).astype(np.float32)


def measure_resets(size: tuple[int, int] | None, repeats: int, count: int) -> float:
    """A reset with a new scene of 16 pieces, with its observation [ms]."""
    env = ChessPickEnv(**arguments_of(size))
    env.reset(seed=SEED)
    result = min(median_ms(lambda i: env.reset(options={"index": i + 1}), count) for _ in range(repeats))
    env.close()
    return result


def measure_arm(env: ChessPickEnv, moving: bool, chunks: int) -> float:
    """Chunks of 50 frames a second, without images: the arm at rest, or following a slow sine above the board."""
    observation, _ = env.reset(seed=SEED)
    low, high = env.action_space.low[0], env.action_space.high[0]
    start = observation["agent_pos"]
    seconds = 0.0
    for i in range(chunks):
        targets = np.repeat(start[None], CHUNK, axis=0)
        if moving:
            targets = sine(start, low, high, range(CHUNK * i, CHUNK * (i + 1)))
        seconds += seconds_of(lambda targets=targets: env.step(targets))  # type: ignore[misc]
    return chunks / seconds


def measure_expert(episodes: int, repeats: int) -> dict[str, float]:
    """The scripted pick at work: chunks a second of the environment alone, of MuJoCo alone, and a plan's time [ms]."""
    env = ChessPickEnv(**arguments_of(None))
    env.reset(seed=SEED)
    simulation = env.simulation
    expert = Expert(simulation.scene)
    totals = {"env": 0.0, "mujoco": 0.0, "plan": 0.0}
    frames = plans = 0
    for index in range(episodes):
        env.reset(seed=SEED, options={"index": index})
        begin = time.process_time()
        plan = expert.plan(simulation.data, simulation.target_slot, np.random.default_rng(index))
        totals["plan"] += time.process_time() - begin
        if plan is None:
            continue
        plans += 1
        units = to_units(plan).astype(np.float32)
        units = np.concatenate([units, np.repeat(units[-1:], -len(units) % CHUNK, axis=0)])
        best = {"env": np.inf, "mujoco": np.inf}
        executed = 0
        for _ in range(repeats):
            env.reset(seed=SEED, options={"index": index})
            begin, executed = time.process_time(), 0
            for chunk in units.reshape(-1, CHUNK, 6):
                *_, terminated, truncated, info = env.step(chunk)
                executed += info["num_executed_frames"]
                if terminated or truncated:
                    break
            best["env"] = min(best["env"], time.process_time() - begin)
            env.reset(seed=SEED, options={"index": index})
            model, data = simulation.scene.model, simulation.data
            begin = time.process_time()
            for target in plan[:executed]:
                data.ctrl[simulation.scene.actuator_ids] = target
                mujoco.mj_step(model, data, env.config.physics_steps_per_frame)
            best["mujoco"] = min(best["mujoco"], time.process_time() - begin)
        frames += executed
        for name, value in best.items():
            totals[name] += value
    env.close()
    return {
        "chunks_per_s": frames / CHUNK / totals["env"],
        "mujoco_alone_chunks_per_s": frames / CHUNK / totals["mujoco"],
        "python_us_per_frame": (totals["env"] - totals["mujoco"]) / frames * 1e6,
        "plan_ms": totals["plan"] / max(plans, 1) * 1e3,
    }


def measure_single(repeats: int) -> dict[str, float]:
    """One process without images."""
    env = ChessPickEnv(**arguments_of(None))
    single = gymnasium.make("chess_env:ChessPickStep-v0", **arguments_of(None)).unwrapped
    observation, _ = single.reset(seed=SEED)
    target = observation["agent_pos"]
    steps = min(seconds_of(lambda: [single.step(target) for _ in range(100)]) for _ in range(repeats))
    result = {
        "chunks_per_s_rest": max(measure_arm(env, False, 10) for _ in range(repeats)),
        "chunks_per_s_moving": max(measure_arm(env, True, 10) for _ in range(repeats)),
        "frames_per_s_step_by_step": 100 / steps,
    }
    env.close()
    single.close()
    return result


def measure_images(size: tuple[int, int], repeats: int, count: int) -> dict[str, float]:
    """One observation's two images [ms], decisions (50 frames and two images) and observed frames a second."""
    env = ChessPickEnv(**arguments_of(size))
    observation, _ = env.reset(seed=SEED)
    chunk = np.repeat(observation["agent_pos"][None], CHUNK, axis=0)
    images_ms = min(median_ms(lambda i: env.observe(), count) for _ in range(repeats))
    decision_s = min(seconds_of(lambda: [env.step(chunk) for _ in range(4)]) / 4 for _ in range(repeats))
    env.close()
    single = gymnasium.make("chess_env:ChessPickStep-v0", **arguments_of(size)).unwrapped
    target = single.reset(seed=SEED)[0]["agent_pos"]
    frame_s = min(seconds_of(lambda: [single.step(target) for _ in range(count)]) for _ in range(repeats))
    single.close()
    return {
        "two_images_ms": images_ms,
        "decisions_per_s": 1 / decision_s,
        "observed_frames_per_s": count / frame_s,
    }


def measure_workers(num_envs: int, size: tuple[int, int] | None, repeats: int) -> dict[str, float]:
    """Worker processes: chunks a second of all, seconds to the first observation, memory [MB], an idle one's use."""
    begin = time.perf_counter()
    envs = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=num_envs, seconds=60.0, **arguments_of(size))
    observation, _ = envs.reset(seed=SEED)
    start_s = time.perf_counter() - begin
    chunk = np.repeat(observation["agent_pos"][:, None], CHUNK, axis=1)
    envs.step(chunk)
    step_s = min(
        seconds_of(lambda: [envs.step(chunk) for _ in range(4)], time.perf_counter) / 4
        for _ in range(repeats)
    )
    pids = [process.pid for process in envs.unwrapped.processes]  # type: ignore[attr-defined]
    memory = [memory_mb(pid) for pid in pids]
    before = cpu_seconds(pids)
    time.sleep(1.0)
    idle = (cpu_seconds(pids) - before) / num_envs
    envs.close()
    result = {"chunks_per_s": num_envs / step_s, "first_observation_s": start_s, "idle_cpu_fraction": idle}
    return result | {name: float(np.mean([one[name] for one in memory])) for name in memory[0]}


def memory_mb(pid: int) -> dict[str, float]:
    """Private, shared-by-parts and resident memory of a process [MB], from Linux's smaps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {
        "uss_mb": (kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]) / 1024,
        "pss_mb": kilobytes["Pss"] / 1024,
        "rss_mb": kilobytes["Rss"] / 1024,
    }


def cpu_seconds(pids: list[int]) -> float:
    """Processor time that processes have used [s]."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_first_step(size: tuple[int, int] | None, repeats: int) -> dict[str, float]:
    """A fresh interpreter: import and make, the first reset, and all up to the end of the first step [s]."""
    arguments = "observation='state'" if size is None else f"image_size={size}"
    code = FIRST_STEP.format(arguments=arguments)
    runs = []
    for _ in range(repeats):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        runs.append([float(word) for word in out.split()])
    made, reset, total = min(runs, key=lambda run: run[2])
    return {"make_s": made, "first_reset_s": reset, "first_step_s": total}


class Peer:
    """so101-nexus in an interpreter of its own, asked by lines of JSON."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("so101_nexus_peer.py")
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"MUJOCO_GL": "egl", **os.environ},
        )
        self.facts = self._read()

    def ask(self, kind: str, count: int, size: tuple[int, int] | None = None) -> float:
        """The one number of a request's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kind": kind, "count": count, "size": size}) + "\n")
        self._process.stdin.flush()
        (value,) = self._read().values()
        return float(value)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer's interpreter ended: does it have so101-nexus and so101-nexus-mujoco?")
        return json.loads(line)

    def close(self) -> None:
        """End its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_peer(python: str, repeats: int, count: int) -> dict[str, Any]:
    """Side by side in alternation, the best of each; rates without images are simulated seconds per second."""
    peer = Peer(python)
    hertz = peer.facts["control_hz"]
    env = ChessPickEnv(**arguments_of(None))
    rows: dict[str, dict[str, float]] = {}
    for name, moving, kind in (("arm at rest", False, "rest"), ("arm moving", True, "move")):
        ours = theirs = 0.0
        for _ in range(repeats):
            ours = max(ours, measure_arm(env, moving, 10) * CHUNK / CONTROL_HZ)
            theirs = max(theirs, peer.ask(kind, 500) / hertz)
        rows[f"simulated s/s, {name}"] = {"chess_env": ours, "so101_nexus": theirs, "ratio": ours / theirs}
    env.close()
    for label, size in SIZES.items():
        if size is None:
            continue
        camera = ChessPickEnv(**arguments_of(size))
        camera.reset(seed=SEED)
        ours = theirs = 0.0
        for _ in range(repeats):
            ours = max(ours, count / seconds_of(lambda env=camera: [env.observe() for _ in range(count)]))
            theirs = max(theirs, peer.ask("images", max(count // 4, 3), size))
        camera.close()
        rows[f"pairs of images/s, {label}"] = {
            "chess_env": ours,
            "so101_nexus": theirs,
            "ratio": ours / theirs,
        }
        rows[f"pairs of images/s, {label}"]["so101_nexus_default_quality"] = peer.ask(
            "images_default", 2, size
        )
    peer.close()
    return {"peer": peer.facts, "rows": rows}


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cpu = "".join(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    return {
        "commit": commit or "unknown",
        "cpu": cpu.split("model name")[1].strip("\t :") if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "mujoco": mujoco.__version__,
        "python": platform.python_version(),
        "MUJOCO_GL": os.environ.get("MUJOCO_GL", ""),
    }


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """A Markdown table, one row for each entry."""
    columns = list(next(iter(rows.values())))
    print(f"\n| {title} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in columns)} |")


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="most worker processes")
    parser.add_argument("--peer-python", help="interpreter that has so101-nexus: measured side by side")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    repeats, count = (2, 8) if options.quick else (4, 20)
    results: dict[str, Any] = {"machine": machine()}
    print(json.dumps(results["machine"]))

    results["single"] = measure_single(repeats) | measure_expert(4 if options.quick else 12, repeats)
    print_table("one process, no images", {"16 pieces": results["single"]})
    results["images"] = {
        name: measure_images(size, repeats, count) for name, size in SIZES.items() if size is not None
    }
    print_table("images", results["images"])
    results["start"] = {
        name: {"reset_ms": measure_resets(size, repeats, count), **measure_first_step(size, repeats)}
        for name, size in SIZES.items()
    }
    print_table("start", results["start"])
    numbers = sorted({1, 2, options.workers})
    results["workers"] = {
        f"{n} workers, images {name}": measure_workers(n, size, repeats)
        for name, size in SIZES.items()
        for n in numbers
    }
    print_table("workers", results["workers"])
    if options.peer_python:
        results["side_by_side"] = measure_peer(options.peer_python, repeats, count)
        print(f"\n{json.dumps(results['side_by_side']['peer'])}")
        print_table("side by side", results["side_by_side"]["rows"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
