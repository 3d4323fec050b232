"""What `convert` says last: how much quality the result has lost, as far as that is known, and what to do about it."""

import shlex
from typing import TYPE_CHECKING

from gqa_convert.merging.methods import CALIBRATED_DEFAULT, COPY, METHODS, REPEAT

if TYPE_CHECKING:
    from gqa_convert.checkpoint.provenance import CalibrationRecord

_LITTLE = 0.02
"""Nats per token, below which more training has little to gain."""

_CALIBRATED = f"convert --calibration TEXT, method {CALIBRATED_DEFAULT.name}, loses"


def quality_advice(method: str, source: str, out: str, calibration: "CalibrationRecord | None") -> str | None:
    """Return one line about the quality of a conversion's result; None where no heads were merged.

    Args:
        method: the effective method.
        source: the checkpoint that was converted.
        out: the folder of the result.
        calibration: the text that the method measured on, and the divergence from the source on held-out parts of it.
    """
    if method in (COPY.name, REPEAT.name):
        return None
    measure = f"{shlex.join(['gqa-convert', 'evaluate', source, out, '--data'])} TEXT"
    if METHODS[method].pooling is not None:
        return f"after {method} the model is often useless until it is uptrained: measure it with {measure}; {_CALIBRATED} far less"
    divergence = None if calibration is None else calibration.kl
    if calibration is None or divergence is None:
        less = "" if METHODS[method].trains else f"; {_CALIBRATED} less"
        return f"the loss of quality was not measured: measure it with {measure}{less}"
    if METHODS[method].trains:
        return _after_training(divergence.after, calibration.kl_steps)
    return f"the divergence was measured on {calibration.text}; {_CALIBRATED} less, and evaluate compares both models on other text"


def _after_training(divergence: float, kl_steps: int) -> str:
    """Return whether more training is worth its time after `fit`.

    Args:
        divergence: from the source, in nats per token.
        kl_steps: of the stage that trained all layers together, 0 where it did not run.
    """
    if divergence < _LITTLE:
        return "the result predicts nearly what the source predicts: uptraining has little to gain"
    if not kl_steps:
        return (
            "fit's last stage, which trains all layers together, did not run (by default it does on a CPU up to 200 million "
            "parameters, where memory allows): --kl-steps 200 asks for it, and uptrain with the source as teacher does more, with lora in less memory"
        )
    return (  # docs/real-model.md, Uptraining
        f"--kl-steps {2 * kl_steps} lowers the divergence further, on a model of 135 million parameters as much as uptraining on as "
        "many tokens did; then uptrain with the source as teacher: docs/uptraining.md"
    )
