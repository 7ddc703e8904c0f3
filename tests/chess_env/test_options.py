"""Reset options: positions, squares, and one readable line for everything that cannot be."""

import re
import sys

import gymnasium
import numpy as np
import pytest
from python_process import run_python

from chess_env import board
from chess_env.config import EnvConfig
from chess_env.env import ChessPickEnv
from chess_env.errors import OptionError
from chess_env.options import check_options
from chess_env.position import PositionPiece, read_fen, write_placement
from chess_episodes import full_state

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR"
SCATTERED = "r1b2q1k/8/8/3p4/4P3/2N2n2/8/8"


@pytest.fixture(scope="module")
def all_env():
    made = ChessPickEnv(observation="state", pieces="all", task="square")
    yield made
    made.close()


def standing(env):
    """Square -> kind of the pieces on the board, from the simulator's state; the target first."""
    simulation = env.simulation
    slots = (simulation.target_slot, *simulation.distractor_slots)
    pieces = [simulation.scene.pieces[slot] for slot in slots]
    return {board.square_at(simulation.data.xpos[piece.body_id]): piece.kind for piece in pieces}


def test_fen_is_read_square_by_square():
    assert read_fen("8/8/8/4n3/8/8/8/K7 w - - 0 1") == (
        PositionPiece("a1", "king", "white"),
        PositionPiece("e5", "knight", "black"),
    )
    for placement in (START, SCATTERED, "8/8/8/8/8/8/8/8"):
        assert write_placement(read_fen(placement)) == placement


def test_position_stands_on_the_board_with_the_piece_of_the_square_as_target(all_env):
    _, info = all_env.reset(seed=3, options={"fen": SCATTERED, "square": "c3"})
    squares = standing(all_env)
    assert next(iter(squares)) == "c3"
    assert squares == {
        "a8": "rook", "c8": "bishop", "f8": "queen", "h8": "king", "d5": "pawn", "e4": "pawn", "c3": "knight", "f3": "knight",
    }  # fmt: skip
    assert (info["piece"], info["square"], info["colour"]) == ("knight", "c3", "white")
    assert info["task"] == all_env.task == all_env.task_description == "Pick up the knight on c3."
    assert info["placement"] == SCATTERED and info["num_distractors"] == 7
    rgba = all_env.simulation.scene.model.geom_rgba
    for slot in (all_env.simulation.target_slot, *all_env.simulation.distractor_slots):
        piece = all_env.simulation.scene.pieces[slot]
        square = board.square_at(all_env.simulation.data.xpos[piece.body_id])
        assert (rgba[piece.drawn_geom_ids[0]][0] > 0.5) == (square in ("e4", "c3"))


def test_position_of_a_whole_game_stands():
    env = ChessPickEnv(image_size=32, pieces="all")
    _, info = env.reset(seed=3, options={"fen": f"{START} w KQkq - 0 1", "square": "e2"})
    assert info["num_distractors"] == 31 and info["placement"] == START
    assert info["task"] == "Pick up the pawn on e2."  # with the default task too: white is not enough
    assert len(standing(env)) == 32
    env.close()


def test_rest_of_the_scene_is_a_function_of_seed_and_index(all_env):
    options = {"fen": SCATTERED, "square": "c3", "index": 5}
    all_env.reset(seed=3, options=options)
    first = full_state(all_env)
    all_env.reset(seed=3)
    all_env.reset(seed=3, options=options)
    assert np.array_equal(full_state(all_env), first)
    all_env.reset(seed=3, options={**options, "index": 6})
    assert not np.array_equal(full_state(all_env), first)
    assert "fen" in options


def test_options_hold_for_one_episode(all_env):
    all_env.reset(seed=3, options={"fen": SCATTERED})
    _, after = all_env.reset()
    _, plain = all_env.reset(seed=3, options={"index": 1})
    assert after == plain and after["placement"] != SCATTERED


def test_instruction_by_colour_stays_where_it_is_enough(env):
    _, info = env.reset(seed=3, options={"fen": "8/8/8/3p4/4P3/8/8/8", "square": "e4"})
    assert info["task"] == "Pick up the white chess piece."
    _, info = env.reset(seed=3, options={"fen": "8/8/8/3p4/4P3/8/8/8", "square": "d5"})
    assert info["task"] == "Pick up the pawn on d5."
    _, info = env.reset(seed=3, options={"square": "b6"})
    assert info["square"] == "b6" and info["task"] == "Pick up the white chess piece."


