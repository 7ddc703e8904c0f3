"""What LeRobot's flow-matching policies share behind the FlowPolicy interface: files, processors, names, instruction."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from lerobot.configs.types import FeatureType, NormalizationMode
from lerobot.lerobot_types import TransitionKey
from lerobot.processor import NormalizerProcessorStep, RenameObservationsProcessorStep, TokenizerProcessorStep
from lerobot.processor.converters import create_transition
from lerobot.utils.constants import OBS_ENV_STATE, OBS_IMAGE, OBS_IMAGES, OBS_STATE
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.policy.folder import VLM, WEIGHTS, PolicyFolder, open_policy_folder, replace_paths
from flowrl.policy.interface import ExpertDtype, FlowPolicy, FlowSpec
from flowrl.policy.lerobot_loading import build_module, load_processors, load_weights, read_config
from flowrl.policy.lerobot_reference import reload_with_lerobot
from flowrl.policy.token_cache import TokenCache

_STEPS_WITHOUT_IMAGES = {
    "RenameObservationsProcessorStep",
    "AddBatchDimensionProcessorStep",
    "NewLineTaskProcessorStep",
    "SmolVLANewLineProcessor",
    "TokenizerProcessorStep",
    "DeviceProcessorStep",
    "NormalizerProcessorStep",
}
"""Of LeRobot's processors; the last one where its settings say so."""


