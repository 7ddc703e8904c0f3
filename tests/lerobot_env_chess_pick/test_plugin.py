"""The LeRobot plugin: found by its name, true features, LeRobot's own evaluation, seeds and scenes."""

import importlib.metadata
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import draccus
import gymnasium
import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.envs import (
    EnvConfig,
    check_env_attributes_and_types,
    make_env,
    make_env_pre_post_processors,
    preprocess_observation,
)
from lerobot.envs.factory import make_env_config
from lerobot.envs.utils import NEW_ROLLOUT_OPTION, env_to_policy_features
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy
from lerobot.utils.import_utils import register_third_party_plugins

from chess_env.errors import OptionError
from chess_env.expert import Expert, ExpertAgent

DISTRIBUTION = "lerobot_env_chess_pick"
ROOT = Path(__file__).parents[2]
NEW_ROLLOUT = {NEW_ROLLOUT_OPTION: True}


def is_installed() -> bool:
    try:
        importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_installed(), reason=f"distribution {DISTRIBUTION} is not installed")


@pytest.fixture(autouse=True, scope="module")
def plugins():
    """Plugins as LeRobot's programs load them; nothing here imports ours by itself."""
    torch.set_num_threads(1)
    register_third_party_plugins()


@pytest.fixture
def make_envs():
    """Makes LeRobot's vector environment of a configuration and closes it after the test."""
    made = []

    def make(n_envs: int = 1, use_async_envs: bool = False, **arguments):
        arguments = {"image_size": 64, "distractors": (0, 2), **arguments}
        config = make_env_config("chess_pick", **arguments)
        made.append(make_env(config, n_envs=n_envs, use_async_envs=use_async_envs)["chess_pick"][0])
        return made[-1]

    yield make
    for envs in made:
        envs.close()


@pytest.fixture
def chess_tiny(monkeypatch):
    """The shipped policy, whose folder names its language model relative to the repository."""
    monkeypatch.chdir(ROOT)
    config = PreTrainedConfig.from_pretrained("models/chess-tiny")
    config.pretrained_path = Path("models/chess-tiny")
    return config


def test_lerobot_finds_the_environment_by_the_distributions_name():
    found = EnvConfig.get_choice_class("chess_pick")
    assert found.__module__.split(".")[0] == DISTRIBUTION
    assert found().type == "chess_pick"


@dataclass
class Program:
    """A program of LeRobot's with an environment among its flags."""

    env: EnvConfig


def test_command_line_sets_the_arguments():
    flags = {"type": "chess_pick", "image_size": 128, "distractors": [0, 8], "seconds": 4, "scene_seed": 7}
    config = draccus.parse(Program, args=[f"--env.{name}={value}" for name, value in flags.items()]).env
    kwargs = {"image_size": 128, "distractors": (0, 8), "seconds": 4.0, "render_mode": "rgb_array"}
    plain = {"task": "white", "pieces": ("pawn", "knight"), "randomization": "default"}
    assert config.gym_kwargs == {**kwargs, **plain} and config.scene_seed == 7
    flags |= {"task": "square", "pieces": "pawn,king", "randomization": "wide"}
    config = draccus.parse(Program, args=[f"--env.{name}={value}" for name, value in flags.items()]).env
    assert config.gym_kwargs == {
        **kwargs,
        "task": "square",
        "pieces": ("pawn", "king"),
        "randomization": "wide",
    }


def test_defaults_are_those_of_chess_env():
    config = make_env_config("chess_pick")
    registered = gymnasium.spec("ChessPickStep-v0").kwargs
    assert {name: registered[name] for name in config.gym_kwargs if name != "render_mode"} == {
        name: value for name, value in config.gym_kwargs.items() if name != "render_mode"
    }


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("distractors=[9,3]", r"distractors=\(9, 3\): "),
        ("image_size=4", "image_size=4: "),
        ("task=colour", "task='colour': allowed are 'white', 'square'"),
        ("pieces=pawn,ace", "'ace'"),
    ],
)
def test_a_wrong_argument_is_refused_while_flags_are_read(flag, message):
    with pytest.raises(draccus.utils.DecodingError, match=message):
        draccus.parse(Program, args=["--env.type=chess_pick", f"--env.{flag}"])


