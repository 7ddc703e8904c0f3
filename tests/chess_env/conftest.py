"""Environments that a module's tests share: a reset begins from nothing."""

import os
from multiprocessing import get_context

import pytest

from chess_env.env import ChessPickEnv
from chess_episodes import SMALL

# One server for all tests' workers, whoever starts it first: with chess_env imported, and one BLAS thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
get_context("forkserver").set_forkserver_preload(["chess_env.worker"])


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
