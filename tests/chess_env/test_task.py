"""Ends and flags of an episode, from hand-made snapshots."""

from dataclasses import replace

import numpy as np
import pytest

from chess_env.task import HOLD_FRAMES, Episode, Snapshot, episode_metrics

UP = np.array([0.0, 0.0, 1.0])
LYING = np.array([1.0, 0.0, 0.0])
START = Snapshot(
    target_w=np.array([0.2, 0.0, 0.012]),
    target_axis_w=UP,
    distractors_w=np.array([[0.2, 0.04, 0.012], [0.3, 0.0, 0.012]]),
    distractors_upright=np.ones(2),
    grasp_point_w=np.array([0.2, 0.0, 0.2]),
    held=False,
    stable=True,
    grasp_height_m=0.024,
)


def lifted(height_m: float, held: bool = True) -> Snapshot:
    return replace(START, target_w=START.target_w + np.array([0, 0, height_m]), held=held)


def moved_distractor(distance_m: float) -> Snapshot:
    shift = np.array([[0.0, 0.0, 0.0], [distance_m, 0.0, 0.0]])
    return replace(START, distractors_w=START.distractors_w + shift)


def test_success_needs_ten_frames_in_a_row_held_forty_millimetres_up():
    episode = Episode(START, max_frames=600, early_stop=False)
    for _ in range(HOLD_FRAMES - 1):
        assert episode.update(lifted(0.041)) is None
    assert episode.update(lifted(0.039)) is None  # starts over
    for _ in range(HOLD_FRAMES - 1):
        assert episode.update(lifted(0.040)) is None
    assert episode.update(lifted(0.040)) == "success"
    assert episode.frames == 2 * HOLD_FRAMES
    assert episode.success


def test_piece_in_the_air_that_is_not_held_is_no_success():
    episode = Episode(START, max_frames=600, early_stop=False)
    for _ in range(2 * HOLD_FRAMES):
        assert episode.update(lifted(0.1, held=False)) is None


@pytest.mark.parametrize(
    ("distance_mm", "disturbed"), [(0.0, False), (9.9, False), (10.1, True), (200.0, True)]
)
def test_distractor_may_move_ten_millimetres(distance_mm, disturbed):
    episode = Episode(START, max_frames=600, early_stop=True)
    assert episode.update(moved_distractor(distance_mm * 1e-3)) == ("disturbed" if disturbed else None)
    assert episode.disturbed is disturbed


@pytest.mark.parametrize(("lean_deg", "fallen"), [(0, False), (44, False), (46, True), (90, True)])
def test_pieces_that_lean_more_than_45_degrees_have_fallen(lean_deg, fallen):
    lean = np.radians(lean_deg)
    target = replace(START, target_axis_w=np.array([np.sin(lean), 0.0, np.cos(lean)]))
    other = replace(START, distractors_upright=np.array([1.0, np.cos(lean)]))
    assert Episode(START, 600, early_stop=True).update(target) == ("toppled" if fallen else None)
    assert Episode(START, 600, early_stop=True).update(other) == ("disturbed" if fallen else None)


def test_target_that_is_held_aslant_or_stands_beside_the_board():
    held = replace(START, target_axis_w=LYING, held=True)
    assert Episode(START, 600, early_stop=True).update(held) is None
    beside = replace(START, target_w=np.array([0.1, 0.0, 0.0]))
    assert Episode(START, 600, early_stop=True).update(beside) == "toppled"


def test_evaluation_runs_on_after_a_fall_and_reports_it():
    episode = Episode(START, max_frames=600, early_stop=False)
    assert episode.update(replace(START, target_axis_w=LYING)) is None
    assert episode.update(moved_distractor(0.05)) is None
    for _ in range(HOLD_FRAMES):
        end = episode.update(lifted(0.05))
    assert end == "success"
    metrics = episode_metrics(episode, None, 1.0, "pawn", 0)
    assert metrics["success"] and metrics["toppled"] and metrics["disturbed"] and not metrics["clean_lift"]


def test_episode_of_max_frames_times_out():
    episode = Episode(START, max_frames=3, early_stop=True)
    assert [episode.update(START) for _ in range(3)] == [None, None, "timeout"]
    assert not episode.success
    assert not episode.reward_state().terminal


def test_unstable_state_is_never_a_success():
    episode = Episode(START, max_frames=600, early_stop=False)
    for _ in range(HOLD_FRAMES - 1):
        episode.update(lifted(0.05))
    broken = replace(lifted(0.05), stable=False, target_w=np.full(3, np.nan))
    assert episode.update(broken) == "unstable"
    assert not episode.success
    assert np.isfinite(episode.reward_state().distance_m)
    assert episode.reward_state().terminal


def test_success_at_the_frame_of_a_disturbance_is_a_success_that_is_not_clean():
    episode = Episode(START, max_frames=600, early_stop=True)
    for _ in range(HOLD_FRAMES - 1):
        episode.update(lifted(0.05))
    both = replace(lifted(0.05), distractors_upright=np.array([0.0, 1.0]))
    assert episode.update(both) == "success"
    assert not episode_metrics(episode, None, 1.0, "pawn", 0)["clean_lift"]


def test_distances_that_were_not_measured_are_none():
    metrics = episode_metrics(Episode(START, 600, False), None, 0.0, "knight", 0)
    assert metrics["closest_mm"] is metrics["close_lateral_mm"] is metrics["lift_mm"] is None
    assert metrics["piece"] == "knight"
