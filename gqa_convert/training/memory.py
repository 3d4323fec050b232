"""Estimates the memory that each process of a run needs, from sizes alone, before anything large is loaded.

The estimate counts weights, gradients and optimizer states, and everything that a forward pass keeps for its backward
pass. It does not count the program itself, the memory of CUDA and NCCL, fragmentation, and the temporary buffers of
operations and optimizers.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import UnsupportedFamilyError
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count
from gqa_convert.families.table import family_of
from gqa_convert.losses.distillation import CHUNK, CHUNK_ON_ACCELERATOR, positions_at_once
from gqa_convert.training.adafactor import LEAST_FACTORED
from gqa_convert.training.architecture import Architecture
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.teacher import rounds_teacher

GB = 1e9
_NF4 = 0.6
"""The bytes of a parameter in 4 bits with its scales, and the share of the embeddings, which stay in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a run that its memory use depends on."""

    parameters: int
    trained: int
    sequence_length: int
    target_length: int = 0
    """Decoder tokens of an encoder-decoder."""
    micro_batch_size: int = 1
    optimizer: str = "adamw"
    bf16: bool = True
    gradient_checkpointing: bool = False
    document_mask: bool = False
    teacher_parameters: int = 0
    teacher_bytes: int = 2
    """Bytes per parameter of the teacher."""
    weight_bytes: float = 4.0
    """Bytes per parameter of the model; fewer than 4 if only adapters are trained."""
    adapters: int = 0
    """Parameters of the adapters, which are trained in float32."""
    shards: int = 1
    """Over how many processes parameters, gradients and moments are sharded."""
    device: str = "cuda"


def plan(architecture: Architecture, setting: Setting) -> dict[str, int]:
    """The estimated bytes per process, by part."""
    split = setting.shards
    tokens, decoded = _tokens(architecture, setting)
    held = positions_at_once(decoded) * architecture.vocabulary
    of_logits = _loss(architecture, setting, held)
    of_teacher_logits = setting.teacher_bytes * held if setting.teacher_parameters else 0
    parts = {
        "weights": setting.weight_bytes * setting.parameters / split,
        "adapters": 4 * setting.adapters / split,
        # DDP's gradients are views into its buckets (gradient_as_bucket_view), which need no extra memory
        "gradients": 4 * setting.trained / split,
        "moments": _moments(architecture, setting) / split,
        "gathered layers": _gathered(architecture, setting),
        "weights in bf16": _copies(architecture, setting)
        if setting.shards == 1 and setting.bf16 and setting.weight_bytes == 4
        else 0.0,
        "activations": _activations(architecture, setting, tokens - decoded, decoded, of_logits + of_teacher_logits),
        "document masks": _masks(architecture, setting),
        "logits": of_logits,
        "teacher": _teacher(architecture, setting) + of_teacher_logits,
    }
    return {name: round(size) for name, size in parts.items() if size}


def _loss(architecture: Architecture, setting: Setting, held: int) -> float:
    """What the loss takes of the student: the logits that it makes at once, whose place their gradient takes; for a part
    of them, the float32 distributions and gradients of student and teacher; and the gradient of the output layer, which
    exists from then on.

    Args:
        architecture: that of the student.
        setting: of the run.
        held: the number of logits that are made at once.
    """
    chunk = min(held, CHUNK if setting.device == "cpu" else CHUNK_ON_ACCELERATOR)
    learns = setting.trained == setting.parameters and setting.shards == 1  # sharding counts this gradient as gathered
    of_layer = 4 * architecture.vocabulary * architecture.hidden_size * learns
    return (2 if setting.bf16 else 4) * held + 4 * 4 * chunk + of_layer


def _tokens(architecture: Architecture, setting: Setting) -> tuple[int, int]:
    """The tokens of a micro-batch: all of them, and those of the decoder."""
    own = setting.target_length if architecture.encoder_layers else setting.sequence_length
    encoded = setting.sequence_length if architecture.encoder_layers else 0
    return setting.micro_batch_size * (own + encoded), setting.micro_batch_size * own


def _moments(architecture: Architecture, setting: Setting) -> float:
    """The optimizer's moments. AdamW (Loshchilov & Hutter 2019) keeps two numbers per parameter. Adafactor (Shazeer &
    Stern 2018) keeps one per row and column, that is 1/m + 1/n per parameter of an m x n matrix, at most 2 /
    hidden_size.
    """
    if setting.optimizer == "adafactor":
        return (
            4 * setting.trained * (2 / architecture.hidden_size if architecture.hidden_size >= LEAST_FACTORED else 1.0)
        )
    return 8 * setting.trained


def _layer_parameters(architecture: Architecture, parameters: int) -> float:
    return max(0, parameters - architecture.outer_parameters) / max(
        1, architecture.layers + architecture.encoder_layers
    )


def _gathered(architecture: Architecture, setting: Setting) -> float:
    """What FSDP2 (Zhao et al. 2023) gathers: the current layer and the next one, the parameters outside the layers, and
    the gradients of a layer and of these parameters before they are scattered, additionally in float32 if they were
    computed in bfloat16. If only a part is trained, it is taken to lie in the layers.
    """
    if setting.shards == 1:
        return 0.0
    size, layers = 2 if setting.bf16 else 4, max(1, architecture.layers + architecture.encoder_layers)
    layer, outer = (
        _layer_parameters(architecture, setting.parameters),
        min(architecture.outer_parameters, setting.parameters),
    )
    learning = layer + outer if setting.trained == setting.parameters else setting.trained / layers
    return size * (2 * (layer + setting.adapters / layers) + outer) + (6 if setting.bf16 else 4) * learning


def _copies(architecture: Architecture, setting: Setting) -> float:
    """Autocasting's copies of the matrices. The backward pass needs all of them, or those of one layer if activations
    are recomputed.
    """
    layer = _layer_parameters(architecture, setting.parameters)
    outer = architecture.vocabulary * architecture.hidden_size
    count = 1 if setting.gradient_checkpointing else architecture.layers + architecture.encoder_layers
    return 2 * (layer * count + outer)


def _activations(architecture: Architecture, setting: Setting, encoded: int, decoded: int, logits: float) -> float:
    """What the layers save for the backward pass. With recomputation (Chen et al. 2016), each layer saves its input,
    and one layer saves everything: from the moment that the backward pass reaches it, when what the loss took, which is
    given in bytes, is no longer needed. Only what this layer takes beyond them is counted.
    """
    cross, size = architecture.encoder_layers > 0, 2 if setting.bf16 else 4
    own, theirs = setting.target_length if cross else setting.sequence_length, setting.sequence_length
    decoder = decoded * _per_token(architecture, bf16=setting.bf16, length=own, cross=cross)
    encoder = encoded * _per_token(architecture, bf16=setting.bf16, length=theirs, cross=False)
    if cross:  # keys and values of the encoder's output
        decoder += encoded * size * 2 * architecture.kv_heads * architecture.head_dim
    everything = architecture.layers * decoder + architecture.encoder_layers * encoder
    if not setting.gradient_checkpointing:
        return everything
    stream = (2 if setting.shards > 1 and setting.bf16 else 4) * architecture.hidden_size
    inputs: float = stream * (architecture.layers * decoded + architecture.encoder_layers * encoded)
    return inputs + max(decoder - logits, encoder - logits, 0)


def _masks(architecture: Architecture, setting: Setting) -> float:
    """The masks that keep documents of a row apart: one of booleans, and for each layer what torch's attention keeps for
    the backward pass, which is the mask in the type of its inputs, and keys and values repeated for every query head.
    """
    if not setting.document_mask:
        return 0.0
    kept = 1 if setting.gradient_checkpointing else architecture.layers
    size, length = 2 if setting.bf16 else 4, setting.sequence_length
    repeated = 2 * (architecture.heads - architecture.kv_heads) * architecture.head_dim
    return setting.micro_batch_size * length * (length + size * kept * (length + repeated))


def _per_token(architecture: Architecture, *, bf16: bool, length: int, cross: bool) -> float:
    """The bytes that a layer saves per token, as counted from the tensors that autograd saves for Llama, T5, OPT and
    Phi.

    This follows Korthikanti et al. 2022, without dropout and attention scores, and with norms in float32. It counts the
    inputs of norms (twice for RMSNorm), the inputs of projections (each with its own copy under autocasting), queries,
    keys, values and the output of attention, and what the MLP's activation and products need.
    """
    a, size = architecture, 2 if bf16 else 4
    blocks = 3 if cross else 2
    norms = blocks * (8 if a.rms_norm else 4) * a.hidden_size
    inputs = (2 * (3 + (2 if a.gated else 1) + (1 if cross else 0)) if bf16 else 4 * blocks) * a.hidden_size
    attention = size * a.head_dim * (2 * a.heads + 2 * a.kv_heads + (2 * a.heads if cross else 0))
    name = a.activation.removeprefix("gated-")
    # gelu_new consists of five operations
    steps = 1 if name == "relu" else 5 if name in ("gelu_new", "NewGELU") else 2
    inner = size * a.inner * (steps + (2 if a.gated else 0))
    return norms + inputs + attention + inner + (4 * a.heads * length if a.scores else 0)


def _teacher(architecture: Architecture, setting: Setting) -> int:
    if not setting.teacher_parameters:
        return 0
    size = setting.teacher_bytes
    kept = setting.teacher_parameters * size
    if setting.shards > 1:
        outer = min(architecture.outer_parameters, setting.teacher_parameters)
        kept = round(
            kept / setting.shards + size * (2 * _layer_parameters(architecture, setting.teacher_parameters) + outer)
        )
    return kept


def parameters_of(
    student: Checkpoint, teacher: Checkpoint | None, recipe: Recipe, device: str = "cpu"
) -> dict[str, int]:
    """What `Setting` needs of the models, from their configs and the headers of their files: the numbers of parameters,
    and on a type of device the bytes of one of the teacher.
    """
    sizes = {name: entry.elements for _, name, entry in student.tensors()}
    names = trained_of(student, recipe)
    counts = {"parameters": sum(sizes.values()), "trained": sum(sizes[name] for name in names)}
    if recipe.lora is not None:
        adapters = sum(rows * columns for rows, columns in adapter_shapes(student, recipe).values())
        counts |= {"trained": adapters, "adapters": adapters}
    if teacher is not None:
        count = sum(entry.elements for _, _, entry in teacher.tensors())
        size = {"bf16": 2, "float32": 4}.get(recipe.teacher_dtype) or bytes_each(teacher)
        if rounds_teacher(recipe.teacher_dtype, size, device):
            size = 2
        counts |= {"teacher_parameters": count, "teacher_bytes": size}
    return counts


def trained_of(student: Checkpoint, recipe: Recipe) -> list[str]:
    """The names of the tensors in a checkpoint that the recipe trains or gives adapters; all of them if its type is
    unknown.
    """
    from gqa_convert.training.optimizers import trained_names

    names = [name for _, name, _ in student.tensors()]
    chosen = recipe.trainable if recipe.lora is None else "attention" if recipe.lora.targets == "attention" else "all"
    if chosen != "all":
        with suppress(UnsupportedFamilyError):
            names = trained_names(family_of(student.config), names, chosen)
    elif recipe.lora is not None:
        vocabulary = stated_count(student.config, VOCABULARY_KEYS)
        names = [name for _, name, entry in student.tensors() if vocabulary not in entry.shape]
    return names


def adapter_shapes(student: Checkpoint, recipe: Recipe) -> dict[str, tuple[int, int]]:
    """The shapes of the adapters' matrices by name: two for each matrix that gets an adapter."""
    if recipe.lora is None:
        return {}
    rank, names = recipe.lora.rank, set(trained_of(student, recipe))
    found: dict[str, tuple[int, int]] = {}
    for _, name, entry in student.tensors():
        if name in names and len(entry.shape) == 2:
            found |= {f"{name}.lora_A": (rank, entry.shape[1]), f"{name}.lora_B": (entry.shape[0], rank)}
    return found


def bytes_each(checkpoint: Checkpoint) -> int:
    """The bytes of a parameter in a checkpoint, on average."""
    return round(checkpoint.weight_bytes / max(1, sum(entry.elements for _, _, entry in checkpoint.tensors())))


def setting_of(recipe: Recipe, **known: Any) -> Setting:
    """The setting of a recipe, completed with the facts that only the models and the launch determine."""
    return Setting(
        micro_batch_size=recipe.micro_batch_size,
        optimizer=recipe.optimizer,
        bf16=recipe.precision == "bf16",
        gradient_checkpointing=recipe.gradient_checkpointing,
        weight_bytes=_weight_bytes(recipe),
        document_mask=recipe.document_mask,
        **known,
    )


def _weight_bytes(recipe: Recipe) -> float:
    if recipe.lora is None or recipe.precision == "no":
        return 4.0
    return 2.0 if recipe.lora.quantize is None else _NF4


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
            f"{text}, more than the {_amount(free)} that are free: if it fails, lower micro_batch_size, set gradient_checkpointing to true or use more "
            "GPUs with fsdp2.yaml"
        )
    return f"{text}, of {_amount(free)} free"


def _amount(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"
