"""LeRobot's own pi0 and pi0.5 behind the FlowPolicy interface.

The network, the processors and their files are LeRobot's; this file only takes their sampler apart into prefix and
velocity. Without exploration noise the results equal `predict_action_chunk` bit for bit.

pi0 gives the state to the action expert, not to PaliGemma: `state_proj` makes a token of it that stands before the noisy
chunk in every denoising step. So the normalized state is stored in the prefix, and `state_proj` is run again in every
velocity. It is frozen all the same, as in SmolVLA: what the policy sees of an observation then is the same before and after
an update, and a change of the arm's behaviour can only come from the expert. pi0.5 writes the state into the prompt; its
prefix holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache

from flowrl.policy.folder import CONFIG, WEIGHTS, PolicyFolder, replace_json_string
from flowrl.policy.interface import FlowSpec
from flowrl.policy.lerobot_loading import quiet
from flowrl.policy.lerobot_policy import LeRobotFlowPolicy
from flowrl.prefix import Prefix

_TOKEN_AXES = {"pad_mask": 1, "keys": 3, "values": 3}
_LOADED = "model."
_A_VLM_WEIGHT = "paligemma.model.language_model.layers.0.self_attn.q_proj.weight"


class PI0FlowPolicy(LeRobotFlowPolicy):
    """pi0 as a flow policy. Made by `load`.

    Prefix tensors: `pad_mask` (B, P) bool; `keys` and `values` (B, L, H, P, head_dim), PaliGemma's attention keys and
    values of the images and the text for L layers, in its dtype; `state` (B, max_state_dim) float32, normalized, padded by 0.
    """

    kind = "pi0"
    vlm = "model.paligemma_with_expert.paligemma."
    expert = "model.paligemma_with_expert.gemma_expert.model."
    trainable = (expert, "model.action_in_proj.", "model.action_out_proj.", "model.action_time_mlp_")
    unsupported: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "use_relative_actions": lambda config: config.use_relative_actions,
    }
    module: PI0Policy | PI05Policy

    @staticmethod
    def _spec(config: Any) -> FlowSpec:
        return FlowSpec(
            num_denoising_steps=config.num_inference_steps,
            chunk_size=config.chunk_size,
            n_action_steps=config.n_action_steps,
            action_dim=config.action_feature.shape[0],
            padded_action_dim=config.max_action_dim,
        )

    @staticmethod
    def _renamed(module: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As LeRobot's loader does it for openpi's names and for files without the leading `model.`."""
        with quiet():  # it warns of every file that has an image encoder
            fixed = module._fix_pytorch_state_dict_keys(dict(tensors), module.config)
        return {name if name.startswith(_LOADED) else _LOADED + name: t for name, t in fixed.items()}

    @classmethod
    def _set_up(cls, config: Any, folder: PolicyFolder) -> None:
        """Built in the dtype of the file, since `save` writes float32 into the config for the expert's sake.

        LeRobot's bfloat16 build also rounds the frequencies of the rotary embedding, which are in no file.
        """
        with safe_open(folder.path / WEIGHTS, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(_A_VLM_WEIGHT)]  # noqa: SIM118 - no mapping
            stored = {file.get_slice(name).get_dtype() for name in names}
        config.dtype = "bfloat16" if stored == {"BF16"} else "float32"

    @torch.no_grad()
    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        batch = self.prepare(observation, tasks)
        model = self.module.model
        images, image_masks = self.module._preprocess_images(batch)
        embeddings, pad_mask, attention_mask = model.embed_prefix(
            images, image_masks, batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        )
        # As in LeRobot's sample_actions; its mask has the four dimensions that eager attention takes.
        model.paligemma_with_expert.paligemma.model.language_model.config._attn_implementation = "eager"
        _, cache = model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(pad_mask, attention_mask)),
            position_ids=torch.cumsum(pad_mask, dim=1) - 1,
            past_key_values=None,
            inputs_embeds=[embeddings, None],
            use_cache=True,
        )
        tensors = {
            "pad_mask": pad_mask,
            "keys": torch.stack([layer.keys for layer in cache.layers], dim=1),
            "values": torch.stack([layer.values for layer in cache.layers], dim=1),
        }
        return Prefix(tensors | self._suffix_inputs(batch), _TOKEN_AXES)

    def _suffix_inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the action expert reads beside the cache and the noisy chunk, by LeRobot's argument names."""
        assert isinstance(self.module, PI0Policy)
        return {"state": self.module.prepare_state(batch)}

    def velocity(self, x_t: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        tensors = dict(prefix.tensors)
        keys, values, pad_mask = (tensors.pop(name) for name in ("keys", "values", "pad_mask"))
        cache = DynamicCache()
        for layer in range(keys.shape[1]):
            cache.update(keys[:, layer], values[:, layer], layer)
        return self.module.model.denoise_step(
            prefix_pad_masks=pad_mask, past_key_values=cache, x_t=x_t, timestep=time, **tensors
        )

    @torch.no_grad()
    def prefix_features(self, prefix: Prefix) -> Tensor:
        """Mean of all layers' values over the valid tokens, and the state where the prefix has it. F = L H head_dim + S."""
        weight = prefix.tensors["pad_mask"][:, None, None, :, None].float()
        mean = (prefix.tensors["values"].float() * weight).sum(3) / weight.sum(3)
        state = prefix.tensors.get("state")
        return mean.flatten(1) if state is None else torch.cat([mean.flatten(1), state.float()], dim=1)

    def _loadable(self, files: dict[str, bytes]) -> dict[str, bytes]:
        if (
            self.expert_dtype == "float32"
        ):  # LeRobot builds the whole policy in the dtype that the config names
            files[CONFIG] = replace_json_string(files[CONFIG], "dtype", "float32")
        return files


class PI05FlowPolicy(PI0FlowPolicy):
    """pi0.5 as a flow policy. Made by `load`. The prefix has no `state`: it is a part of the text, in 256 steps a dimension."""

    kind = "pi05"
    trainable = (PI0FlowPolicy.expert, "model.action_in_proj.", "model.action_out_proj.", "model.time_mlp_")

    def _suffix_inputs(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {}

    def _prompt(self, task: str) -> str:
        """With the longest state there is. Source: `Pi05PrepareStateTokenizerProcessorStep`, LeRobot 0.6.1."""
        size = self.module.config.robot_state_feature.shape[0]
        return f"Task: {task.strip()}, State: {' '.join(['255'] * size)};\nAction: "
