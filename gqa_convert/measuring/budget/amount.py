"""The budget that a user states: a share of the source's K/V cache, or bytes per token."""

from dataclasses import dataclass
from fractions import Fraction

from gqa_convert.errors import OptionError


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What the K/V cache of a result may take per token, over all layers.

    Attributes:
        stated: the budget as the user wrote it.
        share: of the source's bytes per token; None if bytes are stated.
        nbytes: bytes per token; None if a share is stated.
    """

    stated: str
    share: Fraction | None = None
    nbytes: int | None = None

    def limit(self, source: int, least: int) -> int:
        """The most bytes per token that the budget allows.

        Args:
            source: the source's bytes per token.
            least: those of one K/V head in every layer.

        Raises:
            OptionError: the budget is not below the source's bytes, or does not suffice for one head in every layer.
        """
        limit = self.nbytes if self.share is None else int(source * self.share)
        assert limit is not None
        smallest = f"{least:,} bytes per token ({-(-1000 * least // source) / 10:g}%)"
        if limit >= source:
            raise OptionError(
                f"--kv-budget {self.stated} is not below the {source:,} bytes that the source's K/V heads take per token: "
                f"state less than 100%; the smallest possible budget is {smallest}"
            )
        if limit < least:
            raise OptionError(
                f"--kv-budget {self.stated} is {limit:,} bytes per token, and one K/V head in every layer takes more: "
                f"state at least {smallest}"
            )
        return limit
