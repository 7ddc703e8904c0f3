"""The same training on a GPU."""

import copy
import gc
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from flowrl.config import TrainConfig
from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.flow.sampler import episode_noise, integrate, sample_chain
from flowrl.graphs import GraphCache
from flowrl.policy.critic import Critic
from flowrl.policy.gelu_product import linear_gelu
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.ppo import PPO
from flowrl.precision import matrix_products
from flowrl.prefix import HostPrefix, Prefix, PrefixStore
from flowrl.record import TIME_FIELDS
from flowrl.rollout import Decisions
from flowrl.train import train
from toy import load_toy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("change", [{}, {"noise_basis": "dct", "noise_modes": 2, "learn_sigma": True}])
def test_training_on_a_gpu_scores_exactly_and_learns_something(tmp_path, change):
    config = TrainConfig(
        policy="none",
        env_id="toy_env:ToyReach-v0",
        out=str(tmp_path / "run"),
        iterations=3,
        envs=3,
        episodes=8,
        val_episodes=4,
        lr=1e-3,
        target_kl=1.0,
        bootstrap_truncated=True,
        grad_cosine=True,
        critic_epochs=1,
        device="cuda",
    )
    out = train(replace(config, **change), lambda path, *, device, **_: load_toy(path, device))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["ratio_max_dev"] for line in lines] == [None, 0.0, 0.0, 0.0]
    assert lines[2]["kl"] > 0 and lines[2]["skipped"] == 0


def test_results_do_not_depend_on_where_the_decisions_wait(tmp_path):
    """In host memory, pinned, or on the GPU: the same log but for times."""
    logs = []
    for offload in ("gpu", "cpu"):
        config = TrainConfig(
            policy="none",
            env_id="toy_env:ToyReach-v0",
            out=str(tmp_path / offload),
            iterations=2,
            envs=3,
            episodes=8,
            val_episodes=4,
            lr=1e-3,
            minibatch=4,
            device="cuda",
            offload=offload,
        )
        out = train(config, lambda path, *, device, **_: load_toy(path, device))
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        logs.append([{key: value for key, value in line.items() if key not in TIME_FIELDS} for line in lines])
    assert logs[0] == logs[1] and logs[0][2]["kl"] > 0


def test_rows_in_pinned_memory_come_to_the_device_bit_for_bit():
    prefix = Prefix(
        {"keys": torch.randn(6, 5, device="cuda").bfloat16(), "mask": torch.ones(6, 2, device="cuda") > 0}
    )
    store = PrefixStore("cpu", prefix.tensors["keys"].device)
    store.add(prefix[:4])
    store.add(prefix[4:])
    joined = store.join()
    assert isinstance(joined, HostPrefix) and all(tensor.is_pinned() for tensor in joined.tensors.values())
    for index in (torch.tensor([5, 0, 2], device="cuda"), slice(1, 3)):
        rows, expected = joined[index], prefix[index]
        for name, tensor in expected.tensors.items():
            assert rows.tensors[name].device == tensor.device and torch.equal(rows.tensors[name], tensor)


KINDS = {
    "white": {},
    "learned": {"learn_sigma": True},
    "head": {"kind": "head"},
    "flow-sde": {"kind": "flow-sde"},
}


FAST = [("fused", "off"), ("split", "off"), ("tf32", "off"), ("split", "on"), ("tf32", "on")]
SIZE = 4
"""Of the batches of compiled policies: another size would be compiled anew, in seconds."""


@pytest.fixture(params=FAST, ids=lambda way: f"{way[0]}-{way[1]}")
def fast(base_folder, request):
    policy = SmolVLAFlowPolicy.load(base_folder, device="cuda")
    assert policy.velocity_mode == "fused" and not policy.compiled  # too small for auto
    policy.choose_velocity(*request.param)
    assert policy.graphs is not None
    yield policy
    assert policy.compiled == (request.param[1] == "on")  # no compilation has failed meanwhile


def encoded(policy, make_observation, count):
    """Instructions of different length, so that rows have different masks and positions."""
    return policy.encode(
        make_observation(count), [f"Pick {'very ' * (row % 3)}fast." for row in range(count)]
    )


def make_noise(policy, prefix, kind):
    settings = dict(KINDS[kind])
    if kind == "head":
        settings["num_features"] = policy.prefix_features(prefix).shape[1]
    return NoiseModel(policy.spec, **settings).to(policy.device)


