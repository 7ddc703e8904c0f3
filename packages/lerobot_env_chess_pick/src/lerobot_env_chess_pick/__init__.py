"""LeRobot plugin: chess_env as `--env.type=chess_pick`.

LeRobot imports every installed distribution whose name begins with `lerobot_env_`; this import registers the type.
"""

from .configuration_chess_pick import ChessPickEnvConfig

__all__ = ["ChessPickEnvConfig"]
