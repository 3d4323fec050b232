"""`gqa-convert plan`."""

from typing import Any

from .options import (
    Budget,
    Calibration,
    CalibrationContext,
    CalibrationLength,
    CalibrationTokens,
    Devices,
    Encoder,
    FitSteps,
    Groups,
    GroupsFile,
    Json,
    KLRank,
    KLSteps,
    Method,
    Native,
    Quiet,
    Revision,
    ShardSize,
    Source,
    byte_count,
    cache_budget,
    check_one_choice_of_groups,
    group_counts,
)


def plan(
    source: Source,
    groups: Groups = None,
    groups_file: GroupsFile = None,
    kv_budget: Budget = None,
    method: Method = None,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    calibration_length: CalibrationLength = None,
    calibration_context: CalibrationContext = None,
    fit_steps: FitSteps = None,
    kl_steps: KLSteps = None,
    kl_rank: KLRank = None,
    device: Devices = None,
    encoder: Encoder = False,
    native: Native = None,
    revision: Revision = None,
    max_shard_size: ShardSize = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a conversion would change, what it would save, and which software would load the result.

    The plan needs only config.json and the tensor headers: nothing is written, and of a Hub id only the headers are
    downloaded. A checkpoint that convert would refuse is refused here with the same message.
    Memory and disk space are estimated from the same sizes. Calibration text is not read.

    With --kv-budget, the source also runs on the text, as in convert --kv-budget, and the list that it
    would choose is shown with its divergence from the source. Give the list to --groups of convert, which then does not
    measure again.

    Examples:

      gqa-convert plan ./Llama-2-7b --groups 8
      gqa-convert plan ./Llama-2-7b --groups 8 --calibration text.txt --fit-steps 100
      gqa-convert plan meta-llama/Llama-2-7b-hf --groups 4 --json
      gqa-convert plan ./model --groups 8,8,4,4,2,2,4,8
      gqa-convert plan ./model --kv-budget 50% --calibration text.txt
    """
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.cli.console.plan import show_needs, show_plan
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.conversion.fit.calibrated import CalibrationOptions
    from gqa_convert.conversion.fit.defaults import plan_conversion
    from gqa_convert.conversion.fit.needs import estimate_needs

    check_one_choice_of_groups(groups, groups_file, kv_budget)
    budget, choice = cache_budget(kv_budget), None
    asked = CalibrationOptions(
        calibration,
        calibration_tokens,
        calibration_length,
        steps=fit_steps,
        kl_steps=kl_steps,
        kl_rank=kl_rank,
        context=calibration_context,
        device=device,
    )
    options: dict[str, Any] = {
        "encoder": encoder,
        "native": native,
        "max_shard_size": byte_count(max_shard_size, "--max-shard-size"),
    }
    if budget is None:
        wanted = group_counts(groups, groups_file)
    else:
        from gqa_convert.cli.console.progress import stage_progress
        from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

        with stage_progress(quiet=quiet) as step:
            choice = choose_num_kv_heads(
                source, budget, asked, method=method, revision=revision, progress=step, **options
            )
        wanted = choice.groups
    made, text = plan_conversion(open_checkpoint(source, revision=revision), wanted, method, asked, **options)
    if as_json:
        estimate = {"estimate": estimate_needs(made, text).as_json()}
        print_json(made.summary() | estimate | ({} if choice is None else {"budget": choice.as_json()}))
    elif not quiet:
        if choice is not None:
            from gqa_convert.cli.console.budget import note_choice

            note_choice(choice)
        show_plan(made)
        show_needs(estimate_needs(made, text))
