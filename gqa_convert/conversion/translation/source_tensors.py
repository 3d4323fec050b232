"""The source tensors of a translation, each of which must have the shape that the config implies and must be used."""

from collections.abc import Iterator, Mapping

from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.conversion.translation.description import Described, Rows, Run, TranslatedTensor
from gqa_convert.errors import ConfigError, UnsupportedFormatError
from gqa_convert.families.source_sizes import Config, read_dimensions
from gqa_convert.families.target_architectures import ORIGINS, Origin, TargetArchitecture
from gqa_convert.merging.methods import MergeMethod


class SourceTensors:
    """The tensors of one source: checks their shapes, tracks which of them a translation has used, and describes plain
    copies.

    Raises:
        ConfigError: the embedding is missing.
    """

    def __init__(
        self,
        sources: Mapping[str, Described],
        config: Config,
        target_architecture: TargetArchitecture,
        groups: int,
        method: MergeMethod,
    ) -> None:
        self.sources, self.target_architecture, self.groups, self.method = sources, target_architecture, groups, method
        self.origin: Origin = ORIGINS[target_architecture.source_type]
        self.config = config
        self.dimensions = read_dimensions(config)
        self.claimed: set[str] = set()
        embedding = f"{self.origin.names.embedding}.weight"
        prefixes = [prefix for prefix in (self.origin.names.prefix, "") if f"{prefix}{embedding}" in sources]
        if not prefixes:
            raise ConfigError(
                f"the checkpoint holds no tensor {self.origin.names.prefix}{embedding}, though its model type {target_architecture.source_type} has it: "
                "the config and the weights do not belong together"
            )
        self.old = prefixes[0]
        self.new = target_architecture.names.prefix if self.old else ""

    def claim(self, name: str, *shape: int | None) -> Described:
        """The header of a source tensor, which must have this shape (None: any size)."""
        if name not in self.sources:
            raise ConfigError(f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again")
        found = self.sources[name]
        if len(found.shape) != len(shape) or any(
            want not in (None, size) for want, size in zip(shape, found.shape, strict=True)
        ):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise ConfigError(
                f"tensor {name} has shape {list(found.shape)}, expected [{expected}]: the config and the weights do not belong together"
            )
        self.claimed.add(name)
        return found

    def copy(self, old: str, new: str, shape: tuple[int | None, ...]) -> TranslatedTensor:
        entry = self.claim(old, *shape)
        return TranslatedTensor(
            name=new, dtype=entry.dtype, shape=entry.shape, runs=(Run(entry.shape[0], (Rows(old, 0),)),), place=old
        )

    def norm(self, old: str, new: str) -> Iterator[TranslatedTensor]:
        for kind in ("weight", "bias"):
            yield self.copy(f"{old}.{kind}", f"{new}.{kind}", (self.dimensions.hidden_size,))

    def filled(self, name: str, rows: int, like: str, fill: float = 0.0) -> TranslatedTensor:
        dtype = self.sources[like].dtype
        self.check_arithmetic(like, dtype)
        return TranslatedTensor(name=name, dtype=dtype, shape=(rows,), runs=(Run(rows, fill=fill),), place=like)

    def check_arithmetic(self, name: str, dtype: str) -> None:
        if dtype not in ITEM_BYTES:
            raise UnsupportedFormatError(
                f"{name} has type {dtype}, which can't be translated: save the model in one float type"
            )

    def unused(self) -> tuple[str, ...]:
        """The names of unused tensors, all of which must be buffers.

        Raises:
            ConfigError: an unused tensor is not a known buffer.
        """
        left = tuple(name for name in self.sources if name not in self.claimed)
        for name in left:
            if not name.endswith(self.origin.stale):
                raise ConfigError(
                    f"tensor {name} does not belong to a {self.target_architecture.source_type} checkpoint with {self.dimensions.layers} layers: "
                    "the config and the weights do not belong together"
                )
        return left
