"""Llama, Mistral or Qwen2 whose layers differ in their number of K/V heads (Ainslie et al. 2023), as DeciLM.

This file is part of gqa-convert and is copied into every checkpoint with a number of K/V heads for each layer, so that
transformers loads the checkpoint without gqa-convert. It therefore imports only torch and transformers.
Everything but the attention module and the config is transformers' own code.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads of the layer, c head_dim. Query head i reads K/V
head i // (H / N).
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama


# Shared part: begin (written by gqa_convert.families.modeling.generate from shared.py)
def pack_heads(states: Any, groups: int) -> Any:
    """[B, H, L, x] -> [B, N, H / N * L, x]: the query heads of a group move into the length axis. An array with one
    head is returned unchanged, because it broadcasts.
    """
    if states.shape[1] == 1:
        return states
    return states.reshape(states.shape[0], groups, -1, states.shape[-1])


def grouped_attention(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    eager: Any,
    *,
    position_bias: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Grouped-query attention through the configured attention function.

    Where keys and values would be repeated in memory (always with eager attention, and with sdpa while decoding), the
    query heads of a group are packed into the length axis instead, which gives the same sums from H / N times fewer
    bytes.

    Args:
        module: the attention module; its `num_key_value_groups` is H / N.
        query: [B, H, L, c].
        key: [B, N, S, c].
        value: [B, N, S, c].
        mask: None, or broadcasting to [B, H, L, S], boolean or additive.
        eager: the family's eager attention function, which needs as many keys and values as query heads.
        position_bias: None, or added to the scores, broadcasting to [B, H, L, S].
        options: `scaling`, `dropout` and further arguments of the function.

    Returns:
        The output [B, L, H, c] and, from eager attention, the attention weights [B, H, L, S].
    """
    kind = module.config._attn_implementation
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    size, rest = divmod(heads, groups)
    if rest:
        raise ValueError(f"{groups} K/V heads do not divide {heads} query heads")
    paged = options.get("cache") is not None  # continuous batching: the attention function itself updates the cache
    packs = size > 1 and not paged and (kind == "eager" or (kind == "sdpa" and length == 1))
    if packs:
        query = pack_heads(query, groups)
        if position_bias is not None:
            position_bias = pack_heads(position_bias, groups)
        if mask is not None:
            mask = mask.repeat(1, 1, size, 1) if mask.shape[1] == 1 and mask.shape[2] > 1 else pack_heads(mask, groups)
    if packs and kind == "sdpa":
        if position_bias is not None and mask is not None:
            lowest = torch.finfo(query.dtype).min
            mask = torch.where(mask, position_bias, lowest) if mask.dtype == torch.bool else mask + position_bias
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            position_bias if mask is None else mask,
            options.get("dropout", 0.0),
            scale=options.get("scaling"),
        )
        return output.reshape(batch, heads, length, -1).transpose(1, 2), None
    if position_bias is not None:
        options["position_bias"] = position_bias
    function = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager)
    output, weights = function(module, query, key, value, mask, **options)
    if packs:
        output = output.transpose(1, 2).reshape(batch, heads, length, -1).transpose(1, 2)
        weights = weights.reshape(batch, heads, length, -1)
    return output, weights


def replace_attention(model: nn.Module, stock: type[nn.Module], grouped: Any) -> None:
    """Replace every attention module of type `stock` by `grouped.like(module)`, which may have fewer K/V heads."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is stock:
                setattr(parent, name, grouped.like(child))


# Shared part: end


class Section(dict):  # type: ignore[type-arg]
    """A dictionary whose values are attributes too, as engines read `block_configs`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def eager_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, dropout: float = 0.0, **_: Any
) -> tuple[Any, Any]:
    """Llama's own attention for as many keys and values as query heads, softmax in float32."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@strict
class DeciLMConfig(LlamaConfig):
    """Llama's config with `block_configs`, an entry for each layer. `qkv_bias`, where it is stated, decides about the
    biases of queries, keys and values, and `attention_bias` about that of the output alone.
    """

    model_type = "nemotron-nas"
    block_configs: list[Any] | None = None

    def __post_init__(self, **options: Any) -> None:
        self.block_configs = [
            Section({name: Section(section) for name, section in block.items()}) for block in self.block_configs or []
        ]
        super().__post_init__(**options)


class DeciLMAttention(llama.LlamaAttention):
    """Llama's attention with the layer's own number of K/V heads."""

    @classmethod
    def like(cls, stock: Any) -> Any:
        """A fresh module with the settings of `stock`."""
        return cls(stock.config, stock.layer_idx)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, hidden_size = config.num_attention_heads, config.hidden_size
        self.num_key_value_groups = config.block_configs[layer_idx].attention.n_heads_in_group
        groups = heads // self.num_key_value_groups
        bias = getattr(config, "qkv_bias", config.attention_bias)
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, groups * self.head_dim, bias=bias)

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        shape = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = grouped_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            eager_attention,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            **options,
        )
        return self.o_proj(output.reshape(*shape, -1)), weights


class GroupedModel(llama.LlamaPreTrainedModel):
    """Builds transformers' model, then gives each attention module its layer's number of K/V heads."""

    config: DeciLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        replace_attention(self, llama.LlamaAttention, DeciLMAttention)
        self.post_init()


class DeciLMModel(GroupedModel, llama.LlamaModel):
    config: DeciLMConfig


class DeciLMForCausalLM(GroupedModel, llama.LlamaForCausalLM):
    config: DeciLMConfig
