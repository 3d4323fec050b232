"""CTranslate2, on which faster-whisper and LibreTranslate are built, and the folder that it loads.

    python -m gqa_convert.serving.ctranslate2 RESULT OUT [--quantization int8]

CTranslate2's converter has a loader for each of transformers' classes. That of a T5, BART, Whisper
or OPT takes whatever rows the projections have, but states no number of K/V heads: the number is
added here, and the attention's head_dim.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gqa_convert.errors import GQAConvertError, OutputError, first_line
from gqa_convert.families.loading import (
    hears,
    is_encoder_decoder,
    load_complete,
    load_tokenizer,
    read_config,
)
from gqa_convert.publishing.atomic_files import sync
from gqa_convert.publishing.publication import staged_folder
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.paths import local_path

from .request import NEW_TOKENS, NotSupportedError, Request, TokenIds, commands, random_sound

_COPIED = ("tokenizer.json", "preprocessor_config.json")
"""Files of the checkpoint that faster-whisper reads beside the model."""


def make_folder(result: Path, out: Path, quantization: str | None = None) -> None:
    """Write what CTranslate2 loads in place of a checkpoint.

    Args:
        result: the checkpoint, converted or not.
        out: the folder to make.
        quantization: type of the weights, by CTranslate2's name; None for the checkpoint's.

    Raises:
        NotSupportedError: CTranslate2 has no loader for the checkpoint.
        OutputError: `out` exists, or can't be written.
        ValueError: the tokenizer does not fit, or CTranslate2 does not know the quantization.
        Exception: whatever transformers raises.
    """
    if out.exists():
        raise OutputError(f"{out} exists already: name a new folder")
    spec = _specification(result)
    for name in _COPIED:
        if (result / name).is_file():
            spec.register_file(str(result / name))
    spec.validate()
    spec.optimize(quantization=quantization)
    with staged_folder(out) as made:
        spec.save(str(made.path))
        for file in made.path.iterdir():
            sync(file)
        made.publish(overwrite=False)


def _specification(result: Path) -> Any:
    """CTranslate2's description of a model, with its weights."""
    import torch
    from ctranslate2.converters import transformers as stock

    model = load_complete(str(result), result, "auto", "CTranslate2 predicts tokens with it")
    # the class of a result with a modelling file is derived from transformers' own
    names = [each.__name__ for each in type(model.config).__mro__]
    loader = next(
        (stock._MODEL_LOADERS[name] for name in names if name in stock._MODEL_LOADERS), None
    )
    joins_projections = isinstance(loader, (stock.T5Loader, stock.BartLoader))
    if loader is None or (names[0] not in stock._MODEL_LOADERS and not joins_projections):
        raise NotSupportedError(f"CTranslate2 has no loader for {model.config.model_type}")
    if joins_projections:
        _state_variant(model)
    with torch.no_grad():
        spec = loader(model, load_tokenizer(result))
    if joins_projections:
        _state_heads(spec, model.config)
    return spec


def _state_variant(model: Any) -> None:
    """Put into a model's config what the loaders read there, and transformers 5 keeps elsewhere."""
    config = model.config
    if hasattr(config, "dense_act_fn"):  # a T5: whether the decoder's outputs are scaled
        config.tie_word_embeddings = getattr(config, "scale_decoder_outputs", False)
    elif is_encoder_decoder(config.to_dict()):
        encoder = model.get_encoder()
        config.normalize_before = hasattr(encoder, "layer_norm")
        config.normalize_embedding = hasattr(encoder, "layernorm_embedding")


def _state_heads(spec: Any, config: Any) -> None:
    """State the sizes of every attention, which the shapes of its weights show."""
    import numpy as np
    from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec

    decoder_heads = getattr(config, "decoder_attention_heads", config.num_attention_heads)
    spec.decoder.num_heads = np.int16(decoder_heads)  # BART's loader writes the encoder's
    stacks = [getattr(spec, name) for name in ("encoder", "decoder") if hasattr(spec, name)]
    for stack in stacks:
        for layer in stack.layer:
            for part in vars(layer).values():
                if isinstance(part, MultiHeadAttentionSpec):
                    _state_sizes(part, int(stack.num_heads))


