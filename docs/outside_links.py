"""A hook of mkdocs: files of the repository that a page links to come into the site, below
`repository/`.

On the disk such a link is a relative path that leads out of docs/, which mkdocs can't follow.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
SHELF = "repository"
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside docs/, and what the pages among that link to."""
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for target in _LINK.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            name = _in_site(path)
            if (
                not name.startswith(f"{SHELF}/")
                or files.get_file_from_path(name)
                or not (ROOT / path).is_file()
            ):
                continue
            added = File.generated(
                config, name, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(added)
            if added.is_documentation_page():
                pages.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to the places that files have in the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        return posixpath.relpath(
            _in_site(_in_repository(here, link[1])), posixpath.dirname(here) or "."
        )

    return _LINK.sub(moved, markdown)


def _in_repository(page: str, target: str) -> str:
    """The path in the repository of what a page of the site links to; a page on the shelf has its
    place in the repository.
    """
    home = page.removeprefix(f"{SHELF}/") if page.startswith(f"{SHELF}/") else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target))


def _in_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{SHELF}/{path}"
