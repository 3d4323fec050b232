"""`gqa-convert plan`."""

from .options import Encoder, Groups, Json, Method, Native, Quiet, Revision, ShardSize, Source, byte_count


def plan(
    source: Source,
    groups: Groups,
    method: Method = None,
    encoder: Encoder = False,
    native: Native = None,
    revision: Revision = None,
    max_shard_size: ShardSize = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a conversion would change, what it would save, and which software would load the result.

    The plan needs only config.json and the tensor headers: nothing is written, and of a Hub id only the headers are
    downloaded. A checkpoint that [bold]convert[/bold] would refuse is refused here with the same message.

    Examples:

      gqa-convert plan ./Llama-2-7b --groups 8
      gqa-convert plan meta-llama/Llama-2-7b-hf --groups 4 --json
    """
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.cli.console.plan import show_plan
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.conversion.fit.calibrated import CalibrationOptions
    from gqa_convert.conversion.fit.defaults import plan_conversion

    made, _ = plan_conversion(
        open_checkpoint(source, revision=revision),
        groups,
        method,
        CalibrationOptions(),
        encoder=encoder,
        native=native,
        max_shard_size=byte_count(max_shard_size, "--max-shard-size"),
    )
    if as_json:
        print_json(made.summary())
    elif not quiet:
        show_plan(made)
