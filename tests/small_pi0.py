"""Very small pi0 and pi0.5 policies for tests, built without a download.

LeRobot takes the widths of PaliGemma and of the action expert from a fixed table and the image encoder's and the
vocabulary from constants. `small_widths` sets small ones while it is active; every other line that runs is LeRobot's.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.processor import TokenizerProcessorStep
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIDE, VOCABULARY = 28, 320
PROCESSORS = {"pi0": make_pi0_pre_post_processors, "pi05": make_pi05_pre_post_processors}


def _small(kind: type) -> Any:
    """The class, but of a configuration with a small vocabulary and image encoder."""

    def build(config: Any) -> Any:
        getattr(config, "text_config", config).vocab_size = VOCABULARY
        if hasattr(config, "vision_config"):
            vision = config.vision_config
            vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads = 16, 2, 2
            vision.intermediate_size, vision.patch_size = 32, 14
            vision.projection_dim = config.projection_dim = config.text_config.hidden_size
        return kind(config)

    return build


@contextlib.contextmanager
def small_widths() -> Iterator[None]:
    """LeRobot's pi0 and pi0.5 are built small, whoever builds them."""
    with contextlib.ExitStack() as stack:
        for module in (modeling_pi0, modeling_pi05):
            widths = {
                "gemma_2b": module.GemmaConfig(32, 2, 48, 8, 1, 16),
                "gemma_300m": module.GemmaConfig(32, 2, 48, 8, 1, 16),
            }
            stack.enter_context(mock.patch.object(module, "get_gemma_config", widths.__getitem__))
            for name in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"):
                stack.enter_context(mock.patch.object(module, name, _small(getattr(module, name))))
        yield


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with PaliGemma's special tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(folder)


def statistics(size: int) -> dict[str, dict[str, np.ndarray]]:
    """Normalization statistics of states and actions in [-20, 20] or so."""
    rng = np.random.default_rng(0)
    result = {}
    for name in (OBS_STATE, ACTION):
        mean, std = rng.normal(size=size), rng.uniform(0.5, 2.0, size=size)
        result[name] = {"mean": mean, "std": std, "q01": mean - 2 * std, "q99": mean + 2 * std}
    return {
        name: {key: value.astype(np.float32) for key, value in part.items()} for name, part in result.items()
    }


def save_small(
    folder: Path, kind: str = "pi0", *, size: int = 6, chunk_size: int = 10, dtype: str = "float32",
    cameras: tuple[str, ...] = ("top", "wrist"), **changes: Any,
) -> Path:  # fmt: skip
    """A policy folder with random weights, all of them away from their zeros; needs `small_widths`.

    Args:
        folder: Target.
        kind: pi0 or pi05.
        size: Of state and action; the network's are padded by 2.
        chunk_size, dtype, cameras, changes: Of LeRobot's config.
    """
    config = make_policy_config(
        kind,
        input_features={
            OBS_STATE: PolicyFeature(FeatureType.STATE, (size,)),
            **{f"{OBS_IMAGES}.{c}": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for c in cameras},
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (size,))},
        chunk_size=chunk_size, n_action_steps=chunk_size, max_state_dim=size + 2, max_action_dim=size + 2,
        num_inference_steps=4, image_resolution=(SIDE, SIDE), dtype=dtype, device="cpu", push_to_hub=False,
        **changes,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(1)
        policy = get_policy_class(kind)(config)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    tokenizer = folder / "vlm"
    write_tokenizer(tokenizer)
    local = lambda **arguments: TokenizerProcessorStep(**{**arguments, "tokenizer_name": str(tokenizer)})  # noqa: E731
    make = PROCESSORS[kind]
    with mock.patch(f"{make.__module__}.TokenizerProcessorStep", local):
        preprocessor, postprocessor = make(config, statistics(size))
    policy.save_pretrained(folder)
    preprocessor.save_pretrained(folder)
    postprocessor.save_pretrained(folder)
    return folder