def test_declared_features_are_the_real_spaces(make_envs):
    config = make_env_config("chess_pick", image_size=64)
    envs = make_envs(image_size=64)
    observation, _ = envs.reset(seed=[0], options=NEW_ROLLOUT)
    real = {
        "action": envs.single_action_space.shape,
        "agent_pos": observation["agent_pos"][0].shape,
        **{f"pixels/{name}": image[0].shape for name, image in observation["pixels"].items()},
    }
    assert {name: feature.shape for name, feature in config.features.items()} == real
    assert set(config.features_map) == set(config.features)
    visual = {name for name, feature in config.features.items() if feature.type is FeatureType.VISUAL}
    assert visual == {"pixels/top", "pixels/wrist"}
    assert config.fps == envs.metadata["render_fps"] == 30


def test_units_of_every_joint_are_stated(make_envs):
    metadata = make_envs().metadata
    names = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
    assert tuple(metadata["joint_names"]) == names
    assert tuple(metadata["joint_units"]) == ("deg",) * 5 + ("0..100",)


def test_observations_have_the_names_and_shapes_that_the_policy_declares(make_envs):
    declared = json.loads((ROOT / "models/chess-tiny/config.json").read_text())
    features = env_to_policy_features(make_env_config("chess_pick", image_size=128))
    given = {name: list(feature.shape) for name, feature in features.items()}
    wanted = {**declared["input_features"], **declared["output_features"]}
    assert given == {name: feature["shape"] for name, feature in wanted.items()}

    observation, _ = make_envs(image_size=128).reset(seed=[3], options=NEW_ROLLOUT)
    batch = preprocess_observation(observation)
    assert {name: list(value.shape[1:]) for name, value in batch.items()} == {
        name: feature["shape"] for name, feature in declared["input_features"].items()
    }
    top = batch["observation.images.top"]
    assert torch.equal((top * 255).round()[0, :, 5, 7], torch.tensor(observation["pixels"]["top"][0, 5, 7]))


