import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from flowrl.errors import FlowRLError
from flowrl.flow.sampler import sample_chain
from flowrl.flow.schedule import denoising_times, flow_sde_schedule, geometric_schedule
from flowrl.policy.interface import FlowSpec
from flowrl.policy.noise import NoiseModel, gaussian_entropy
from toy import SPEC as TOY_SPEC
from toy import ToyPolicy

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


def test_flow_sde_log_prob_is_the_normal_density_of_the_published_sizes():
    noise = NoiseModel(SPEC, kind="flow-sde", flow_sde_level=0.7)
    mean, _, x_next = transitions(noise)
    sigma = torch.tensor(flow_sde_schedule(0.7, 10), dtype=torch.float64)[None, :, None, None]
    expected = Normal(mean[..., :6].double(), sigma).log_prob(x_next[..., :6].double())
    torch.testing.assert_close(noise.log_prob(x_next, mean).double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", [{"learn_sigma": True}, {"kind": "flow-sde"}])
def test_half_precision_states_give_finite_float32_densities_at_the_smallest_noise(kind):
    noise = NoiseModel(SPEC, sigma_start=1e-3, sigma_end=1e-3, flow_sde_level=0.01, **kind)
    mean, _, x_next = transitions(noise)
    mean = mean.requires_grad_()
    log_prob = noise.log_prob(x_next.half(), mean.half())
    log_prob.sum().backward()
    assert log_prob.dtype == torch.float32 and log_prob.isfinite().all()
    assert mean.grad is not None and mean.grad.isfinite().all()


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


@pytest.mark.parametrize(
    "arguments", [{}, {"basis": "dct", "num_modes": 6}, {"learn_sigma": True}, {"kind": "flow-sde"}]
)
def test_one_step_and_all_steps_give_the_same_bits(arguments):
    noise = NoiseModel(SPEC, **arguments)
    mean, _, x_next = transitions(noise)
    single = torch.stack([noise.log_prob(x_next[:, k], mean[:, k], k) for k in range(10)], dim=1)
    assert torch.equal(noise.log_prob(x_next, mean), single)
    means = [noise.mean(x_next[:, k], mean[:, k], -0.1, k) for k in range(10)]
    assert torch.equal(noise.mean(x_next, mean, -0.1), torch.stack(means, dim=1))


def test_learned_sigma_starts_exactly_at_the_schedule():
    learned, fixed = NoiseModel(SPEC, learn_sigma=True), NoiseModel(SPEC)
    assert learned.sigma().shape == (10, 6)
    assert torch.equal(learned.sigma(), fixed.sigma().expand(10, 6))
    assert not list(fixed.parameters())


@pytest.mark.parametrize("raw", [-1e4, -50.0, 50.0, 1e4])
def test_extreme_raw_values_stay_in_bounds_and_finite(raw):
    noise = NoiseModel(SPEC, learn_sigma=True)
    with torch.no_grad():
        noise.sizes.raw_sigma.fill_(raw)
    sigma = noise.sigma()
    bound = 0.5 * 0.002 if raw < 0 else 1.5 * 0.2
    np.testing.assert_allclose(sigma.detach().numpy(), bound, rtol=1e-5)
    mean, _, x_next = transitions(noise)
    log_prob = noise.log_prob(x_next, mean)
    log_prob.sum().backward()
    assert log_prob.isfinite().all() and noise.sizes.raw_sigma.grad.isfinite().all()


def test_the_gradient_of_learned_sigma_is_that_of_the_normal_density():
    noise = NoiseModel(SPEC, learn_sigma=True)
    with torch.no_grad():
        noise.sizes.raw_sigma.normal_(generator=torch.Generator().manual_seed(3))
        mean, _, x_next = transitions(noise)
        x_next = mean + 1.3 * (x_next - mean)
    (gradient,) = torch.autograd.grad(noise.log_prob(x_next, mean).sum(), noise.sizes.raw_sigma)

    raw = noise.sizes.raw_sigma.detach().double().requires_grad_()
    low, high = math.log(0.001), math.log(0.3)
    start = torch.tensor(geometric_schedule(0.2, 0.002, 10), dtype=torch.float64).log()[:, None]
    position = (start - low) / (high - low)
    sigma = torch.exp(low + (high - low) * torch.sigmoid(torch.log(position / (1 - position)) + raw))
    expected = (
        Normal(mean[..., :6].double(), sigma[None, :, None, :]).log_prob(x_next[..., :6].double()).sum()
    )
    (expected_gradient,) = torch.autograd.grad(expected, raw)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "kind", [{"learn_sigma": True}, {"kind": "head", "num_features": 5}, {"kind": "flow-sde", "flow_sde_level": 0.7}]
)  # fmt: skip
def test_settings_rebuild_the_model(kind):
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.05, basis="dct", num_modes=4, **kind)
    features = torch.randn(3, 5)
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter.normal_()
    again = NoiseModel(SPEC, **noise.settings())
    again.load_state_dict(noise.state_dict())
    assert again.settings() == noise.settings()
    assert ("sigma_start" in noise.settings()) == (noise.kind != "flow-sde")
    assert torch.equal(again.sigma(features), noise.sigma(features))


