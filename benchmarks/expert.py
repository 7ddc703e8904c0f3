"""How often the scripted expert lifts cleanly through ``ChessPick-v0``, with actions in LeRobot's units, chunk by chunk.

    python benchmarks/expert.py --scenes 200
    python benchmarks/expert.py --scenes 200 --start near
    python benchmarks/expert.py --scenes 100 --aim-error-mm 6
    python benchmarks/expert.py --scenes 200 --pieces all --randomization wide

Scenes are not checked beforehand. Prints every failure, the share of clean lifts with its Wilson 95 % interval, the
frames of a lift, and the processor time of a plan. One process; no images are rendered.
"""

import argparse
import math
import time

import numpy as np

from chess_env.env import ChessPickEnv
from chess_env.expert import Expert, ExpertAgent, ExpertConfig

SEED = 5_000_003  # not a seed of training, validation or test


def main() -> None:
    parser = argparse.ArgumentParser(description="Clean lifts of the scripted expert.")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--first", type=int, default=0, help="index of the first scene")
    parser.add_argument("--start", choices=("home", "near"), default="home")
    parser.add_argument("--distractors", type=int, nargs=2, default=(0, 15), metavar=("LOW", "HIGH"))
    parser.add_argument("--pieces", default="pawn,knight")
    parser.add_argument("--randomization", choices=("none", "default", "wide"), default="default")
    parser.add_argument("--variety", type=float, default=1.0)
    parser.add_argument("--aim-error-mm", type=float, default=0.0)
    parser.add_argument("--hesitation-frames", type=int, default=0)
    parser.add_argument("--close-early-late-frames", type=int, default=0)
    args = parser.parse_args()
    config = ExpertConfig(
        args.variety, args.aim_error_mm, args.hesitation_frames, args.close_early_late_frames
    )
    env = ChessPickEnv(
        observation="state",
        distractors=tuple(args.distractors),
        pieces=args.pieces,
        randomization=args.randomization,
    )
    expert: Expert | None = None
    clean, frames, errors, plan_ms = 0, [], [], []
    for index in range(args.first, args.first + args.scenes):
        _, info = env.reset(seed=args.seed, options={"index": index})
        simulation = env.simulation
        expert = expert or Expert(simulation.scene, config)
        rng = np.random.default_rng([args.seed, index])
        if args.start == "near":
            simulation.restart(expert.sample_near_start(simulation.data, simulation.target_slot, rng))
        before = time.process_time()
        plan_exists = (
            expert.plan(simulation.data, simulation.target_slot, np.random.default_rng(index)) is not None
        )
        plan_ms.append(1e3 * (time.process_time() - before))
        metrics = run_episode(env, ExpertAgent(expert), rng)
        if metrics["clean_lift"]:
            clean += 1
            frames.append(metrics["frames"])
        else:
            name = f"{info['piece']} on {info['square']}, {info['num_distractors']} distractors"
            print(f"scene {index}: {name}: {metrics['end']}{'' if plan_exists else ', no plan'}")
        if metrics["close_lateral_mm"] is not None:
            errors.append(metrics["close_lateral_mm"])
    env.close()
    low, high = wilson(clean, args.scenes)
    print(
        f"clean lifts {clean}/{args.scenes} = {100 * clean / args.scenes:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    )
    if frames:
        print(
            f"frames: median {np.median(frames):.0f}, 95 % {np.percentile(frames, 95):.0f}, most {max(frames)}"
        )
    if errors:
        print(f"sideways error at closing: median {np.median(errors):.1f} mm")
    print(
        f"plan: median {np.median(plan_ms):.1f} ms, 95 % {np.percentile(plan_ms, 95):.1f} ms of processor time"
    )


def run_episode(env: ChessPickEnv, agent: ExpertAgent, rng: np.random.Generator) -> dict[str, object]:
    """The metrics of one episode under the expert; it plans again until the time is over."""
    simulation = env.simulation
    while True:
        *_, terminated, truncated, info = env.step(agent.act(simulation.data, simulation.target_slot, rng))
        if terminated or truncated:
            return info["episode_metrics"]


def wilson(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval. Source: Wilson (1927)."""
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return centre - half, centre + half


if __name__ == "__main__":
    main()
