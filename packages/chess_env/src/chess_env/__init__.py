"""chess_env: a simulated SO-101 arm picks up a chess piece; Gymnasium environments on MuJoCo.

`import chess_env` registers the environments and imports nothing heavy; the simulator is imported when one is made.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium

from chess_env.config import DEFAULT_ARGUMENTS

CHESS_PICK_ID = "ChessPick-v0"
CHESS_PICK_STEP_ID = "ChessPickStep-v0"

if TYPE_CHECKING:
    from chess_env.config import EnvConfig, Randomization, RewardConfig
    from chess_env.env import ChessPickEnv, ChessPickStepEnv
    from chess_env.errors import ChessEnvError, WorkerError
    from chess_env.vector import ChessPickStepVectorEnv, ChessPickVectorEnv
    from chess_env.wrappers import FlatObservation

__all__ = [
    "CHESS_PICK_ID",
    "CHESS_PICK_STEP_ID",
    "DEFAULT_ARGUMENTS",
    "ChessEnvError",
    "ChessPickEnv",
    "ChessPickStepEnv",
    "ChessPickStepVectorEnv",
    "ChessPickVectorEnv",
    "EnvConfig",
    "FlatObservation",
    "Randomization",
    "RewardConfig",
    "WorkerError",
    "register_environments",
]
_MODULES = {
    "config": ("EnvConfig", "Randomization", "RewardConfig"),
    "env": ("ChessPickEnv", "ChessPickStepEnv"),
    "errors": ("ChessEnvError", "WorkerError"),
    "vector": ("ChessPickStepVectorEnv", "ChessPickVectorEnv"),
    "wrappers": ("FlatObservation",),
}


def register_environments() -> None:
    """Register both environments with Gymnasium; those that are registered already stay as they are."""
    chunked_only = ("chunk_size", "n_action_steps")
    step_arguments = {name: value for name, value in DEFAULT_ARGUMENTS.items() if name not in chunked_only}
    for env_id, name, arguments in (
        (CHESS_PICK_ID, "ChessPick", DEFAULT_ARGUMENTS),
        (CHESS_PICK_STEP_ID, "ChessPickStep", step_arguments),
    ):
        if env_id not in gymnasium.registry:
            gymnasium.register(
                id=env_id,
                entry_point=f"chess_env.env:{name}Env",
                vector_entry_point=f"chess_env.vector:{name}VectorEnv",
                kwargs=dict(arguments),
            )


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"chess_env.{module}"), name)
    raise AttributeError(f"module 'chess_env' has no attribute {name!r}")


register_environments()