def test_lerobot_is_told_the_instruction_the_time_limit_and_an_image(make_envs):
    envs = make_envs(seconds=0.5)
    envs.reset(seed=[0], options=NEW_ROLLOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env_attributes_and_types(envs)
    assert envs.call("task_description") == envs.call("task") == ("Pick up the white chess piece.",)
    assert envs.call("_max_episode_steps") == (15,)
    assert envs.call("render")[0].shape == (480, 640, 3)


def test_lerobot_is_told_each_scenes_own_instruction(make_envs):
    envs = make_envs(n_envs=2, task="square", pieces="all", image_size=16)
    _, info = envs.reset(seed=[0, 1], options=NEW_ROLLOUT)
    expected = [f"Pick up the {piece} on {square}." for piece, square in zip(info["piece"], info["square"])]
    assert list(envs.call("task_description")) == list(envs.call("task")) == expected
    assert expected[0] != expected[1]


def test_lerobots_seed_is_the_seed_of_the_scene_at_index_0(make_envs):
    envs = make_envs(2)
    observation, info = envs.reset(seed=[40, 41], options=NEW_ROLLOUT)
    assert info["seed"].tolist() == [40, 41] and info["index"].tolist() == [0, 0]
    chunked = gymnasium.make("chess_env:ChessPick-v0", image_size=64, distractors=(0, 2))
    same, _ = chunked.reset(seed=41)
    chunked.close()
    assert np.array_equal(observation["agent_pos"][1], same["agent_pos"])
    assert np.array_equal(observation["pixels"]["top"][1], same["pixels"]["top"])


def test_without_a_seed_the_environments_differ_and_say_which_they_drew(make_envs):
    envs = make_envs(2)
    _, info = envs.reset(options=NEW_ROLLOUT)
    first, second = info["seed"].tolist()
    assert first != second and info["index"].tolist() == [0, 0]
    _, again = envs.reset(seed=[first, second], options=NEW_ROLLOUT)
    assert again["torch_seed"].tolist() == info["torch_seed"].tolist()


def test_with_scene_seed_lerobots_seed_is_the_index(make_envs):
    envs = make_envs(2, scene_seed=9_300_003)
    _, info = envs.reset(seed=[4, 5], options=NEW_ROLLOUT)
    assert info["seed"].tolist() == [9_300_003] * 2 and info["index"].tolist() == [4, 5]
    with pytest.raises(OptionError, match="--seed=0"):
        envs.reset(options=NEW_ROLLOUT)


def test_a_finished_environment_stands_still_until_the_next_rollout(make_envs):
    envs = make_envs(seconds=0.1)
    action = envs.reset(seed=[0], options=NEW_ROLLOUT)[0]["agent_pos"]
    for _ in range(3):
        last, _, terminated, truncated, info = envs.step(action)
    assert truncated[0] and not terminated[0] and not info["is_success"][0]
    for _ in range(3):
        after, reward, *_ = envs.step(action)
        assert reward[0] == 0 and np.array_equal(after["pixels"]["wrist"], last["pixels"]["wrist"])
    assert envs.envs[0].unwrapped.num_frames == 3
    envs.reset(seed=[1], options=NEW_ROLLOUT)
    assert envs.envs[0].unwrapped.num_frames == 0


def test_a_lifted_piece_is_a_success_for_lerobot(make_envs):
    envs = make_envs(distractors=(0, 0), image_size=16)
    envs.reset(seed=[21], options={**NEW_ROLLOUT, "check_expert": True})
    simulation = envs.envs[0].unwrapped.simulation
    agent = ExpertAgent(Expert(simulation.scene), chunk_size=50)
    rng = np.random.default_rng(0)
    done = False
    for _ in range(12):
        for target in agent.act(simulation.data, simulation.target_slot, rng):
            _, reward, terminated, truncated, info = envs.step(target[None])
            done = bool(terminated[0] or truncated[0])
            assert info["is_success"].tolist() == [done]
            if done:
                break
        if done:
            break
    assert terminated[0] and reward[0] == 1.0


def test_one_episode_of_the_shipped_policy_runs_in_lerobots_own_evaluation(make_envs, chess_tiny, tmp_path):
    env_config = make_env_config("chess_pick", image_size=128)
    policy = make_policy(chess_tiny, env_cfg=env_config)
    before, after = make_pre_post_processors(chess_tiny, pretrained_path="models/chess-tiny")
    env_before, env_after = make_env_pre_post_processors(env_config, chess_tiny)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*task_description.*")
        result = eval_policy(
            make_envs(image_size=128, seconds=0.2),
            policy,
            env_before,
            env_after,
            before,
            after,
            n_episodes=1,
            max_episodes_rendered=1,
            videos_dir=tmp_path,
            start_seed=1000,
        )
    episode = result["per_episode"][0]
    assert episode["seed"] == 1000 and episode["success"] is False and episode["sum_reward"] == 0
    assert [Path(path).name for path in result["video_paths"]] == ["eval_episode_0.mp4"]
    assert (tmp_path / "eval_episode_0.mp4").stat().st_size > 0


@pytest.mark.slow
def test_processes_give_the_same_observations(make_envs):
    action = np.zeros((2, 6), np.float32)
    seen = []
    for use_async_envs in (False, True):
        envs = make_envs(2, use_async_envs, seconds=0.1, scene_seed=5)
        envs.reset(seed=[1, 2], options=NEW_ROLLOUT)
        for _ in range(3):
            observation, _, _, truncated, _ = envs.step(action)
        assert truncated.all()
        seen.append(observation)
    assert np.array_equal(seen[0]["agent_pos"], seen[1]["agent_pos"])
    assert np.array_equal(seen[0]["pixels"]["top"], seen[1]["pixels"]["top"])
