"""The commands. Each one reads like its help text; the work is done elsewhere and imported when it is called."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Never

import typer

from gqa_convert import __version__
from gqa_convert.errors import GQAConvertError, InterruptedRunError

app = typer.Typer(
    name="gqa-convert",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Turn a multi-head-attention checkpoint into a grouped-query one, prove it, and use it.

    [bold]Try it[/bold] (offline, some minutes):  gqa-convert demo

    [bold]A real one[/bold]:

      gqa-convert plan    ./Llama-2-7b --groups 8
      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8
      gqa-convert verify  ./Llama-2-7b-gqa8 --source ./Llama-2-7b""",
)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder or Hub id.", show_default=False)]
Groups = Annotated[
    int, typer.Option("--groups", "-n", metavar="N", help="K/V heads per layer in the result; 1 is multi-query.", show_default=False)
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method", "-m", show_default=False,
        help="How heads are merged: fit (needs --calibration, its default), factor (the default without), align, mean, first or random.",
    ),
]  # fmt: skip
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration", "-c", metavar="TEXT", help="Text file, folder, pattern or Hub dataset to measure on.", show_default=False
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option("--calibration-tokens", metavar="T", help="How much of it; by default from the model's width.", show_default=False),
]
Encoder = Annotated[
    bool, typer.Option("--encoder", help="Convert an encoder's self-attention too. It has no cache; the GQA paper leaves it as it is.")
]
Native = Annotated[
    bool | None,
    typer.Option(
        "--native/--no-native", show_default=False,
        help="For types without a K/V-head count: translate to a stock class that has one, or bring a modelling file. Default: what is possible.",
    ),
]  # fmt: skip
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub id.", show_default=False)]
Seed = Annotated[int, typer.Option("--seed", help="Of the choice of calibration text, and for --method random.")]
ShardSize = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="Split the output anew, e.g. 5GB; without it files stay as in SOURCE.", show_default=False),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gqa-convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    del version


