"""Whether the tensors are those that transformers will look for: it fills what it misses with fresh numbers and a
warning, and refuses shapes that the config does not state.

Only names, shapes and the config are looked at. Tensors beyond those are no mistake: transformers leaves them out.
"""

import re
from collections.abc import Iterable, Iterator

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import ConfigError
from gqa_convert.families.geometry import AttentionFinder, config_value
from gqa_convert.families.records.wrappers import FURTHER_ROWS

_BY_TOKEN = re.compile(
    r"(?:.+\.)?(?:embed_tokens|wte|word_embeddings|shared|embed_in|embeddings|lm_head|embed_out|proj_out|output_projection)\.weight"
)
"""The tensors with a row for each token, [vocabulary, hidden_size], in all families: embeddings and the head."""

_VOCABULARY = ("vocab_size", "decoder_vocab_size", "padded_vocab_size")
"""Config keys of the number of rows."""


def check_tensors(checkpoint: Checkpoint, finder: AttentionFinder) -> Iterator[str]:
    """Notes about tensors that transformers does not look for.

    Args:
        checkpoint: the opened source.
        finder: its attention.

    Raises:
        ConfigError: a layer or its attention is missing, is where transformers does not look, or has other shapes than
            the config states.
    """
    for place, keys in finder.family.layers:
        yield from _Layers(checkpoint, finder, place, keys).check()
    _check_widths(finder)
    _check_vocabulary(checkpoint, finder)


class _Layers:
    """The layers of a decoder or an encoder, by the names of their tensors."""

    def __init__(self, checkpoint: Checkpoint, finder: AttentionFinder, place: str, keys: tuple[str, ...]) -> None:
        self._checkpoint, self._family, self._place = checkpoint, finder.family, place
        self._where, self._config = finder.where, finder.config
        pattern = re.compile(rf"(?:{'|'.join(map(re.escape, finder.family.prefixes))}){re.escape(place)}\.(\d+)\.(.+)")
        looked_at = "|".join(map(re.escape, (*finder.family.attention, *finder.family.without_attention)))
        modules = re.compile(rf"(?:.+\.)?(?:{looked_at})\.")
        self._found: dict[int, set[str]] = {}
        """By layer, the names in it that are looked at; there may be thousands of experts beside them."""
        for name in finder.entries:
            if match := pattern.fullmatch(name):
                names = self._found.setdefault(int(match[1]), set())
                if modules.match(match[2]):
                    names.add(match[2])
        self._example = finder.layers[0].module
        self._key, self._count = self._stated(keys)

    def _stated(self, keys: tuple[str, ...]) -> tuple[str, int]:
        """The config's number of layers, and its key; where it has none, as many as there are."""
        for key in keys:
            value = config_value(self._config, key)
            if isinstance(value, list):
                value = len(value)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise ConfigError(f"{self._where} has {key} = {value!r} where a count belongs: repair the config")
                return key, value
        return keys[0], max(self._found, default=0) + 1

    def check(self) -> Iterator[str]:
        is_encoder = self._family.encoder is not None and self._place.split(".")[0] == self._family.encoder
        if not self._found and is_encoder and not self._config.get("is_encoder_decoder", True):
            return  # the decoder alone
        if not self._found:
            expected = next((prefix for prefix in self._family.prefixes if prefix), "")
            raise ConfigError(
                f"{self._checkpoint.source_id} has no tensors {expected}{self._place}.0..., where transformers looks for the layers of a "
                f"{self._family.model_type}; attention is at {self._example}: rename the tensors, or save the model with save_pretrained"
            )
        missing = next((number for number in range(self._count) if number not in self._found), None)
        if missing is not None:
            raise ConfigError(
                f"{self._where} states {self._key} = {self._count}, and the weights hold {_listed(self._found)} of {self._place} and none of "
                f"layer {missing}: correct the config, or complete the weights"
            )
        self._check_attention()
        extra = [number for number in self._found if number >= self._count]
        if extra:
            yield (
                f"{self._where} states {self._key} = {self._count}: transformers leaves {_listed(extra)} of {self._place} out, which the result "
                "holds nevertheless"
            )

    def _check_attention(self) -> None:
        """Every layer has the attention that another one has, unless it has something else in its place."""
        family = self._family
        inner = (family.fused,) if family.fused else (family.query, family.key, family.value)
        shared = config_value(self._config, family.shared_layers_key) if family.shared_layers_key else None
        own = self._count - (shared if type(shared) is int else 0)
        for attention in family.attention:
            pattern = re.compile(rf"((?:.+\.)?{re.escape(attention)})\.(?:{'|'.join(map(re.escape, inner))})\.weight")
            modules = {
                number: {m[1] for name in names if (m := pattern.fullmatch(name))}
                for number, names in self._found.items()
            }
            if not any(modules.values()):
                continue
            for number in range(self._count):
                if not modules[number] and not self._has_another(number):
                    example = next(iter(next(filter(None, modules.values()))))
                    raise self._lacks(number, f"{example}.{inner[0]}.weight")
                for module in modules[number]:
                    for projection in (*(inner if number < own else (family.query,)), family.output):
                        if f"{module}.{projection}.weight" not in self._found[number]:
                            raise self._lacks(number, f"{module}.{projection}.weight")

    def _has_another(self, number: int) -> bool:
        kinds = self._config.get("layer_types")
        if isinstance(kinds, list) and number < len(kinds) and kinds[number] in ("full_attention", "sliding_attention"):
            return False
        marks = "|".join(map(re.escape, self._family.without_attention))
        return bool(marks) and any(re.match(rf"(?:.+\.)?(?:{marks})\.", name) for name in self._found[number])

    def _lacks(self, number: int, name: str) -> ConfigError:
        return ConfigError(
            f"{self._checkpoint.source_id} has no tensor {self._place}.{number}.{name}, which transformers looks for: the checkpoint is "
            "incomplete, download or copy it again"
        )


