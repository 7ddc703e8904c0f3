"""SmolVLA's flow-matching loss with static shapes, so that a CUDA graph can replay it.

LeRobot's own ``VLAFlowMatching.forward`` builds small constant tensors on the CPU and indexes with boolean masks
at every call, which a graph capture forbids and which leaves a GPU waiting. Here the same arithmetic runs on
tensors that stay where they are. ``tests/apps/test_flow_matching.py`` holds the two to the same loss and gradients.
"""

import math

import torch
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding, make_att_2d_masks
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor, nn

from flowrl.errors import FlowRLError


class FlowMatchingLoss(nn.Module):
    """The flow-matching loss of one SmolVLA policy for square images that need no resizing.

    ``x_t = time * noise + (1 - time) * actions`` and the target velocity is ``noise - actions``
    (SmolVLA, arXiv:2506.01844, eq. 1; time 1 is noise, time 0 is the action).
    """

    def __init__(self, policy: SmolVLAPolicy) -> None:
        super().__init__()
        model, config = policy.model, policy.config
        if model.add_image_special_tokens or model.prefix_length > 0:
            raise FlowRLError(
                "this policy pads its prefix or adds image tokens; clone it with lerobot-train instead of chess-bc"
            )
        self.model = model
        self.chunk_size = int(config.chunk_size)
        self.action_dim = int(config.action_feature.shape[0])
        self.max_action_dim = int(config.max_action_dim)
        self.max_state_dim = int(config.max_state_dim)
        self.num_text_tokens = int(config.tokenizer_max_length)

    def embed_images(self, images: Tensor) -> Tensor:
        """Image tokens, shape (B, C * tokens, width), of images in [-1, 1], shape (B, C, 3, H, W), float32."""
        vlm = self.model.vlm_with_expert.get_vlm_model()
        vision = vlm.vision_model
        batch, cameras = images.shape[:2]
        pixels = images.flatten(0, 1).to(vision.dtype)
        patches = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = patches + vision.embeddings.position_embedding.weight
        hidden = vision.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        tokens = vlm.connector(vision.post_layernorm(hidden))
        tokens = tokens * math.sqrt(tokens.shape[-1])
        return tokens.reshape(batch, cameras * tokens.shape[1], tokens.shape[2])

    def forward(
        self,
        images: Tensor,
        text: Tensor,
        text_mask: Tensor,
        state: Tensor,
        actions: Tensor,
        noise: Tensor,
        time: Tensor,
    ) -> Tensor:
        """Mean squared velocity error over the scored action dimensions.

        Args:
            images: (B, C, 3, H, W) float32 in [-1, 1]; H and W are the vision encoder's own size.
            text: token ids (B, L) int64. text_mask: (B, L) bool.
            state: normalized (B, S) float32. actions: normalized (B, T, A) float32.
            noise: (B, T, max_action_dim) float32. time: (B,) float32 in (0, 1].
        """
        model = self.model
        pad = nn.functional.pad
        actions = pad(actions, (0, self.max_action_dim - actions.shape[-1]))
        state = pad(state, (0, self.max_state_dim - state.shape[-1]))
        t = time[:, None, None]
        x_t = t * noise + (1 - t) * actions
        target = noise - actions

        image_tokens = self.embed_images(images)
        text_tokens = model.vlm_with_expert.embed_language_tokens(text)
        text_tokens = text_tokens * math.sqrt(text_tokens.shape[-1])
        prefix = torch.cat([image_tokens, text_tokens, model.state_proj(state)[:, None]], dim=1)

        suffix = model.action_in_proj(x_t)
        embedded_time = create_sinusoidal_pos_embedding(
            time,
            model.vlm_with_expert.expert_hidden_size,
            model.config.min_period,
            model.config.max_period,
            device=suffix.device,
        ).to(suffix.dtype)
        suffix = torch.cat([suffix, embedded_time[:, None].expand_as(suffix)], dim=2)
        suffix = model.action_time_mlp_out(nn.functional.silu(model.action_time_mlp_in(suffix)))

        mask, positions = self._attention(image_tokens.shape[1], text_mask)
        (_, out), _ = model.vlm_with_expert.forward(
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
            inputs_embeds=[prefix, suffix],
            use_cache=False,
        )
        velocity = model.action_out_proj(out[:, -self.chunk_size :].to(torch.float32))
        return nn.functional.mse_loss(velocity[..., : self.action_dim], target[..., : self.action_dim])

    def _attention(self, num_image_tokens: int, text_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attention mask (B, P+T, P+T) bool and positions (B, P+T): images and text see each other, the state
        sees them, each action sees the prefix and the actions before it."""
        batch, device = text_mask.shape[0], text_mask.device
        ones = torch.ones(batch, 1, dtype=torch.bool, device=device)
        pad_mask = torch.cat(
            [ones.expand(-1, num_image_tokens), text_mask, ones, ones.expand(-1, self.chunk_size)], dim=1
        )
        bidirectional = num_image_tokens + text_mask.shape[1]
        causal = torch.ones(batch, pad_mask.shape[1], dtype=torch.bool, device=device)
        causal[:, :bidirectional] = False
        return make_att_2d_masks(pad_mask, causal), torch.cumsum(pad_mask, dim=1) - 1


def sample_time(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Flow times (B,) float32 in (0.001, 1], Beta(1.5, 1) as LeRobot's SmolVLA trains with.

    The Beta(a, 1) distribution's inverse CDF is ``u ** (1 / a)``.
    """
    u = torch.rand(batch, device=device, generator=generator)
    return u.pow(1 / 1.5) * 0.999 + 0.001
