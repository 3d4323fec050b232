"""Leaves weights in the checkpoint's files and reads each when a module uses it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Parameters(dict[str, Any]):
    """A module's parameters, some of which are read from files on access, by its own forward pass or by that of an
    enclosing module.

    Iterating over all of them reads nothing.

    Args:
        parameters: the parameters of the module; offloaded ones are on torch's `meta` device.
        read: reads an offloaded parameter by its name.
    """

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
        super().__init__(parameters)
        self._read = read
        self.absent = {
            name: parameter for name, parameter in parameters.items() if parameter is not None and parameter.is_meta
        }

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is not None and found is self.absent.get(name):
            found = self[name] = self._read(name)
        return found

    def let_go(self) -> None:
        self.update(self.absent)


class OffloadedWeights:
    """Reads the weights of a model that transformers has left on disk, each when it is used.

    They are released when the call of their module or of an enclosing one ends. While weights are held, `release` drops
    all of them at once instead, so that a layer that many batches pass in turn is read once.

    Args:
        model: the result of `from_pretrained` with a device map that leaves everything on disk.
        device: the device on which modules run.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module

        self.device, self._holding = device, False
        self._files: dict[int, Mapping[str, Tensor]] = {}
        """Offloaded parameters by the module's id."""
        self._loaded: dict[int, Any] = {}
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
            offload = next((each for each in hooks if isinstance(each, AlignDevicesHook) and each.offload), None)
            if offload is not None:
                _make_again(model, module, offload.original_devices)
            remove_hook_from_module(module)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
            if any(parameter is not None and parameter.is_meta for parameter in module._parameters.values()):
                assert offload is not None, "accelerate has left a module without a hook"
                self._files[id(module)] = offload.weights_map
                module._parameters = _Parameters(module._parameters, self._reader(module))
        for module in model.modules():
            if any(id(inner) in self._files for inner in module.modules()):
                module.register_forward_hook(self._done, always_call=True)
        model._gqa_offloaded = self

    def _reader(self, module: Any) -> Callable[[str], Tensor]:
        def read(name: str) -> Tensor:
            self._loaded[id(module)] = module
            return self._read(module, name)

        return read

    def _read(self, module: Any, name: str) -> Tensor:
        # copied, because the tensor may be a view of the whole mapped file
        found = self._files[id(module)][name].to(self.device, module._parameters.absent[name].dtype, copy=True)
        return torch.nn.Parameter(found, requires_grad=False)

    def _done(self, module: Any, _: Any, __: Any) -> None:
        if not self._holding and self._loaded:
            for inner in module.modules():
                if self._loaded.pop(id(inner), None) is not None:
                    inner._parameters.let_go()

    def release(self) -> None:
        """Drop all weights; a paused pass that still uses one reads it again when it resumes."""
        for module in self._loaded.values():
            module._parameters.let_go()
        self._loaded.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep weights that are read until `release` or the end of the context."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self.release()

    def parameters(self, module: Any) -> dict[str, Tensor]:
        """The parameters of a module and its submodules by name; offloaded ones are read immediately."""
        return {
            f"{path}.{name}" if path else name: parameter.detach()
            if not parameter.is_meta
            else self._read(inner, name).detach()
            for path, inner in module.named_modules()
            for name, parameter in inner._parameters.items()
            if parameter is not None
        }


def _make_again(model: Any, module: Any, devices: Mapping[str, torch.device]) -> None:
    """Recompute parameters that are not in any file, such as a table of sines, which the model created and accelerate
    discarded.
    """
    lost = [name for name, device in devices.items() if name in module._parameters and device.type != "meta"]
    for name in lost:
        absent = module._parameters[name]
        made = torch.empty(absent.shape, dtype=absent.dtype, device=devices[name])
        module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    if lost:
        model._init_weights(module)


def offloaded_weights(model: Any) -> OffloadedWeights | None:
    """The reader of the model's weights; None if they are in memory."""
    found = getattr(model, "_gqa_offloaded", None)
    assert found is None or isinstance(found, OffloadedWeights)
    return found


def running_device(model: Any) -> torch.device:
    """The device on which a model computes, wherever its weights are: `model.device` is `meta` where they are offloaded."""
    offloaded = offloaded_weights(model)
    return torch.device(model.device if offloaded is None else offloaded.device)
