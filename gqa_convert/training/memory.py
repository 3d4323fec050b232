"""What a run needs in memory on each process, estimated from sizes alone, before anything large is loaded.

Counted is what lasts and what a step's forward pass keeps for its backward pass, together, as where micro-batches are
accumulated.
Not counted: the program itself, CUDA's and NCCL's own memory, fragmentation, and what an operation or an optimizer
holds for a moment.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.geometry import config_value
from gqa_convert.families.loading import is_encoder_decoder
from gqa_convert.families.table import find_family
from gqa_convert.training.recipe import Recipe

GB = 1e9
_WIDTH = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_ENCODER_LAYERS = ("encoder_layers", "num_layers")
_INNER = (
    "intermediate_size",
    "ffn_hidden_size",
    "decoder_ffn_dim",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_config.ffn_hidden_size",
)
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn", "ffn_config.ffn_act_fn.name")
_LOSS_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits that the loss works on at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a transformer."""

    layers: int
    """Of a decoder."""
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Of the MLP; where tokens go to several experts, theirs together."""
    vocabulary: int
    encoder_layers: int = 0
    gated: bool = True
    """Whether the MLP has a third matrix."""
    activation: str = "silu"
    rms_norm: bool = True
    scores: bool = False
    """Whether self-attention keeps its scores for the backward pass, as where position biases are learned."""
    tied: bool = False
    """Whether the output layer is the embedding."""

    @property
    def outer_parameters(self) -> int:
        """Of embedding and output layer."""
        return self.vocabulary * self.width * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How it is trained."""

    parameters: int
    trained: int
    sequence_length: int
    target_length: int = 0
    """Tokens of a decoder beside an encoder."""
    micro_batch_size: int = 1
    optimizer: str = "adamw"
    bf16: bool = True
    gradient_checkpointing: bool = False
    teacher_parameters: int = 0
    teacher_bytes: int = 2
    """Of each of them."""
    processes: int = 1
    sharded: bool = False
    device: str = "cuda"


def plan(architecture: Architecture, setting: Setting) -> dict[str, int]:
    """Bytes per process, by part; their sum is the estimate."""
    split = setting.processes if setting.sharded else 1
    tokens, decoded = _tokens(architecture, setting)
    logits = decoded * architecture.vocabulary
    parts = {
        "weights": 4 * setting.parameters / split,
        # DDP's gradients are views into its buckets (gradient_as_bucket_view), which need nothing more
        "gradients": 4 * setting.trained / split,
        "moments": _moments(architecture, setting) / split,
        "gathered layers": _gathered(architecture, setting),
        "weights in bf16": 0.0 if setting.sharded or not setting.bf16 else _copies(architecture, setting),
        "activations": _activations(architecture, setting, tokens - decoded, decoded),
        # two at most, as measured; and of a chunk the float32 distributions and gradients of student and teacher
        "logits": (4 if setting.bf16 else 8) * logits
        + 4 * 4 * min(logits, _LOSS_CHUNK.get(setting.device, _LOSS_CHUNK["cuda"])),
        "teacher": _teacher(architecture, setting, logits),
    }
    return {name: round(size) for name, size in parts.items() if size}


def _tokens(architecture: Architecture, setting: Setting) -> tuple[int, int]:
    """Of a micro-batch: all, and those of the decoder."""
    own = setting.target_length if architecture.encoder_layers else setting.sequence_length
    encoded = setting.sequence_length if architecture.encoder_layers else 0
    return setting.micro_batch_size * (own + encoded), setting.micro_batch_size * own


def _moments(architecture: Architecture, setting: Setting) -> float:
    """AdamW (Loshchilov & Hutter 2019): two numbers per parameter. Adafactor (Shazeer & Stern 2018): one per row and
    column, that is 1/m + 1/n per parameter of an m x n matrix, and at most 2 / width. Muon (Jordan et al. 2024): one,
    beside AdamW on the outer matrices."""
    if setting.optimizer == "adafactor":
        return 4 * setting.trained * (2 / architecture.width if architecture.width >= 128 else 1.0)
    if setting.optimizer == "muon":
        outer = min(architecture.outer_parameters, setting.trained) if setting.trained == setting.parameters else 0
        return 4 * setting.trained + 4 * outer
    return 8 * setting.trained


