"""Tables of measurements in the documentation's pages."""

import re


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page: str, name: str, text: str) -> str:
    """The page with this text between the block's markers."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{block}\n" if page.strip() else f"{block}\n"
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, page, flags=re.DOTALL)
