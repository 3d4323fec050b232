"""Weights that stay in a checkpoint's files and are read when a module runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OffloadedWeights:
    """Reads the weights of a model that transformers has left on the disk, each module's own as it is called.

    They are let go when the module's call is over; or while weights are held, all at once by `release`, so that a layer that many batches
    pass one after the other is read once.

    Args:
        model: what `from_pretrained` returns for a device map that sends everything to the disk.
        device: where modules run.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module

        self.device, self._holding = device, False
        self._homes: dict[int, tuple[Mapping[str, Tensor], dict[str, Tensor]]] = {}
        """By the module's id: where its weights are read, and what stands in their place."""
        self._loaded: list[Any] = []
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
            files = next((each.weights_map for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)
            remove_hook_from_module(module)
            absent = {name: parameter for name, parameter in module._parameters.items() if parameter is not None and parameter.is_meta}
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            if absent:
                assert files is not None, "accelerate has left a module without a hook"
                self._homes[id(module)] = (files, absent)
                module.register_forward_pre_hook(self._load)
                module.register_forward_hook(self._done, always_call=True)
        model._gqa_offloaded = self

    def _load(self, module: Any, _: Any) -> None:
        files, absent = self._homes[id(module)]
        for name in absent:
            if module._parameters[name].is_meta:
                module._parameters[name] = self._read(files, name, absent[name])
        self._loaded.append(module)

    def _read(self, files: Mapping[str, Tensor], name: str, absent: Tensor) -> Any:
        # copied, since what is read may be a view of the whole mapped file
        return torch.nn.Parameter(files[name].to(self.device, absent.dtype, copy=True), requires_grad=False)

    def _done(self, module: Any, _: Any, __: Any) -> None:
        if not self._holding:
            self._let_go(module)

    def _let_go(self, module: Any) -> None:
        module._parameters.update(self._homes[id(module)][1])

    def release(self) -> None:
        """Let all weights go."""
        for module in self._loaded:
            self._let_go(module)
        self._loaded.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep what is read until `release`, or the end."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self.release()

    def parameters(self, module: Any) -> dict[str, Tensor]:
        """Of a module and all within it, by name, read now."""
        found: dict[str, Tensor] = {}
        for path, inner in module.named_modules():
            files, absent = self._homes.get(id(inner), ({}, {}))
            for name, parameter in inner._parameters.items():
                if parameter is not None:
                    key = f"{path}.{name}" if path else name
                    found[key] = self._read(files, name, absent[name]).detach() if name in absent else parameter.detach()
        return found


def offloaded_weights(model: Any) -> OffloadedWeights | None:
    """What reads the model's weights; None where they are in memory."""
    found = getattr(model, "_gqa_offloaded", None)
    assert found is None or isinstance(found, OffloadedWeights)
    return found
