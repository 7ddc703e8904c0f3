"""SmolVLA's VLM in `layers`, for the fused ways of `expert`: levels of pixels, text and state -> keys and values.

LeRobot encodes one camera after the other and makes position numbers in loops on the host; this has all cameras in one batch,
and never waits for the device.

Source of the arithmetic: `SmolVLAPolicy.prepare_images` and `VLAFlowMatching.embed_prefix`, LeRobot 0.6.1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from lerobot.policies.common.vla_utils import resize_with_pad
from torch import Tensor, nn

from flowrl.compiled import Compiler
from flowrl.policy import layers
from flowrl.policy.fused_expert import layer_shape, layer_weights
from flowrl.policy.layers import VisionWeights
from flowrl.precision import matrix_products


class FusedVLM:
    """Images, text and state -> keys and values of all layers.

    Args:
        model: LeRobot's `VLAFlowMatching`, frozen.
        unit_interval: (256,) float32, the levels of a pixel as LeRobot's numbers from 0 to 1, on the model's device.
        compiler: Calls the layers.
    """

    def __init__(self, model: Any, unit_interval: Tensor, compiler: Compiler) -> None:
        self._model, self._call = model, compiler
        self._network = model.vlm_with_expert
        self._vlm = self._network.get_vlm_model()
        self._unit_interval = unit_interval
        # The numbers that LeRobot's scaling and the encoder's dtype make of the levels.
        self._pixel_values = (unit_interval * 2.0 - 1.0).to(self._vlm.vision_model.dtype)
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def prepare(self, levels: Tensor) -> None:
        """Looks up the position numbers of images of this size (B, H, W, 3), for which the host waits for the device."""
        size = self._size(levels)
        if size not in self._positions:
            vision = self._vlm.vision_model
            seen: list[Tensor] = []
            hook = vision.embeddings.position_embedding.register_forward_pre_hook(
                lambda _, arguments: seen.append(arguments[0])
            )
            blank = torch.zeros(1, 3, *size, device=levels.device, dtype=vision.dtype)
            patches = [side // vision.patch_size for side in size]
            mask = torch.ones(1, *patches, dtype=torch.bool, device=levels.device)
            vision.embeddings(pixel_values=blank, patch_attention_mask=mask)
            hook.remove()
            self._positions[size] = seen[0]

    def __call__(
        self, levels: Sequence[Tensor], num_absent: int, tokens: Tensor, token_mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`pad_mask` (B, P) bool, `keys` and `values` (B, L, G, P, head_dim) of a prefix.

        Args:
            levels: One per camera, each (B, H, W, 3) uint8, of sizes that have become known to `prepare`.
            num_absent: Cameras of the policy that are not there; they come after the others, masked.
            tokens, token_mask: The instruction, (B, N) int64 and bool.
            state: (B, S) float32, normalized and padded.
        """
        batch, network = len(state), self._network
        levels = [*levels, *[torch.zeros_like(levels[0])] * num_absent]
        seen = self._embed_images(levels).unflatten(0, (len(levels), batch))
        words = network.embed_language_tokens(tokens)
        words = words * math.sqrt(words.shape[-1])
        embedded = [*seen.unbind(0), words, self._model.state_proj(state)[:, None]]
        pad_mask = torch.ones(
            batch, sum(part.shape[1] for part in embedded), dtype=torch.bool, device=state.device
        )
        num_seen = seen.shape[2] * len(levels)
        pad_mask[:, seen.shape[2] * (len(levels) - num_absent) : num_seen] = False
        pad_mask[:, num_seen:-1] = token_mask
        # The only float32 products of a bfloat16 model are those of its queries and keys: bfloat16 numbers, which TF32 holds.
        rounded = self._vlm.text_model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
        with matrix_products("tf32") if rounded else contextlib.nullcontext():
            return pad_mask, *self._keys_and_values(torch.cat(embedded, dim=1), pad_mask)

    def weights(self) -> list[nn.Parameter]:
        """All weights that a call reads."""
        return [*self._network.vlm.parameters(), *self._model.state_proj.parameters()]

    def _embed_images(self, levels: Sequence[Tensor]) -> Tensor:
        """Tokens of images, (cameras B, tokens, W), scaled as the text's are."""
        vision = self._vlm.vision_model
        config, embeddings = vision.config, vision.embeddings
        size = self._size(levels[0])
        convolution = embeddings.patch_embedding
        others = (
            convolution.weight,
            convolution.bias,
            embeddings.position_embedding(self._positions[size]),
            vision.patch_size,
        )
        if all(tuple(image.shape[1:3]) == size for image in levels):
            hidden = self._call(layers.embed_levels, levels, self._pixel_values, *others)
        else:
            hidden = self._call(
                layers.embed_pixels, [self._resized(image, size) for image in levels], *others
            )
        for layer in vision.encoder.layers:
            epsilons = layer.layer_norm1.eps, layer.layer_norm2.eps
            settings = config.num_attention_heads, epsilons, config.hidden_act
            hidden = self._call(layers.vision_layer, hidden, _vision_weights(layer), *settings)
        norm, connector = vision.post_layernorm, self._vlm.connector
        projection = connector.modality_projection.proj.weight
        scale = torch.tensor(len(projection) ** 0.5, dtype=projection.dtype)  # LeRobot rounds it too
        affine = norm.weight, norm.bias
        return self._call(
            layers.connect, hidden, affine, norm.eps, projection, connector.scale_factor, float(scale)
        )

    def _resized(self, levels: Tensor, size: tuple[int, int]) -> Tensor:
        """As LeRobot resizes and pads, (B, H, W, 3) float32 in [-1, 1]."""
        image = self._call(layers.look_up, levels, self._unit_interval)
        return (resize_with_pad(image, *size, pad_value=0) * 2.0 - 1.0).permute(0, 2, 3, 1).contiguous()

    def _size(self, levels: Tensor) -> tuple[int, int]:
        """Height and width that images are resized to."""
        config = self._model.config
        if config.resize_imgs_with_padding is None:
            return levels.shape[1], levels.shape[2]
        width, height = config.resize_imgs_with_padding
        return height, width

    def _keys_and_values(self, hidden: Tensor, pad_mask: Tensor) -> tuple[Tensor, Tensor]:
        network, call = self._network, self._call
        shape = layer_shape(network, network.vlm.config.text_config)
        # Images and text see each other; the state, the last token, sees all and is seen by none.
        block = torch.zeros_like(pad_mask)
        block[:, -1:] = True
        table, bias = call(layers.language_tables, pad_mask, block, shape.width)
        all_layers = self._vlm.text_model.layers[: network.num_vlm_layers]
        keys, values = [], []
        for number, layer in enumerate(all_layers, 1):
            weights = layer_weights(layer, True, lambda weight: weight)
            if number < len(all_layers):
                hidden, key, value = call(layers.language_layer, hidden, weights, table, bias, shape)
            else:
                key, value = call(layers.language_states, hidden, weights, table, shape)
            keys.append(key)
            values.append(value)
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def _vision_weights(layer: Any) -> VisionWeights:
    attention = layer.self_attn
    modules = (
        *(layer.layer_norm1, attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj),
        *(layer.layer_norm2, layer.mlp.fc1, layer.mlp.fc2),
    )
    return VisionWeights(*((module.weight, module.bias) for module in modules))
