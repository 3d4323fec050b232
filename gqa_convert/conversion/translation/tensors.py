"""Determines where every row of every output tensor comes from, using the source's headers alone."""

from collections.abc import Iterator, Mapping

from gqa_convert.conversion.translation.description import Described, TranslatedTensor, Translation
from gqa_convert.conversion.translation.layer import LayerTranslation
from gqa_convert.conversion.translation.source_tensors import SourceTensors
from gqa_convert.families.source_sizes import Config
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.methods import MEAN, MergeMethod


def translate_tensors(
    sources: Mapping[str, Described],
    config: Config,
    target_architecture: TargetArchitecture,
    groups: int,
    method: MergeMethod = MEAN,
) -> Translation:
    """Describe every tensor of the target architecture in terms of the source's tensors.

    Args:
        sources: the headers of every tensor of the source, by name, in file order.
        config: the source's config.json.
        target_architecture: the result of `find_target_architecture` for that config.
        groups: K/V heads per layer of the result; divides the source's heads.
        method: how K/V heads are merged.

    Raises:
        ConfigError: a tensor is missing, unexpected, or contradicts the config.
        UnsupportedFormatError: a tensor that must be computed has a dtype that does not support arithmetic.
    """
    source = SourceTensors(sources, config, target_architecture, groups, method)
    old, new, hidden = source.origin.names, target_architecture.names, source.dimensions.hidden_size
    tensors = [
        source.copy(f"{source.old}{before}.weight", f"{source.new}{after}.weight", (None, hidden))
        for before, after in ((old.embedding, new.embedding), (old.positions, new.positions))
        if before and after
    ]
    layers = []
    for number in range(source.dimensions.layers):
        layer = LayerTranslation(source, number)
        tensors += layer.tensors()
        layers.append(layer.attention())
    tensors += source.norm(f"{source.old}{old.final_norm}", f"{source.new}{new.final_norm}")
    tensors += _head(source)
    return Translation(target_architecture, groups, tuple(tensors), tuple(layers), source.unused())


def _head(source: SourceTensors) -> Iterator[TranslatedTensor]:
    """The output projection. Checkpoints with tied embeddings may omit it; one without a head has no head bias."""
    old, new = source.origin.names, source.target_architecture.names.heads[0]
    embedding = f"{source.old}{old.embedding}.weight"
    vocabulary = source.sources[embedding].shape[0]
    name = next((f"{head}.weight" for head in old.heads if f"{head}.weight" in source.sources), None)
    if name:
        yield source.copy(name, f"{new}.weight", (None, source.dimensions.hidden_size))
        vocabulary = source.sources[name].shape[0]
    elif not source.config.get("tie_word_embeddings", source.origin.tied) and source.old:
        source.claim(f"{old.heads[0]}.weight", None, source.dimensions.hidden_size)  # raises: it is missing
    if source.target_architecture.head_bias and (name or source.old):
        bias = f"{(name or 'lm_head.weight').removesuffix('.weight')}.bias"
        if source.origin.head_bias and bias in source.sources:
            yield source.copy(bias, f"{new}.bias", (vocabulary,))
        else:
            yield source.filled(f"{new}.bias", vocabulary, name or embedding)
