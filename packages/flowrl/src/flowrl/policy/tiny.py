"""SmolVLA policies of any size, built without a download: VLM folder, config, processors, random weights.

The architecture and the code path are LeRobot's; only the widths, and a byte-level tokenizer, are our own.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.errors import FlowRLError
from flowrl.policy.folder import VLM

Statistics = Mapping[str, Mapping[str, Any]]

_SPECIAL_TOKENS = {
    "unk_token": "<|endoftext|>",
    "bos_token": "<|im_start|>",
    "pad_token": "<|im_end|>",
    "eos_token": "<end_of_utterance>",
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


@dataclass(frozen=True)
class SmolVLASize:
    """Widths of a SmolVLA.

    Attributes:
        text_width, text_layers, heads, kv_heads, head_dim, text_ffn: The language model's; the action expert has as many
            layers and heads, and 0.75 of the width.
        vision_width, vision_layers, vision_heads, vision_ffn: The image encoder's.
        image_size: Side of the square that images are resized to [px].
        patch: Side of an image patch [px].
        pixel_shuffle: Factor per side by which image tokens are merged.
        vocabulary: Rows of the token embedding; None for the byte tokenizer's own size.
        vlm_layers: Layers in the VLM's config, of which SmolVLA uses the first `text_layers`.
    """

    text_width: int
    text_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    text_ffn: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    vision_ffn: int
    image_size: int = 128
    patch: int = 16
    pixel_shuffle: int = 2
    vocabulary: int | None = None
    vlm_layers: int | None = None


SIZES = {
    "2m": SmolVLASize(128, 4, 4, 2, 32, 384, 128, 4, 4, 384),
    "8m": SmolVLASize(256, 4, 4, 2, 64, 768, 192, 6, 3, 768),
    "30m": SmolVLASize(448, 8, 7, 1, 64, 1152, 256, 6, 4, 1024),
    "450m": SmolVLASize(
        960, 16, 15, 5, 64, 2560, 768, 12, 12, 3072,
        image_size=512, pixel_shuffle=4, vocabulary=49280, vlm_layers=32,
    ),
}  # fmt: skip
"""Named sizes. 450m has the widths of `lerobot/smolvla_base` (450,046,176 parameters)."""


def build_smolvla(
    vlm_folder: Path | str,
    *,
    size: str | SmolVLASize = "2m",
    cameras: Sequence[str] = ("top", "wrist"),
    image_size: int | None = None,
    state_dim: int = 6,
    action_dim: int = 6,
    padded_dim: int | None = None,
    chunk_size: int = 50,
    n_action_steps: int | None = None,
    num_denoising_steps: int = 10,
    task_tokens: int = 48,
    device: str = "cpu",
    seed: int = 0,
) -> SmolVLAPolicy:
    """A SmolVLA with random weights, every parameter trainable, float32.

    Args:
        vlm_folder: Where the VLM's config and tokenizer are written. Use `<policy folder>/vlm`; a relative path is kept
            relative in the config, so that a policy folder can be committed.
        size: A name of `SIZES`, or widths.
        cameras: Camera names; the features are `observation.images.<name>`.
        image_size: Side that images are resized to [px]; the size's own by default.
        state_dim, action_dim: Sizes of `observation.state` and `action`.
        padded_dim: Width of the network's state and action inputs; the larger of both dimensions by default. (Random
            weights leave padded dimensions untrained.)
        chunk_size: Targets per decision.
        n_action_steps: Targets executed; all by default.
        num_denoising_steps: Euler steps.
        task_tokens: Tokens of the instruction, padded to that length. One byte is one token.
        device: Where the policy is meant to run; it is built on the CPU.
        seed: Seed of the weights; the global random state is left alone.

    Raises:
        FlowRLError: If the size is unknown or the image does not divide into patches.
    """
    widths = _resolve_size(size, image_size)
    write_vlm_folder(vlm_folder, widths)
    side = widths.image_size
    padded = padded_dim or max(state_dim, action_dim)
    config = SmolVLAConfig(
        input_features={
            OBS_STATE: PolicyFeature(FeatureType.STATE, (state_dim,)),
            **{
                f"{OBS_IMAGES}.{camera}": PolicyFeature(FeatureType.VISUAL, (3, side, side))
                for camera in cameras
            },
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (action_dim,))},
        vlm_model_name=str(vlm_folder),
        load_vlm_weights=False,
        resize_imgs_with_padding=(side, side),
        num_vlm_layers=widths.text_layers,
        chunk_size=chunk_size,
        n_action_steps=n_action_steps or chunk_size,
        max_state_dim=padded,
        max_action_dim=padded,
        num_steps=num_denoising_steps,
        tokenizer_max_length=task_tokens,
        pad_language_to="max_length",
        train_expert_only=False,
        freeze_vision_encoder=False,
        train_state_proj=True,
        device=device,
        push_to_hub=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = SmolVLAPolicy(config)
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    return policy.float()


def save_policy_folder(folder: Path | str, policy: SmolVLAPolicy, statistics: Statistics) -> None:
    """Writes a complete LeRobot policy folder around a policy whose VLM folder is already `<folder>/vlm`.

    Args:
        folder: Policy folder.
        policy: The policy; `policy.config.vlm_model_name` is written as it is.
        statistics: {"observation.state": {"mean", "std"}, "action": {"mean", "std"}}, arrays of the features' sizes, in
            the environment's units. Further statistics (a dataset's) are kept.

    Raises:
        FlowRLError: If the VLM folder is elsewhere, or a statistic is missing.
    """
    folder = Path(folder)
    if Path(policy.config.vlm_model_name).absolute() != (folder / VLM).absolute():
        raise FlowRLError(
            f"the policy's VLM folder is {policy.config.vlm_model_name}; it must be {folder / VLM}"
        )
    for name in (OBS_STATE, ACTION):
        for statistic in ("mean", "std"):
            if statistic not in statistics.get(name, {}):
                raise FlowRLError(
                    f"no statistic {name}.{statistic}; normalization needs mean and std of both features"
                )
    arrays = {
        name: {key: np.asarray(value, dtype=np.float32) for key, value in values.items()}
        for name, values in statistics.items()
    }
    preprocessor, postprocessor = make_pre_post_processors(policy.config, dataset_stats=arrays)
    policy.save_pretrained(folder)
    preprocessor.save_pretrained(folder)
    postprocessor.save_pretrained(folder)


def write_vlm_folder(folder: Path | str, size: SmolVLASize) -> None:
    """Config, byte-level tokenizer and processors of a SmolVLM of the given widths; no weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {role: tokenizer.convert_tokens_to_ids(token) for role, token in _SPECIAL_TOKENS.items()}
    vocabulary = size.vocabulary or (len(tokenizer) + 63) // 64 * 64
    files = {
        "config.json": _vlm_config(size, vocabulary, ids),
        "processor_config.json": {
            "processor_class": "SmolVLMProcessor",
            "image_seq_len": (size.image_size // size.patch // size.pixel_shuffle) ** 2,
        },
        "preprocessor_config.json": _image_processor(size.image_size),
        "video_preprocessor_config.json": _video_processor(size.image_size),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    )


def _resolve_size(size: str | SmolVLASize, image_size: int | None) -> SmolVLASize:
    if isinstance(size, str):
        if size not in SIZES:
            raise FlowRLError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")
        size = SIZES[size]
    if image_size is not None:
        size = replace(size, image_size=image_size)
    token_side = size.patch * size.pixel_shuffle
    if size.image_size % token_side:
        raise FlowRLError(f"images of {size.image_size} px do not divide into tokens of {token_side} px")
    return size


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    special = [*dict.fromkeys(_SPECIAL_TOKENS.values())]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {
        role: token
        for role, token in _SPECIAL_TOKENS.items()
        if role in ("unk_token", "bos_token", "pad_token", "eos_token")
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        extra_special_tokens={role: token for role, token in _SPECIAL_TOKENS.items() if role not in named},
        model_max_length=8192,
        padding_side="right",
    )


def _vlm_config(size: SmolVLASize, vocabulary: int, ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": ids["image_token"],
        "scale_factor": size.pixel_shuffle,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "pad_token_id": ids["pad_token"],
        "text_config": {
            "model_type": "llama",
            "hidden_size": size.text_width,
            "intermediate_size": size.text_ffn,
            "num_hidden_layers": size.vlm_layers or size.text_layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "vocab_size": vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "pad_token_id": ids["pad_token"],
            "bos_token_id": ids["bos_token"],
            "eos_token_id": ids["eos_token"],
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": size.vision_width,
            "intermediate_size": size.vision_ffn,
            "num_hidden_layers": size.vision_layers,
            "num_attention_heads": size.vision_heads,
            "image_size": size.image_size,
            "patch_size": size.patch,
        },
    }


def _image_processor(image_size: int) -> dict[str, Any]:
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
        "resample": 1,
        "size": {"longest_edge": image_size},
        "max_image_size": {"longest_edge": image_size},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": image_size}},
    }


def _video_processor(image_size: int) -> dict[str, Any]:
    shared = (
        "do_convert_rgb",
        "do_normalize",
        "do_rescale",
        "do_resize",
        "image_mean",
        "image_std",
        "rescale_factor",
    )
    image = _image_processor(image_size)
    return {
        "video_processor_type": "SmolVLMVideoProcessor",
        "processor_class": "SmolVLMProcessor",
        **{key: image[key] for key in shared},
        "do_pad": True,
        "do_sample_frames": False,
        "size": {"longest_edge": image_size},
        "max_image_size": {"longest_edge": image_size},
        "fps": 1,
        "num_frames": 64,
    }
