"""The manual, `ChessPickEnv`'s docstring, against what the environment does: rewards, ends, measures, arguments."""

import ast
import re
from dataclasses import asdict
from fractions import Fraction
from typing import get_args

import numpy as np

from chess_env.config import DEFAULT_ARGUMENTS, REWARDS
from chess_env.env import ChessPickEnv
from chess_env.options import RESET_OPTIONS
from chess_env.reward import TERM_NAMES
from chess_env.task import End, Episode, episode_metrics
from chess_episodes import hold

MANUAL = ChessPickEnv.__doc__ or ""


def table(heading: str, number: int = 0) -> list[list[str]]:
    """Cells of the rows of a section's table."""
    section = MANUAL.split(f"    ## {heading}\n")[1].split("    ## ")[0]
    tables = re.findall(r"(?:^    \|.*\n)+", section, re.MULTILINE)
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in tables[number].splitlines()
    ]
    return rows[2:]


def names(cell: str) -> list[str]:
    return [name.strip(" `") for name in cell.split(",")]


def test_reward_table_has_the_weights_of_both_presets():
    weights = {names(row[0])[0]: (float(row[1]), float(row[2])) for row in table("Reward")}
    sparse, shaped = asdict(REWARDS["sparse"]), asdict(REWARDS["shaped"])
    assert weights == {name: (sparse[name], shaped[name]) for name in TERM_NAMES}


def test_table_of_ends_lists_every_end_with_its_flag():
    rows = {names(row[0])[0]: row[1].strip("`") for row in table("End")}
    assert set(rows) == set(get_args(End))
    assert {end for end, flag in rows.items() if flag == "truncated"} == {"timeout"}


def test_table_of_measures_lists_every_measure(env):
    listed = [name for row in table("End", 1) for name in names(row[0])]
    env.reset(seed=0)
    metrics = episode_metrics(Episode(env.simulation.episode.start, 1, False), None, 0.0, "pawn", 0)
    assert sorted(listed) == sorted(metrics)


def test_table_of_options_lists_every_option():
    assert sorted(names(row[0])[0] for row in table("Start")) == sorted(RESET_OPTIONS)


def test_table_of_infos_lists_every_key_of_reset_and_the_manual_those_of_step(env):
    listed = [name for row in table("Start", 1) for name in names(row[0])]
    observation, info = env.reset(seed=0, options={"check_expert": True})
    assert sorted(listed) == sorted(info)
    info = env.step(hold(observation))[4]
    assert all(f"`{name}`" in MANUAL for name in info)


def test_table_of_arguments_has_every_argument_with_its_default():
    rows = {names(row[0])[0]: row[1].strip("`") for row in table("Arguments")}
    assert rows.pop("render_mode") == "None"
    assert float(Fraction(rows.pop("physics_timestep"))) == DEFAULT_ARGUMENTS["physics_timestep"]
    assert {name: ast.literal_eval(value) for name, value in rows.items()} == {
        name: value for name, value in DEFAULT_ARGUMENTS.items() if name != "physics_timestep"
    }


def test_reach_is_the_named_potential(env):
    """1 at the grasp point, 0 at 0.4 m: with weight 1 and no discount the rewards sum to the distance's change / 0.4."""
    made = ChessPickEnv(observation="state", reward={"success": 0.0, "reach": 1.0, "discount": 1.0})
    observation, _ = made.reset(seed=0)
    before = made.simulation.episode.now.distance_m
    chunk = hold(observation) + np.linspace(0, 6, 50, dtype=np.float32)[:, None]
    reward = made.step(chunk)[1]
    after = made.simulation.episode.now.distance_m
    assert max(before, after) < 0.4
    assert abs(reward - (before - after) / 0.4) < 1e-9
    made.close()