def draw(policy, count, noise):
    drawn = [episode_noise(row, 0, policy.spec, noise.num_elements) for row in range(count)]
    return tuple(torch.stack(part).to(policy.device) for part in zip(*drawn))


@pytest.mark.parametrize("repeats", [1, 10])
@torch.no_grad()
def test_the_exact_velocity_is_lerobots_on_a_gpu_too(base_folder, make_observation, repeats):
    policy = SmolVLAFlowPolicy.load(base_folder, device="cuda")
    policy.choose_velocity("exact")
    prefix = encoded(policy, make_observation, 3)
    x_t, time = torch.randn(3 * repeats, 50, 6, device="cuda"), torch.rand(3 * repeats, device="cuda")
    many, cache = prefix.repeat_interleave(repeats), DynamicCache()
    for layer in range(many.tensors["keys"].shape[1]):
        cache.update(many.tensors["keys"][:, layer], many.tensors["values"][:, layer], layer)
    expected = policy.module.model.denoise_step(many.tensors["pad_mask"], cache, x_t, time)
    got = policy.velocity_field(prefix, repeats)(x_t, time)
    if repeats == 1:
        assert torch.equal(got, expected)
    else:  # products of another batch shape round otherwise on a GPU
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_replayed_chain_is_the_computed_one_also_after_an_update_in_place(fast, make_observation, kind):
    prefix = encoded(fast, make_observation, 4)
    noise = make_noise(fast, prefix, kind)
    x_0, eps = draw(fast, 4, noise)

    def check():
        with torch.no_grad():
            expected = integrate(fast, prefix, x_0, noise, eps)
        chain = sample_chain(fast, prefix, x_0, noise, eps)
        assert torch.equal(chain.states, expected.states) and torch.equal(chain.log_prob, expected.log_prob)
        return chain.states

    first = check()
    with torch.no_grad():
        for parameter in (*fast.trainable_parameters().values(), *noise.parameters()):
            parameter.mul_(1.01).add_(0.01)
    second = check()
    assert not torch.equal(first, second)
    for parameter in fast.trainable_parameters().values():
        parameter.data = parameter.data * 1.02  # elsewhere in memory
    assert not torch.equal(second, check())
    assert not fast.graphs.failed


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17])
def test_chains_rescored_as_sampled_have_ratio_one_exactly_on_a_gpu(fast, make_observation, count):
    if fast.compiled and fast.sampling_batch(count) != SIZE:
        pytest.skip("compiled in one size")
    prefix = encoded(fast, make_observation, count)
    noise = make_noise(fast, prefix, "white")
    x_0, eps = draw(fast, count, noise)
    chain = sample_chain(fast, prefix, x_0, noise, eps)
    if not fast.compiled:  # with gradients other functions are compiled
        assert torch.equal(rescore(fast, prefix, chain.states, noise), chain.log_prob)
    with torch.no_grad():
        assert torch.equal(rescore(fast, prefix, chain.states, noise), chain.log_prob)
        flat = rescore_flat(fast, prefix, chain.states, noise)
    limit = 0.5 if fast.velocity_mode == "tf32" else 1e-3  # rounded at 2^-11, where the last noise is 0.002
    assert ((flat - chain.log_prob).exp() - 1).abs().max() < limit


def test_a_chunk_on_a_gpu_is_lerobots_to_a_hundredth_of_a_degree(fast, make_observation, tasks):
    for count in (3,) if fast.compiled else (1, 3):
        observation, x_0 = make_observation(count), torch.randn(count, 50, 6, device="cuda")
        chain = sample_chain(fast, fast.encode(observation, tasks(count)), x_0)
        expected = fast.predict_action_chunk(observation, tasks(count), x_0)
        limit = 0.2 if fast.velocity_mode == "tf32" else 0.01
        assert (fast.unnormalize(chain.actions[..., :6]) - expected).abs().max() < limit
    assert not fast.graphs.failed and not fast._encoders.failed


