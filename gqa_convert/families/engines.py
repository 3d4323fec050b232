"""Which software loads a model type with fewer K/V heads: where it was run, and where it is only listed. Data only.

"Run" means that a tiny random checkpoint of the type, converted from 12 to 3 K/V heads, gave the tokens and logits of
transformers (`check-serving`; docs/serving.md names the versions).
"""

from gqa_convert.checkpoint.strict_json import Config

ENGINES = ("transformers", "vLLM", "llama.cpp")
"""The software that a plan reports on."""


def _table(**names: str) -> dict[str, frozenset[str]]:
    return {engine.replace("_", "."): frozenset(text.split()) for engine, text in names.items()}


_RUN = _table(
    vLLM="""
        apertus arcee bitnet cohere cohere2 cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma
        gemma2 gemma3_text glm glm4 glm4_moe gpt_bigcode gpt_oss granite granite_swa granitemoe granitemoe_swa
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 llama ministral ministral3 mistral mixtral
        nanochat nemotron nemotron-nas olmo olmo2 olmo3 olmoe phi phi3 phi4_multimodal qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
        solar_open stablelm starcoder2 vaultgemma
    """,
    llama_cpp="""
        afmoe apertus arcee cohere cohere2 cohere2_moe dbrx ernie4_5 exaone4 falcon_h1 gemma gemma2 gemma3_text glm glm4
        glm4_moe gpt_bigcode granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_dense
        hy_v3 internlm3 iquestcoder jais2 jamba lfm2 lfm2_moe llama minimax_m2 mistral mixtral nemotron nemotron-nas olmo olmo2 olmo3 phi3
        qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
    """,
)

# The engine's list of architectures names the type, and its code reads the K/V-head count.
_LISTED = _table(
    vLLM="afmoe chatglm dbrx falcon_h1 granitemoehybrid hy_v3 internlm3 iquestcoder jamba lfm2 minimax_m2 nemotron_h qwen3_next",
    llama_cpp="chatglm hunyuan_v1_moe nemotron_h phimoe qwen3_next",
)

# The engine attends to more than the sliding window: vLLM to one token more, llama.cpp to all tokens.
_BEYOND_WINDOW = _table(vLLM="cohere2 cohere2_moe", llama_cpp="mistral mixtral phi3 qwen2 qwen3 starcoder2")
_WINDOW_IF_ASKED = ("qwen2", "qwen3")
"""Model types whose window has an effect only with `use_sliding_window`."""


# The engine ignores scaled positions other than these, or is not known to heed them.
_SCALED = {
    ("llama.cpp", "nemotron-nas"): ("default", "llama3"),
    ("llama.cpp", "starcoder2"): ("default",),
    ("vLLM", "starcoder2"): ("default",),
    ("vLLM", "phi"): ("default",),
}

_ONE_GELU = ("gpt_bigcode", "starcoder2")
"""Model types that llama.cpp runs with one approximation of GELU, whatever the config's activation."""
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def run_in(model_type: str) -> frozenset[str]:
    """Engines besides transformers in which the type was run."""
    return frozenset(engine for engine, types in _RUN.items() if model_type in types)


def listed_in(model_type: str) -> frozenset[str]:
    """Engines that list the type, but in which it was not run."""
    return frozenset(engine for engine, types in _LISTED.items() if model_type in types)


def computes_otherwise(engine: str, config: Config) -> bool:
    """Whether a config has scaled positions or an activation that an engine ignores for its type, so that it computes
    something else.
    """
    activation = config.get("hidden_act", config.get("activation_function"))
    if engine == "llama.cpp" and config.get("model_type") in _ONE_GELU and activation not in (*_GELUS, None):
        return True
    known = _SCALED.get((engine, str(config.get("model_type"))))
    stated = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = stated.get("rope_type", stated.get("type", "default")) if isinstance(stated, dict) else "default"
    return known is not None and scaling not in known


def same_up_to(engine: str, config: Config) -> int | None:
    """Number of tokens of a text up to which an engine computes the same as transformers; None for any number.

    Args:
        engine: one of `ENGINES`.
        config: of the result.
    """
    model_type, window, positions = (
        config.get(key) for key in ("model_type", "sliding_window", "max_position_embeddings")
    )
    if model_type not in _BEYOND_WINDOW.get(engine, ()) or not isinstance(window, int):
        return None
    if model_type in _WINDOW_IF_ASKED and not config.get("use_sliding_window"):
        return None
    return None if isinstance(positions, int) and positions <= window else window
