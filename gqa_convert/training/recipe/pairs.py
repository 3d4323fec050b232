"""Checks that a recipe's sources fit its objective: running text, conversations, or pairs of texts."""

from collections.abc import Sequence

from gqa_convert.errors import RecipeError
from gqa_convert.text.keys import keys_of
from gqa_convert.text.objectives import CAUSAL
from gqa_convert.text.sources import Source
from gqa_convert.training.recipe.schema import Recipe

_TEXT_FIELD = keys_of(Source)["text_field"].default


def check_pairs(recipe: Recipe) -> None:
    """Refuse sources whose keys contradict one another, the other sources or the objective.

    Raises:
        RecipeError: the keys contradict one another.
    """
    named = [*_named("data", recipe.data), *_named("evaluation_data", recipe.evaluation_data or ())]
    for key, source in named:
        _check_keys(key, source)
    chats = [key for key, source in named if source.format == "chat"]
    if recipe.objective not in ("auto", CAUSAL) and chats:
        raise RecipeError(
            f"objective is {recipe.objective} and {chats[0]} has format chat, which only the objective causal reads: remove one of them"
        )
    pairs = [key for key, source in named if source.holds_pairs]
    texts = [key for key, source in named if not source.holds_pairs]
    if recipe.objective == "pairs" and texts:
        raise RecipeError(
            f"objective is pairs and {texts[0]} does not name their fields: give it source_field and target_field"
        )
    if recipe.objective not in ("auto", "pairs") and pairs:
        raise RecipeError(
            f"objective is {recipe.objective} and {pairs[0]} names source_field and target_field: remove objective, or name the text "
            "with text_field"
        )
    if pairs and texts:
        raise RecipeError(
            f"{pairs[0]} holds pairs and {texts[0]} running text: give all sources source_field and target_field, or none"
        )


def _named(key: str, sources: Sequence[Source]) -> list[tuple[str, Source]]:
    return [(key if len(sources) == 1 else f"{key}[{number}]", source) for number, source in enumerate(sources)]


def _check_keys(key: str, source: Source) -> None:
    for one, other in (("source_field", "target_field"), ("target_field", "source_field")):
        if getattr(source, one) is not None and getattr(source, other) is None:
            raise RecipeError(f"{key} names {one} without {other}: give both, or neither")
    if source.format == "text":
        for name in ("messages_field", "loss_on"):
            if getattr(source, name) != keys_of(Source)[name].default:
                raise RecipeError(
                    f"{key} has format text and names {name}, which belongs to conversations: remove one of them"
                )
    if source.holds_pairs and source.text_field != _TEXT_FIELD:
        raise RecipeError(
            f"{key} names text_field and source_field: keep text_field for running text, or source_field and target_field for pairs"
        )
