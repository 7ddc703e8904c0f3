"""Flags, their checks, and presets."""

import dataclasses
import json
from typing import get_type_hints

import pytest

from flowrl.cli import parse_flags
from flowrl.config import CheckConfig, EvalConfig, TrainConfig, check_config, parse_env_kwargs, parse_rename
from flowrl.errors import FlowRLError
from flowrl.noise_flags import NOISE_FLAGS, noise_flags
from flowrl.preset import describe_preset, load_preset, with_preset, with_preset_env_kwargs


def test_defaults_are_those_of_the_specification():
    config = TrainConfig()
    expected = {
        "policy": "models/chess-tiny", "env_id": "chess_env:ChessPick-v0", "iterations": 30, "envs": 10, "episodes": 100,
        "train_seed": 7700003, "val_seed": 9300003, "val_episodes": 60, "val_every": 5, "save_every": 5, "seconds": 20,
        "lr": 3e-7, "sigma_lr": 3e-3, "critic_lr": 3e-4, "sigma_start": 0.2, "sigma_end": 0.002, "gamma": 0.99, "lam": 0.95,
        "clip": 0.2, "epochs": 2, "minibatch": 16, "target_kl": 0.02, "vf_coef": 0.5, "max_grad_norm": 1.0,
        "critic_warmup": 1, "torch_threads": 2, "device": "auto", "noise_basis": "white", "noise_modes": 6,
        "ratio": "element", "kl_adapt": None, "critic_epochs": 0, "learn_sigma": False, "bootstrap_truncated": False,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_defaults_pass_their_own_checks():
    check_config(TrainConfig())
    check_config(EvalConfig())
    check_config(CheckConfig())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("envs", 0), ("episodes", 0), ("minibatch", 0), ("epochs", 0), ("val_every", 0), ("iterations", -1), ("clip", 0.0),
        ("clip", 1.0), ("gamma", 1.5), ("lam", -0.1), ("lr", -1e-4), ("lr", float("nan")), ("sigma_end", 0.0),
        ("target_kl", float("inf")), ("kl_adapt", 0.0), ("device", "gpu"), ("env_kwargs", "[1]"), ("env_kwargs", "{"),
        ("rename", ("top",)), ("val_seed", 7_700_003), ("torch_threads", 0), ("seconds", 0.0), ("train_seed", -1),
    ],
)  # fmt: skip
def test_impossible_value_is_one_line_that_names_flag_and_value(name, value):
    with pytest.raises(FlowRLError) as error:
        check_config(dataclasses.replace(TrainConfig(), **{name: value}))
    message = str(error.value)
    assert "\n" not in message and "--" + name.replace("_", "-") in message
    assert str(value if not isinstance(value, tuple) else value[0]) in message


def test_rename_pairs():
    assert parse_rename(("top=camera1", "wrist=")) == {"top": "camera1", "wrist": ""}
    for pairs in (("top",), ("=camera1",), ("a=b=c",), ("a=x", "a=y"), ("a=x", "b=x")):
        with pytest.raises(FlowRLError, match="--rename"):
            parse_rename(pairs)


def test_env_kwargs_are_json():
    assert parse_env_kwargs('{"distractors": [0, 4]}') == {"distractors": [0, 4]}


def write_preset(folder, content) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "preset.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_preset_gives_defaults_that_flags_override(tmp_path):
    policy = write_preset(
        tmp_path / "tiny",
        {"env_kwargs": {"image_size": 128, "distractors": [0, 4]}, "train": {"lr": 3e-5, "epochs": 1}},
    )
    preset = load_preset(policy)
    defaults = with_preset(TrainConfig(), preset)
    assert (defaults.lr, defaults.epochs, defaults.minibatch) == (3e-5, 1, 16)
    config = with_preset_env_kwargs(
        dataclasses.replace(defaults, env_kwargs='{"distractors": [2, 2]}'), preset
    )
    assert parse_env_kwargs(config.env_kwargs) == {"image_size": 128, "distractors": [2, 2]}
    line = describe_preset(policy, preset)
    assert "--lr 3e-05" in line and "image_size" in line and "\n" not in line


def test_evaluation_takes_only_what_it_shares_with_training(tmp_path):
    preset = load_preset(
        write_preset(tmp_path / "tiny", {"train": {"lr": 1e-4, "seconds": 10, "rename": ["a=b"]}})
    )
    config = with_preset(EvalConfig(), preset)
    assert config.seconds == 10 and config.rename == ("a=b",)


def test_check_takes_the_presets_noise_as_its_default_and_its_own_flags_before_it(tmp_path):
    train = {"noise_basis": "dct", "noise_modes": 2, "sigma_start": 0.3, "sigma_end": 0.15, "lr": 1e-4}
    defaults = with_preset(CheckConfig(), load_preset(write_preset(tmp_path / "tiny", {"train": train})))
    assert noise_flags(defaults) == {
        "noise_kind": "geometric", "sigma_start": 0.3, "sigma_end": 0.15, "learn_sigma": False, "flow_sde_level": 0.5,
        "noise_basis": "dct", "noise_modes": 2,
    }  # fmt: skip
    given = ["--noise-kind", "flow-sde", "--flow-sde-level", "0.3", "--noise-modes", "4"]
    config = parse_flags(CheckConfig, "", given, defaults)
    assert (config.noise_kind, config.flow_sde_level, config.noise_modes) == ("flow-sde", 0.3, 4)
    assert config.sigma_start == 0.3 and config.noise_basis == "dct"
    check_config(config)


def test_noise_flags_of_check_are_those_of_training_with_the_same_defaults_and_refusals():
    assert noise_flags(CheckConfig()) == noise_flags(TrainConfig())
    hints = [get_type_hints(config) for config in (TrainConfig, CheckConfig)]
    assert all(hints[0][name] == hints[1][name] for name in NOISE_FLAGS)
    for changes in ({"flow_sde_level": 0.7}, {"noise_kind": "head", "learn_sigma": True}, {"sigma_end": 0.0}):
        with pytest.raises(FlowRLError, match=r"^--"):
            check_config(dataclasses.replace(CheckConfig(), **changes))


def test_checkpoint_brings_the_environment_arguments_it_was_trained_with(tmp_path):
    policy = write_preset(tmp_path / "last", {"env_kwargs": {"image_size": 128, "distractors": [0, 4]}})
    record = {"meta": {"env_kwargs": {"distractors": [0, 15]}}}
    (tmp_path / "last" / "flowrl.json").write_text(json.dumps(record))
    assert load_preset(policy)["env_kwargs"] == {"image_size": 128, "distractors": [0, 15]}


def test_policy_without_preset_sets_nothing(tmp_path):
    preset = load_preset(str(tmp_path / "nothing"))
    assert with_preset(TrainConfig(), preset) == TrainConfig() and describe_preset("x", preset) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ({"learning_rate": {}}, "unknown key learning_rate"),
        ({"train": {"learning_rate": 1e-4}}, "unknown key train.learning_rate"),
        ({"train": {"out": "x"}}, "unknown key train.out"),
        ({"train": {"lr": "fast"}}, "--lr does not take"),
        ({"train": {"epochs": 1.5}}, "--epochs does not take"),
        ({"train": {"noise_basis": "pink"}}, "--noise-basis does not take"),
        ({"train": {"learn_sigma": 1}}, "--learn-sigma does not take"),
        ({"train": []}, "must be an object"),
    ],
)
def test_wrong_preset_is_one_line(tmp_path, content, message):
    with pytest.raises(FlowRLError, match=message) as error:
        load_preset(write_preset(tmp_path / "tiny", content))
    assert "\n" not in str(error.value)
