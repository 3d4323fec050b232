"""The loaded source: where its weights are, how its modules are found, and in which precision it
multiplies.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.resources import WEIGHTS_SHARE, free_memory, half_type, held_bytes
from gqa_convert.errors import ConfigError
from gqa_convert.families.composite import is_composite
from gqa_convert.families.loading import check_complete, explained, load_model
from gqa_convert.families.table import family_of
from gqa_convert.processes import by_first
from gqa_convert.publishing.publication import staged_folder
from gqa_convert.sharding import load, shard, weights_by_hand, whole_weights

_HEAD = "calibration compares its predictions; merge its heads without text"
Precision = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which torch multiplies matrices in one precision."""


def open_model(
    folder: Path, *, device: str = "cpu", halves: bool = False, sharded: bool = False
) -> Any:
    """Load a model with logits that computes in float32, in evaluation mode and without gradients.

    Args:
        folder: a local checkpoint.
        device: the device to run it on. Of its free memory the weights take 70% at most. What does
            not fit is offloaded by accelerate, in float32: it stays in the machine's memory or on
            the disk until its module runs.
        halves: hold matrices in the 16 bits in which the folder has them
            (`resources.holds_halves`). Autocast products are the same bit for bit; for others, each
            matrix is widened while it is used.
        sharded: hold a share of every layer in each process, which the first one reads. All
            processes call this.

    Raises:
        CorruptCheckpointError: parameters are missing in the folder, or transformers can't load it.
        NoLanguageModelError: the language-model head is missing, and the folder does not claim to
            have one.
        GQAConvertError: see `open_checkpoint`.
    """
    # what it takes, and what there is
    place = torch.device(device)
    limit = int(WEIGHTS_SHARE * free_memory(device))
    checkpoint = open_checkpoint(folder)
    stored = half_type(checkpoint) if halves else None
    fits = sharded or held_bytes(checkpoint, halves=stored is not None) <= limit
    with explained(str(folder)), ExitStack() as stack:
        if fits:
            model, missing = _load_whole(folder, stored, sharded=sharded)
        else:
            # accelerate puts what fits on the device, and the rest into the machine or on the disk
            memory: dict[str | int, int] = {"cpu": int(WEIGHTS_SHARE * free_memory("cpu"))}
            memory[(place.index or 0) if place.type == "cuda" else "cpu"] = limit
            scratch = stack.enter_context(staged_folder(Path(gettempdir()) / "offloaded"))
            model, missing = load_model(
                folder,
                torch.float32,
                device_map="auto",
                max_memory=memory,
                offload_folder=scratch.path,
            )
            weakref.finalize(model, stack.pop_all().close)
    check_complete(str(folder), folder, missing, _HEAD)
    model.requires_grad_(False)
    if sharded:
        model = shard(model, place, bf16=False)
    elif fits:
        model.to(place)
    model.register_forward_pre_hook(_take_encoder_outputs, with_kwargs=True)
    return model


