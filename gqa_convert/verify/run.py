"""Runs a verification: reads the inputs, checks what is stored, then checks what the models compute."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.errors import OptionError
from gqa_convert.families.family import Modeling
from gqa_convert.verify.config import check_config, check_modelling_file
from gqa_convert.verify.files import check_carried, check_files, check_hashes, check_index
from gqa_convert.verify.geometry import Geometry, read_geometry
from gqa_convert.verify.inputs import Inputs, Progress, read_inputs
from gqa_convert.verify.models import Subject, check_models
from gqa_convert.verify.provenance import check_functions, check_provenance, judged_method, read_claims
from gqa_convert.verify.report import Failure, VerificationReport
from gqa_convert.verify.tensors import FACTORED, FITTED, TensorChecks, foldable_roles
from gqa_convert.verify.tokenizers import check_tokenizer
from gqa_convert.verify.weights import Weights


def verify_checkpoint(
    out: str | Path,
    source: str | Path,
    *,
    revision: str | None = None,
    logits: bool = True,
    text: Path | None = None,
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
    with read_inputs(out, source, revision, text, on_note) as inputs:
        report = VerificationReport(str(inputs.out), str(source))
        verification = _Verification(report, inputs, progress)
        verification.check_stored()
        if logits:
            verification.check_behaviour()
        return report


@dataclass
class _Verification:
    """One verification, and what its checks found out about OUT."""

    report: VerificationReport
    inputs: Inputs
    progress: Progress
    geometry: Geometry | None = None
    """None if OUT is too damaged to have one."""
    method: Any = None
    """By whose rules OUT is judged."""
    is_own_code: bool = True
    """Whether OUT's modelling files, if it must have any, are the package's own."""

    def __post_init__(self) -> None:
        self.claims = _readable_claims(self.inputs.out)
        family, stated = self.inputs.family, self.inputs.out_config.get("model_type")
        self.forms = [form for form in family.layerwise if form.model_type == stated]
        """The form of layers that differ that OUT's config has, if any."""
        self.modeling: Modeling | None = self.forms[0] if self.forms else family.modeling
        """The modelling file that OUT must come with."""

    def check_stored(self) -> None:
        """Check everything that can be checked without running a model."""
        report, inputs = self.report, self.inputs
        out = self._open_out()
        if out is not None:
            report.check("heads", lambda: self._read_heads(out))
        if out is not None and self.geometry is not None:
            self._check_contents(out, self.geometry)
        modeling, shipped = self.modeling, []
        if modeling is not None and (self.geometry is not None or (inputs.out / modeling.files[0].name).is_file()):
            shipped = [file.name for file in modeling.files]
            self.is_own_code = report.check(
                "modelling file", lambda: check_modelling_file(inputs.out, inputs.out_config, modeling)
            )
        report.check("carried files", lambda: check_carried(inputs.out, inputs.source.folder, shipped))
        if self.claims:
            required = self.method in (*FACTORED, *FITTED)
            report.check("hashes", lambda: check_hashes(inputs.out, self.claims, required=required))

    def check_behaviour(self) -> None:
        """Run both models, one in memory at a time."""
        report, inputs = self.report, self.inputs
        if not inputs.has_class:
            report.check("behaviour", lambda: _not_run(inputs))
            return
        if inputs.out_config.get("model_type") != inputs.original_config.get("model_type"):
            # transformers 5 has no tokenizer class for gpt_bigcode, so that its class may be another
            other = inputs.is_rewritten and inputs.family.model_type == "gpt_bigcode"
            if not inputs.why_not_loaded:
                folder = inputs.original.folder
                report.check("tokenizer", lambda: check_tokenizer(inputs.out, folder, other_class=other))
        if self.geometry is None or not self.is_own_code:
            for name in ("loads", "logits", "cache heads", "cached decoding"):
                report.check(name, self._not_executed)
            return
        subject = Subject(report, inputs, self.geometry, self.claims, self.method, self.modeling, self.progress)
        check_models(subject)

    def _not_executed(self) -> str:
        if self.geometry is None:
            raise Failure("not run: OUT's tensors did not pass their checks")
        raise Failure("not run: OUT's modelling file did not pass its check, and other code is not executed")

    def _open_out(self) -> Weights | None:
        """OUT's tensors; None if they cannot be opened."""
        opened: list[Weights] = []

        def files() -> str:
            opened.append(Weights(self.inputs.out, Failure))
            return check_files(opened[0], self.inputs.source)

        self.report.check("files", files)
        return opened[0] if opened else None

    def _read_heads(self, out: Weights) -> str:
        inputs, family = self.inputs, self.inputs.family
        shapes = inputs.source.shapes, out.shapes
        geometry = read_geometry(
            family, inputs.decoder_config, *shapes, may_differ=bool(self.forms) or family.reads_per_layer_config
        )
        self.geometry = geometry
        self.method = judged_method(self.claims, geometry)
        if not self.forms and not geometry.changed and not family.is_converted:
            self.modeling = None  # stock classes load it
        return geometry.describe()

    def _check_contents(self, out: Weights, geometry: Geometry) -> None:
        """Check tensors, index, config and record."""
        report, inputs, method = self.report, self.inputs, self.method
        total = sum(stored.nbytes for stored in out.tensors.values())
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.progress("tensors", done, total)

        foldable = foldable_roles(method, geometry, inputs)
        tensors = TensorChecks(inputs.source, out, geometry, method, foldable, count)
        report.check("tensor names", tensors.names)
        report.check("untouched tensors", tensors.untouched)
        merged = report.check("merged tensors", tensors.merged)
        if foldable:
            report.check(
                "attention functions", lambda: check_functions(inputs, out, self.claims, geometry, method, foldable)
            )
        report.check("index", lambda: check_index(out, inputs.source))
        encoder = geometry.encoder
        if encoder is None:
            encoder = self.claims.get("encoder") is True
        report.check("config", lambda: check_config(inputs, geometry, self.modeling, encoder=encoder))
        errors = tensors.errors if merged and not foldable else None
        report.check("provenance", lambda: check_provenance(inputs, geometry, self._route(), encoder, errors))

    def _route(self) -> str:
        """What loads OUT."""
        if self.modeling is not None:
            return "own file"
        return "native" if self.inputs.has_class else "checkpoint's own code"


def _readable_claims(out: Path) -> dict[str, Any]:
    """OUT's claims; empty if the record cannot be read, which the check on provenance reports."""
    try:
        return read_claims(out)
    except Failure:
        return {}


def _not_run(inputs: Inputs) -> str:
    model_type = inputs.family.model_type
    return f"not run: transformers has no class of type {model_type}, and code in checkpoints is never executed"