def test_checked_position_is_solved(all_env):
    _, info = all_env.reset(seed=3, options={"fen": SCATTERED, "square": "d5", "check_expert": True})
    assert info["expert_ok"] is True and info["placement"] == SCATTERED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fen": "8/8/8/8"}, "fen='8/8/8/8': expected 8 rows"),
        ({"fen": "8/8/8/8/8/8/8/8 x - - 0 1"}, "a FEN or its first field is needed"),
        ({"fen": 7}, "fen=7: a string is needed"),
        ({"fen": "8/8/8/8/8/8/8/8"}, "no piece of the position stands within the arm's reach"),
        ({"fen": SCATTERED, "square": "e5"}, "square='e5' is empty in the position: use one of c3, f3, e4"),
        ({"fen": SCATTERED, "square": "h8"}, "square='h8' is out of the arm's reach: use any square but"),
        ({"square": "e9"}, "square='e9': a square from a1 to h8 is needed"),
        ({"square": None}, "square=None: a string is needed"),
        ({"fen": "QQQQQQQQ/QQQQQQQQ/QQ6/8/8/8/8/8"}, "18 pieces of kind queen, this environment 16"),
        ({"fen": START}, "room for 15 pieces beside the target, the position has 31"),
        ({"fenn": START}, "unknown reset option 'fenn'"),
    ],
)
def test_what_cannot_be_built_is_one_readable_line(all_env, options, message):
    all_env.reset(seed=3)
    before = full_state(all_env)
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        all_env.reset(seed=3, options=options)
    assert "\n" not in str(caught.value)
    assert np.array_equal(full_state(all_env), before)


def test_pieces_that_the_environment_lacks_are_named_with_the_remedy():
    with pytest.raises(
        OptionError, match=r"has a queen, this environment has pawn, knight: make it with pieces='all'"
    ):
        check_options({"fen": "8/8/8/3q4/8/8/8/8"}, EnvConfig())
    with pytest.raises(
        OptionError, match=r"3 pieces of kind pawn, this environment 1: make it with distractors=\(0, 2\)"
    ):
        check_options({"fen": "8/8/8/3ppp2/8/8/8/8"}, EnvConfig(distractors=(0, 0)))


def test_missing_chess_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(OptionError, match=re.escape("pip install chess-env[fen]")):
        check_options({"fen": SCATTERED}, EnvConfig(pieces=("pawn",)))


def test_chess_is_imported_only_for_a_fen():
    code = (
        "import sys\n"
        "from chess_env.env import ChessPickEnv\n"
        "env = ChessPickEnv(observation='state')\n"
        "env.reset(seed=0, options={'square': 'e4'})\n"
        "print('chess' in sys.modules)\n"
    )
    assert run_python(code).stdout.strip() == "False"


def test_vector_environment_deals_positions_and_squares_out():
    envs = gymnasium.make_vec(
        "chess_env:ChessPick-v0",
        num_envs=2,
        observation="state",
        pieces="all",
        distractors=(0, 3),
        task="square",
    )
    fens = ["8/8/8/3q4/4K3/8/8/8", "8/8/8/8/2n5/2N5/8/8"]
    options = {"fen": fens, "square": ["d5", "c3"], "index": np.arange(2)}
    _, info = envs.reset(seed=[1, 1], options=options)
    assert info["task"].tolist() == ["Pick up the queen on d5.", "Pick up the knight on c3."]
    assert options["fen"] is fens
    _, info = envs.reset(seed=[1, 1], options={"fen": np.array(fens)})
    assert info["placement"].tolist() == fens
    _, info = envs.reset(seed=[1, 1], options={"fen": [None, fens[1]], "square": "c3"})
    assert info["square"].tolist() == ["c3", "c3"] and info["placement"][1] == fens[1] != info["placement"][0]
    with pytest.raises(OptionError, match="square='e5' is empty"):
        envs.reset(seed=[1, 1], options={"fen": fens, "square": ["d5", "e5"]})
    with pytest.raises(OptionError, match=r"option fen has shape \(3,\)"):
        envs.reset(seed=[1, 1], options={"fen": [*fens, fens[0]]})
    envs.close()
