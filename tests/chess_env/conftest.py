"""Environments that a module's tests share: a reset begins from nothing."""

import pytest

from chess_env.env import ChessPickEnv
from chess_episodes import SMALL


@pytest.fixture(scope="module")
def env():
    """One environment without images for all tests that only need states: a reset begins from nothing."""
    made = ChessPickEnv(observation="state")
    yield made
    made.close()


@pytest.fixture(scope="module")
def pixel_env():
    made = ChessPickEnv(**SMALL)
    yield made
    made.close()
