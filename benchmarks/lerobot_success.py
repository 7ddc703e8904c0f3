"""One policy on the same scenes in LeRobot's evaluation loop and in flowrl's: a table of both, scene by scene.

    flowrl-eval --policy models/chess-tiny --fast --expert-fp32 --episodes 12 --seed 9300003 --workers 1 --out outputs/flowrl
    python benchmarks/lerobot_success.py --flowrl outputs/flowrl/eval_results.json --json outputs/both.json

LeRobot's loop (`eval_policy` of lerobot-eval) runs with flowrl's noise, so that what differs is the loop itself;
`--lerobot outputs/.../eval_info.json` adds a run of `lerobot-eval`, which draws noise of its own.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.envs import make_env, make_env_pre_post_processors
from lerobot.envs.factory import make_env_config
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy
from lerobot.utils.import_utils import register_third_party_plugins

from flowrl.flow.sampler import episode_noise
from flowrl.policy.interface import FlowSpec


def give_flowrl_noise(policy: Any, env: Any) -> None:
    """Let `select_action` begin each chunk with the noise that flowrl draws for this scene and decision."""
    config = policy.config
    spec = FlowSpec(
        num_denoising_steps=config.num_steps,
        chunk_size=config.chunk_size,
        n_action_steps=config.n_action_steps,
        action_dim=config.action_feature.shape[0],
        padded_action_dim=config.max_action_dim,
    )
    select_action, reset = policy.select_action, policy.reset
    state = {"decision": 0}

    def begin() -> None:
        state["decision"] = 0
        reset()

    def select(batch: dict[str, Any], **arguments: Any) -> torch.Tensor:
        if policy._queues["action"]:
            return select_action(batch, **arguments)
        seed = env.envs[0].unwrapped.torch_seed
        x_0, _ = episode_noise(seed, state["decision"], spec)
        state["decision"] += 1
        return select_action(batch, noise=x_0[None].to(config.device), **arguments)

    policy.reset, policy.select_action = begin, select


def remember_torch_seed(env: Any) -> None:
    """Keep the scene's seed of a policy's noise, which `reset` returns, where `select` finds it."""
    inner = env.envs[0].unwrapped
    reset = inner.reset

    def reset_and_remember(**arguments: Any) -> Any:
        observation, info = reset(**arguments)
        inner.torch_seed = info["torch_seed"]
        return observation, info

    inner.reset = reset_and_remember


def run_lerobot(folder: Path, scene_seed: int, episodes: int, arguments: dict[str, Any]) -> list[bool]:
    """Success of each scene in LeRobot's loop with flowrl's noise."""
    register_third_party_plugins()
    torch.set_num_threads(1)
    env_config = make_env_config("chess_pick", scene_seed=scene_seed, **arguments)
    (env,) = make_env(env_config, n_envs=1)["chess_pick"].values()
    config = PreTrainedConfig.from_pretrained(str(folder))
    config.pretrained_path, config.device = folder, "cpu"
    policy = make_policy(config, env_cfg=env_config)
    policy.eval()
    before, after = make_pre_post_processors(config, pretrained_path=str(folder))
    env_before, env_after = make_env_pre_post_processors(env_config, config)
    remember_torch_seed(env)
    give_flowrl_noise(policy, env)
    result = eval_policy(env, policy, env_before, env_after, before, after, n_episodes=episodes, start_seed=0)
    env.close()
    return [episode["success"] for episode in result["per_episode"]]


def main() -> None:
    """Run LeRobot's loop and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, default=Path("models/chess-tiny"))
    parser.add_argument("--flowrl", type=Path, required=True, help="eval_results.json of flowrl-eval")
    parser.add_argument("--lerobot", type=Path, help="eval_info.json of lerobot-eval on the same scenes")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    flags = parser.parse_args()
    preset = json.loads((flags.policy / "preset.json").read_text())["env_kwargs"]
    results = json.loads(flags.flowrl.read_text())
    flowrl = results["episodes"]
    rows = [
        {
            "scene": episode["index"],
            "flowrl-eval": episode["success"],
            "flowrl frames": episode["frames"],
            "flowrl toppled": episode["toppled"],
            "LeRobot's loop, flowrl's noise": success,
        }
        for episode, success in zip(
            flowrl, run_lerobot(flags.policy, flowrl[0]["seed"], len(flowrl), preset), strict=True
        )
    ]
    if flags.lerobot:
        own = json.loads(flags.lerobot.read_text())["per_task"][0]["metrics"]["successes"]
        rows = [{**row, "lerobot-eval": success} for row, success in zip(rows, own)]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
