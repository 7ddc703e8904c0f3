"""SmolVLA's VLM run from LeRobot's weights, in the ways of `expert`.

LeRobot runs the last layer to its end, of which only keys and values are read; `keys_and_values` does not. `FusedVLM` is for
a GPU: LeRobot encodes one camera after the other and makes position numbers in loops on the host; it has all cameras in one
batch, and never waits for the device.

Source of the arithmetic: `VLAFlowMatching.embed_prefix` and `SmolVLMWithExpertModel.forward`, LeRobot 0.6.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks
from torch import Tensor, nn

from flowrl.policy.attention import Attention, VelocityMode, layer_input, prepared_layer, projections, rotary


def keys_and_values(
    network: Any, hidden: Tensor, pad_mask: Tensor, block: Tensor, mode: VelocityMode
) -> tuple[Tensor, Tensor]:
    """The language model's keys and values (B, L, H, P, head_dim) in its dtype; of the last layer nothing else is computed.

    Args:
        network: LeRobot's `SmolVLMWithExpertModel`.
        hidden: (B, P, W), the embedded prefix.
        pad_mask: (B, P) bool, its valid tokens.
        block: (B, P) bool, True where a token and those after it are not seen by the ones before.
        mode: "exact": LeRobot's operations, bit for bit on a CPU; or "fused".
    """
    head_dim = network.vlm.config.text_config.head_dim
    context = Attention(
        network.num_attention_heads,
        network.num_key_value_heads,
        head_dim,
        repeats=1,
        mode=mode,
        table=rotary(torch.cumsum(pad_mask, dim=1) - 1, head_dim),
        visible=make_att_2d_masks(pad_mask, block)[:, None],
    )
    keys, values = [], []
    layers = network.get_vlm_model().text_model.layers[: network.num_vlm_layers]
    for number, layer in enumerate(layers, 1):
        project = projections(layer.self_attn, context)

        def attend(normed: Tensor, project: Any = project) -> Tensor:
            query, key, value = project(normed)
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
            return context.attend(query, context.keys(key), context.values(value))

        if number < len(layers):
            hidden = prepared_layer(layer, attend, mode)(hidden)
        else:
            _, key, value = project(layer_input(layer, hidden, mode != "exact"))
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)


class FusedVLM:
    """Images, text and state -> keys and values of all layers.

    Args:
        model: LeRobot's `VLAFlowMatching`, frozen.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._network = model.vlm_with_expert
        self._vlm = self._network.get_vlm_model()
        self._positions: dict[tuple[int, ...], Tensor] = {}

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether this prefix is made of images, text and state alone, as in every published SmolVLA."""
        return not model.add_image_special_tokens and model.prefix_length <= 0

    def prepare(self, image: Tensor) -> None:
        """Looks up the position numbers of images of this size, for which the host waits for the device."""
        size = tuple(image.shape[2:])
        if size not in self._positions:
            embeddings = self._vlm.vision_model.embeddings
            seen: list[Tensor] = []
            hook = embeddings.position_embedding.register_forward_pre_hook(
                lambda _, arguments: seen.append(arguments[0])
            )
            blank = torch.zeros(1, *image.shape[1:], device=image.device, dtype=self._vlm.vision_model.dtype)
            patch = self._vlm.vision_model.patch_size
            mask = torch.ones(1, size[0] // patch, size[1] // patch, dtype=torch.bool, device=image.device)
            embeddings(pixel_values=blank, patch_attention_mask=mask)
            hook.remove()
            self._positions[size] = seen[0]

    def __call__(
        self,
        images: Sequence[Tensor],
        image_masks: Sequence[Tensor],
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`pad_mask` (B, P) bool, `keys` and `values` (B, L, H, P, head_dim) of a prefix.

        Args:
            images: One per camera, each (B, 3, H, W) float32 in [-1, 1], of one size.
            image_masks: (B,) bool, whether there is that image.
            tokens, token_mask: The instruction, (B, N) int64 and bool.
            state: (B, S) float32, normalized and padded.
        """
        batch, network = len(state), self._network
        seen = self._embed_images(torch.cat(list(images))).unflatten(0, (len(images), batch))
        words = network.embed_language_tokens(tokens)
        words = words * math.sqrt(words.shape[-1])
        embedded = [*seen.unbind(0), words, self._model.state_proj(state)[:, None]]
        masks = [mask[:, None].expand(-1, seen.shape[2]) for mask in image_masks]
        masks += [token_mask, torch.ones(batch, 1, dtype=torch.bool, device=state.device)]
        pad_mask, hidden = torch.cat(masks, dim=1), torch.cat(embedded, dim=1)
        # Images and text see each other; the state, the last token, sees all and is seen by none.
        block = torch.zeros_like(pad_mask)
        block[:, -1:] = True
        return pad_mask, *keys_and_values(network, hidden, pad_mask, block, "fused")

    def _embed_images(self, images: Tensor) -> Tensor:
        """Tokens of images (N, 3, H, W), (N, tokens, W), scaled as the text's are."""
        vision = self._vlm.vision_model
        patches = vision.embeddings.patch_embedding(images.to(vision.dtype)).flatten(2).transpose(1, 2)
        hidden = patches + vision.embeddings.position_embedding(self._positions[tuple(images.shape[2:])])
        for layer in vision.encoder.layers:
            hidden = layer(hidden, None)
        embedded = self._vlm.connector(vision.post_layernorm(hidden))
        scale = torch.tensor(embedded.shape[-1] ** 0.5, dtype=embedded.dtype)  # LeRobot rounds it too
        return embedded * float(scale)

    def weights(self) -> list[nn.Parameter]:
        """All weights that a call reads."""
        return [*self._network.vlm.parameters(), *self._model.state_proj.parameters()]