@pytest.mark.parametrize(
    "arguments",
    [{"sigma_start": 0.0}, {"sigma_end": -1.0}, {"sigma_end": math.nan}, {"basis": "pink"}, {"num_modes": 6},
     {"basis": "dct", "num_modes": 0}, {"basis": "dct", "num_modes": 51}, {"kind": "ou"},
     {"kind": "head"}, {"kind": "head", "num_features": 5, "learn_sigma": True},
     {"kind": "flow-sde", "learn_sigma": True}, {"kind": "flow-sde", "flow_sde_level": 0.0},
     {"kind": "flow-sde", "flow_sde_level": 1.5}],
)  # fmt: skip
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(FlowRLError):
        NoiseModel(SPEC, **arguments)


# ---- a head that reads the observation


def head(**arguments) -> NoiseModel:
    return NoiseModel(SPEC, kind="head", num_features=5, **arguments)


def trained_head(**arguments) -> NoiseModel:
    noise = head(**arguments)
    with torch.no_grad():
        noise.sizes.output.weight.normal_(generator=torch.Generator().manual_seed(1))
    return noise


def test_a_noise_head_starts_exactly_at_the_schedule_whatever_it_sees():
    features = 10 * torch.randn(3, 5)
    assert torch.equal(head().sigma(features), NoiseModel(SPEC).sigma().expand(3, 10, 6))


def test_a_noise_head_starts_alike_in_every_run_and_draws_from_no_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = head(), head()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("basis", [{}, {"basis": "dct", "num_modes": 6}])
def test_a_noise_head_gives_every_observation_step_and_joint_its_own_gaussian(basis):
    noise = trained_head(**basis)
    sigma = noise.sigma(torch.randn(3, 5, generator=torch.Generator().manual_seed(2)))
    assert sigma.shape == (3, 10, 6) and len(sigma.unique()) == 3 * 10 * 6
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 10, 50, 9, generator=generator)
    eps = torch.randn(3, 10, noise.num_elements, 6, generator=generator)
    x_next = torch.stack([noise.perturb(mean[:, k], k, eps[:, k], sigma) for k in range(10)], dim=1)
    scale = sigma[:, :, None, :].double()
    expected = Normal(torch.zeros_like(scale), scale).log_prob(scale * eps.double())
    actual = noise.log_prob(x_next, mean, sigma=sigma)
    # At sigma .001 the rounding of x_next (1e-7) is 1e-4 of a standard deviation.
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-3)
    single = [noise.log_prob(x_next[:, k], mean[:, k], k, sigma) for k in range(10)]
    assert torch.equal(actual, torch.stack(single, dim=1))


@pytest.mark.parametrize("bias", [-1e4, -50.0, 50.0, 1e4])
def test_a_noise_head_pushed_to_its_extremes_stays_in_bounds_and_finite(bias):
    noise = trained_head()
    with torch.no_grad():
        noise.sizes.output.bias.fill_(bias)
    sigma = noise.sigma(torch.randn(3, 5))
    assert float(sigma.detach().min()) >= 0.999 * 0.001 and float(sigma.detach().max()) <= 1.001 * 0.3
    mean = torch.zeros(3, 10, 50, 9)
    log_prob = noise.log_prob(mean + 0.1, mean, sigma=sigma)
    log_prob.sum().backward()
    assert log_prob.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in noise.parameters())


