"""Runs a verification: reads the inputs, checks the stored data, then checks what the models compute."""

from collections.abc import Callable
from pathlib import Path

from gqa_convert.errors import OptionError
from gqa_convert.verify.files.hashes import check_hashes
from gqa_convert.verify.files.provenance import claims_of
from gqa_convert.verify.inputs import Progress, read_inputs
from gqa_convert.verify.report import VerificationReport
from gqa_convert.verify.runner import CheckRunner, OnCheck
from gqa_convert.verify.stored import check_stored


def verify_checkpoint(
    out: str | Path,
    source: str | Path,
    *,
    revision: str | None = None,
    logits: bool = True,
    text: Path | None = None,
    max_text_tokens: int | None = None,
    seed: int = 0,
    on_check: OnCheck = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> VerificationReport:
    """Check that `out` is the correct conversion of `source`.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from.
        revision: branch, tag or commit on the Hub.
        logits: also load and run both models.
        text: a UTF-8 file on which the loss of both models is measured; needs `logits`.
        max_text_tokens: measure only on the first tokens of the text.
        seed: the seed of the random tokens that the models run on.
        on_check: called as each check ends.
        on_note: called with sentences about a SOURCE that is rewritten first.
        progress: called with the progress of the work.

    Returns:
        A report. Damage to `out` of any kind is a failed check in it.

    Raises:
        SourceNotFoundError: `out` is not a folder, or `source` holds no checkpoint.
        ConfigError: the config of `source` is damaged.
        CorruptCheckpointError: a tensor of `source` cannot be read.
        UnsupportedFamilyError: the model type of `source` cannot be converted.
        OptionError: the text cannot be read or scored, or `logits` is off; or no stock class computes what SOURCE does.
    """
    if text is not None and not logits:
        raise OptionError("--text needs both models to run: leave out --text or --no-logits")
    with read_inputs(out, source, revision=revision, text=text, on_note=on_note) as inputs:
        runner = CheckRunner(VerificationReport(str(inputs.out), str(source)), on_check)
        claims = claims_of(inputs.out)
        stored = check_stored(runner, inputs, progress)
        if claims.get("result") is not None:
            runner.check("hashes", lambda: check_hashes(inputs.out, claims["result"]))
        if logits:
            from gqa_convert.verify.behaviour.run import check_behaviour

            check_behaviour(runner, inputs, stored, seed=seed, max_text_tokens=max_text_tokens, progress=progress)
        return runner.report