@app.command()
def plan(
    source: Source, groups: Groups, method: Method = None, encoder: Encoder = False, native: Native = None, revision: Revision = None,
    max_shard_size: ShardSize = None, as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show what a conversion would do, from the config and the tensor headers alone.

    Nothing is written; of a Hub id only the headers travel. Whatever would make [bold]convert[/bold] refuse is found here.

      gqa-convert plan ./Llama-2-7b --groups 8

      gqa-convert plan meta-llama/Llama-2-7b-hf --groups 4 --json
    """
    from gqa_convert import console
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.plan import make_plan

    made = make_plan(
        open_checkpoint(source, revision=revision), groups, method=method or "factor", encoder=encoder, native=native,
        max_shard_size=_bytes(max_shard_size, "--max-shard-size"),
    )  # fmt: skip
    if as_json:
        console.print_json(made.summary())
    if not quiet and not as_json:
        console.show_plan(made)


@app.command()
def inspect(
    source: Source,
    calibration: Calibration = None, calibration_tokens: CalibrationTokens = None,
    groups: Annotated[
        str | None,
        typer.Option("--groups", "-n", metavar="N,N,...", help="Numbers to try; by default the head count's divisors, at most 6.", show_default=False),
    ] = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option("--max-loss-increase", metavar="NATS", help="Per token, that N may cost. Default: 0.1.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the errors, layer by layer; needs matplotlib.", show_default=False)
    ] = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Look at an encoder's self-attention too.")] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of calibration text.")] = 0,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Show what merging K/V heads would cost, layer by layer, and recommend an N. Nothing is converted.

    Keys and values of every layer are merged in memory by the closed form (method factor); stated is what they lose, and which pairs of
    heads merge most cheaply. With --calibration the source runs with merged heads on held-out text, which predicts the loss for each N:
    an upper bound, since [bold]convert --calibration[/bold] fits more closely. Without it only the weights are looked at: quick, and no prediction.

      gqa-convert inspect ./Llama-2-7b --calibration text.txt

      gqa-convert inspect ./Llama-2-7b --calibration text.txt --groups 4,8,16 --max-loss-increase 0.05 --plot errors.png

      gqa-convert inspect ./flan-t5-xl --json
    """
    from gqa_convert import console
    from gqa_convert.inspecting.inspection import inspect_checkpoint

    with console.stage_progress(quiet=quiet) as step:
        result = inspect_checkpoint(
            source, calibration=calibration, calibration_tokens=calibration_tokens, groups=_counts(groups, "--groups"),
            max_loss_increase=max_loss_increase, seed=seed, encoder=encoder, revision=revision, plot=plot, progress=step,
        )  # fmt: skip
    if as_json:
        console.print_json(result)
    if not quiet and not as_json:
        console.show_inspection(result)


@app.command()
def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; it appears whole or not at all.", show_default=False)],
    groups: Groups, method: Method = None,
    calibration: Calibration = None, calibration_tokens: CalibrationTokens = None,
    fit_steps: Annotated[
        int | None,
        typer.Option("--fit-steps", metavar="S", help="Gradient steps per layer of fit, 400 if not said; 0: closed forms only.", show_default=False),
    ] = None,
    seed: Seed = 0, encoder: Encoder = False, native: Native = None,
    revision: Revision = None, max_shard_size: ShardSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, once the new checkpoint is complete.")] = False,
    hash_weights: Annotated[bool, typer.Option("--hash", help="Record the SHA-256 of SOURCE's weight files too; reads them whole.")] = False,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Merge the K/V heads of SOURCE into N groups and write the result to OUT.

    With calibration text every layer is fitted on it, one after the other, and little is lost; a GPU is used where there is one, and a
    killed run goes on with the same command. Without, heads are merged from the weights alone, one layer in memory.

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration text.txt

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8

      gqa-convert convert org/model ./model-mqa --groups 1 --revision main

      gqa-convert convert ./flan-t5-xl ./flan-t5-xl-gqa8 --groups 8

      gqa-convert convert ./pythia-6.9b ./pythia-6.9b-gqa8 --groups 8 --no-native

      gqa-convert convert ./gqa4 ./gqa16 --groups 16

    T5's decoder is converted, its encoder only with --encoder; the result loads with trust_remote_code=True. Pythia becomes a stock phi
    unless --no-native keeps it a GPT-NeoX. The last one repeats heads exactly, for tensor parallelism. --method mean is what the GQA
    paper does; mean, first and random stream from disk to disk.
    """
    from contextlib import ExitStack

    from gqa_convert import console
    from gqa_convert.convert import convert_checkpoint

    with ExitStack() as stack:
        layers = stack.enter_context(console.layer_progress(quiet=quiet))
        bar: list[Any] = []

        def begin(made: Any) -> None:
            bar.append(stack.enter_context(console.byte_progress("converting", made.weight_bytes_after, quiet=quiet)))

        result = convert_checkpoint(
            source, out, groups, method=method, calibration=calibration, calibration_tokens=calibration_tokens, fit_steps=fit_steps,
            seed=seed, encoder=encoder, native=native, revision=revision, overwrite=overwrite, hash_weights=hash_weights, on_layer=layers,
            max_shard_size=_bytes(max_shard_size, "--max-shard-size"), command=["gqa-convert", *sys.argv[1:]], on_plan=begin,
            progress=lambda nbytes: bar[0](nbytes),
        )  # fmt: skip
    if as_json:
        console.print_json(result)
    if not quiet:
        console.show_conversion(result)


@app.command()
def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The converted checkpoint.", show_default=False)],
    source: Annotated[str, typer.Option("--source", metavar="SOURCE", help="What it was made from: a folder or a Hub id.", show_default=False)],
    revision: Revision = None,
    logits: Annotated[bool, typer.Option("--logits/--no-logits", help="Also load both models and compare what they compute.")] = True,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Also report both models' loss on this text.", show_default=False)] = None,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Prove that OUT is SOURCE with its K/V heads merged, and nothing else. Exit code 1 if it is not.

    A checkpoint that was uptrained since has numbers of its own: verify what it was trained from.

    Every tensor is compared or recomputed, by code that shares nothing with the converter; then both models are loaded and OUT must
    compute what SOURCE computes once its K/V heads are replaced by the merged ones. Methods align and factor are proven by what attention
    computes from the weights. Of fit, which depends on its text, only the form is proven, and that OUT predicts more like SOURCE than
    mean pooling would, on the text or on random tokens.

      gqa-convert verify ./Llama-2-7b-gqa8 --source ./Llama-2-7b

      gqa-convert verify ./Llama-2-70b-gqa4 --source ./Llama-2-70b --no-logits
    """
    from gqa_convert import console
    from gqa_convert.verify import verify_checkpoint

    with console.stage_progress(quiet=quiet) as step:
        report = verify_checkpoint(out, source, revision=revision, logits=logits, text=text, progress=step)
    if as_json:
        console.print_json(report.summary())
    if not quiet:
        console.show_verification(report.summary())
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def uptrain(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="What to train, on what, for how long.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Replace keys of the recipe.", show_default=False)] = None,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Restore a converted checkpoint's quality by training, with its source as teacher if the recipe names one.

    The same command goes on where a run was interrupted. Exit code 75: a signal (TERM, USR1, INT, HUP) asked to stop, and the state is
    saved. The keys of a recipe are in docs/uptraining.md.

      gqa-convert uptrain recipes/tiny.yaml

      gqa-convert uptrain recipe.yaml tokens=500M learning_rate=1e-4

      accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m gqa_convert uptrain recipe.yaml

      ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 -m gqa_convert uptrain recipe.yaml
    """
    from gqa_convert import console
    from gqa_convert.uptrain import uptrain as run

    with console.training_progress(quiet=quiet) as screen:
        summary = run(recipe, overrides or [], on_message=screen.say, on_step=screen.step, on_tokenize=screen.tokenize)
    if summary and as_json:
        console.print_json(summary)
    if summary and not quiet:
        console.show_training(summary)


@app.command()
def demo(
    out: Annotated[Path, typer.Argument(metavar="[OUT]", help="Folder for the results.")] = Path("gqa-demo"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results of an earlier demo.")] = False,
    uptraining: Annotated[bool, typer.Option("--uptrain/--no-uptrain", help="Also uptrain one of them, with the source as teacher.")] = True,
    as_json: Json = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """The whole story offline: convert a small bundled model to several N, by mean pooling and by fitting on calibration text, verify each,
    measure what is lost and gained, uptrain one.

    gqa-convert demo

    gqa-convert demo /tmp/gqa-demo --json
    """
    from gqa_convert import console
    from gqa_convert.demo import UPTRAINING_TOKENS, run_demo

    with console.stage_progress(quiet=quiet) as step:
        summary = run_demo(
            out, overwrite=overwrite, uptraining_tokens=UPTRAINING_TOKENS if uptraining else 0,
            on_plan=(lambda made: None) if quiet else console.show_plan, progress=step,
        )  # fmt: skip
    if as_json:
        console.print_json(summary)
    if not quiet:
        console.show_demo(summary)
    if not summary["passed"]:
        raise typer.Exit(1)


def _bytes(text: str | None, option: str) -> int | None:
    """ "5GB", "500 MiB" or a plain number of bytes."""
    import re

    from gqa_convert.errors import OptionError

    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", text)
    if match is None:
        raise OptionError(f"{option} {text!r} is no size: write it like 5GB or 500MiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _counts(text: str | None, option: str) -> list[int] | None:
    """ "1,2,4"."""
    from gqa_convert.errors import OptionError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{option} {text!r} is no list of numbers: write it like 1,2,4") from None


def main() -> Never:
    """Run the command line; every mistake becomes one line on stderr and an exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        code = app(standalone_mode=False)
    except GQAConvertError as mistake:
        sys.exit(mistake.exit_code if mistake.told_elsewhere else _report(str(mistake), mistake.exit_code))
    except Exception as problem:
        # typer brings its own copy of click's exceptions or uses click's, depending on its version
        if hasattr(problem, "format_message") and hasattr(problem, "exit_code"):
            text = " ".join(problem.format_message().split()).rstrip(".")
            sys.exit(_report(f"{text}: see gqa-convert --help", problem.exit_code) if text else problem.exit_code)
        if isinstance(problem, OSError):
            sys.exit(_report(f"{problem.filename or 'the system'}: {problem.strerror or problem}", 1))
        raise
    sys.exit(code if isinstance(code, int) else 0)


def _terminated(number: int, frame: FrameType | None) -> None:
    del frame
    raise InterruptedRunError(f"stopped by {signal.Signals(number).name}: nothing was left behind")


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"gqa-convert: {' '.join(message.split())}\n")
    if "--json" in sys.argv[1:]:
        from gqa_convert import console

        console.print_json({"error": message, "exit_code": code})
    return code