def test_a_noise_head_does_not_send_a_gradient_to_the_features():
    features = torch.randn(3, 5, requires_grad=True)
    assert trained_head().sigma(features).requires_grad
    trained_head().sigma(features).sum().backward()
    assert features.grad is None


@pytest.mark.parametrize("features", [None, torch.zeros(3, 4)])
def test_a_noise_head_refuses_an_observation_of_another_width(features):
    with pytest.raises(FlowRLError, match="5 features"):
        head().sigma(features)


# ---- Flow-SDE

DATA_MEAN = torch.tensor([0.5, -0.3, 0.0, 0.4])[:, None]
DATA_STD = torch.tensor([0.2, 0.4, 0.6, 0.8])[:, None]


class GaussianFlow(ToyPolicy):
    """The exact velocity of a flow between independent Gaussian targets of a chunk and standard normal noise."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.spec = FlowSpec(num_steps, *(getattr(TOY_SPEC, name) for name in list(vars(TOY_SPEC))[1:]))

    def velocity(self, x_t, time, prefix):
        t = time[:, None, None]
        slope = (t - (1 - t) * DATA_STD**2) / ((1 - t) ** 2 * DATA_STD**2 + t**2)
        return -DATA_MEAN + slope * (x_t - (1 - t) * DATA_MEAN)


def test_the_sde_has_the_published_sizes_and_drift():
    # K = 4, a = .5: t = 1, .75, .5, .25 and s = a sqrt(t / (1 - t)), the first with 1 - t of the second
    s = [0.5 * math.sqrt(r) for r in (1 / 0.25, 0.75 / 0.25, 0.5 / 0.5, 0.25 / 0.75)]
    np.testing.assert_allclose(flow_sde_schedule(0.5, 4), [value * math.sqrt(0.25) for value in s])
    assert flow_sde_schedule(0.5, 10)[0] == pytest.approx(0.5) and flow_sde_schedule(0.5, 1) == [0.5]
    noise = NoiseModel(TOY_SPEC, kind="flow-sde", flow_sde_level=0.5)
    x, v = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    t, dt = 0.75, -0.25
    expected = x + (v + s[1] ** 2 / (2 * t) * (x + (1 - t) * v)) * dt
    actual = noise.mean(x, v, dt, 1)
    torch.testing.assert_close(actual[..., :2], expected[..., :2])
    assert torch.equal(actual[..., 2:], (x + dt * v)[..., 2:])


@pytest.mark.parametrize("basis", [{}, {"basis": "dct", "num_modes": 2}])
def test_the_sde_keeps_the_marginals_of_the_flow_and_needs_its_drift_for_that(basis, monkeypatch):
    """6,000 samples: the standard error of a variance is 1.8 %; 300 steps add about 1 %."""
    num_steps, batch = 300, 3000
    policy = GaussianFlow(num_steps)
    noise = NoiseModel(policy.spec, kind="flow-sde", flow_sde_level=0.5, **basis)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randn(batch, 4, 3, generator=generator)
    eps = torch.randn(batch, num_steps, noise.num_elements, 2, generator=generator)
    prefix = policy.encode({"agent_pos": np.zeros((batch, 2), np.float32)}, ["toy"] * batch)

    def moments(step):
        t = 1 - step / num_steps
        std = ((1 - t) ** 2 * DATA_STD**2 + t**2).sqrt()
        scaled = (states[:, step, :, :2] - (1 - t) * DATA_MEAN) / std
        chunks = scaled.permute(0, 2, 1).reshape(-1, 4)
        return chunks.mean(0), torch.cov(chunks.T)

    states = sample_chain(policy, prefix, x_0, noise, eps).states
    for step in (90, 180, 300):
        mean, covariance = moments(step)
        torch.testing.assert_close(mean, torch.zeros(4), rtol=0, atol=0.04)
        torch.testing.assert_close(covariance, torch.eye(4), rtol=0, atol=0.07)

    monkeypatch.setattr(noise, "mean", lambda x_t, v_t, dt, step: x_t + dt * v_t)
    states = sample_chain(policy, prefix, x_0, noise, eps).states
    assert moments(300)[1].diag().min() > 1.4


def test_entropy_is_that_of_the_normal_distribution():
    sigma = torch.tensor([0.002, 0.2, 1.0])
    torch.testing.assert_close(gaussian_entropy(sigma), Normal(0.0, sigma).entropy())
