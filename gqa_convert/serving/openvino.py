"""OpenVINO, through optimum-intel."""

from .client import Answer, Request
from .optimum import ask_exported


def answer(request: Request) -> Answer:
    """Export the checkpoint to OpenVINO in float32, load the result and answer the request.

    Raises:
        NotSupportedError: there is no export of this model type.
    """
    from optimum.intel import OVModelForCausalLM

    # without this hint, processors with bfloat16 instructions would compute in bfloat16
    precise = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return ask_exported(OVModelForCausalLM, request, load_in_8bit=False, ov_config=precise)
