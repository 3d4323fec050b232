"""What a model computes, measured through transformers alone.

Run as a program, this file stands for a machine without gqa-convert: it can't import the project,
and answers one request after another, since importing torch and transformers takes seconds.
`Elsewhere` is its other end. Requests are lines of JSON, answers files.
"""

import contextlib
import filecmp
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import EncoderDecoderCache

PADDED = torch.tensor([[0, 0, 7, 33, 12, 50, 9, 41], [5, 21, 60, 3, 44, 18, 27, 36]])
PADDED_MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
ENCODED = torch.tensor([[7, 33, 12, 50, 9, 41, 0, 0, 0], [5, 21, 60, 3, 44, 18, 27, 36, 11]])
ENCODED_MASK = (ENCODED != 0).long()
DECODED = torch.tensor([[4, 30, 14, 0, 0], [4, 22, 61, 35, 8]])
DECODED_MASK = (DECODED != 0).long()
NEW_TOKENS = 4


def batch(model: nn.Module) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of a forward pass over a batch with padding, and the mask of the tokens whose
    logits count.
    """
    config, generator = model.config, torch.Generator().manual_seed(1)
    if not config.is_encoder_decoder:
        given = {"input_ids": PADDED, "attention_mask": PADDED_MASK}
        if getattr(config, "add_cross_attention", False):
            given["encoder_hidden_states"] = torch.randn(
                2, 9, config.hidden_size, generator=generator
            )
            given["encoder_attention_mask"] = ENCODED_MASK
        return given, PADDED_MASK.bool()
    decoded = {"decoder_input_ids": DECODED, "decoder_attention_mask": DECODED_MASK}
    if model.main_input_name == "input_features":
        sound = torch.randn(2, *sound_shape(config), generator=generator)
        return {"input_features": sound} | decoded, DECODED_MASK.bool()
    if model.main_input_name == "pixel_values":
        size = config.encoder.image_size
        picture = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": picture} | decoded, DECODED_MASK.bool()
    return {"input_ids": ENCODED, "attention_mask": ENCODED_MASK} | decoded, DECODED_MASK.bool()


def sound_shape(config: Any) -> tuple[int, int]:
    """Of one sound's features: Whisper counts bins first, and reads windows of one length."""
    if hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    return config.max_source_positions, config.input_feat_per_channel


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of the batch, except at padding."""
    given, mask = batch(model)
    given |= {
        name: tensor.to(model.dtype) for name, tensor in given.items() if tensor.is_floating_point()
    }
    return model(**given, use_cache=False).logits[mask]


def cache_name(model: nn.Module) -> str:
    """What the installed transformers calls the cache among a model's arguments and outputs."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def logits_in_parts(model: nn.Module) -> torch.Tensor:
    """Return the same logits from two passes, the second of which adds several tokens to a
    cache.
    """
    given, mask = batch(model)
    tokens, padding = "input_ids", "attention_mask"
    if model.config.is_encoder_decoder:
        encoded = {
            name: given.pop(name)
            for name in ("input_ids", "attention_mask", "input_features", "pixel_values")
            if name in given
        }
        given["encoder_outputs"] = model.get_encoder()(**encoded)
        given |= {name: encoded[name] for name in ("attention_mask",) if name in encoded}
        tokens, padding = "decoder_input_ids", "decoder_attention_mask"
    half = given[tokens].shape[1] // 2
    first = model(
        **given | {tokens: given[tokens][:, :half], padding: given[padding][:, :half]},
        use_cache=True,
    )
    name = cache_name(model)
    second = model(
        **given | {tokens: given[tokens][:, half:], name: getattr(first, name)}, use_cache=True
    )
    return torch.cat([first.logits, second.logits], dim=1)[mask]


def generate(model: nn.Module, **options: Any) -> Any:
    """The output of `generate` for a batch with padding. No token comes twice, so that the most
    likely one can't hide the others.
    """
    given = {
        name: tensor for name, tensor in batch(model)[0].items() if not name.startswith("decoder_")
    }
    return model.generate(
        **given,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        no_repeat_ngram_size=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        **({"use_cache": True} | options),
    )


