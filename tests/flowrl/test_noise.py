import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from flowrl.errors import FlowRLError
from flowrl.flow.schedule import denoising_times, geometric_schedule
from flowrl.policy.interface import FlowSpec
from flowrl.policy.noise import NoiseModel

SPEC = FlowSpec(num_denoising_steps=10, chunk_size=50, n_action_steps=50, action_dim=6, padded_action_dim=9)


def transitions(noise: NoiseModel, batch: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(batch, 10, 50, 9, generator=generator)
    eps = torch.randn(batch, 10, noise.num_elements, 6, generator=generator)
    x_next = torch.stack([noise.perturb(mean[:, k], k, eps[:, k]) for k in range(10)], dim=1)
    return mean, eps, x_next


def independent_dct(num_modes: int, length: int) -> np.ndarray:
    """Orthonormal DCT-II rows from the Fourier transform of the mirrored unit vectors."""
    rows = np.empty((num_modes, length))
    for t in range(length):
        mirrored = np.zeros(2 * length)
        mirrored[[t, 2 * length - 1 - t]] = 1.0
        spectrum = np.fft.fft(mirrored)[:num_modes] * np.exp(
            -1j * np.pi * np.arange(num_modes) / (2 * length)
        )
        rows[:, t] = spectrum.real / math.sqrt(2 * length)
    rows[0] /= math.sqrt(2)
    return rows


def test_the_schedule_is_geometric_and_exact_at_both_ends():
    sizes = geometric_schedule(0.2, 0.002, 10)
    assert (sizes[0], sizes[-1]) == (0.2, 0.002)
    np.testing.assert_allclose(np.diff(np.log(sizes)), math.log(0.01) / 9, rtol=1e-12)
    assert geometric_schedule(0.2, 0.05, 1) == [0.05]


def test_times_are_lerobots():
    dt, times = denoising_times(10)
    assert dt == -0.1
    assert times == [1.0 + k * -0.1 for k in range(10)]


def test_white_log_prob_is_the_normal_density_of_every_target():
    noise = NoiseModel(SPEC)
    mean, _, x_next = transitions(noise)
    expected = Normal(mean[..., :6].double(), noise.sigma().double()[None, :, :, None]).log_prob(
        x_next[..., :6].double()
    )
    actual = noise.log_prob(x_next, mean)
    assert actual.shape == (3, 10, 50, 6) and actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_modes", [6, 50])
def test_dct_log_prob_is_the_normal_density_in_the_rotated_basis(num_modes):
    noise = NoiseModel(SPEC, sigma_start=0.2, sigma_end=0.05, basis="dct", num_modes=num_modes)
    mean, eps, x_next = transitions(noise)
    rows = torch.from_numpy(independent_dct(num_modes, 50))
    torch.testing.assert_close(rows @ rows.T, torch.eye(num_modes, dtype=torch.float64))
    delta = torch.einsum("ft,bkta->bkfa", rows, (x_next - mean)[..., :6].double())
    sigma = torch.tensor(geometric_schedule(0.2, 0.05, 10), dtype=torch.float64)[None, :, None, None]
    torch.testing.assert_close(delta, sigma * eps.double(), rtol=1e-4, atol=1e-6)
    expected = Normal(torch.zeros(1, dtype=torch.float64), sigma).log_prob(delta)
    actual = noise.log_prob(x_next, mean)
    assert actual.shape == (3, 10, num_modes, 6)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_all_modes_and_white_noise_have_the_same_density_of_a_whole_chunk():
    white, dct = NoiseModel(SPEC), NoiseModel(SPEC, basis="dct")
    mean, _, x_next = transitions(white)
    torch.testing.assert_close(
        dct.log_prob(x_next, mean).sum((2, 3)), white.log_prob(x_next, mean).sum((2, 3)), rtol=1e-3, atol=1e-2
    )


@pytest.mark.parametrize("arguments", [{}, {"basis": "dct", "num_modes": 6}])
def test_padded_dimensions_get_no_noise(arguments):
    noise = NoiseModel(SPEC, **arguments)
    mean, _, x_next = transitions(noise)
    assert torch.equal(x_next[..., 6:], mean[..., 6:])
    assert not torch.equal(x_next[..., :6], mean[..., :6])


def test_few_modes_are_smooth_in_time():
    noise = NoiseModel(SPEC, basis="dct", num_modes=6)
    mean, _, x_next = transitions(noise)
    delta = (x_next - mean)[..., :6]
    assert delta.diff(dim=2).abs().mean() < 0.3 * delta.abs().mean()


def test_one_step_and_all_steps_give_the_same_bits():
    for arguments in ({}, {"basis": "dct", "num_modes": 6}, {"learn_sigma": True}):
        noise = NoiseModel(SPEC, **arguments)
        mean, _, x_next = transitions(noise)
        single = torch.stack([noise.log_prob(x_next[:, k], mean[:, k], k) for k in range(10)], dim=1)
        assert torch.equal(noise.log_prob(x_next, mean), single)


def test_learned_sigma_starts_exactly_at_the_schedule():
    learned, fixed = NoiseModel(SPEC, learn_sigma=True), NoiseModel(SPEC)
    assert learned.sigma().shape == (10, 6)
    assert torch.equal(learned.sigma(), fixed.sigma().expand(10, 6))
    assert not list(fixed.parameters())


@pytest.mark.parametrize("raw", [-1e4, -50.0, 50.0, 1e4])
def test_extreme_raw_values_stay_in_bounds_and_finite(raw):
    noise = NoiseModel(SPEC, learn_sigma=True)
    with torch.no_grad():
        noise.raw_sigma.fill_(raw)
    sigma = noise.sigma()
    bound = 0.5 * 0.002 if raw < 0 else 1.5 * 0.2
    np.testing.assert_allclose(sigma.detach().numpy(), bound, rtol=1e-5)
    mean, _, x_next = transitions(noise)
    log_prob = noise.log_prob(x_next, mean)
    log_prob.sum().backward()
    assert log_prob.isfinite().all() and noise.raw_sigma.grad.isfinite().all()


def test_the_gradient_of_learned_sigma_is_that_of_the_normal_density():
    noise = NoiseModel(SPEC, learn_sigma=True)
    with torch.no_grad():
        noise.raw_sigma.normal_(generator=torch.Generator().manual_seed(3))
        mean, _, x_next = transitions(noise)
        x_next = mean + 1.3 * (x_next - mean)
    (gradient,) = torch.autograd.grad(noise.log_prob(x_next, mean).sum(), noise.raw_sigma)

    raw = noise.raw_sigma.detach().double().requires_grad_()
    low, high = math.log(0.001), math.log(0.3)
    start = torch.tensor(geometric_schedule(0.2, 0.002, 10), dtype=torch.float64).log()[:, None]
    position = (start - low) / (high - low)
    sigma = torch.exp(low + (high - low) * torch.sigmoid(torch.log(position / (1 - position)) + raw))
    expected = (
        Normal(mean[..., :6].double(), sigma[None, :, None, :]).log_prob(x_next[..., :6].double()).sum()
    )
    (expected_gradient,) = torch.autograd.grad(expected, raw)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-3, atol=1e-3)


def test_settings_rebuild_the_model():
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.05, basis="dct", num_modes=4, learn_sigma=True)
    again = NoiseModel(SPEC, **noise.settings())
    again.load_state_dict(noise.state_dict())
    assert again.settings() == noise.settings()
    assert torch.equal(again.sigma(), noise.sigma())


@pytest.mark.parametrize(
    "arguments",
    [{"sigma_start": 0.0}, {"sigma_end": -1.0}, {"sigma_end": math.nan}, {"basis": "pink"}, {"num_modes": 6},
     {"basis": "dct", "num_modes": 0}, {"basis": "dct", "num_modes": 51}],
)  # fmt: skip
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(FlowRLError):
        NoiseModel(SPEC, **arguments)
