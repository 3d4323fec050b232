"""What the program imports before it works: a person waits for each of these modules."""

import sys
from pathlib import Path

import gqa_convert
from gqa_convert.cli.commands import COMMANDS
from tests.helpers.command_line import loaded_after

RUN = (
    "sys.argv[0] = 'gqa-convert'\nfrom gqa_convert.cli import main\ntry: main()\nexcept "
    "SystemExit: pass\n"
)
OURS = {
    "gqa_convert",
    "gqa_convert._version",
    "gqa_convert.cli",
    *(
        f"gqa_convert.cli.{name}"
        for name in ("commands", "console", "console.screen", "options", "running")
    ),
    *(f"gqa_convert.cli.{name.replace('-', '_')}" for name in COMMANDS),
    "gqa_convert.runtime",
    "gqa_convert.runtime.messages",
    "gqa_convert.errors",
    "gqa_convert.merging",
    "gqa_convert.merging.methods",
}
"""What every command line imports."""


def libraries(modules: set[str]) -> set[str]:
    """The modules' packages outside the standard library."""
    return (
        {name.split(".")[0] for name in modules}
        - set(sys.stdlib_module_names)
        - {"__main__", "gqa_convert"}
    )


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "gqa_convert"}


def test_help_imports_the_options_alone() -> None:
    always = libraries(loaded_after(""))  # files of an environment may import some at every start
    for arguments in (
        ("--help",),
        ("convert", "--help"),
        ("convert", "--help"),
        ("convert", "--gruops", "8"),
    ):
        found = loaded_after(RUN, *arguments)
        assert ours(found) == OURS, arguments
        assert libraries(found) - always <= {
            "typer",
            "click",
            "shellingham",
            "annotated_doc",
            "typing_extensions",
        }


def test_a_dry_run_imports_no_library_of_models() -> None:
    """Not for the estimate of what `factor` on text needs either."""
    model = Path(gqa_convert.__file__).parent / "demo_checkpoint"
    dry_run = ("convert", str(model), "--kv-heads", "3", "--dry-run")
    found = libraries(loaded_after(RUN, *dry_run, "--device", "cpu"))
    assert {"numpy", "tokenizers", "rich"} <= found
    assert not found & {
        "torch",
        "transformers",
        "huggingface_hub",
        "datasets",
        "accelerate",
        "pyarrow",
        "jinja2",
    }
    assert not libraries(loaded_after(RUN, *dry_run, "--method", "mean")) & {
        "torch",
        "transformers",
        "tokenizers",
    }


def test_merging_by_the_mean_imports_no_torch(tmp_path: Path) -> None:
    model = Path(gqa_convert.__file__).parent / "demo_checkpoint"
    found = loaded_after(
        RUN, "convert", str(model), str(tmp_path / "out"), "--kv-heads", "3", "--method", "mean"
    )
    assert (tmp_path / "out" / "config.json").is_file()
    assert not libraries(found) & {"torch", "transformers", "tokenizers", "huggingface_hub"}
