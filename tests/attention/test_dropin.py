"""GroupedMultiheadAttention against nn.MultiheadAttention: alone, and inside torch's own
Transformer modules.

With fewer K/V heads than query heads, the reference is nn.MultiheadAttention whose key and value
heads are those of their group, repeated.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gqa_convert.attention import GroupedMultiheadAttention, GroupedQueryAttention, convert_module
from gqa_convert.errors import GroupsError, NonFiniteError, OptionError
from tests.helpers.attention import numbers
from tests.helpers.checkpoints import refused
from tests.helpers.selection import slow_but

EMBED_DIM, HEADS, BATCH, QUERIES, KEYS = 24, 6, 3, 5, 7
KV_HEADS = [1, 2, 6]


def shaken(module: Any) -> Any:
    """Biases begin as zeros and norms as ones, which would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def repeated(model: nn.Module, num_kv_heads: int) -> nn.Module:
    """The model with each key and value head of nn.MultiheadAttention replaced by the mean of its
    group.
    """
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention):
            joined = part.in_proj_weight
            rows = (
                [part.k_proj_weight, part.v_proj_weight] if joined is None else joined.chunk(3)[1:]
            )
            rows = [*rows, *(() if part.in_proj_bias is None else part.in_proj_bias.chunk(3)[1:])]
            for tensor in rows:
                heads = tensor.detach().clone().split(EMBED_DIM // HEADS)
                size = HEADS // num_kv_heads
                merged = [
                    sum(heads[group * size : (group + 1) * size]) / size
                    for group in range(num_kv_heads)
                ]
                tensor.data.copy_(torch.cat([merged[head // size] for head in range(HEADS)]))
    return model


def pair(
    num_kv_heads: int, **options: Any
) -> tuple[GroupedMultiheadAttention, nn.MultiheadAttention]:
    source = shaken(nn.MultiheadAttention(EMBED_DIM, HEADS, dtype=torch.float64, **options))
    reference = repeated(source, num_kv_heads)
    assert isinstance(reference, nn.MultiheadAttention)
    return GroupedMultiheadAttention.from_multihead(source, num_kv_heads), reference


def hidden(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.4
    mask[..., 0] = False  # every query sees a key: nn.MultiheadAttention makes NaN of the others
    return mask


def as_floats(mask: Tensor) -> Tensor:
    return numbers(*mask.shape).masked_fill(mask, -torch.inf)


def assert_same(
    result: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]
) -> None:
    assert isinstance(result, tuple)
    assert len(result) == 2
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=1e-11)
    assert (result[1] is None) == (expected[1] is None)
    if result[1] is not None:
        torch.testing.assert_close(result[1], expected[1], rtol=0, atol=1e-11)


@pytest.fixture(params=["train", "eval with gradients", "eval without"])
def mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether to train. nn.MultiheadAttention runs other code in each of the three."""
    with torch.set_grad_enabled(request.param != "eval without"), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about mixed types of masks, and about the encoder's nested tensors
        yield request.param == "train"


@pytest.mark.parametrize("num_kv_heads", KV_HEADS)
@pytest.mark.parametrize("layout", ["batch first", "length first", "unbatched"])
@pytest.mark.parametrize("kind", ["self", "cross", "widths", "no bias"])
def test_arguments_and_results_are_those_of_multihead_attention(
    num_kv_heads: int, layout: str, kind: str, mode: bool
) -> None:
    options = {"widths": {"kdim": 10, "vdim": 14}, "no bias": {"bias": False}}.get(kind, {})
    ours, theirs = pair(num_kv_heads, batch_first=layout == "batch first", **options)
    ours.train(mode)
    theirs.train(mode)
    query = numbers(BATCH, QUERIES, EMBED_DIM)
    key, value = (
        (query, query)
        if kind == "self"
        else (numbers(BATCH, KEYS, theirs.kdim), numbers(BATCH, KEYS, theirs.vdim))
    )
    keys = key.shape[1]
    wide, flat, padding = (
        hidden(QUERIES, keys),
        hidden(BATCH * HEADS, QUERIES, keys),
        hidden(BATCH, keys),
    )
    if layout == "unbatched":
        query, key, value = (
            (query[0], query[0], query[0]) if kind == "self" else (query[0], key[0], value[0])
        )
        flat, padding = flat[:HEADS], padding[0]
    elif layout == "length first":
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    masks = [None, wide, flat, as_floats(wide), as_floats(flat)]
    paddings = [None, padding, as_floats(padding)]
    for attn_mask, key_padding_mask, weights in itertools.product(
        masks, paddings, [{"need_weights": False}, {}, {"average_attn_weights": False}]
    ):
        given: dict[str, Any] = {
            "attn_mask": attn_mask,
            "key_padding_mask": key_padding_mask,
        } | weights
        assert_same(ours(query, key, value, **given), theirs(query, key, value, **given))


@pytest.mark.parametrize("num_kv_heads", KV_HEADS)
@pytest.mark.parametrize("queries", [1, QUERIES, KEYS, 60])
def test_a_causal_hint_gives_what_it_gives_there(num_kv_heads: int, queries: int) -> None:
    ours, theirs = pair(num_kv_heads, batch_first=True)
    query, key = numbers(BATCH, queries, EMBED_DIM), numbers(BATCH, KEYS, EMBED_DIM)
    mask = torch.ones(queries, KEYS, dtype=torch.bool).triu(1)
    for given, padding, need in itertools.product(
        (mask, as_floats(mask)), (None, hidden(BATCH, KEYS)), (False, True)
    ):
        options: dict[str, Any] = {
            "attn_mask": given,
            "key_padding_mask": padding,
            "need_weights": need,
        }
        options["is_causal"] = True
        assert_same(ours(query, key, key, **options), theirs(query, key, key, **options))
    with pytest.raises(OptionError, match="give attn_mask too"):
        ours(query, key, key, is_causal=True)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(query, key, key, is_causal=True)


def test_the_layer_takes_the_same_weights() -> None:
    source = shaken(nn.MultiheadAttention(EMBED_DIM, HEADS, dtype=torch.float64, batch_first=True))
    ours = GroupedQueryAttention.from_multihead(source, 2)
    inputs = numbers(BATCH, KEYS, EMBED_DIM)
    mask, padding = hidden(KEYS, KEYS), hidden(BATCH, KEYS)
    expected, _ = repeated(source, 2)(
        inputs, inputs, inputs, attn_mask=mask, key_padding_mask=padding
    )
    torch.testing.assert_close(
        ours(inputs, mask=~mask, key_mask=~padding), expected, rtol=0, atol=1e-11
    )
    other = nn.MultiheadAttention(EMBED_DIM, HEADS, kdim=10, vdim=14)
    with pytest.raises(OptionError, match="use GroupedMultiheadAttention"):
        GroupedQueryAttention.from_multihead(other, 2)


def test_gradients_are_those_of_the_reference() -> None:
    ours, theirs = pair(HEADS, batch_first=True)
    query, key = (
        numbers(BATCH, QUERIES, EMBED_DIM).requires_grad_(),
        numbers(BATCH, KEYS, EMBED_DIM).requires_grad_(),
    )
    for need in (False, True):
        for options in (
            {"attn_mask": hidden(QUERIES, KEYS)},
            {"attn_mask": as_floats(hidden(QUERIES, KEYS))},
        ):
            outputs = [
                module(query, key, key, need_weights=need, **options)[0]
                for module in (ours, theirs)
            ]
            gradients = [
                torch.autograd.grad(output.square().sum(), (query, key)) for output in outputs
            ]
            for mine, other in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


# Inside torch's Transformer modules


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        EMBED_DIM, HEADS, 20, **{"dropout": 0.0, "dtype": torch.float64} | options
    )


def converted(model: nn.Module, num_kv_heads: int, mode: bool) -> tuple[nn.Module, nn.Module]:
    """The model with grouped-query attention, and its reference."""
    shaken(model).train(mode)
    made = convert_module(model, num_kv_heads)
    assert not any(isinstance(part, nn.MultiheadAttention) for part in made.modules())
    assert any(
        isinstance(part, GroupedMultiheadAttention) and part.num_kv_heads == num_kv_heads
        for part in made.modules()
    )
    return made, repeated(model, num_kv_heads)


def turned(tensor: Tensor, batch_first: bool) -> Tensor:
    return tensor if batch_first else tensor.transpose(0, 1)


def left_aligned(*shape: int) -> Tensor:
    """Padding at the end, of which nn.TransformerEncoder's fast path makes nested tensors."""
    return torch.arange(shape[1]) >= torch.randint(2, shape[1], (shape[0], 1))


@pytest.mark.parametrize("num_kv_heads", slow_but((2, 6), KV_HEADS))
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True}, {"bias": False, "activation": "gelu"}]
)
def test_encoders_compute_the_same(
    num_kv_heads: int,
    batch_first: bool,
    stacked: bool,
    options: dict[str, Any],
    mode: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer: nn.Module = encoder_layer(batch_first=batch_first, **options)
    model = (
        nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(EMBED_DIM, dtype=torch.float64))
        if stacked
        else layer
    )
    ours, theirs = converted(model, num_kv_heads, mode)
    source = turned(numbers(BATCH, KEYS, EMBED_DIM), batch_first)
    causal = nn.Transformer.generate_square_subsequent_mask(KEYS, dtype=torch.float64)
    name = "mask" if stacked else "src_mask"
    flat, padding = hidden(BATCH * HEADS, KEYS, KEYS), left_aligned(BATCH, KEYS)
    for given, key_padding in itertools.product(
        (None, causal, causal == -torch.inf, as_floats(hidden(KEYS, KEYS)), flat, as_floats(flat)),
        (None, padding, as_floats(padding), hidden(BATCH, KEYS)),
    ):
        for is_causal in [False, True] if given is causal else [False]:
            masks: dict[str, Any] = {
                name: given,
                "src_key_padding_mask": key_padding,
                "is_causal": is_causal,
            }
            # torch's fast path reads floats as booleans, and then makes NaN of finite ones: they
            # are no reference there
            finite = any(
                mask is not None and mask.is_floating_point() and mask is not causal
                for mask in (given, key_padding)
            )
            result = ours(source, **masks)
            with monkeypatch.context() as patch:
                patch.setattr(
                    torch.backends.mha, "get_fastpath_enabled", lambda enabled=not finite: enabled
                )
                expected = theirs(source, **masks)
            seen = torch.ones_like(result, dtype=torch.bool)
            if key_padding is padding:  # their fast path leaves zeros where there is padding
                seen = turned(~padding, batch_first)[..., None].expand_as(result)
            torch.testing.assert_close(result[seen], expected[seen], rtol=0, atol=1e-10)
    one = source[0] if batch_first else source[:, 0]
    for masks in ({}, {name: causal}, {"src_key_padding_mask": padding[0]}):
        torch.testing.assert_close(ours(one, **masks), theirs(one, **masks), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_kv_heads", KV_HEADS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_whole_transformers_compute_the_same(
    num_kv_heads: int, batch_first: bool, mode: bool
) -> None:
    model = nn.Transformer(
        EMBED_DIM, HEADS, 2, 2, 20, dropout=0.0, batch_first=batch_first, dtype=torch.float64
    )
    ours, theirs = converted(model, num_kv_heads, mode)
    source, target = (
        turned(numbers(BATCH, length, EMBED_DIM), batch_first) for length in (KEYS, QUERIES)
    )
    padding = left_aligned(BATCH, KEYS)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    choices: list[dict[str, Any]] = [
        {},
        {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding},
        {"tgt_mask": causal, "tgt_is_causal": True, "tgt_key_padding_mask": hidden(BATCH, QUERIES)},
        {"src_mask": hidden(KEYS, KEYS), "memory_mask": as_floats(hidden(QUERIES, KEYS))},
    ]
    for masks in choices:
        torch.testing.assert_close(
            ours(source, target, **masks), theirs(source, target, **masks), rtol=0, atol=1e-10
        )


# Refusals


@pytest.mark.parametrize(
    ("query", "memory", "name", "mask", "message"),
    [
        ((3, 5, 24), (7, 24), "attn_mask", None, "axes"),
        ((5, 24), (3, 7, 24), "attn_mask", None, "axes"),
        ((3, 3, 5, 24), (3, 7, 24), "attn_mask", None, "axes"),
        ((3, 5, 24), (3, 7, 24), "attn_mask", torch.zeros(3, 5, 7), "[18, 5, 7]"),
        ((3, 5, 24), (3, 7, 24), "attn_mask", torch.zeros(1, 7), "[5, 7]"),
        ((3, 5, 24), (3, 7, 24), "attn_mask", torch.zeros(3, 6, 5, 7), "attn_mask is"),
        (
            (3, 5, 24),
            (3, 7, 24),
            "attn_mask",
            torch.zeros(5, 7).long(),
            "True where a key is hidden",
        ),
        ((3, 5, 24), (3, 7, 24), "key_padding_mask", torch.zeros(1, 7), "[3, 7]"),
        (
            (3, 5, 24),
            (3, 7, 24),
            "key_padding_mask",
            torch.zeros(3, 7).byte(),
            "True where a key is hidden",
        ),
        ((5, 24), (7, 24), "key_padding_mask", torch.zeros(3, 7), "key_padding_mask is"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    query: Any, memory: Any, name: str, mask: Any, message: str
) -> None:
    module = GroupedMultiheadAttention(EMBED_DIM, HEADS, num_kv_heads=2, batch_first=True)
    with refused(OptionError, message):
        module(torch.zeros(query), torch.zeros(memory), torch.zeros(memory), **{name: mask})


def test_what_cannot_be_grouped_is_refused() -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(OptionError, match="add_bias_kv and add_zero_attn"):
            GroupedMultiheadAttention(EMBED_DIM, HEADS, **options)
        with pytest.raises(OptionError, match=r"1\.0: the module appends"):
            convert_module(
                nn.Sequential(
                    nn.Linear(1, 1),
                    nn.Sequential(nn.MultiheadAttention(EMBED_DIM, HEADS, **options)),
                ),
                2,
            )
    with pytest.raises(OptionError, match="divisible"):
        GroupedMultiheadAttention(25, HEADS)
    with pytest.raises(GroupsError, match=r"layers\.0\.self_attn: 6 query heads cannot share 4"):
        convert_module(nn.TransformerEncoder(encoder_layer(batch_first=True), 1), 4)
    with pytest.raises(OptionError, match="nothing to convert"):
        convert_module(nn.Linear(2, 2), 2)
    broken = encoder_layer(batch_first=True)
    broken.self_attn.in_proj_weight.data[30, 2] = torch.nan
    with pytest.raises(NonFiniteError):
        convert_module(broken, 2)

    class Special(nn.MultiheadAttention):
        pass

    layer = encoder_layer()
    layer.self_attn = Special(EMBED_DIM, HEADS)
    with pytest.raises(OptionError, match="self_attn: the module is a Special"):
        convert_module(layer, 2)
    nested = torch.nested.nested_tensor([torch.zeros(2, EMBED_DIM), torch.zeros(3, EMBED_DIM)])
    with pytest.raises(OptionError, match="nested"):
        GroupedMultiheadAttention(EMBED_DIM, HEADS, batch_first=True)(nested, nested, nested)
