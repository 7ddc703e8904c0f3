"""The expert as its users see it: a generator of targets, an agent over chunks, and the check of a scene."""

import gymnasium
import mujoco
import numpy as np
import pytest

from chess_env.env import ChessPickEnv
from chess_env.expert import ChunkedExpert, Expert, ExpertConfig, expert_targets
from chess_env.rendering import OffscreenRenderer

STEPS_PER_FRAME = 8  # 30 Hz in steps of 1/240 s

# -- with Gymnasium's interface alone ----------------------------------------------------------------------------------


def test_generator_of_targets_lifts_the_piece_step_by_step():
    env = gymnasium.make("chess_env:ChessPickStep-v0", observation="state", pieces="all")
    env.reset(seed=7, options={"check_expert": True})
    for target in expert_targets(env):
        assert env.action_space.contains(target)
        *_, reward, terminated, truncated, info = env.step(target)
        if terminated or truncated:
            break
    assert terminated and reward == 1.0 and info["episode_metrics"]["clean_lift"]
    assert info["episode_metrics"]["frames"] < 150
    env.close()


@pytest.mark.parametrize("n_action_steps", [50, 20])
def test_chunked_expert_lifts_the_pieces_of_two_episodes(n_action_steps):
    env = gymnasium.make("chess_env:ChessPick-v0", observation="state", n_action_steps=n_action_steps)
    expert = ChunkedExpert(env)
    for index in range(2):
        env.reset(seed=7, options={"check_expert": True, "index": index})
        expert.reset(seed=index)
        done = False
        while not done:
            action = expert.act()
            assert action.shape == (50, 6) and action.dtype == np.float32
            *_, terminated, truncated, info = env.step(action)
            done = terminated or truncated
        assert info["episode_metrics"]["clean_lift"], index
    env.close()


def test_chunked_expert_of_single_steps_gives_the_generators_targets():
    env = gymnasium.make("chess_env:ChessPickStep-v0", observation="state")
    env.reset(seed=7)
    targets = expert_targets(env, seed=4)
    expected = [next(targets) for _ in range(3)]
    expert = ChunkedExpert(env)
    expert.reset(seed=4)
    actions = [expert.act() for _ in range(3)]
    np.testing.assert_array_equal(actions, expected)
    assert actions[0].shape == (6,)
    env.close()


def test_expert_goes_on_after_a_failed_lift():
    env = gymnasium.make("chess_env:ChessPickStep-v0", observation="state", distractors=0)
    env.reset(seed=7)
    num_targets = 0
    for target in expert_targets(env, seed=5, config=ExpertConfig(aim_error_mm=14.0)):
        *_, terminated, truncated, info = env.step(target)
        num_targets += 1
        if terminated or truncated:
            break
    assert info["episode_metrics"]["success"] and num_targets > 150  # a plan has about 100
    env.close()


# -- check_expert ------------------------------------------------------------------------------------------------------


def test_check_expert_costs_one_episode_of_the_expert_for_a_draw_and_no_image(monkeypatch):
    steps, images = [], []
    step, render = mujoco.mj_step, OffscreenRenderer.render

    def counting_step(model, data, nstep=1):
        steps.append(nstep)
        return step(model, data, nstep)

    def counting_render(self, *args, **kwargs):
        images.append(1)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(mujoco, "mj_step", counting_step)
    monkeypatch.setattr(OffscreenRenderer, "render", counting_render)
    env = ChessPickEnv(image_size=32, pieces="all")
    settle = 72
    for index in range(4):
        env.reset(seed=3, options={"index": index})
        unchecked = sum(steps)
        steps.clear()
        images.clear()
        env.reset(seed=3, options={"index": index, "check_expert": True})
        draws = env.simulation.layout.attempt + 1
        plan = Expert(env.simulation.scene, ExpertConfig(variety=0.0)).plan(
            env.simulation.data, env.simulation.target_slot, np.random.default_rng(0)
        )
        assert unchecked == settle and draws == 1
        # the draw settles, the expert plays it until success, and it is placed again
        assert 2 * settle < sum(steps) <= 2 * settle + len(plan) * STEPS_PER_FRAME
        assert len(images) == 2  # of the observation that reset returns
        steps.clear()
    env.close()
