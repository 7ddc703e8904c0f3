"""Opening a policy folder by its type."""

import json

import pytest
import torch

from flowrl.errors import FlowRLError
from flowrl.policy.loading import load_policy
from flowrl.policy.smolvla import SmolVLAFlowPolicy


def test_a_smolvla_folder_opens_as_smolvla_with_the_weights_of_its_own_loader(base_folder, policy):
    opened = load_policy(base_folder)
    assert type(opened) is SmolVLAFlowPolicy
    own, other = policy.module.state_dict(), opened.module.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_an_unknown_type_is_told_with_the_known_ones(folder_copy):
    config = json.loads((folder_copy / "config.json").read_text())
    (folder_copy / "config.json").write_text(json.dumps({**config, "type": "act"}))
    with pytest.raises(FlowRLError, match=r"config\.json: type 'act' .* takes .*smolvla"):
        load_policy(folder_copy)


def test_a_folder_without_config_is_told(tmp_path):
    with pytest.raises(FlowRLError, match=r"config\.json is missing"):
        load_policy(tmp_path)
    with pytest.raises(FlowRLError, match="does not exist"):
        load_policy(tmp_path / "nothing")
