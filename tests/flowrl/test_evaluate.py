"""flowrl-eval one environment at a time, by the library's own sampler, against the batched path."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import flowrl.flow.sampler
from flowrl.config import EvalConfig
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate, run_fast, run_plain
from flowrl.plain import reset_scene, run_episode, stack_observations
from flowrl.scenes import Scene, fixed_scenes
from flowrl.vector_env import make_single_env
from toy import SPEC, ToyPolicy, load_toy

TOY, BARE = "toy_env:ToyReach-v0", "toy_env:ToyBare-v0"
CONFIG = EvalConfig(policy="no-folder", env_id=TOY, episodes=6, workers=3, device="cpu")


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device)


def episodes(config):
    return json.loads((evaluate(config, load) / "eval_results.json").read_text())["episodes"]


def test_plain_and_fast_give_the_same_records(tmp_path):
    plain = episodes(replace(CONFIG, out=str(tmp_path / "plain")))
    fast = episodes(replace(CONFIG, out=str(tmp_path / "fast"), fast=True))
    assert plain == fast
    assert [record["index"] for record in plain] == list(range(6))
    assert len({record["distance"] for record in plain}) == 6


def test_environments_without_index_run_plain_and_fast_alike():
    scenes = fixed_scenes(3, 5)
    plain, _ = run_plain(ToyPolicy(), BARE, {}, scenes, label="plain", default_task="go")
    fast, _ = run_fast(ToyPolicy(), BARE, {}, scenes, 2, label="fast", default_task="go")
    assert plain == fast
    assert len({record["decisions"] for record in plain}) > 1 and all(record["success"] for record in plain)


def test_plain_episode_equals_a_loop_written_by_hand():
    policy, env, scene = ToyPolicy(), make_single_env(TOY, {}, SPEC), Scene(9, 4)
    record = run_episode(policy, env, 0, scene).record()
    observation, info = env.reset(seed=9, options={"index": 4, "early_stop": False})
    rewards, ended = [], False
    while not ended:
        x_0, _ = flowrl.flow.sampler.episode_noise(info["torch_seed"], len(rewards), policy.spec)
        pair = stack_observations([observation, observation])
        action = policy.predict_action_chunk(pair, ["reach"] * 2, torch.stack([x_0, x_0]))[0].numpy()
        observation, reward, terminated, truncated, last = env.step(action)
        rewards.append(reward)
        ended = terminated or truncated
    assert record == {
        "index": 4,
        "seed": 9,
        "decisions": len(rewards),
        "return": sum(rewards),
        "task": "reach",
        **last["episode_metrics"],
    }


def test_plain_evaluation_does_not_depend_on_the_global_random_state(tmp_path):
    torch.manual_seed(1)
    first = episodes(replace(CONFIG, out=str(tmp_path / "a")))
    torch.manual_seed(2)
    assert episodes(replace(CONFIG, out=str(tmp_path / "b"))) == first
    assert episodes(replace(CONFIG, out=str(tmp_path / "c"), seed=5)) != first


def test_noise_needs_the_batched_path(tmp_path):
    with pytest.raises(FlowRLError, match="--noise without --fast"):
        evaluate(replace(CONFIG, noise=True, out=str(tmp_path)), load)


def test_results_of_one_path_are_not_taken_for_the_others(tmp_path):
    config = replace(CONFIG, out=str(tmp_path / "eval"))
    written = evaluate(config, load) / "eval_results.json"
    stamp = written.stat().st_mtime_ns
    evaluate(config, load)
    assert written.stat().st_mtime_ns == stamp
    with pytest.raises(FlowRLError, match="results with other fast"):
        evaluate(replace(config, fast=True), load)


@pytest.mark.parametrize("name", ["model.safetensors", "policy_preprocessor.json", "vlm/tokenizer.json"])
def test_results_of_a_policy_that_has_changed_are_not_reused(name, tmp_path):
    folder = tmp_path / "policy"
    (folder / "vlm").mkdir(parents=True)
    ToyPolicy().save(folder)
    config = replace(CONFIG, policy=str(folder), episodes=1, out=str(tmp_path / "eval"))
    evaluate(config, load)
    if name == "model.safetensors":
        ToyPolicy(seed=1).save(folder)
    else:
        (folder / name).write_text("{}")
    with pytest.raises(FlowRLError, match="results with other policy_sha256"):
        evaluate(config, load)


def test_actions_that_are_not_finite_are_told_with_their_scene():
    policy = ToyPolicy()
    with torch.no_grad():
        policy.module["field"][-1].bias.fill_(float("nan"))
    with pytest.raises(FlowRLError, match="not finite in scene 3:0"):
        run_plain(policy, TOY, {}, fixed_scenes(3, 1), label="nan")


def test_missing_instruction_and_unknown_environment_are_told():
    with pytest.raises(FlowRLError, match="--task"):
        run_plain(ToyPolicy(), BARE, {}, fixed_scenes(3, 1), label="bare")
    with pytest.raises(FlowRLError, match="Nowhere"):
        run_plain(ToyPolicy(), "toy_env:Nowhere-v0", {}, fixed_scenes(3, 1), label="nowhere")
    with pytest.raises(FlowRLError, match="chunks do not match"):
        run_plain(ToyPolicy(), TOY, {"chunk_size": 5}, fixed_scenes(3, 1), label="chunk")


def test_scenes_start_as_in_the_environment_itself():
    env = make_single_env(TOY, {}, SPEC)
    observation, info = reset_scene(env, Scene(5, 2))
    goal = np.random.default_rng([5, 2]).uniform(-1, 1, 2).astype(np.float32)
    assert np.array_equal(observation["agent_pos"], goal) and info["index"] == 2