def generated(model: nn.Module, **options: Any) -> list[list[int]]:
    """The tokens that follow a batch with padding."""
    return generate(model, **options).sequences[:, -NEW_TOKENS:].tolist()


def cached_heads(model: nn.Module) -> dict[str, list[int]]:
    """K/V heads that each kind of cache holds."""
    cache = getattr(generate(model), cache_name(model))
    caches = {"self": cache}
    if isinstance(cache, EncoderDecoderCache):
        caches = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    found = {}
    for kind, each in caches.items():
        held = [getattr(layer, name, None) for layer in each.layers for name in ("keys", "values")]
        found[kind] = sorted(
            {states.shape[1] for states in held if states is not None and states.dim() == 4}
        )
    return found


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
}
"""Ways to generate, and their options."""


@torch.no_grad()
def attentions(model: nn.Module) -> dict[str, torch.Tensor]:
    """Attention weights [layers, tokens, heads, keys] of the tokens that count, for a model with
    eager attention.
    """
    given, mask = batch(model)
    output = model(**given, output_attentions=True, use_cache=False)
    kinds = {"self": "decoder_attentions" if model.config.is_encoder_decoder else "attentions"}
    if "encoder_attention_mask" in given or model.config.is_encoder_decoder:
        kinds["cross"] = "cross_attentions"
    return {
        kind: torch.stack([layer.transpose(1, 2)[mask] for layer in output[name]])
        for kind, name in kinds.items()
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter after one training step."""
    given, mask = batch(model)
    model.train()
    model.zero_grad(set_to_none=True)
    model(**given, use_cache=False).logits[mask].float().log_softmax(-1).square().mean().backward()
    model.eval()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


@torch.no_grad()
def first_output(model: nn.Module, missing: list[str]) -> torch.Tensor:
    """What a model for any task gives first, for sequences with the same number of ends; parameters
    that lacked a tensor are set.
    """
    for name in missing:
        parameter = model.get_parameter(name)
        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    names = inspect.signature(model.forward).parameters
    encoded = torch.cat([PADDED[:, 2:], torch.full((2, 1), model.config.eos_token_id)], dim=1)
    given: dict[str, Any] = {"input_ids": encoded}
    if model.main_input_name != "input_ids":
        name = model.main_input_name
        given = {name: batch(model)[0][name]}
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = encoded
    return model(**given).to_tuple()[0]


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or the traceback as text if it raises."""
    try:
        return work()
    except Exception:
        return traceback.format_exc()


def measure(model: nn.Module, ways: list[str]) -> dict[str, Any]:
    """Logits at once and in parts, cached heads, generated tokens; a measurement that fails leaves
    its trace in its place.
    """
    return {
        "logits": attempt(lambda: logits(model)),
        "logits in parts": attempt(lambda: logits_in_parts(model)),
        "heads": attempt(lambda: cached_heads(model)),
        "tokens": {way: attempt(lambda way=way: generated(model, **WAYS[way])) for way in ways},
    }


def measure_training(model: nn.Module) -> dict[str, Any]:
    """Return the gradients without and with gradient checkpointing."""
    plain = gradients(model)
    # older releases know the second only
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")()
    again = gradients(model)
    getattr(model, f"{name}_checkpointing_disable")()
    return {"plain": plain, "checkpointing": again}


def save_twice(model: nn.Module, load: Callable[..., Any]) -> dict[str, Any]:
    """Save, load and save again: the files, those that differ, and the logits between."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        model.save_pretrained(first)
        loaded = load(first).eval()
        loaded.save_pretrained(second)
        names = sorted(path.name for path in first.iterdir() if path.is_file())
        _, differing, missing = filecmp.cmpfiles(first, second, names, shallow=False)
        config = json.loads((first / "config.json").read_text())
        return {
            "files": names,
            "differing": differing + missing,
            "config": config,
            "logits": logits(loaded),
        }


def measure_auto(auto: str, folder: str) -> dict[str, Any]:
    """What the class of another task computes, and the keys that did not fit it."""
    model, info = getattr(transformers, auto).from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True, output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    return {
        "missing": missing,
        "unexpected": sorted(info["unexpected_keys"]),
        "output": first_output(model.eval(), missing),
    }


def measure_folder(request: dict[str, Any]) -> dict[str, Any]:
    """What the model in a folder computes.

    Args:
        request: `folder`; `auto`, the auto class that loads it; `ways` to generate; `thorough`,
            whether to measure attention weights, training and other ways to load too; `saved`, what
            was saved and loaded again too; `autos`, further auto classes to load with; `compiled`,
            torch.compile too.
    """
    auto, folder = getattr(transformers, request["auto"]), request["folder"]

    def load(path: str | Path = folder, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return auto.from_pretrained(path, dtype=dtype, trust_remote_code=True, **options)

    model, info = load(output_loading_info=True)
    model.eval()
    result = measure(model, request["ways"])
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    result["info"] = {kind: sorted(map(str, info[kind])) for kind in kinds}
    result["transformers"] = transformers.__version__
    result["class"] = f"{type(model).__module__}.{type(model).__qualname__}"
    result["file"] = sys.modules[type(model).__module__].__file__
    if request.get("saved"):
        result["saved"] = attempt(lambda: save_twice(model, load))
    eager = load(attn_implementation="eager").eval()
    result["eager"] = measure(eager, request["ways"][:1])
    if request.get("thorough"):
        result["attentions"] = attempt(lambda: attentions(eager))
        result["eager"] = measure(eager, ["greedy", "static cache"])
        result["training"] = attempt(lambda: measure_training(model))
        result["bfloat16"] = attempt(lambda: logits(load(dtype=torch.bfloat16).eval()))
        result["device map"] = attempt(lambda: logits(load(device_map="cpu").eval()))
    if request.get("autos"):
        result["autos"] = {
            name: attempt(lambda name=name: measure_auto(name, folder)) for name in request["autos"]
        }
    if request.get("compiled"):
        result["compiled"] = attempt(
            lambda: logits(torch.compile(model, backend="eager", fullgraph=True))
        )
    return result


class NoProject(MetaPathFinder):
    """Hides the modules of the project, wherever they are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002
        if name.partition(".")[0] in ("gqa_convert", "tests"):
            raise ModuleNotFoundError(f"{name} is not here")


def main() -> None:
    """Answer requests until stdin ends."""
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [
        entry for entry in sys.path if Path(entry).resolve() not in (root, root / "tests")
    ]
    sys.meta_path.insert(0, NoProject())
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("gqa_convert")
        raise SystemExit("gqa_convert can be imported")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        torch.save(attempt(lambda request=request: measure_folder(request)), request["answer"])
        sys.stdout.write("answered\n")
        sys.stdout.flush()


class Elsewhere:
    """A process that measures models.

    Args:
        folder: for its files; its Python modules of checkpoints are cached here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = ("PYTHONPATH", "HF_HOME", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {
            "HF_MODULES_CACHE": str(folder / "modules"),
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(
                Path(transformers.__file__).parents[1]
            ),  # the same transformers, wherever it lies
        }
        self.log = folder / "errors.txt"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=folder,
                env=env,
            )
        self.requests = 0

    def measure(self, **request: Any) -> Any:
        """What `measure_folder` returns for a request, or a traceback as text if it failed."""
        self.requests += 1
        answer = self.folder / f"answer-{self.requests}.pt"
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"answer": str(answer), **request}) + "\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "answered\n":
            if not line:
                raise RuntimeError(self.log.read_text()[-3000:])
        return torch.load(answer)

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


if __name__ == "__main__":
    main()
