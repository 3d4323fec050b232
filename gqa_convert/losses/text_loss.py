"""The loss of a causal model on tokens in memory."""

from collections.abc import Callable, Sequence
from typing import Any

from gqa_convert.data.labels import IGNORED
from gqa_convert.families.context_length import block_length


def text_loss(
    model: Any,
    token_ids: Sequence[int],
    *,
    batch: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Mean next-token loss in nats per token. Blocks overlap by one token, so that each token except the first is
    scored once.

    Args:
        model: a transformers causal LM, in evaluation mode.
        token_ids: the text.
        batch: blocks per forward pass.
        progress: called with the number of tokens scored and the total.

    Returns:
        The loss; NaN if the model produces NaN.

    Raises:
        ValueError: the text has fewer than two tokens.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from gqa_convert.losses.distillation import combined_loss
    from gqa_convert.losses.output_layer import without_output_layer

    ids = torch.tensor(token_ids, device=model.device)
    count = len(ids) - 1
    if count < 1:
        raise ValueError("a loss needs at least two tokens of text")
    length = max(1, block_length(model.config.to_dict()) - 1)
    inputs = pad_sequence(ids[:-1].split(length), batch_first=True).split(batch)
    labels = pad_sequence(ids[1:].split(length), batch_first=True, padding_value=IGNORED).split(batch)
    total = done = 0.0
    with torch.inference_mode(), without_output_layer(model, {"input_ids": inputs[0]}) as layer:
        for read, wanted in zip(inputs, labels, strict=True):
            output = model(input_ids=read, use_cache=False).logits
            found = combined_loss(output, wanted, layer=layer)
            total += float(found.sum)
            done += float(found.count)
            progress(int(done), count)
    return total / count