def _layer_parameters(architecture: Architecture, parameters: int) -> float:
    return max(0, parameters - architecture.outer_parameters) / max(
        1, architecture.layers + architecture.encoder_layers
    )


def _gathered(architecture: Architecture, setting: Setting) -> float:
    """FSDP2 (Zhao et al. 2023): the layer that computes and the next one, whole; what is outside the layers; and
    gradients of a layer and of the latter before they are spread, in float32 too where they were computed in
    bfloat16."""
    if not setting.sharded:
        return 0.0
    size = 2 if setting.bf16 else 4
    layer, outer = (
        _layer_parameters(architecture, setting.parameters),
        min(architecture.outer_parameters, setting.parameters),
    )
    return size * (2 * layer + outer) + (6 if setting.bf16 else 4) * (layer + outer)


def _copies(architecture: Architecture, setting: Setting) -> float:
    """Autocasting's copies of the matrices, all of which the backward pass needs, or one layer's where it computes them
    anew.
    """
    layer = _layer_parameters(architecture, setting.parameters)
    outer = architecture.vocabulary * architecture.width
    count = 1 if setting.gradient_checkpointing else architecture.layers + architecture.encoder_layers
    return 2 * (layer * count + outer)


def _activations(architecture: Architecture, setting: Setting, encoded: int, decoded: int) -> float:
    """What the layers keep for the backward pass. Recomputed (Chen et al. 2016), each layer keeps its input, and one
    layer all.
    """
    cross = architecture.encoder_layers > 0
    own, theirs = setting.target_length if cross else setting.sequence_length, setting.sequence_length
    decoder = decoded * _per_token(architecture, bf16=setting.bf16, length=own, cross=cross)
    encoder = encoded * _per_token(architecture, bf16=setting.bf16, length=theirs, cross=False)
    if cross:  # keys and values of the encoder's output
        decoder += encoded * (2 if setting.bf16 else 4) * 2 * architecture.kv_heads * architecture.head_dim
    if not setting.gradient_checkpointing:
        return architecture.layers * decoder + architecture.encoder_layers * encoder
    stream = (2 if setting.sharded and setting.bf16 else 4) * architecture.width
    return stream * (architecture.layers * decoded + architecture.encoder_layers * encoded) + max(decoder, encoder)


def _per_token(architecture: Architecture, *, bf16: bool, length: int, cross: bool) -> float:
    """Bytes that a layer keeps per token, as counted among the tensors that autograd saves for Llama, T5, OPT and Phi.

    After the manner of Korthikanti et al. 2022, without dropout and without attention scores, and with norms in
    float32: inputs of norms (twice for RMSNorm), inputs of projections (each its own copy where autocasting makes it),
    queries, keys, values and the output of attention, and what the MLP's activation and products need.
    """
    a, size = architecture, 2 if bf16 else 4
    blocks = 3 if cross else 2
    norms = blocks * (8 if a.rms_norm else 4) * a.width
    inputs = (2 * (3 + (2 if a.gated else 1) + (1 if cross else 0)) if bf16 else 4 * blocks) * a.width
    attention = size * a.head_dim * (2 * a.heads + 2 * a.kv_heads + (2 * a.heads if cross else 0))
    name = a.activation.removeprefix("gated-")
    steps = (
        1 if name == "relu" else 5 if name in ("gelu_new", "NewGELU") else 2
    )  # the latter is written out in five operations
    inner = size * a.inner * (steps + (2 if a.gated else 0))
    return norms + inputs + attention + inner + (4 * a.heads * length if a.scores else 0)


