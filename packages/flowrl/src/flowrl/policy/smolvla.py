"""LeRobot's own SmolVLA behind the FlowPolicy interface.

The network, the processors and their files are LeRobot's; this file takes its sampler apart into prefix and velocity, and
`expert` runs the denoising steps. On a CPU, without exploration noise, the results equal `SmolVLAPolicy.predict_action_chunk`
bit for bit; on a GPU other kernels run by default, see `choose_velocity`.

Kernels of a CPU (and some of a GPU) round differently by batch size: on the CPU a batch of one can differ in the last
bits from the same observation in a larger batch. Compare and rescore in the composition that was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast, get_args

import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor

from flowrl.compiled import choose_compiler
from flowrl.errors import FlowRLError
from flowrl.flow.sampler import rows_as_sampled
from flowrl.graphs import GraphCache
from flowrl.policy.attention import VelocityMode
from flowrl.policy.expert import ExpertField
from flowrl.policy.folder import CONFIG, VLM, PolicyFolder, replace_json_string
from flowrl.policy.fused_expert import FusedField, fusable
from flowrl.policy.fused_vlm import FusedVLM
from flowrl.policy.interface import FlowSpec, VelocityField
from flowrl.policy.lerobot_policy import LeRobotFlowPolicy
from flowrl.policy.vlm import keys_and_values
from flowrl.prefix import Prefix

_BATCHES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_TOKEN_AXES = {"pad_mask": 1, "keys": 3, "values": 3}


class SmolVLAFlowPolicy(LeRobotFlowPolicy):
    """SmolVLA as a flow policy. Made by `load`.

    Prefix tensors: `pad_mask` (B, P) bool; `keys` and `values` (B, L, H, P, head_dim), the VLM's attention keys and
    values of the images, the text and the state for L layers, in the VLM's dtype, taken before any denoising.
    """

    kind = "smolvla"
    vlm = "model.vlm_with_expert.vlm."
    expert = "model.vlm_with_expert.lm_expert."
    trainable = (expert, "model.action_in_proj.", "model.action_out_proj.", "model.action_time_mlp_")
    unsupported: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        "adapt_to_pi_aloha": lambda config: config.adapt_to_pi_aloha,
        "use_cache=false": lambda config: not config.use_cache,
    }
    module: SmolVLAPolicy
    velocity_mode: VelocityMode

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._encoders: GraphCache | None = None
        self.choose_velocity("auto")

    @staticmethod
    def _spec(config: Any) -> FlowSpec:
        return FlowSpec(
            num_denoising_steps=config.num_steps,
            chunk_size=config.chunk_size,
            n_action_steps=config.n_action_steps,
            action_dim=config.action_feature.shape[0],
            padded_action_dim=config.max_action_dim,
        )

    @classmethod
    def _set_up(cls, config: Any, folder: PolicyFolder) -> None:
        config.vlm_model_name = str(folder.vlm)
        config.load_vlm_weights = False  # The checkpoint holds all weights.

    @torch.no_grad()
    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        if self.velocity_mode != "exact" and self.reads_levels:
            return self._encode_fused(observation, tasks)
        batch = self.prepare(observation, tasks)
        model = self.module.model
        images, image_masks = self.module.prepare_images(batch)
        text = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        state = self.module.prepare_state(batch)
        embeddings, pad_mask, attention_mask = model.embed_prefix(images, image_masks, *text, state=state)
        keys, values = keys_and_values(model.vlm_with_expert, embeddings, pad_mask, attention_mask)
        return Prefix({"pad_mask": pad_mask, "keys": keys, "values": values}, _TOKEN_AXES)

    def _encode_fused(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        """In a batch as it is sampled; on a GPU as a CUDA graph."""
        batch, levels = self.prepare_levels(observation, tasks)
        config = self.module.config
        cameras = [levels[name] for name in config.image_features if name in levels]
        num_absent = min(len(config.image_features) - len(cameras), config.empty_cameras)
        text = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        inputs = [*cameras, *text, self.module.prepare_state(batch)]
        count = len(tasks)
        if (rows := rows_as_sampled(self, count, self.device)) is not None:
            inputs = [tensor[rows] for tensor in inputs]
        vlm = self._fused_vlm
        vlm.prepare(inputs[0])

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            return vlm(tensors[:-3], num_absent, *tensors[-3:])

        encoded = (
            function(*inputs) if self._encoders is None else self._encoders.run(num_absent, function, inputs)
        )
        names = "pad_mask", "keys", "values"
        return Prefix({name: tensor[:count] for name, tensor in zip(names, encoded)}, _TOKEN_AXES)

    def velocity(self, x_t: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        return self.velocity_field(prefix)(x_t, time)

    def velocity_field(self, prefix: Prefix, repeats: int = 1) -> VelocityField:
        model, tensors = self.module.model, prefix.tensors
        if self.velocity_mode == "exact":
            return ExpertField(model, **tensors, repeats=repeats)
        return FusedField(model, **tensors, repeats=repeats, mode=self.velocity_mode, compiler=self._compiler)

    def choose_velocity(self, mode: str, compile: str = "auto") -> None:
        """auto: fused on a GPU, where chains are also replayed as CUDA graphs; exact elsewhere. See `expert`, `flowrl.compiled`."""
        on_gpu, known = self.device.type == "cuda", fusable(self.module.model)
        if mode == "auto":
            mode = "fused" if on_gpu and known else "exact"
        if mode not in get_args(VelocityMode):
            raise FlowRLError(f"--velocity {mode!r}: must be auto, {', '.join(get_args(VelocityMode))}")
        if mode != "exact" and not known:
            raise FlowRLError(
                f"--velocity {mode}: this SmolVLA has biases, an activation or special tokens that it lacks; use exact"
            )
        model = self.module.model
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._compiler = choose_compiler(compile, mode, self.device, num_parameters)
        self._fused_vlm = FusedVLM(model, self._unit_interval, self._compiler)
        self.velocity_mode = cast(VelocityMode, mode)
        self.graphs = self._encoders = None
        if on_gpu and mode != "exact":
            expert = list(self.trainable_parameters().values())
            self.graphs = GraphCache("the denoising", self.device, expert)
            self._encoders = GraphCache("the encoder", self.device, self._fused_vlm.weights())

    @property
    def compiled(self) -> bool:
        return self._compiler.enabled and not self._compiler.failed

    def sampling_batch(self, count: int) -> int:
        """Fused: the next of few sizes, so that few graphs are captured and all rounds of a rollout run the same kernels."""
        if self.velocity_mode == "exact":
            return count
        return next((size for size in _BATCHES if size >= count), -(-count // _BATCHES[-1]) * _BATCHES[-1])

    @torch.no_grad()
    def prefix_features(self, prefix: Prefix) -> Tensor:
        """Values of all layers: their mean over the valid tokens, and those of the last one, the state. F = 2 L H head_dim."""
        pad_mask, values = prefix.tensors["pad_mask"], prefix.tensors["values"].float()
        weight = pad_mask[:, None, None, :, None].float()
        mean = (values * weight).sum(3) / weight.sum(3)
        last = pad_mask.shape[1] - 1 - pad_mask.flip(1).int().argmax(1)
        state = values[torch.arange(len(prefix), device=values.device), :, :, last]
        return torch.cat([mean.flatten(1), state.flatten(1)], dim=1)

    def _loadable(self, files: dict[str, bytes]) -> dict[str, bytes]:
        files[CONFIG] = re.sub(rb'("load_vlm_weights"\s*:\s*)true', rb"\1false", files[CONFIG])
        if self.expert_dtype == "float32":
            files[f"{VLM}/{CONFIG}"] = _with_float32(files[f"{VLM}/{CONFIG}"])
        return files


def _with_float32(vlm_config: bytes) -> bytes:
    """LeRobot builds the expert in the dtype that the VLM's text config names; a float32 expert must stay float32."""
    config = json.loads(vlm_config)
    text = config.get("text_config", {})
    keys = [(part, key) for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)]
    if all(part[key] == "float32" for part, key in keys):
        return vlm_config
    for key in ("dtype", "torch_dtype"):
        if f'"{key}"'.encode() in vlm_config:
            vlm_config = replace_json_string(vlm_config, key, "float32")
    return vlm_config
