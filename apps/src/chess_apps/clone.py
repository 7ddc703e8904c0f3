"""Cloning: demonstrations -> a SmolVLA folder, by flow matching (``chess-bc``)."""

import contextlib
import io
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor, nn
from tqdm import tqdm

from chess_apps.config import CloneConfig
from chess_apps.demonstrations import Demonstrations
from chess_apps.flow_matching import FlowMatchingLoss, sample_time


class Batches:
    """Random minibatches of demonstrations, written into buffers that keep their addresses.

    ``text`` and ``text_mask`` hold one row of token ids per task.
    """

    def __init__(
        self,
        demos: Demonstrations,
        statistics: dict[str, dict[str, Tensor]],
        text: Tensor,
        text_mask: Tensor,
        *,
        batch: int,
        max_action_dim: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.batch = device, batch
        self.images = torch.from_numpy(demos.images).to(device)
        self.state = self._normalized(demos.state, statistics["observation.state"])
        self.actions = self._normalized(demos.actions, statistics["action"])
        self.task_index = torch.from_numpy(demos.task_index).to(device)
        self.text, self.text_mask = text.to(device), text_mask.to(device)
        cameras, height, width = demos.images.shape[1:4]
        chunk_size, action_dim = demos.actions.shape[1:]
        self.buffers = {
            "images": torch.zeros(batch, cameras, 3, height, width, device=device),
            "text": torch.zeros(batch, text.shape[1], dtype=torch.int64, device=device),
            "text_mask": torch.zeros(batch, text.shape[1], dtype=torch.bool, device=device),
            "state": torch.zeros(batch, demos.state.shape[1], device=device),
            "actions": torch.zeros(batch, chunk_size, action_dim, device=device),
            "noise": torch.zeros(batch, chunk_size, max_action_dim, device=device),
            "time": torch.zeros(batch, device=device),
        }

    def _normalized(self, values, moments: dict[str, Tensor]) -> Tensor:
        # LeRobot's normalizer divides by std + 1e-8.
        mean, std = moments["mean"].to(self.device), moments["std"].to(self.device)
        return (torch.from_numpy(values).to(self.device) - mean) / (std + 1e-8)

    def fill(self) -> None:
        """Draw the next minibatch into ``buffers``."""
        rows = torch.randint(len(self.state), (self.batch,), device=self.device, generator=self.generator)
        task = self.task_index[rows]
        images = self.images[rows].permute(0, 1, 4, 2, 3)
        self.buffers["images"].copy_(images).mul_(2 / 255).sub_(1)
        self.buffers["text"].copy_(self.text[task])
        self.buffers["text_mask"].copy_(self.text_mask[task])
        self.buffers["state"].copy_(self.state[rows])
        self.buffers["actions"].copy_(self.actions[rows])
        self.buffers["noise"].normal_(generator=self.generator)
        self.buffers["time"].copy_(sample_time(self.batch, self.device, self.generator))


class GraphedLoss:
    """Forward and backward of the loss over static buffers; on a GPU captured once and replayed."""

    def __init__(self, loss: FlowMatchingLoss, parameters: list[nn.Parameter], batches: Batches) -> None:
        self.loss, self.parameters, self.batches = loss, parameters, batches
        self.graph: torch.cuda.CUDAGraph | None = None
        batches.fill()
        if batches.device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._eager()
            torch.cuda.current_stream().wait_stream(side)
            self._clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.value = self.loss(**batches.buffers)
                self.value.backward()
            self.graph = graph
        else:
            self._eager()

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _eager(self) -> None:
        self._clear()
        self.value = self.loss(**self.batches.buffers)
        self.value.backward()

    def __call__(self) -> Tensor:
        """Gradients of the next minibatch, and its loss (a scalar that the next call overwrites)."""
        self.batches.fill()
        if self.graph is None:
            self._eager()
        else:
            self.graph.replay()
        return self.value.detach()


def choose_parameters(policy: SmolVLAPolicy, train: str) -> list[nn.Parameter]:
    """Freeze and unfreeze the policy's weights as ``train`` ("all" or "expert") says; return those that train.

    LeRobot's own switches leave the last VLM layer frozen, which from random weights would never learn.
    """
    expert = expert_modules(policy)
    for parameter in policy.parameters():
        parameter.requires_grad_(train == "all")
    for module in expert:
        module.requires_grad_(True)
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def expert_modules(policy: SmolVLAPolicy) -> list[nn.Module]:
    """The action expert and its projections: everything that acts on the prefix, nothing that makes it."""
    model = policy.model
    return [
        model.vlm_with_expert.lm_expert,
        model.action_in_proj,
        model.action_out_proj,
        model.action_time_mlp_in,
        model.action_time_mlp_out,
    ]


def reset_expert(policy: SmolVLAPolicy, seed: int) -> None:
    """Draw the action expert and its projections anew, as LeRobot initializes them."""
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = SmolVLAPolicy(policy.config)
    for module, initial in zip(expert_modules(policy), expert_modules(fresh)):
        module.load_state_dict(initial.state_dict())


def learning_rate(step: int, config: CloneConfig, time_used: float = 0.0) -> float:
    """Linear warm-up, then a cosine from ``lr`` to 1 % of it, over the steps or the share of ``max_seconds`` that is used."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(max(step / config.steps, time_used), 1.0)))
    return config.lr * min(1.0, (step + 1) / max(config.warmup, 1)) * (0.01 + 0.99 * cosine)


def clone(policy: SmolVLAPolicy, batches: Batches, config: CloneConfig) -> list[tuple[int, float]]:
    """Fit the policy to the demonstrations; returns (step, mean loss since the last entry)."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    parameters = choose_parameters(policy, config.train)
    policy.train()
    step_gradients = GraphedLoss(FlowMatchingLoss(policy), parameters, batches)
    # Parameters that the loss never reaches (the unused language head) have no gradient and no optimizer state.
    parameters = [p for p in parameters if p.grad is not None]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=batches.device.type == "cuda",
    )
    curve: list[tuple[int, float]] = []
    total, count, every = torch.zeros((), device=batches.device), 0, max(config.steps // 50, 1)
    started = time.monotonic()
    with tqdm(total=config.steps, desc="cloning", unit="step", mininterval=1.0, disable=None) as bar:
        for step in range(config.steps):
            used = (time.monotonic() - started) / config.max_seconds if config.max_seconds else 0.0
            last = step + 1 == config.steps or used >= 1.0
            total += step_gradients()
            count += 1
            nn.utils.clip_grad_norm_(parameters, config.max_grad_norm, foreach=True)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config, used)
            optimizer.step()
            bar.update()
            if (step + 1) % every == 0 or last:
                curve.append((step + 1, float(total / count)))
                total.zero_()
                count = 0
                bar.set_postfix(loss=f"{curve[-1][1]:.4f}")
            if last:
                break
    policy.eval()
    seconds = time.monotonic() - started
    print(
        f"cloned {step + 1} steps in {seconds:.1f} s, {(step + 1) / seconds:.1f}/s, loss {curve[-1][1]:.4f}"
    )
    return curve


def write_record(
    out: Path, config: CloneConfig, demos: Demonstrations, curve: list[tuple[int, float]]
) -> None:
    """``clone.json`` beside the weights: the flags, the data and the loss curve."""
    record = {
        "config": asdict(config),
        "episodes_kept": demos.num_episodes,
        "observations": len(demos),
        "loss": [[step, round(loss, 6)] for step, loss in curve],
    }
    (out / "clone.json").write_text(json.dumps(record, indent=1) + "\n")