def _state_sizes(attention: Any, heads: int) -> None:
    """State the number of K/V heads and the head_dim of one attention."""
    import numpy as np

    *projections, output = attention.linear
    head_dim = output.weight.shape[1] // heads
    rows = sum(linear.weight.shape[0] for linear in projections)  # of queries, keys and values
    kv_heads = (rows // head_dim - heads) // 2
    # a specification's own setattr refuses attributes that it was not made with
    vars(attention).update(num_heads_kv=np.int32(kv_heads), head_dim=np.int32(head_dim))


class Adapter:
    """A checkpoint in CTranslate2.

    Raises:
        NotSupportedError: CTranslate2 has no loader for it.
    """

    def __init__(self, request: Request) -> None:
        import ctranslate2

        source, folder = Path(request.folder), Path("ctranslate2")
        make_folder(source, folder, "float32")
        config = read_config(source)
        self._decode: Decode
        if hears(config):
            model = ctranslate2.models.Whisper(str(folder))
            self._decode = partial(_after_sound, model, config)
        elif is_encoder_decoder(config):
            words = _read(folder / "shared_vocabulary.json")
            start = [words[config["decoder_start_token_id"]]]
            if _read(folder / "config.json")["decoder_start_token"]:
                start = []  # mBART's is a language
            model = ctranslate2.Translator(str(folder))
            self._decode = partial(_after_reading, model, words, start)
        else:
            words = _read(folder / "vocabulary.json")
            self._decode = partial(_after_prompt, ctranslate2.Generator(str(folder)), words)

    def generate(self, prompts: list[TokenIds]) -> list[TokenIds]:
        """The greedy tokens after each prompt."""
        return [self._decode(prompt, [])[0] for prompt in prompts]

    def logits(self, prompt: TokenIds, written: TokenIds) -> Any:
        """The logits [1 + written, vocabulary] while the engine is made to decode these tokens."""
        import numpy as np

        _, rows = self._decode(prompt, written)
        return np.stack([np.array(row).reshape(-1) for row in rows])


Decode = Callable[[TokenIds, TokenIds], tuple[TokenIds, Any]]
"""Decodes greedily, past an end of text: called with a prompt and the tokens that are begun with,
it returns all new tokens, these first, and the logits of each.
"""


def _read(path: Path) -> Any:
    """What a JSON file of CTranslate2's holds."""
    return json.loads(path.read_bytes())


def _after_prompt(
    model: Any, words: list[str], prompt: TokenIds, begun: TokenIds
) -> tuple[TokenIds, Any]:
    """What a language model writes; see `Decode`."""
    (result,) = model.generate_batch(
        [[words[token] for token in prompt + begun]],
        max_length=len(prompt) + NEW_TOKENS - 1,
        end_token=[],
        return_logits_vocab=True,
    )
    return result.sequences_ids[0][-NEW_TOKENS:], result.logits[0][-NEW_TOKENS:]


def _after_reading(
    model: Any, words: list[str], start: list[str], prompt: TokenIds, begun: TokenIds
) -> tuple[TokenIds, Any]:
    """What an encoder-decoder writes after it has read the prompt; see `Decode`."""
    (result,) = model.translate_batch(
        [[words[token] for token in prompt]],
        [start + [words[token] for token in begun]],
        beam_size=1,
        max_decoding_length=NEW_TOKENS,
        max_input_length=0,
        end_token=[],
        return_logits_vocab=True,
    )
    return [words.index(word) for word in result.hypotheses[0]], result.logits[0]


def _after_sound(
    model: Any, config: JsonObject, prompt: TokenIds, begun: TokenIds
) -> tuple[TokenIds, Any]:
    """What a Whisper writes after it has heard a sound, without an end of text; see `Decode`."""
    import ctranslate2

    sound = random_sound(config)  # a view does not keep it in memory
    (result,) = model.generate(
        ctranslate2.StorageView.from_array(sound),
        [prompt + begun],
        beam_size=1,
        # it decodes half as many tokens at most, and at most so many with the prompt
        max_length=max(len(prompt), NEW_TOKENS) + NEW_TOKENS,
        suppress_blank=False,
        suppress_tokens=[] if begun else commands(config),
        return_logits_vocab=True,
    )
    return result.sequences_ids[0][:NEW_TOKENS], result.logits[0][:NEW_TOKENS]


def main() -> None:
    """Make a folder for CTranslate2."""
    parser = argparse.ArgumentParser(
        prog="python -m gqa_convert.serving.ctranslate2",
        description="Write the folder that CTranslate2 and faster-whisper load in place of RESULT.",
    )
    parser.add_argument("result", metavar="RESULT", help="checkpoint, converted or not")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--quantization",
        metavar="TYPE",
        help="type of the weights, such as int8 or float16; default: that of RESULT",
    )
    options = parser.parse_args()
    try:
        make_folder(local_path(options.result), local_path(options.out), options.quantization)
    except (GQAConvertError, NotSupportedError, ImportError, ValueError) as problem:
        parser.error(first_line(problem))


if __name__ == "__main__":
    main()
