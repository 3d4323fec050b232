"""Types that transformers loads only by the code in their checkpoints, and that this package converts directly."""

from collections.abc import Iterator

from gqa_convert.families.family import Family, RotaryShare, make_family
from gqa_convert.families.records.building import at


def remote_code() -> Iterator[Family]:
    """The records."""
    yield make_family(
        model_type="chatglm",
        **at("encoder.layers", "num_layers", "transformer"),
        rotary="interleaved",
        rotary_dimensions=RotaryShare(0.5),
        key_norm="none",
        attention=("self_attention",),
        fused="query_key_value",
        output="dense",
        kv_heads_keys=("multi_query_group_num",),
        head_dim_key="kv_channels",
        mlp="gated",
        refused_unless=(("multi_query_attention", "only ChatGLM2 and later have a separate number of K/V heads"),),
        engines=frozenset(),
    )
