"""The package's jinja2 templates, in which every printed value is escaped unless it is markup already."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.measuring.results.fields import printable
from gqa_convert.publishing.markup import Markdown, escaped

_FOLDER = Path(__file__).parent


def render_markdown(
    name: str,
    values: Mapping[str, object],
    *,
    tools: Mapping[str, Callable[..., object]],
    escape: Callable[[str], Markdown] = escaped,
) -> str:
    """The text of a Markdown template.

    Args:
        name: of the template, relative to the folder of this module.
        values: what the template names; a name that is missing here is an error.
        tools: functions that the template calls, as filters or by name; what they return as `Markdown` is not escaped.
        escape: of all other strings.
    """

    def finalize(value: Any) -> Any:
        # jinja2 also passes undefined values, which have to stay undefined to be reported
        return escape(value) if isinstance(value, str) and not isinstance(value, Markdown) else value

    return _render(name, values, {"safe": Markdown, **tools}, finalize, autoescape=False)


def render_html(name: str, values: Mapping[str, object], *, tools: Mapping[str, Callable[..., object]]) -> str:
    """The text of an HTML template; the arguments are as in `render_markdown`, and `Markup` is not escaped."""
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return _render(name, values, tools, finalize, autoescape=True)


def _render(
    name: str,
    values: Mapping[str, object],
    tools: Mapping[str, Callable[..., object]],
    finalize: Callable[[Any], Any],
    *,
    autoescape: bool,
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        finalize=finalize,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= tools
    environment.globals |= tools
    return environment.get_template(name).render(values)