@pytest.mark.parametrize("learn_sigma", [False, True])
def test_an_update_as_cuda_graphs_is_the_one_without_bit_for_bit(fast, make_observation, learn_sigma):
    """Also of graphs that follow weights which the optimizer has changed."""
    count = 2 * SIZE + 1
    noise = NoiseModel(fast.spec, learn_sigma=learn_sigma).to("cuda")
    prefixes = [encoded(fast, make_observation, SIZE) for _ in range(3)]
    x_0, eps = draw(fast, 3 * SIZE, noise)
    parts = zip(prefixes, x_0.split(SIZE), eps.split(SIZE))
    chains = [sample_chain(fast, prefix, start, noise, drawn) for prefix, start, drawn in parts]
    prefix = Prefix.concatenate(prefixes)[:count]
    decisions = Decisions(
        prefix=prefix,
        states=torch.cat([chain.states for chain in chains])[:count],
        log_prob=torch.cat([chain.log_prob for chain in chains])[:count].detach(),
        features=fast.prefix_features(prefix),
        num_executed=torch.arange(40, 40 + count, device="cuda"),
        episode=np.arange(count),
        order=np.zeros(count, dtype=np.int64),
        rounds=[np.arange(SIZE), np.arange(SIZE, 2 * SIZE)],
    )
    advantages, returns = np.random.default_rng(0).standard_normal((2, count))
    config = TrainConfig(minibatch=SIZE, epochs=2, lr=1e-3, critic_warmup=0, target_kl=1e9)
    start = copy.deepcopy(fast.module.state_dict())
    results = []
    for graphs in (False, True):
        fast.module.load_state_dict(start)
        own = copy.deepcopy(noise)
        torch.manual_seed(0)
        ppo = PPO(fast, own, Critic(decisions.features.shape[1]).to("cuda"), config)
        assert ppo._graphs is not None
        cache = ppo._graphs
        if not graphs:
            ppo._graphs = None
        stats = ppo.update(decisions, advantages, returns, iteration=1)
        modules = (fast.module, own, ppo.critic)
        weights = [tensor.clone() for module in modules for tensor in module.state_dict().values()]
        results.append((weights, stats))
        assert len(cache._graphs) == graphs and not cache.failed
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]
    changed = [not torch.equal(start[name], value) for name, value in fast.module.state_dict().items()]
    assert any(changed) and not all(changed)


def test_graphs_that_are_garbage_do_not_break_a_capture_off():
    def double(x):
        _ = [[number] for number in range(1000)]  # for which the collector is called
        return (2 * x,)

    x = torch.arange(3.0, device="cuda")
    old = GraphCache("an old function", x.device, [])
    old.run("key", double, [x])
    circle = [old]
    circle.append(circle)
    del old, circle
    thresholds = gc.get_threshold()
    gc.set_threshold(10)
    try:
        new = GraphCache("a function", x.device, [])
        assert torch.equal(new.run("key", double, [x])[0], 2 * x) and not new.failed
    finally:
        gc.set_threshold(*thresholds)


