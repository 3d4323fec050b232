"""The package's jinja2 templates, in which every printed value is escaped unless it is markup already."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa_convert.measuring.results.records import Origin
from gqa_convert.publishing.markup import Markdown, code, fenced, number, plain, table, with_error

if TYPE_CHECKING:
    import jinja2

_FOLDER = Path(__file__).parent


def render_markdown(name: str, **values: object) -> str:
    """The text of a Markdown template.

    Args:
        name: of the template, relative to this folder.
        values: what the template may name; a name that is missing here is an error.
    """
    return _markdown().get_template(name).render(values)


@cache
def _markdown() -> "jinja2.Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        undefined=StrictUndefined,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= {"code": code, "plain": plain, "number": number, "with_error": with_error}
    environment.filters |= {"codes": lambda names: Markdown(", ".join(map(code, names)))}
    environment.globals |= {
        "table": lambda header, rows: Markdown("\n".join(table(header, rows))),
        "origin": lambda origin: Markdown("\n".join(_origin(origin))),
        "fenced": lambda text, language="": Markdown("\n".join(fenced(text, language))),
    }
    return environment


def _origin(origin: Origin) -> list[str]:
    """The command and the machine of a measurement."""
    command = fenced(origin.command, "sh") if origin.command else ["The command was not recorded."]
    machine = f"Measured on: {plain(origin.machine)}." if origin.machine else "The machine was not recorded."
    return [*command, "", machine]


def _escaped(value: Any) -> Any:
    """The value as Markdown; jinja2 also passes what is undefined, which must stay what it is to be reported."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markdown) else value
