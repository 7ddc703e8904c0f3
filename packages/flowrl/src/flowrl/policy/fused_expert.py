"""SmolVLA's action expert in `layers`, for the fused ways of `expert`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.compiled import Compiler
from flowrl.policy import layers
from flowrl.policy.attention import VelocityMode
from flowrl.policy.expert import expert_layers, is_joint, time_frequencies
from flowrl.policy.layers import ACTIVATIONS, LayerWeights, Linear, Shape
from flowrl.policy.split_product import weight_parts
from flowrl.precision import matrix_products


class FusedField:
    """As `ExpertField`.

    Args:
        model, pad_mask, keys, values, repeats: As in `ExpertField`.
        mode: "fused", "split" or "tf32".
        compiler: Calls the layers.
    """

    def __init__(
        self,
        model: Any,
        pad_mask: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        repeats: int,
        mode: VelocityMode,
        compiler: Compiler,
    ) -> None:
        self._model, self._mode, self._call = model, mode, compiler
        network = model.vlm_with_expert
        # Where TF32 is allowed, it is the faster way to fewer bits.
        self._splits = mode == "split" and torch.get_float32_matmul_precision() == "highest"
        self._shape = layer_shape(network, network.lm_expert.config, repeats)
        self._frequencies = time_frequencies(model, pad_mask.device)
        self._layers: list[Callable[[Tensor], Tensor]] = []
        numbered = {n: layer for n, layer in enumerate(expert_layers(network)) if layer is not None}
        joint = tuple(n for n in numbered if is_joint(network, n))
        cross = tuple(n for n in numbered if n not in joint)
        modules = [numbered[n].self_attn for n in cross]
        with self._precision():
            for_joint, for_cross, bias, own_bias = compiler(
                layers.field_tables, pad_mask, model.config.chunk_size, self._shape
            )
            joint_keys, joint_values, cross_keys, cross_values = compiler(
                layers.field_prefix,
                keys,
                values,
                joint,
                cross,
                [module.k_proj.weight for module in modules],
                [module.v_proj.weight for module in modules],
                network.lm_expert.layers[0].self_attn.q_proj.weight.dtype,
            )
            for n, layer in numbered.items():
                weights = self._weights(layer, n in joint)
                if n in joint:
                    place = joint.index(n)
                    states: tuple[Any, ...] = (
                        for_joint,
                        joint_keys[place],
                        joint_values[place],
                        bias,
                        own_bias,
                    )
                    self._layers.append(self._prepared(layers.joint_layer, weights, states))
                else:
                    place = cross.index(n)
                    states = (for_cross, cross_keys[place], cross_values[place], bias)
                    self._layers.append(self._prepared(layers.cross_layer, weights, states))

    def __call__(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Velocity (B R, T, D) float32 at x_t (B R, T, D) float32 and time (B R,) float32."""
        model, call = self._model, self._call
        norm = model.vlm_with_expert.lm_expert.norm
        ends = model.action_in_proj, model.action_time_mlp_in, model.action_time_mlp_out
        with self._precision():
            hidden = call(layers.embed_chunk, x_t, time, self._frequencies, *(_affine(end) for end in ends))
            for layer in self._layers:
                hidden = layer(hidden)
            out = _affine(model.action_out_proj)
            return call(layers.velocity_head, hidden, norm.weight, norm.variance_epsilon, out)

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        return matrix_products("tf32") if self._mode == "tf32" else contextlib.nullcontext()

    def _prepared(
        self, function: Callable[..., Tensor], weights: LayerWeights, states: tuple[Any, ...]
    ) -> Callable[[Tensor], Tensor]:
        return lambda hidden: self._call(function, hidden, weights, *states, self._shape)

    def _weights(self, layer: Any, own_keys: bool) -> LayerWeights:
        return layer_weights(layer, own_keys, self._prepared_weight)

    def _prepared_weight(self, weight: Tensor) -> Linear:
        if not self._splits or weight.dtype != torch.float32:
            return weight
        return weight, self._call(weight_parts, weight)


def fusable(model: Any) -> bool:
    """Whether `layers` knows all that this SmolVLA is made of, as it does of every published one."""
    network = model.vlm_with_expert
    config = network.vlm.config
    every = [*network.get_vlm_model().text_model.layers, *network.lm_expert.layers]
    return (
        not model.add_image_special_tokens
        and model.prefix_length <= 0
        and config.text_config.hidden_act in ACTIVATIONS
        and config.vision_config.hidden_act in ACTIVATIONS
        and not any(name.endswith("bias") for layer in every for name, _ in layer.named_parameters())
    )


def layer_shape(network: Any, config: Any, repeats: int = 1) -> Shape:
    """Of the layers of LeRobot's `SmolVLMWithExpertModel`: the language model's or the expert's, by the config."""
    width = network.vlm.config.text_config.head_dim
    heads = network.num_attention_heads, network.num_key_value_heads
    return Shape(*heads, width, repeats, config.rms_norm_eps, config.hidden_act)


def layer_weights(layer: Any, own_keys: bool, prepare: Callable[[Tensor], Linear]) -> LayerWeights:
    """A layer's weights, those of products that are taken together in one.

    Args:
        layer: LeRobot's module.
        own_keys: Whether it has keys and values of its own, as the language model's and the joint ones do.
        prepare: What is done to the weight of a product.
    """
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LayerWeights(
        layer.input_layernorm.weight,
        prepare(torch.cat([part.weight for part in parts]) if own_keys else attention.q_proj.weight),
        prepare(attention.o_proj.weight),
        layer.post_attention_layernorm.weight,
        prepare(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        prepare(mlp.down_proj.weight),
    )


def _affine(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight, module.bias
