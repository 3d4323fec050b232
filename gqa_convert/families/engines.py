"""Where engines compute something else than transformers."""

from gqa_convert.runtime.json_objects import Config

from .composite import decoder_config
from .context_length import has_window, scaled_positions
from .records import record_of

LOADERS = ("transformers", "vLLM", "llama.cpp")
"""The software that a plan reports on."""

# The engine ignores scaled positions other than these, or is not known to heed them.
_SCALED = {
    ("llama.cpp", "nemotron-nas"): ("default", "llama3"),
    ("llama.cpp", "starcoder2"): ("default",),
    ("vLLM", "starcoder2"): ("default",),
    ("vLLM", "phi"): ("default",),
}

_ONE_GELU = ("gpt_bigcode", "starcoder2")
"""Model types that llama.cpp runs with one approximation of GELU, whatever the config's activation.
"""
_GELUS = (None, "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def computes_otherwise(engine: str, config: Config) -> bool:
    """Whether a config has scaled positions or an activation that an engine ignores for its type,
    so that it computes something else.
    """
    model_type = str(config.get("model_type"))
    activation = config.get("hidden_act", config.get("activation_function"))
    if engine == "llama.cpp" and model_type in _ONE_GELU and activation not in _GELUS:
        return True
    scaling, _ = scaled_positions(config)
    return scaling not in _SCALED.get((engine, model_type), (scaling,))


def same_up_to(engine: str, config: Config) -> int | None:
    """Number of tokens of a text up to which an engine computes the same as transformers; None for
    any number.

    Args:
        engine: one of `LOADERS`.
        config: of the result.
    """
    if engine not in record_of(config).beyond_window_in or not has_window(config):
        return None
    stated = decoder_config(config)
    window, positions = stated["sliding_window"], stated.get("max_position_embeddings")
    return None if isinstance(positions, int) and positions <= window else window
