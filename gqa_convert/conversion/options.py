"""The options of a conversion."""

from dataclasses import dataclass, field

from gqa_convert.conversion.fit.options import CalibrationOptions as CalibrationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What a conversion does beside the numbers of K/V heads, as the user asked for it.

    Attributes:
        method: `mean`, `first`, `factor` or `fit`; by default `fit` with calibration text. Without it, `factor` on text
            that every machine has, or `mean` where the source cannot read text.
        calibration: the text of `fit` and `factor`, and what is done on it.
        encoder: convert an encoder's self-attention too.
        native: rewrite a type without a K/V-head count for a stock class that has one (True), add a modelling file
            (False), or the former where possible (None).
        revision: branch, tag or commit on the Hub.
        overwrite: replace an existing result once the new one is complete.
        hash_weights: record the SHA-256 of the weight files of source and result, which means reading them whole.
            Methods that work on whole layers record that of the result in any case.
        command: the command line, for the provenance record.
    """

    method: str | None = None
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    encoder: bool = False
    native: bool | None = None
    revision: str | None = None
    overwrite: bool = False
    hash_weights: bool = False
    command: list[str] | None = None
