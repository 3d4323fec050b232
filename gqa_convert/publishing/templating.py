"""The jinja2 template of the model card, in which every printed value is escaped unless it is Markdown already."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.publishing.markup import Markdown, plain

_FOLDER = Path(__file__).parent


def render_card(values: Mapping[str, object], tools: Mapping[str, Callable[..., object]]) -> str:
    """The text of a card.

    Args:
        values: what the template names; a name that is missing here is an error.
        tools: functions that the template calls, as filters or by name; what they return as `Markdown` is not escaped,
            and every other string is.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        # jinja2 also passes undefined values, which have to stay undefined to be reported
        return plain(value) if isinstance(value, str) and not isinstance(value, Markdown) else value

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= tools
    environment.globals |= tools
    return environment.get_template("card.md.jinja").render(values)