def _listed(numbers: Iterable[int]) -> str:
    """ "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"layer{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} " + ", ".join(
        "-".join(map(str, run)) for run in runs
    )


def _check_widths(finder: AttentionFinder) -> None:
    """Projections are computed from the residual stream and added to it."""
    family, hidden_key = finder.family, finder.family.hidden_key
    for layer in finder.layers:
        names = (family.fused,) if family.fused else (family.query, family.key, family.value)
        _check_axis(
            finder,
            [f"{layer.module}.{name}.weight" for name in names],
            family.attention_input_key or hidden_key,
            reads=True,
        )
        _check_axis(finder, [f"{layer.module}.{family.output}.weight"], hidden_key, reads=False)


def _check_axis(finder: AttentionFinder, names: list[str], key: str, *, reads: bool) -> None:
    stated = config_value(finder.config, key)
    if stated is None:
        return
    for name in names:
        entry = finder.entries.get(name)
        if (
            entry is not None
            and len(entry.shape) == 2
            and entry.shape[1 if reads != finder.family.transposed else 0] != stated
        ):
            raise ConfigError(
                f"{name} has shape {list(entry.shape)}, which contradicts {key} = {stated!r} in {finder.where}: the config and the weights do "
                "not belong together"
            )


def _check_vocabulary(checkpoint: Checkpoint, finder: AttentionFinder) -> None:
    stated = {key: value for key in _VOCABULARY if (value := config_value(finder.config, key)) is not None}
    for _, name, entry in checkpoint.tensors():
        if finder.family.wrapped and not _is_language_model(name, finder):
            continue
        if finder.config.get("model_type") in FURTHER_ROWS and not name.endswith("lm_head.weight"):
            continue
        if stated and len(entry.shape) == 2 and _BY_TOKEN.fullmatch(name) and entry.shape[0] not in stated.values():
            key, value = next(iter(stated.items()))
            raise ConfigError(
                f"{name} has {entry.shape[0]} rows, which contradicts {key} = {value!r} in {finder.where}: the config and the weights do not "
                "belong together"
            )


def _is_language_model(name: str, finder: AttentionFinder) -> bool:
    """Whether a tensor by tokens belongs to the decoder inside a wrapper, by where its layers are."""
    place, _ = finder.family.layers[0]
    root = finder.layers[0].module.split(f"{place}.")[0]
    return name.startswith(root) or name.endswith("lm_head.weight")
