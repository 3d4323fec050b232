"""GPT-Neo with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from transformers import PreTrainedModel

from .gqa_common import GroupedAttention, class_maker, split_heads


class GroupedGPTNeoAttention(GroupedAttention):
    """GPT-Neo's attention, whose own functions take other numbers of heads here."""

    replaced = ("_split_heads", "_attn")

    def _split_heads(self, tensor, _num_heads, head_dim):
        return split_heads(tensor, head_dim)

    def _attn(self, query, key, value, mask=None):
        size = self.num_key_value_groups
        return super()._attn(
            query, key.repeat_interleave(size, 1), value.repeat_interleave(size, 1), mask
        )


def eager_only(model, implementation, **options):
    """The attention function of a model.

    Raises:
        ValueError: another one than eager is asked for, which the class would ignore.
    """
    found = PreTrainedModel._check_and_adjust_attn_implementation(model, implementation, **options)
    if found != "eager":
        raise ValueError(f"GPT-Neo runs with eager attention, not {found}")
    return found


__getattr__ = class_maker(
    __name__,
    attention={"GPTNeoSelfAttention": GroupedGPTNeoAttention},
    _check_and_adjust_attn_implementation=eager_only,
)
