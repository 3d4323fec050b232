"""`gqa-convert convert`."""

import sys
from typing import Annotated

import typer

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
    NewFolder,
    Quiet,
    ReplaceResult,
    Revision,
    Seed,
    ShardSize,
    Source,
    byte_count,
    cache_budget,
    check_one_choice_of_groups,
    group_counts,
)


def convert(
    source: Source,
    out: NewFolder,
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
    seed: Seed = 0,
    encoder: Encoder = False,
    native: Native = None,
    revision: Revision = None,
    max_shard_size: ShardSize = None,
    overwrite: ReplaceResult = False,
    hash_weights: Annotated[
        bool,
        typer.Option(
            "--hash", help="Record the SHA-256 of the weight files of SOURCE and OUT, which reads them completely."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge the K/V heads of SOURCE into N groups and write the result to OUT.

    With --calibration, method fit adapts the merged heads to the text, layer by layer and then all layers together if
    the model fits in memory. It loses least by far and needs no GPU, but uses one if there is one; a killed run resumes
    with the same command.

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration text.txt

    The GPUs of a machine can share the text (docs/conversion.md).

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration text.txt --device cuda:0,cuda:1

    Without --calibration, method factor measures on a few thousand tokens of this Python's own sources, which is
    quicker and loses more; a source without a tokenizer gets mean. A named --method factor merges from the
    weights alone, one layer in memory at a time. Methods mean (the GQA paper's) and first copy from disk to
    disk and usually need uptraining afterwards.

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8
      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --method mean

    Of a T5, the decoder is converted, and the encoder only with --encoder; the result loads with
    trust_remote_code=True. Pythia becomes a stock phi unless --no-native keeps it a GPT-NeoX.

      gqa-convert convert ./flan-t5-xl ./flan-t5-xl-gqa8 --groups 8 --calibration text.txt
      gqa-convert convert ./pythia-6.9b ./pythia-6.9b-gqa8 --groups 8 --no-native

    A Hub id is downloaded first. More groups than SOURCE has K/V heads repeat heads exactly, for tensor parallelism.

      gqa-convert convert org/model ./model-mqa --groups 1 --revision main --calibration text.txt
      gqa-convert convert ./gqa4 ./gqa16 --groups 16

    Layers of most decoders may differ: list a number for each. The result loads with trust_remote_code=True; that of a
    Llama, a Mistral or a Qwen2 is a DeciLM where it can be, which vLLM and llama.cpp run too.

      gqa-convert convert ./model ./model-by-layer --groups 8,8,4,4,2,2,4,8 --calibration text.txt
      gqa-convert convert ./model ./model-by-layer --groups-file counts.json --calibration text.txt

    With --kv-budget the list is chosen: each layer's cost is measured on the text, with method fit by short fits, and
    the layers that lose least are merged most.

      gqa-convert convert ./model ./model-half --kv-budget 50% --calibration text.txt
    """
    from gqa_convert.checkpoint.early_reading import read_early

    read_early(source, out)
    from gqa_convert.cli.console.conversion import show_conversion
    from gqa_convert.cli.console.conversion_progress import ConversionScreen
    from gqa_convert.cli.console.progress import progress_screen
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.conversion.run import convert_checkpoint

    check_one_choice_of_groups(groups, groups_file, kv_budget)
    shard_size = byte_count(max_shard_size, "--max-shard-size")
    budget, choice = cache_budget(kv_budget), None
    if budget is None:
        wanted = group_counts(groups, groups_file)
    else:
        from gqa_convert.cli.console.budget import note_choice
        from gqa_convert.cli.console.progress import stage_progress
        from gqa_convert.conversion.fit.calibrated import CalibrationOptions
        from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

        with stage_progress(quiet=quiet) as step:
            choice = choose_num_kv_heads(
                source,
                budget,
                CalibrationOptions(
                    source=calibration,
                    tokens=calibration_tokens,
                    sequence_length=calibration_length,
                    seed=seed,
                    steps=fit_steps,
                    kl_steps=kl_steps,
                    kl_rank=kl_rank,
                    context=calibration_context,
                    device=device,
                ),
                out=out,
                method=method,
                revision=revision,
                overwrite=overwrite,
                progress=step,
                encoder=encoder,
                native=native,
                max_shard_size=shard_size,
            )
        wanted = choice.groups
        if not quiet:
            note_choice(choice)
    with progress_screen(quiet=quiet) as progress:
        screen = ConversionScreen(progress)
        result = convert_checkpoint(
            source,
            out,
            wanted,
            method=method,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            calibration_length=calibration_length,
            calibration_context=calibration_context,
            fit_steps=fit_steps,
            kl_steps=kl_steps,
            kl_rank=kl_rank,
            device=device,
            seed=seed,
            encoder=encoder,
            native=native,
            revision=revision,
            overwrite=overwrite,
            hash_weights=hash_weights,
            on_layer=screen.layer,
            max_shard_size=shard_size,
            command=["gqa-convert", *sys.argv[1:]],
            on_plan=lambda plan: screen.will_write(plan.weight_bytes_after),
            progress=screen.written,
        )
    if as_json:
        print_json(result.as_json() | ({} if choice is None else {"budget": choice.as_json()}))
    elif not quiet:
        show_conversion(result)