def test_gelu_in_the_products_kernel_is_nearer_to_the_truth_than_in_one_of_its_own():
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).mul(scale).bfloat16().cuda()
        for shape, scale in (((300, 96), 1.0), ((200, 96), 0.1), ((200,), 1.0))
    )
    exact = functional.gelu(functional.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    apart = functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
    errors = [
        ((found.double() - exact).norm() / exact.norm()).item()
        for found in (linear_gelu(x, weight, bias), apart)
    ]
    assert errors[0] < 2**-8 and errors[0] < 1.05 * errors[1]


def test_rows_that_fill_a_batch_up_change_nothing_on_a_gpu(fast, make_observation):
    prefix, x_0 = encoded(fast, make_observation, 4), torch.randn(4, 50, 6, device="cuda")
    other = x_0.clone()
    other[3] = 7.0
    three, four, changed = (sample_chain(fast, prefix[: len(x)], x).states[:3] for x in (x_0[:3], x_0, other))
    assert torch.equal(three, four) and torch.equal(three, changed)


def test_an_update_on_a_gpu_repeats_its_gradient_bit_for_bit(fast, make_observation):
    count = SIZE if fast.compiled else 16
    prefix = encoded(fast, make_observation, count)
    noise = make_noise(fast, prefix, "white")
    x_0, eps = draw(fast, count, noise)
    chain = sample_chain(fast, prefix, x_0, noise, eps)
    weights = list(fast.trainable_parameters().values())
    first, second = (
        torch.autograd.grad(rescore_flat(fast, prefix, chain.states, noise).mean(), weights) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_what_cannot_be_captured_runs_without_a_graph_and_says_so_once(
    fast, make_observation, monkeypatch, capsys
):
    prefix, x_0 = encoded(fast, make_observation, SIZE), torch.randn(SIZE, 50, 6, device="cuda")
    expected = sample_chain(fast, prefix, x_0).states
    field = fast.velocity_field

    def waiting(prefix, repeats=1):
        float(prefix.tensors["keys"].sum())
        return field(prefix, repeats)

    monkeypatch.setattr(fast, "velocity_field", waiting)
    fast.choose_velocity(fast.velocity_mode, "on" if fast.compiled else "off")  # new, empty caches
    capsys.readouterr()
    for _ in range(2):
        assert torch.equal(sample_chain(fast, prefix, x_0).states, expected)
    assert "".join(capsys.readouterr()).count("no CUDA graph of the denoising") == 1
    assert fast.graphs.failed


def other_ways(base_folder, *ways):
    policies = []
    for way in ways:
        policies.append(SmolVLAFlowPolicy.load(base_folder, device="cuda"))
        policies[-1].choose_velocity(*way)
    return policies


@pytest.mark.parametrize("mode", ["fused", "split", "tf32"])
def test_a_compiled_prefix_and_chain_are_the_ones_that_are_not(base_folder, make_observation, mode):
    plain, compiled = other_ways(base_folder, (mode, "off"), (mode, "on"))
    prefixes = [encoded(policy, make_observation, SIZE).tensors for policy in (plain, compiled)]
    valid = prefixes[0]["pad_mask"][:, None, None, :, None].expand_as(prefixes[0]["keys"])
    assert torch.equal(prefixes[0]["pad_mask"], prefixes[1]["pad_mask"])
    for name in ("keys", "values"):
        torch.testing.assert_close(prefixes[1][name][valid], prefixes[0][name][valid], rtol=1e-4, atol=1e-5)
    prefix, x_0 = encoded(plain, make_observation, SIZE), torch.randn(SIZE, 50, 6, device="cuda")
    chains = [sample_chain(policy, prefix, x_0).actions for policy in (plain, compiled)]
    tolerance = {"fused": 1e-5, "split": 1e-4, "tf32": 1e-2}[mode]
    torch.testing.assert_close(chains[1], chains[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(sample_chain(compiled, prefix, x_0).actions, chains[1])
    assert compiled.compiled and not compiled.graphs.failed and not compiled._encoders.failed


def test_gradients_on_a_gpu_are_those_of_the_exact_float32_ones(base_folder, fast, make_observation):
    (exact,) = other_ways(base_folder, ("exact", "off"))
    prefix = encoded(exact, make_observation, 4)
    # With noise of 0.002 TF32's own rounding turns the gradient: test_tf32.py, which has the bounds of both.
    sigma_end = 0.05 if fast.velocity_mode == "tf32" else 0.002
    noise = NoiseModel(exact.spec, sigma_end=sigma_end).to(exact.device)
    x_0, eps = draw(exact, 4, noise)
    states = sample_chain(exact, prefix, x_0, noise, eps).states
    gradients = []
    for policy in (exact, fast):
        weights = list(policy.trainable_parameters().values())
        with matrix_products("tf32" if policy.velocity_mode == "tf32" else "float32"):
            score = rescore_flat(policy, prefix, states, noise)
            gradients.append(torch.autograd.grad(score.mean(), weights))
    whole = [torch.cat([gradient.double().flatten() for gradient in part]) for part in gradients]
    assert torch.cosine_similarity(*whole, dim=0) > 0.9999
    assert abs(whole[0].norm() / whole[1].norm() - 1) < 1e-2
    for name, a, b in zip(exact.trainable_parameters(), *gradients):
        assert torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.99, name


def test_a_second_field_compiles_nothing_anew(base_folder, make_observation):
    (policy,) = other_ways(base_folder, ("fused", "on"))
    prefix = encoded(policy, make_observation, 4)

    def work():
        sample_chain(policy, prefix, torch.randn(4, 50, 6, device="cuda"))
        x_t, time = torch.randn(40, 50, 6, device="cuda"), torch.rand(40, device="cuda")
        policy.velocity_field(prefix, 10)(x_t, time).square().mean().backward()
        encoded(policy, make_observation, 4)

    work()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    policy.choose_velocity("fused", "on")
    work()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0


def test_tf32_is_the_velocitys_alone(base_folder, make_observation):
    fused, tf32 = other_ways(base_folder, ("fused", "off"), ("tf32", "off"))
    prefix, x_0 = encoded(fused, make_observation, 2), torch.randn(2, 50, 6, device="cuda")
    expected = sample_chain(fused, prefix, x_0).actions
    rounded = sample_chain(tf32, prefix, x_0).actions
    assert torch.get_float32_matmul_precision() == "highest"
    assert 0 < (rounded - expected).abs().max() < 0.02
    assert torch.equal(sample_chain(fused, prefix, x_0).actions, expected)