def _teacher(architecture: Architecture, setting: Setting, logits: int) -> float:
    if not setting.teacher_parameters:
        return 0.0
    size = setting.teacher_bytes
    kept = setting.teacher_parameters * size
    if setting.sharded:
        outer = min(architecture.outer_parameters, setting.teacher_parameters)
        kept = round(
            kept / setting.processes + size * (2 * _layer_parameters(architecture, setting.teacher_parameters) + outer)
        )
    return kept + size * logits


def read_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """The sizes in a config.json; None where they are not stated in a way that is known."""
    values = dict(config)
    try:
        family = find_family(values.get("model_type"))
    except UnsupportedFamilyError:
        return None
    encodes = is_encoder_decoder(values)
    layers = _count(values, *(_DECODER_LAYERS if encodes else ()), *_LAYERS)
    width, heads, vocabulary = (
        _count(values, *_WIDTH),
        _count(values, family.heads_key, "num_attention_heads"),
        _count(values, *_VOCABULARY),
    )
    encoder = _count(values, *_ENCODER_LAYERS) if encodes else 0
    if layers is None or width is None or heads is None or vocabulary is None or encoder is None:
        return None
    activation = next((value for key in _ACTIVATION if isinstance(value := config_value(values, key), str)), "silu")
    is_t5 = family.is_t5
    if family.mlp == "feed_forward_proj":
        stated = str(values.get("feed_forward_proj", "relu"))
        gated = stated.startswith("gated-")
        activation = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    else:
        gated = family.mlp == "gated"
    return Architecture(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_count(values, *family.kv_heads_keys) or heads,
        head_dim=_count(values, *([family.head_dim_key] if family.head_dim_key else [])) or max(1, width // heads),
        inner=(_count(values, *_INNER) or 4 * width) * (_count(values, "num_experts_per_tok") or 1),
        vocabulary=vocabulary,
        encoder_layers=encoder,
        gated=gated,
        activation=activation,
        rms_norm=is_t5 or "rms_norm_eps" in values,
        scores=is_t5,
        tied=bool(values.get("tie_word_embeddings", is_t5)),
    )


def _count(config: dict[str, Any], *keys: str) -> int | None:
    found = (config_value(config, key) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), None)


def parameters_of(student: Checkpoint, teacher: Checkpoint | None, recipe: Recipe) -> dict[str, int]:
    """Numbers of parameters, from the headers of the files."""
    from gqa_convert.training.optimizers import trained_names

    sizes = {name: entry.elements for _, name, entry in student.tensors()}
    trained = sizes
    if recipe.trainable != "all":
        with suppress(UnsupportedFamilyError):
            trained = {
                name: sizes[name]
                for name in trained_names(find_family(student.config.get("model_type")), sizes, recipe.trainable)
            }
    counts = {"parameters": sum(sizes.values()), "trained": sum(trained.values())}
    if teacher is not None:
        count = sum(entry.elements for _, _, entry in teacher.tensors())
        stated = {"bf16": 2, "float32": 4}.get(recipe.teacher_dtype)
        counts |= {"teacher_parameters": count, "teacher_bytes": stated or round(teacher.weight_bytes / max(1, count))}
    return counts


def setting_of(recipe: Recipe, **known: Any) -> Setting:
    """What a recipe says, beside what only the models and the launch say."""
    return Setting(
        micro_batch_size=recipe.micro_batch_size,
        optimizer=recipe.optimizer,
        bf16=recipe.precision == "bf16",
        gradient_checkpointing=recipe.gradient_checkpointing,
        **known,
    )


def shown(parts: Mapping[str, int], free: int | None) -> str:
    """The estimate in one line."""
    total = sum(parts.values())
    listed = ", ".join(
        f"{name} {_amount(size)}"
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
        if size * 50 >= total
    )
    text = f"memory per process (estimate): {_amount(total)} ({listed})"
    if free is None:
        return text
    if total > free:
        return (
            f"{text}: more than the {_amount(free)} that are free; lower micro_batch_size, set gradient_checkpointing to true or use more "
            "GPUs with fsdp2.yaml if it fails"
        )
    return f"{text}, of {_amount(free)} free"


def _amount(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"
