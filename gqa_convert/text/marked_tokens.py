"""Tokens of conversations, which carry in their upper bits whether they are learned and whether they end a conversation.

A vocabulary needs fewer than 29 bits. Tokens of running text have no marks: all of them are learned, and a document ends
with the end-of-text token.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gqa_convert.text.order import Integers
from gqa_convert.text.token_files import TokenSource

CHAT: Final = 1 << 31
"""The token belongs to a conversation."""
LEARNED: Final = 1 << 30
"""The token is predicted in training."""
LAST: Final = 1 << 29
"""The token ends its conversation."""
_ID: Final = LAST - 1
_LOOK: Final = 1 << 22


def marked(ids: Integers, learned: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """The tokens of one conversation with their marks: [tokens]."""
    tokens = ids.astype(np.uint32) | np.uint32(CHAT) | np.where(learned, np.uint32(LEARNED), np.uint32(0))
    tokens[-1:] |= np.uint32(LAST)
    return tokens.astype(np.uint32)


def ids_of(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The token ids without marks."""
    return tokens if tokens.dtype.itemsize < 4 else tokens & tokens.dtype.type(_ID)


def is_learned(tokens: Integers) -> npt.NDArray[np.bool_]:
    """Whether each token is predicted in training."""
    learned: npt.NDArray[np.bool_] = (tokens & CHAT == 0) | (tokens & LEARNED != 0)
    return learned


def learns_any(tokens: TokenSource) -> bool:
    """Whether any token of a complete source is predicted in training."""
    size, _ = tokens.size()
    return any(is_learned(tokens.read(at, min(_LOOK, size - at))).any() for at in range(0, size, _LOOK))


def ends_document(tokens: Integers, eos: int) -> npt.NDArray[np.bool_]:
    """Whether each token ends a conversation, or a document of running text.

    Args:
        tokens: with their marks.
        eos: the token that ends documents of running text; conversations may hold it anywhere.
    """
    ends: npt.NDArray[np.bool_] = np.where(tokens & CHAT == 0, tokens == eos, tokens & LAST != 0)
    return ends