def _load_whole(folder: Path, stored: str | None, *, sharded: bool) -> tuple[Any, list[str]]:
    """Load a model on the CPU, in float32; or with linear layers that hold their weights in the 16
    bits that are stored, and all else float32.
    """
    dtype = {None: torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[stored]
    model, missing = load(folder, dtype, by_first=sharded)
    if stored is None:
        return model, missing
    halves = {torch.bfloat16, torch.float16}
    if by_first(lambda: any(buffer.dtype in halves for buffer in model.buffers())):
        # it was computed in 16 bits, and widening it would not repair it
        return load(folder, torch.float32, by_first=sharded)
    kept, others = set[int](), set[int]()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(_linear, module)
            kept.add(id(module.weight))
        else:
            others |= set(map(id, module._parameters.values()))
    for parameter in model.parameters():
        # an output layer may be tied to embeddings, which enter the residual stream
        if id(parameter) not in kept - others:
            parameter.data = parameter.data.float()
    return model, missing


def _linear(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What a linear layer computes whose weights have 16 bits."""
    weight = module.weight
    if not torch.is_autocast_enabled(inputs.device.type):
        weight = weight.to(inputs.dtype)
    return torch.nn.functional.linear(inputs, weight, module.bias)


def _take_encoder_outputs(
    model: Any, args: Any, inputs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Let a model take what its encoder made of a batch as a tensor, [B, positions, hidden_size],
    of any type. It stays in that type where products are made in half precision anyway.
    """
    encoded = inputs.get("encoder_outputs")
    if isinstance(encoded, torch.Tensor):
        if not torch.is_autocast_enabled(encoded.device.type):
            encoded = encoded.to(model.dtype)
        inputs = inputs | {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
    return args, inputs


def running_device(model: Any) -> torch.device:
    """The device on which a model computes, wherever accelerate has put its weights."""
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return torch.device(model.device if device is None else device)


def walked_weights(model: Any, names: Sequence[str]) -> AbstractContextManager[None]:
    """A context in which a model's layers are run one by one, each inside `weights_in_memory`, by
    every process on what it reads.

    Args:
        model: a loaded model.
        names: its attention modules, as the checkpoint has them.
    """
    modules = find_modules(model, names)
    return weights_by_hand(model, list_elements(model, modules.values()))


@contextmanager
def weights_in_memory(module: Any) -> Iterator[None]:
    """A context in which weights of a module that accelerate has offloaded, or that processes
    share, are on its device, read once.
    """
    with whole_weights(module), ExitStack() as stack:
        for inner in module.modules():
            hook = getattr(inner, "_hf_hook", None)
            if hook is not None:
                hook.pre_forward(inner)
                stack.callback(hook.post_forward, inner, None)
                stack.enter_context(wrapped_forward(inner, inner._old_forward))
        yield


@contextmanager
def wrapped_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module's `forward` is replaced."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def find_modules(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The name of each module in the loaded model.

    Prefixes differ between files and memory (`h.0.attn` is loaded as `transformer.h.0.attn`).
    Therefore, the module whose name shares the longest end with the given one, including the
    layer's number, is the match. In a composite, only modules of the decoder inside count.

    Args:
        model: a loaded model.
        names: the modules' names in the checkpoint.

    Returns:
        The names in the loaded model by those in the checkpoint, in the given order.

    Raises:
        ConfigError: a name matches no module or several, or two names match the same module.
    """
    # where to look
    loaded = [name for name, _ in model.named_modules()]
    config = model.config.to_dict()
    if is_composite(config):
        family = family_of(config)
        loaded = [name for name in loaded if family.owns(name)]
    found: dict[str, str] = {}
    for name in names:
        # the longest end that a module has, with the number of the layer in it
        matches: list[str] = []
        end = name
        while not matches and any(part.isdecimal() for part in end.split(".")):
            matches = [module for module in loaded if f".{module}".endswith(f".{end}")]
            end = end.partition(".")[2]
        if len(matches) != 1 or matches[0] in found.values():
            raise ConfigError(f"{name} is not one module of the loaded {type(model).__name__}")
        found[name] = matches[0]
    return found


def list_elements(model: Any, modules: Collection[str]) -> dict[str, str]:
    """The layers of a model: the elements of the outermost module lists that hold attention
    modules, and the list of each.

    Args:
        model: a loaded model.
        modules: the attention modules' names in it.
    """
    found: dict[str, str] = {}
    for stack, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or stack.startswith((*found,)):
            continue  # lists come before those inside them
        if any(name.startswith(f"{stack}.") for name in modules):
            found |= {f"{stack}.{number}": stack for number in range(len(module))}
    return found


def precision_of(in_bfloat16: bool, device: torch.device) -> Precision:
    """A context for products with activations: in bfloat16 (`resources.is_reduced`), or in the
    precision of the loaded model, float32.

    Args:
        in_bfloat16: which of them.
        device: where the model runs.
    """
    return partial(torch.autocast, device.type, torch.bfloat16) if in_bfloat16 else nullcontext
