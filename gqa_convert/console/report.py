"""What a report holds, and where it is."""

from typing import Any

from .screen import stderr_console


def show_report(made: dict[str, Any]) -> None:
    """The files read and left aside, what is missing, and the pages."""
    console = stderr_console()
    for each in made["read"]:
        console.print(f"read     {each['file']}: {each['kind']}", soft_wrap=True, markup=False)
    for each in made["ignored"]:
        console.print(f"ignored  {each['file']}: {each['why']}", soft_wrap=True, markup=False)
    for note in made["notes"]:
        console.print(f"note     {note}", soft_wrap=True, markup=False)
    for each in made["missing"]:
        console.print(f"missing  {each['title']}: {each['advice']}", soft_wrap=True, markup=False)
    console.print(f"figures  {', '.join(each['title'].lower() for each in made['figures']) or 'none'}", soft_wrap=True, markup=False)
    console.print(f"report   {made['html']}", soft_wrap=True, markup=False)
    console.print(f"         {made['markdown']}", soft_wrap=True, markup=False)
