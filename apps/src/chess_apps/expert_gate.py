"""How often the scripted expert lifts the piece and disturbs nothing (``chess-expert``)."""

from collections import Counter
from functools import partial

import numpy as np
from tqdm import tqdm

from chess_apps.config import ExpertConfig
from chess_apps.recording import worker_pool
from chess_env.env import ChessPickEnv
from chess_env.expert import Expert
from flowrl.errors import FlowRLError
from flowrl.metrics import wilson_interval


def run(config: ExpertConfig) -> None:
    """Print the share of clean lifts with its Wilson interval, by piece, and every scene that failed."""
    if config.episodes < 1:
        raise FlowRLError(f"--episodes {config.episodes}: at least 1 is needed")
    blocks = np.array_split(np.arange(config.episodes), min(config.episodes, 4 * config.workers))
    outcomes: list[tuple[int, str, str, bool]] = []
    with (
        worker_pool(config.workers) as pool,
        tqdm(total=config.episodes, desc="expert", unit="scene", mininterval=1.0, disable=None) as bar,
    ):
        for block in pool.map(partial(_try_scenes, config), blocks):
            outcomes += block
            bar.update(len(block))
    for index, piece, end, clean in outcomes:
        if not clean:
            print(f"scene {index}: {piece}, {end}")
    report("all", outcomes)
    for piece in sorted({outcome[1] for outcome in outcomes}):
        report(piece, [outcome for outcome in outcomes if outcome[1] == piece])
    print("ends:", dict(Counter(outcome[2] for outcome in outcomes)))


def report(name: str, outcomes: list[tuple[int, str, str, bool]]) -> None:
    """One line: clean lifts, scenes, share and its 95 % Wilson interval."""
    clean = sum(outcome[3] for outcome in outcomes)
    low, high = wilson_interval(clean, len(outcomes))
    print(
        f"{name}: {clean}/{len(outcomes)} clean lifts = {100 * clean / len(outcomes):.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f})"
    )


def _try_scenes(config: ExpertConfig, indices: np.ndarray) -> list[tuple[int, str, str, bool]]:
    """(index, piece, end, clean lift) of each scene; runs in a worker, without images."""
    env = ChessPickEnv(observation="state", distractors=config.distractors)
    expert: Expert | None = None
    outcomes = []
    for index in indices.tolist():
        _, info = env.reset(seed=config.seed, options={"index": index})
        expert = expert or Expert(env.simulation.scene)
        rng = np.random.default_rng([config.seed, index])
        outcomes.append((index, info["piece"], *_try_scene(env, expert, rng)))
    env.close()
    return outcomes


def _try_scene(env: ChessPickEnv, expert: Expert, rng: np.random.Generator) -> tuple[str, bool]:
    plan = expert.plan(env.simulation.data, env.simulation.target_slot, rng)
    if plan is None:
        return "no plan", False
    for target in plan:
        if env.simulation.run_frame(target) is not None:
            break
    episode = env.simulation.episode
    end = "disturbed" if episode.success and episode.disturbed else str(episode.end or "not lifted")
    return end, episode.success and not episode.disturbed
