"""Encoder-decoder families, which all need a modelling file."""

from collections.abc import Iterator

from gqa_convert.families.family import Family
from gqa_convert.families.records.building import NO_ROTARY, SPEECH_TASKS, Fields, own_file

_NO_POSITION_IDS = "its decoder accepts no position ids, so that a document can't begin at position 0"

_T5: Fields = {
    "layers": (("decoder.block", ("num_decoder_layers", "num_layers")), ("encoder.block", ("num_layers",))),
    "prefixes": ("", "transformer.", "switch_transformers."),
    "attention": ("SelfAttention", "EncDecAttention"),
    "cross_attention": ("EncDecAttention",),
    "encoder": "encoder",
    "query": "q",
    "key": "k",
    "value": "v",
    "output": "o",
    "hidden_key": "d_model",
    "heads_key": "num_heads",
    "encoder_heads_key": "num_heads",
    "head_dim_key": "d_kv",
    "mlp": "feed_forward_proj",
    **NO_ROTARY,
    "key_norm": "none",
    "order_constraints": tuple(
        (kind, "each head has its own position bias, given by its number") for kind in ("decoder", "encoder")
    ),
    "is_t5": True,
}
_BART: Fields = {
    "layers": (("decoder.layers", ("decoder_layers",)), ("encoder.layers", ("encoder_layers",))),
    "prefixes": ("", "model.", "model.model."),
    "attention": ("self_attn", "encoder_attn"),
    "cross_attention": ("encoder_attn",),
    "encoder": "encoder",
    "output": "out_proj",
    "hidden_key": "d_model",
    "heads_key": "decoder_attention_heads",
    "encoder_heads_key": "encoder_attention_heads",
    "head_dim_key": None,
    "mlp": "plain",
    **NO_ROTARY,
    "key_norm": "none",
    "document_constraint": _NO_POSITION_IDS,
}


def encoder_decoders() -> Iterator[Family]:
    """The records: T5 and its relatives, Bart and its relatives, Whisper."""
    yield from _t5_family()
    yield from _bart_family()
    yield from own_file(
        "gqa_whisper",
        "whisper",
        "Whisper",
        "Model ForConditionalGeneration ForCausalLM ForAudioClassification",
        tokenizer="WhisperTokenizer",
        auto_classes=SPEECH_TASKS,
        order_constraints=(("cross", "word timestamps are read from heads by their numbers"),),
        **_BART | {"document_constraint": None},
    )


def _t5_family() -> Iterator[Family]:
    for model_type, prefix, tokenizer in (
        ("t5", "T5", "T5Tokenizer"),
        ("mt5", "MT5", "T5Tokenizer"),
        ("umt5", "UMT5", "TokenizersBackend"),
    ):
        yield from own_file(
            "gqa_t5",
            model_type,
            prefix,
            "Model ForConditionalGeneration EncoderModel ForSequenceClassification ForTokenClassification "
            "ForQuestionAnswering",
            tokenizer=tokenizer,
            **_T5,
        )
    generation = "Model ForConditionalGeneration"
    yield from own_file("gqa_t5", "longt5", "LongT5", generation, tokenizer="TokenizersBackend", **_T5)
    yield from own_file(
        "gqa_t5",
        "switch_transformers",
        "SwitchTransformers",
        generation,
        tokenizer="T5Tokenizer",
        **_T5 | {"mlp": "plain"},
    )


def _bart_family() -> Iterator[Family]:
    generation, causal = "Model ForConditionalGeneration", "Model ForConditionalGeneration ForCausalLM"
    classification = f"{causal} ForSequenceClassification"
    answering = f"{classification} ForQuestionAnswering"
    last: Fields = {"decoder_starts_with_last": True}
    rows: tuple[tuple[str, str, str, str, Fields], ...] = (
        ("bart", "Bart", answering, "BartTokenizer", {}),
        ("plbart", "PLBart", classification, "PLBartTokenizer", last),
        ("mbart", "MBart", answering, "MBartTokenizer", last),
        ("pegasus", "Pegasus", causal, "PegasusTokenizer", {}),
        ("blenderbot", "Blenderbot", causal, "BlenderbotTokenizer", {}),
        ("blenderbot-small", "BlenderbotSmall", causal, "BlenderbotSmallTokenizer", {}),
        ("m2m_100", "M2M100", generation, "M2M100Tokenizer", {}),
        ("marian", "Marian", "Model MTModel ForCausalLM", "MarianTokenizer", {}),
    )
    for model_type, prefix, tasks, tokenizer, further in rows:
        yield from own_file("gqa_bart", model_type, prefix, tasks, tokenizer=tokenizer, **_BART | further)
