"""The graph-capturable loss is LeRobot's own loss."""

import numpy as np
import pytest
import torch

from chess_apps.clone import choose_parameters, expert_modules, learning_rate, reset_expert
from chess_apps.config import CloneConfig
from chess_apps.demonstrations import Demonstrations, EpisodeRecord
from chess_apps.flow_matching import FlowMatchingLoss, sample_time
from flowrl.policy.tiny import SmolVLASize, build_smolvla

SMALL = SmolVLASize(32, 2, 2, 1, 16, 64, 32, 1, 2, 64, image_size=64)


@pytest.fixture
def policy(tmp_path):
    return build_smolvla(tmp_path / "vlm", size=SMALL, chunk_size=5, task_tokens=8, seed=1)


def batch(num=3):
    generator = torch.Generator().manual_seed(0)
    text_mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [True] * 6 + [False] * 2])
    return {
        "images": torch.rand(num, 2, 3, 64, 64, generator=generator) * 2 - 1,
        "text": torch.randint(30, 250, (num, 8), generator=generator),
        "text_mask": text_mask,
        "state": torch.randn(num, 6, generator=generator),
        "actions": torch.randn(num, 5, 6, generator=generator),
        "noise": torch.randn(num, 5, 6, generator=generator),
        "time": torch.tensor([0.1, 0.5, 0.99]),
    }


def lerobot_loss(policy, b):
    images = [b["images"][:, camera] for camera in range(2)]
    masks = [torch.ones(len(b["state"]), dtype=torch.bool)] * 2
    losses = policy.model.forward(
        images, masks, b["text"], b["text_mask"], b["state"], b["actions"], b["noise"], b["time"]
    )
    return losses[:, :, :6].mean()


def test_loss_and_gradients_equal_lerobots(policy):
    b = batch()
    choose_parameters(policy, "all")
    ours = FlowMatchingLoss(policy)(**b)
    ours.backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    theirs = lerobot_loss(policy, b)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    expected = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6)


def test_expert_training_leaves_the_prefix_frozen(policy):
    parameters = choose_parameters(policy, "expert")
    FlowMatchingLoss(policy)(**batch()).backward()
    with_gradient = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient and len(with_gradient) <= len(parameters)
    assert not any(".vlm." in name or "state_proj" in name for name in with_gradient)


def test_reset_expert_changes_the_expert_alone_and_keeps_its_scale(policy):
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    reset_expert(policy, seed=5)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    expert = {id(p) for module in expert_modules(policy) for p in module.parameters()}
    assert changed
    for name, parameter in policy.named_parameters():
        if name in changed:
            assert id(parameter) in expert
            if parameter.ndim == 2:
                assert 0.5 < parameter.std() / before[name].std() < 2


def test_flow_time_has_the_beta_distributions_moments():
    time = sample_time(200_000, torch.device("cpu"), torch.Generator().manual_seed(0))
    # Beta(1.5, 1): mean 0.6, variance 1.5 / (2.5^2 * 3.5); then scaled by .999 and moved by .001.
    assert abs(float(time.mean()) - (0.6 * 0.999 + 0.001)) < 2e-3
    assert abs(float(time.var()) - 0.999**2 * 1.5 / (6.25 * 3.5)) < 2e-3
    assert float(time.min()) > 0 and float(time.max()) <= 1.0


def test_chunks_hold_the_last_target_past_the_end():
    targets = np.arange(7, dtype=np.float32)[:, None] * np.ones((1, 6), np.float32)
    record = EpisodeRecord(
        0,
        "t",
        targets,
        np.array([0, 5], np.int32),
        np.zeros((2, 1, 4, 4, 3), np.uint8),
        np.zeros((2, 6), np.float32),
    )
    np.testing.assert_array_equal(record.chunks(4)[:, :, 0], [[0, 1, 2, 3], [5, 6, 6, 6]])


def test_statistics_are_those_of_states_and_chunks():
    rng = np.random.default_rng(0)
    episodes = [
        EpisodeRecord(
            i,
            "t",
            rng.normal(size=(9, 6)).astype(np.float32),
            np.array([0, 4], np.int32),
            np.zeros((2, 1, 4, 4, 3), np.uint8),
            rng.normal(size=(2, 6)).astype(np.float32),
        )
        for i in range(5)
    ]
    demos = Demonstrations.from_episodes(episodes, cameras=("top",), chunk_size=4)
    state = np.concatenate([e.state for e in episodes])
    chunks = np.concatenate([e.chunks(4) for e in episodes]).reshape(-1, 6)
    held = demos.statistics()
    np.testing.assert_allclose(held["observation.state"]["mean"], state.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(held["action"]["std"], chunks.std(0), rtol=1e-5)


def test_learning_rate_warms_up_and_falls_to_one_percent():
    config = CloneConfig(out="x", steps=1000, lr=1e-3, warmup=100)
    assert learning_rate(0, config) == pytest.approx(1e-5, rel=0.01)
    assert learning_rate(99, config) == pytest.approx(1e-3, rel=0.03)
    assert learning_rate(1000, config) == pytest.approx(1e-5)


def test_learning_rate_falls_with_the_time_where_that_is_used_up_first():
    config = CloneConfig(out="", steps=1000, lr=1e-3, warmup=100, max_seconds=60.0)
    assert learning_rate(500, config, time_used=0.2) == learning_rate(500, config)
    assert learning_rate(500, config, time_used=0.8) == pytest.approx(learning_rate(800, config))
    assert learning_rate(500, config, time_used=1.2) == pytest.approx(1e-5)
