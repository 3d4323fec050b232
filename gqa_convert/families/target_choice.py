"""Which target architecture computes the same as a source, and in which software."""

from gqa_convert.errors import ConfigError
from gqa_convert.families.source_sizes import Config, Rotary, read_dimensions, read_rotary
from gqa_convert.families.target_architectures import (
    GPT_BIGCODE_FROM_GPT2,
    PHI_FROM_CODEGEN,
    PHI_FROM_GPT_NEOX,
    PHI_FROM_GPTJ,
    STARCODER2_FROM_GPT_NEOX,
    NoTargetArchitecture,
    TargetArchitecture,
    engines_of,
)

_GELUS = frozenset({"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"})
"""Activations that llama.cpp computes by one approximation of GELU, as it does for every model of these
architectures.
"""


def find_target_architecture(config: Config, groups: int) -> TargetArchitecture | NoTargetArchitecture:
    """The stock class that computes the same as a source with `groups` K/V heads, or why there is none.

    Raises:
        ConfigError: a count is missing from the config or absurd.
    """
    model_type = config.get("model_type")
    target_architecture = _target_of_type(config, groups)
    if isinstance(target_architecture, NoTargetArchitecture):
        return target_architecture
    if "auto_map" in config:
        return NoTargetArchitecture(
            f"the checkpoint contains modelling code for {model_type}, which may compute something else"
        )
    architectures = config.get("architectures") or []
    if len(architectures) > 1 or not set(architectures) <= {source for source, _ in target_architecture.architectures}:
        return NoTargetArchitecture(
            f"{target_architecture.model_type} stands for language models, and this is a {', '.join(map(str, architectures))}"
        )
    dimensions = read_dimensions(config)
    if target_architecture.source_type == "gpt2":
        return target_architecture
    rotary = read_rotary(config, dimensions)
    if isinstance(rotary, NoTargetArchitecture):
        return rotary
    if target_architecture.model_type == "starcoder2" and rotary.rotated != dimensions.head_dim:
        return NoTargetArchitecture(
            f"no stock class with a K/V-head count has sequential blocks and {rotary.rotated} rotary dimensions of "
            f"{dimensions.head_dim} in a head (in starcoder2 all are rotary)"
        )
    if target_architecture.source_type == "codegen" and dimensions.heads % 4:
        raise ConfigError(
            f"config.json has {dimensions.heads} heads, and codegen needs a multiple of 4: repair the config"
        )
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocabulary, int) and not -vocabulary <= pad < vocabulary:
        return NoTargetArchitecture(
            f"{target_architecture.model_type} needs a padding token inside its vocabulary, and pad_token_id is {pad}"
        )
    return target_architecture


def engines_for(config: Config, target_architecture: TargetArchitecture) -> frozenset[str]:
    """Software that computes what this source computes: some engines ignore the stated activation or rotary scaling."""
    activation = (
        config.get("hidden_act", "gelu")
        if target_architecture.source_type == "gpt_neox"
        else config.get("activation_function", "gelu_new")
    )
    engines = engines_of(target_architecture)
    if activation not in _GELUS:
        engines -= {"llama.cpp"}
    if target_architecture.source_type == "gpt_neox":
        rotary = read_rotary(config, read_dimensions(config))
        if isinstance(rotary, Rotary) and rotary.scaling:
            engines &= {"transformers"}
    return engines


def _target_of_type(config: Config, groups: int) -> TargetArchitecture | NoTargetArchitecture:
    model_type = config.get("model_type")
    if model_type == "gpt_neox":
        return PHI_FROM_GPT_NEOX if config.get("use_parallel_residual", True) else STARCODER2_FROM_GPT_NEOX
    if model_type == "gptj":
        return PHI_FROM_GPTJ
    if model_type == "codegen":
        return PHI_FROM_CODEGEN
    if model_type == "gpt2":
        if config.get("add_cross_attention"):
            return NoTargetArchitecture("gpt_bigcode has no cross-attention with a single K/V head")
        if groups != 1:
            return NoTargetArchitecture(
                "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query heads"
            )
        return GPT_BIGCODE_FROM_GPT2
    return NoTargetArchitecture(f"no stock class is known to compute what {model_type} does with fewer K/V heads")
