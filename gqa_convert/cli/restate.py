"""`gqa-convert restate`."""

import shlex
from typing import Any

from .options import Json, NewFolder, Quiet, ReplaceResult, Revision, Source


def restate(
    source: Source,
    out: NewFolder,
    revision: Revision = None,
    overwrite: ReplaceResult = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a checkpoint that needs its own Python code, or quantised weights, so that stock classes load it as it is.

    Baichuan 7B, InternLM, InternLM2, Yi and open_llama become llama, the first Qwen becomes qwen2, MiniCPM granite,
    stablelm_epoch stablelm, phi-msft phi, and RefinedWeb falcon. Tensors are renamed and fused projections are split.
    K/V heads do not change, and logits are those of SOURCE up to rounding. The checkpoint's code is never run.

    Weights quantised as FP8, MXFP4, by compressed-tensors or by bitsandbytes are written dequantised in bfloat16, all but
    FP8 by transformers' own readers, which load the whole model into memory.

    Examples:

      gqa-convert restate Qwen/Qwen3-8B-FP8 ./qwen3-8b
      gqa-convert restate ./Baichuan2-7B-Base ./baichuan2-llama
      gqa-convert convert ./baichuan2-llama ./baichuan2-gqa8 --groups 8
    """
    from contextlib import ExitStack

    from gqa_convert.cli.console.progress import byte_progress
    from gqa_convert.cli.console.screen import print_json, print_note, stderr_console, stdout_console, styled
    from gqa_convert.conversion.restating.restate import restate_checkpoint

    with ExitStack() as stack:
        bar: list[Any] = []

        def begin(made: Any) -> None:
            bar.append(stack.enter_context(byte_progress("rewriting", made.weight_bytes_after, quiet=quiet)))

        result = restate_checkpoint(
            source,
            out,
            revision=revision,
            overwrite=overwrite,
            on_plan=begin,
            progress=lambda nbytes: bar[0](nbytes),
        )
    if not quiet:
        for note in result.notes:
            print_note(note, stderr_console())
    if as_json:
        print_json(result.as_json())
    elif not quiet:
        console = stdout_console()
        console.print(
            styled(("done", "green"), f"  {_change(result)}, in {result.out}"),
            soft_wrap=True,
        )
        console.print(f"      next  {shlex.join(['gqa-convert', 'plan', result.out, '--groups'])} N", soft_wrap=True)


def _change(result: Any) -> str:
    if result.model_type == result.result_model_type:
        return f"{result.model_type}, dequantised"
    return f"{result.model_type} -> {result.result_model_type}"
