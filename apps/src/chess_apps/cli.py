"""Entry points. Flags are parsed before torch, LeRobot or MuJoCo are imported, so that --help is quick."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from chess_apps.config import CloneConfig, DemosConfig, ExpertConfig, PictureConfig, PlayConfig
from flowrl.cli import parse_flags
from flowrl.errors import FlowRLError


def _run[Config](config_type: type[Config], program: Callable[[Config], None], prog: str) -> None:
    """Parse the flags and run ``program``; bad input ends in one line and exit code 2."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = parse_flags(config_type, prog, sys.argv[1:])
        import_module("chess_env.opengl")  # before MuJoCo, whose own error of a missing OpenGL is unreadable
        program(config)
    except KeyboardInterrupt:
        _fail(f"{prog}: interrupted", 130)
    except _bad_input_errors() as error:
        _fail(f"{prog}: {error}", 2)


def _bad_input_errors() -> tuple[type[Exception], ...]:
    from chess_env.errors import ChessEnvError

    return (FlowRLError, ChessEnvError)


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def demos() -> None:
    """chess-demos: record expert episodes into a LeRobotDataset."""

    def program(config: DemosConfig) -> None:
        from chess_apps.demos import record_dataset

        print(f"wrote {record_dataset(config)}")

    _run(DemosConfig, program, "chess-demos")


def bc() -> None:
    """chess-bc: clone demonstrations into a SmolVLA."""

    def program(config: CloneConfig) -> None:
        from chess_apps.bc import run

        run(config)

    _run(CloneConfig, program, "chess-bc")


def expert() -> None:
    """chess-expert: how often the scripted expert lifts the piece without disturbing another."""

    def program(config: ExpertConfig) -> None:
        from chess_apps.expert_gate import run

        run(config)

    _run(ExpertConfig, program, "chess-expert")


def picture() -> None:
    """chess-picture: the scene and both cameras as a PNG."""

    def program(config: PictureConfig) -> None:
        from chess_apps.picture import run

        run(config)

    _run(PictureConfig, program, "chess-picture")


def play() -> None:
    """chess-play: episodes of an agent in a window, as a video, or as numbers."""

    def program(config: PlayConfig) -> None:
        from chess_apps.play import run

        run(config)

    _run(PlayConfig, program, "chess-play")