class LeRobotFlowPolicy(FlowPolicy):
    """One of LeRobot's policies. Made by `load`.

    A subclass takes its sampler apart into `encode` and `velocity`, and names its parts.

    Attributes:
        kind: `type` in config.json.
        vlm, expert: How the names of the VLM's and of the action expert's weights begin. They get the dtypes of the file.
        trainable: How the names of the trained weights begin.
        unsupported: What a config may ask for and flowrl cannot do; see `read_config`.
    """

    kind: ClassVar[str]
    vlm: ClassVar[str]
    expert: ClassVar[str]
    trainable: ClassVar[tuple[str, ...]]
    unsupported: ClassVar[Mapping[str, Callable[[Any], bool]]]

    def __init__(
        self,
        module: Any,
        preprocessor: Any,
        postprocessor: Any,
        *,
        files: Mapping[str, bytes],
        stored_dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        expert_dtype: ExpertDtype,
    ) -> None:
        self.module = module
        self.device = device
        self.expert_dtype = expert_dtype
        self.spec = self._spec(module.config)
        self.preprocessor, self.postprocessor = preprocessor, postprocessor
        self._rename_map = _only_step(preprocessor, RenameObservationsProcessorStep).rename_map
        self._normalizer = _only_step(preprocessor, NormalizerProcessorStep)
        self._tokenizer = _only_step(preprocessor, TokenizerProcessorStep)
        self._tokenizer.input_tokenizer = TokenCache(self._tokenizer.input_tokenizer)
        self._files, self._stored_dtypes = dict(files), dict(stored_dtypes)
        self._unit_interval = (torch.arange(256, dtype=torch.float32) / 255).to(device)
        self._checked_tasks: set[str] = set()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(self.trainable))
        module.eval()

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: torch.device | str = "cpu",
        expert_dtype: ExpertDtype = "float32",
        rename: Mapping[str, str] | None = None,
    ) -> Self:
        """Loads a LeRobot policy folder or hub id, strictly.

        Args:
            path: Policy folder (no network traffic), or hub id. The VLM's config and tokenizer are taken from its
                `vlm` subfolder, wherever the folder lies.
            device: Where the network runs.
            expert_dtype: "float32" for the action expert, or "loaded" for the dtype of its file. Every other weight
                keeps the dtype of the file; LeRobot's projections (state, action, time) are always float32.
            rename: Environment name -> policy feature name, e.g. {"top": "camera1"} or with full names
                ({"observation.images.top": "observation.images.camera1"}); an empty target drops a camera.

        Raises:
            FlowRLError: On anything missing, damaged or unsupported.
        """
        folder = open_policy_folder(path)
        device = torch.device(device)
        config = read_config(folder, device, cls.kind, cls.unsupported)
        cls._set_up(config, folder)
        module = build_module(folder, config)
        stored_dtypes = load_weights(
            module,
            folder.path / WEIGHTS,
            (cls.vlm, cls.expert),
            lambda tensors: cls._renamed(module, tensors),
        )
        if expert_dtype == "float32":
            module.get_submodule(cls.expert.removesuffix(".")).float()
        elif expert_dtype != "loaded":
            raise FlowRLError(f"expert dtype {expert_dtype!r} is unknown; choose float32 or loaded")
        module.to(device)
        preprocessor, postprocessor = load_processors(folder, config, device, rename or {})
        return cls(
            module,
            preprocessor,
            postprocessor,
            files=folder.files,
            stored_dtypes=stored_dtypes,
            device=device,
            expert_dtype=expert_dtype,
        )

    @staticmethod
    @abstractmethod
    def _spec(config: Any) -> FlowSpec:
        """Sizes, from LeRobot's config."""

    @classmethod
    def _set_up(cls, config: Any, folder: PolicyFolder) -> None:
        """Changes LeRobot's config before the policy is built, where it must find something in the folder."""

    @staticmethod
    def _renamed(module: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a file with names that the module does not know, under those that it does."""
        return tensors

    def prepare(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
        """LeRobot's input batch: observation and instructions through its renaming, tokenizer and normalizer.

        Args:
            observation: {"pixels": {camera: (B, H, W, 3) uint8}, "agent_pos": (B, S) float32}, numpy.
            tasks: B instructions; the closing newline is added where it is missing.

        Raises:
            FlowRLError: If a camera or the state does not match the policy, or an instruction is empty.
        """
        batch = self._named(observation, tasks)
        for name, value in batch.items():
            if name.startswith(OBS_IMAGE):
                batch[name] = self._to_images(value)
        return self.preprocessor(batch)

    def prepare_levels(
        self, observation: Mapping[str, Any], tasks: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As `prepare`, but the images apart and as they are: by the policy's names, (B, H, W, 3) uint8 on its device."""
        batch = self._named(observation, tasks)
        images = [name for name in batch if name.startswith(OBS_IMAGE)]
        levels = {self._rename_map.get(name, name): batch.pop(name) for name in images}
        return self.preprocessor(batch), levels

    @property
    def reads_levels(self) -> bool:
        """Whether the processors leave images alone, so that `prepare_levels` will do."""
        norm = self._normalizer.norm_map.get(FeatureType.VISUAL, NormalizationMode.IDENTITY)
        known = all(type(step).__name__ in _STEPS_WITHOUT_IMAGES for step in self.preprocessor.steps)
        return known and norm == NormalizationMode.IDENTITY

    def _named(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
        """Observation and instructions under LeRobot's names, checked; images as they are."""
        batch: dict[str, Any] = self._to_lerobot(observation)
        num_envs = len(next(iter(batch.values())))
        if len(tasks) != num_envs:
            raise FlowRLError(f"{len(tasks)} instructions for {num_envs} observations; one each is needed")
        for task in set(tasks) - self._checked_tasks:
            self._check_task(task)
        self._check_names(batch)
        batch["task"] = list(tasks)
        return batch

    @torch.no_grad()
    def predict_action_chunk(
        self, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> Tensor:
        """The chunk by LeRobot's own sampler, (B, T, A) float32 in the environment's units, on the CPU.

        Args:
            observation, tasks: As in `encode`.
            x_0: (B, T, D) standard normal.

        Raises:
            ValueError: If x_0 has another shape.
        """
        batch = self.prepare(observation, tasks)
        expected = (len(tasks), self.spec.chunk_size, self.spec.padded_action_dim)
        if tuple(x_0.shape) != expected:
            raise ValueError(f"x_0 has shape {tuple(x_0.shape)}, expected {expected}")
        return self.unnormalize(self.module.predict_action_chunk(batch, noise=x_0.to(self.device)))

    def reload_with_library(
        self, folder: Path | str, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        return reload_with_lerobot(
            folder, observation, tasks, x_0, device=self.device, rename_map=self._rename_map
        )

    def normalize(self, actions: Tensor) -> Tensor:
        return self._normalizer(create_transition(action=actions))[TransitionKey.ACTION]

    def unnormalize(self, actions: Tensor) -> Tensor:
        return self.postprocessor(actions)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The action expert and its projections: the weights whose names begin as in `trainable`."""
        return {name: p for name, p in self.module.named_parameters() if name.startswith(self.trainable)}

    def save(self, folder: Path | str, *, final_folder: Path | str | None = None) -> None:
        """Writes a LeRobot policy folder: weights, config, processors, and the VLM's config and tokenizer.

        Normalization is byte for byte the loaded policy's. Frozen weights keep the dtype of the loaded file, so they
        are bit-identical. Only the VLM's path changes (to the absolute one in `final_folder`), and what LeRobot's
        loader needs to rebuild the policy without network and with a float32 expert.
        """
        folder = Path(folder)
        vlm = Path(final_folder or folder).absolute() / VLM
        for name, content in self._loadable(replace_paths(self._files, str(vlm))).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        tensors, metadata = _unshared(self.module.state_dict(), self._stored_dtypes)
        for name, tensor in tensors.items():
            dtype = tensor.dtype if name.startswith(self.trainable) else self._stored_dtypes[name]
            tensors[name] = tensor.detach().to("cpu", dtype).contiguous()
        save_file(tensors, folder / WEIGHTS, metadata)

    @abstractmethod
    def _loadable(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """The policy's files with what LeRobot's loader needs to keep this expert's dtype, and to stay off the network."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of the VLM's and the expert's weights, for records."""
        named = dict(self.module.named_parameters())
        groups = {"vlm": self.vlm, "expert": self.expert}
        return {
            group: "+".join(
                sorted({str(p.dtype).removeprefix("torch.") for n, p in named.items() if n.startswith(start)})
            )
            for group, start in groups.items()
        }

    def _prompt(self, task: str) -> str:
        """What the tokenizer gets for an instruction."""
        return task if task.endswith("\n") else f"{task}\n"

    def _to_lerobot(self, observation: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gymnasium observation -> LeRobot's names and tensors on the policy's device; images as they are."""
        pixels = observation.get("pixels", {})
        images = (
            {f"{OBS_IMAGES}.{c}": i for c, i in pixels.items()}
            if isinstance(pixels, Mapping)
            else {OBS_IMAGE: pixels}
        )
        batch: dict[str, Tensor] = {}
        for name, image in images.items():
            if image.dtype != np.uint8 or image.ndim != 4 or image.shape[-1] != 3:
                raise FlowRLError(
                    f"{name} has shape {image.shape} and dtype {image.dtype}; a batch of images is (B, H, W, 3) uint8"
                )
            batch[name] = self._to_device(image)
        for key, name in (("agent_pos", OBS_STATE), ("environment_state", OBS_ENV_STATE)):
            if key in observation:
                batch[name] = self._to_device(observation[key]).float()
        if not batch:
            raise FlowRLError(
                f"the observation has the keys {sorted(observation)}; pixels and agent_pos are needed"
            )
        return {name: value for name, value in batch.items() if self._rename_map.get(name, name)}

    def _to_device(self, array: Any) -> Tensor:
        """On a GPU through pinned memory, without waiting; torch's allocator keeps that until the copy is done."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return host
        staged = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        return staged.copy_(host).to(self.device, non_blocking=True)

    def _to_images(self, levels: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 -> (B, 3, H, W) float32 in [0, 1], with the values of LeRobot's `preprocess_observation`.

        On a GPU the division is a table look-up, because its division by a constant rounds differently from the CPU's.
        """
        levels = levels.permute(0, 3, 1, 2).contiguous()
        return levels.float().div_(255) if levels.device.type == "cpu" else self._unit_interval[levels.int()]

    def _check_names(self, batch: Mapping[str, Tensor]) -> None:
        renamed = {self._rename_map.get(name, name): value for name, value in batch.items()}
        config = self.module.config
        cameras = {name for name in config.image_features if ".empty_camera_" not in name}
        given = {name for name in renamed if name.startswith(OBS_IMAGE)}
        missing, unknown = cameras - given, given - set(config.image_features)
        if unknown or len(missing) > config.empty_cameras or (cameras and not given & cameras):
            raise FlowRLError(
                f"cameras do not match: the environment gives {_names(given)}, the policy takes {_names(cameras)}; "
                "map them with --rename (environment name = policy name, empty = ignore)"
            )
        state = config.robot_state_feature
        if state is not None and OBS_STATE not in renamed:
            raise FlowRLError(
                f"the policy takes {OBS_STATE}, the environment gives {_names(renamed)}; map it with --rename"
            )
        if state is not None and tuple(renamed[OBS_STATE].shape[1:]) != tuple(state.shape):
            raise FlowRLError(
                f"{OBS_STATE} has size {tuple(renamed[OBS_STATE].shape[1:])} in the environment, "
                f"{tuple(state.shape)} in the policy; use the environment that the policy was trained for"
            )

    def _check_task(self, task: str) -> None:
        if not task.strip():
            raise FlowRLError("the instruction is empty; the environment must give a task for every episode")
        num_tokens = len(self._tokenizer.input_tokenizer(self._prompt(task))["input_ids"])
        if num_tokens > self._tokenizer.max_length:
            warnings.warn(
                f"the instruction {task!r} has {num_tokens} tokens; LeRobot cuts it to {self._tokenizer.max_length}",
                stacklevel=3,
            )
        self._checked_tasks.add(task)


def _names(names: Any) -> str:
    return "{" + ", ".join(sorted(names)) + "}"


def _only_step(pipeline: Any, kind: type) -> Any:
    return next(step for step in pipeline.steps if isinstance(step, kind))


def _unshared(
    state: Mapping[str, Tensor], preferred: Mapping[str, object]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One tensor per memory block, under a preferred name if it has one.

    Also the names left out and what they stand for, as safetensors' own save_model notes it.
    """
    kept: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    tensors, metadata = {}, {"format": "pt"}
    for name in sorted(state, key=lambda name: (name not in preferred, name)):
        tensor = state[name]
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in kept:
            metadata[name] = kept[key]
        else:
            kept[key] = name
            tensors[name] = tensor
    return tensors, metadata
