"""The checks on stored data where OUT has another model type than SOURCE."""

from collections.abc import Callable
from typing import Any

from gqa_convert.verify.checkpoint_reader import CONFIG, Weights, read_object
from gqa_convert.verify.files.carried import check_carried
from gqa_convert.verify.files.provenance import check_provenance, claims_of, judged_method, read_provenance
from gqa_convert.verify.files.weight_files import check_index
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.report import Finding
from gqa_convert.verify.runner import CheckRunner
from gqa_convert.verify.stored import StoredResult, byte_counter, open_out
from gqa_convert.verify.translated.config import check_translated_config
from gqa_convert.verify.translated.heads import FoldedTranslatedComparison, TranslatedHeads
from gqa_convert.verify.translated.tensors import TranslatedComparison
from gqa_convert.verify.translated.tokenizer_config import TOKENIZER_CONFIG, check_tokenizer_config
from gqa_convert.verify.translated.translation import Translation

Progress = Callable[[str, int, int], None]


def check_translated(runner: CheckRunner, inputs: Inputs, progress: Progress) -> StoredResult | None:
    """Check an OUT of another stock model type.

    Args:
        runner: runs the checks.
        inputs: both checkpoints.
        progress: called as tensors are compared.

    Returns:
        What was found; None if OUT's type cannot compute what SOURCE computes, and nothing else was checked.
    """
    translation = runner.read("route", lambda: Translation(inputs.config, inputs.out), Translation.describe)
    if translation is None:
        return None
    target = translation.target
    out = open_out(runner, inputs)
    geometry: Geometry | None = None
    method: Any = None
    if out is not None:
        geometry = runner.read(
            "heads",
            lambda: translation.read_geometry(inputs.weights, out),
            lambda found: Finding(found.describe()),
        )
    if out is not None and geometry is not None:
        method = _check_tensors_and_claims(runner, inputs, out, geometry, translation, progress)
    stated_anew = frozenset({TOKENIZER_CONFIG} if target.special_tokens else ())
    runner.check("carried files", lambda: check_carried(inputs.out, inputs.source, stated_anew))
    if stated_anew:
        runner.check(
            "tokenizer config", lambda: check_tokenizer_config(inputs.out, inputs.source, inputs.config, target)
        )
    return StoredResult(geometry, method, translation=translation)


def _check_tensors_and_claims(
    runner: CheckRunner,
    inputs: Inputs,
    out: Weights,
    geometry: Geometry,
    translation: Translation,
    progress: Progress,
) -> Any:
    """Run the checks that need the geometry, and return the method by whose rules OUT is judged."""
    source, family, groups = inputs.weights, inputs.family, geometry.after
    claims = claims_of(inputs.out)
    method = judged_method(claims, geometry)
    rewriting = translation.rewrite(source, groups, method)
    count = byte_counter(out, progress)
    folds = method in FOLDING
    comparison: TranslatedComparison
    if folds:
        translation.folded = TranslatedHeads(rewriting, out)
        comparison = folded = FoldedTranslatedComparison(rewriting, out, count, translation.folded)
    else:
        comparison = TranslatedComparison(rewriting, out, count)
    runner.check("tensor names", comparison.names)
    merged = runner.check("merged tensors", comparison.merged)
    if folds:
        runner.check("attention functions", lambda: folded.functions(claims))
    runner.check("rewritten tensors", comparison.rewritten)
    runner.check("index", lambda: check_index(out, source))
    runner.check(
        "config",
        lambda: check_translated_config(
            read_object(inputs.out / CONFIG), inputs.config, translation.target, translation.sizes, groups
        ),
    )
    errors = comparison.errors() if merged and not folds else None
    runner.check(
        "provenance", lambda: check_provenance(read_provenance(inputs.out), family, geometry, False, source, errors)
    )
    return method
