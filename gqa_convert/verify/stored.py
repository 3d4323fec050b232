"""The checks on stored data where OUT has SOURCE's tensor names: files, tensors, configs and claims."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.checkpoint_reader import CONFIG, Weights, read_object
from gqa_convert.verify.config import check_config
from gqa_convert.verify.exact.tensors import TensorComparison
from gqa_convert.verify.files.carried import check_carried
from gqa_convert.verify.files.provenance import check_provenance, claims_of, judged_method
from gqa_convert.verify.files.weight_files import check_files, check_index
from gqa_convert.verify.folded.tensors import FoldedComparison
from gqa_convert.verify.geometry import Geometry
from gqa_convert.verify.geometry_reader import read_geometry
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.layerwise import layerwise_form
from gqa_convert.verify.modelling_file import check_modelling_file, modelling_file
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.runner import CheckRunner

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class StoredResult:
    """What the checks on stored data found out about OUT."""

    geometry: Geometry | None
    """None if OUT is too damaged to have one."""
    method: Any = None
    """The method by whose rules OUT is judged."""
    own_file: bool | None = None
    """Whether OUT's modelling file is the package's own; None if OUT needs none."""


def check_stored(runner: CheckRunner, inputs: Inputs, progress: Progress) -> StoredResult:
    """Check an OUT of SOURCE's model type, or one with a modelling file.

    Args:
        runner: runs the checks.
        inputs: both checkpoints.
        progress: called as tensors are compared.
    """
    source, family = inputs.weights, inputs.family
    out = open_out(runner, inputs)
    geometry: Geometry | None = None
    method: Any = None
    if out is not None:
        geometry = runner.read(
            "heads",
            lambda: read_geometry(
                family,
                inputs.decoder_config,
                source,
                out,
                form=layerwise_form(inputs.out, family),
            ),
            lambda found: Finding(found.describe()),
        )
    if out is not None and geometry is not None:
        method = _check_tensors_and_claims(runner, inputs, out, geometry, progress)
    modeling = family.modeling if geometry is None else modelling_file(family, geometry)
    own_file: bool | None = None
    if modeling and (geometry is not None or (inputs.out / modeling.files[0].name).is_file()):
        own_file = runner.check(
            "modelling file", lambda: check_modelling_file(inputs.out, read_object(inputs.out / CONFIG), modeling)
        )
    elsewhere = frozenset(file.name for file in modeling.files) if modeling else frozenset()
    runner.check("carried files", lambda: check_carried(inputs.out, inputs.source, elsewhere))
    return StoredResult(geometry, method, own_file)


def _check_tensors_and_claims(
    runner: CheckRunner, inputs: Inputs, out: Weights, geometry: Geometry, progress: Progress
) -> Any:
    """Run the checks that need the geometry, and return the method by whose rules OUT is judged."""
    source, family = inputs.weights, inputs.family
    claims = claims_of(inputs.out)
    method = judged_method(claims, geometry)
    encoder = claims.get("encoder") is True if geometry.encoder is None else geometry.encoder
    count = byte_counter(out, progress)
    folds = method in FOLDING
    comparison: TensorComparison
    if folds:
        comparison = folded = FoldedComparison(source, out, geometry, method, family, inputs.decoder_config, count)
    else:
        comparison = TensorComparison(source, out, geometry, method, count)
    runner.check("tensor names", comparison.names)
    runner.check("untouched tensors", comparison.untouched)
    merged = runner.check("merged tensors", comparison.merged)
    if folds:
        runner.check("attention functions", lambda: folded.functions(claims))
    runner.check("index", lambda: check_index(out, source))
    runner.check(
        "config", lambda: check_config(read_object(inputs.out / CONFIG), inputs.config, family, geometry, encoder)
    )
    errors = comparison.errors() if merged and not folds else None
    runner.check(
        "provenance",
        lambda: check_provenance(inputs, geometry, encoder, errors),
    )
    return method


def open_out(runner: CheckRunner, inputs: Inputs) -> Weights | None:
    """Run the check `files` and return OUT's tensors; None if they cannot be opened."""
    return runner.read(
        "files", lambda: Weights(inputs.out, Failure), lambda weights: check_files(weights, inputs.weights)
    )


def byte_counter(out: Weights, progress: Progress) -> Callable[[int], None]:
    """A function to call with the number of bytes of OUT in each block compared."""
    try:
        total = sum(map(out.nbytes, out.file_of))
    except Failure:  # the checks on tensors find the damage again and report it
        total = 0
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("tensors", done, total)

    return add
