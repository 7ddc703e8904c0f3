"""How often the scripted expert lifts the piece and disturbs nothing (``chess-expert``)."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from chess_apps.config import ExpertConfig
from chess_apps.recording import worker_pool
from chess_env.config import PIECES
from chess_env.env import ChessPickEnv
from chess_env.errors import ChessEnvError
from chess_env.expert import Expert
from flowrl.errors import FlowRLError
from flowrl.metrics import wilson_interval

_BAND = 4  # numbers of distractors in one row of the table


@dataclass(frozen=True)
class Outcome:
    """What became of the expert in one scene."""

    index: int
    piece: str
    square: str
    num_distractors: int
    end: str
    clean: bool


def run(config: ExpertConfig) -> None:
    """Print every scene that failed, and the share of clean lifts with its Wilson interval: all of them, by kind of piece
    and by number of distractors."""
    for name in ("episodes", "workers"):
        if getattr(config, name) < 1:
            raise FlowRLError(f"--{name} {getattr(config, name)}: at least 1 is needed")
    make_env(config).close()  # a wrong flag is reported before any process starts
    blocks = np.array_split(np.arange(config.episodes), min(config.episodes, 4 * config.workers))
    outcomes: list[Outcome] = []
    with (
        worker_pool(config.workers) as pool,
        tqdm(total=config.episodes, desc="expert", unit="scene", mininterval=1.0, disable=None) as bar,
    ):
        for block in pool.map(partial(_try_scenes, config), blocks):
            outcomes += block
            bar.update(len(block))
    for outcome in outcomes:
        if not outcome.clean:
            print(
                f"scene {outcome.index}: {outcome.piece} on {outcome.square}, "
                f"{outcome.num_distractors} distractors: {outcome.end}"
            )
    print("\n".join(table(outcomes)))
    print("ends:", dict(Counter(outcome.end for outcome in outcomes)))


def make_env(config: ExpertConfig) -> ChessPickEnv:
    """The environment of these flags, without images.

    Raises:
        FlowRLError: A flag has a value that the environment refuses.
    """
    try:
        return ChessPickEnv(
            observation="state",
            distractors=config.distractors,
            pieces=config.pieces,
            task=config.task,
            randomization=config.randomization,
        )
    except ChessEnvError as error:
        raise FlowRLError(str(error)) from None


def table(outcomes: list[Outcome]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| scenes | clean lifts | share | 95 % |", "|---|---|---|---|", _row("all", outcomes)]
    groups: dict[str, list[Outcome]] = {kind: [o for o in outcomes if o.piece == kind] for kind in PIECES}
    for low in range(0, max(outcome.num_distractors for outcome in outcomes) + 1, _BAND):
        band = range(low, low + _BAND)
        groups[f"{low} to {band[-1]} distractors"] = [o for o in outcomes if o.num_distractors in band]
    return lines + [_row(name, chosen) for name, chosen in groups.items() if chosen]


def _row(name: str, outcomes: list[Outcome]) -> str:
    clean, total = sum(outcome.clean for outcome in outcomes), len(outcomes)
    low, high = wilson_interval(clean, total)
    return f"| {name} | {clean}/{total} | {100 * clean / total:.1f} % | {100 * low:.1f} to {100 * high:.1f} |"


def _try_scenes(config: ExpertConfig, indices: np.ndarray) -> list[Outcome]:
    """The outcome of each scene; runs in a worker."""
    env = make_env(config)
    expert: Expert | None = None
    outcomes = []
    for index in indices.tolist():
        _, info = env.reset(seed=config.seed, options={"index": index})
        expert = expert or Expert(env.simulation.scene)
        end, clean = _try_scene(env, expert, np.random.default_rng([config.seed, index]))
        outcomes.append(Outcome(index, info["piece"], info["square"], info["num_distractors"], end, clean))
    env.close()
    return outcomes


def _try_scene(env: ChessPickEnv, expert: Expert, rng: np.random.Generator) -> tuple[str, bool]:
    """How one plan ends, and whether it is a clean lift."""
    plan = expert.plan(env.simulation.data, env.simulation.target_slot, rng)
    if plan is None:
        return "no plan", False
    for target in plan:
        if env.simulation.run_frame(target) is not None:
            break
    episode = env.simulation.episode
    end = "success" if episode.success else str(episode.end or "not lifted")
    flags = [name for name in ("toppled", "disturbed") if getattr(episode, name)]
    return ", ".join([end, *flags]), episode.success and not episode.disturbed
