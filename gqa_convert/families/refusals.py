"""Model types that are known and not converted, with the reason, and types that must be rewritten first. Data only."""

from typing import Final

from gqa_convert.families.family import Refusal

_REFUSED: Final[dict[str, str]] = {
    "its attention has no K/V-head count in transformers, and there is no modelling file for it": """
        bigbird_pegasus cpmant ctrl fsmt git gpt-sw3 gpt_neox_japanese hrm_text modernbert-decoder musicgen musicgen_melody
        mvp nllb-moe openai-gpt pegasus_x prophetnet reformer seamless_m4t seamless_m4t_v2 xlm xlnet
    """,
    "its attention has no K/V-head count in transformers and there is no modelling file for it; opt is the nearest type that has one, with "
    "learned positions where this one has sinusoids: convert another model, or write a file as docs/adding-a-family.md says": "xglm",
    "its attention has no K/V-head count in transformers and there is no modelling file for it; bart is the nearest type that has one: its "
    "decoder is the same but its encoder is not a Longformer, so that an LED can't become one": "led",
    "its attention has no K/V-head count in transformers and there is no modelling file for it, and it comes as the decoder of a "
    "vision-encoder-decoder, which holds two models; bart is the nearest type that has one": "trocr",
    "in transformers it has one K/V head or as many as query heads, and nothing between": "gpt_bigcode",
    "it is an encoder, whose attention has no K/V-head count in transformers": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """,
    "it has no attention, so that it keeps no K/V cache": "falcon_mamba mamba mamba2 rwkv xlstm",
    "its multi-head latent attention caches one latent vector per token and has no K/V heads to merge": """
        axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4
        kimi_linear longcat_flash minicpm3 youtu
    """,
    "it has a single K/V head already": "deepseek_v4",
    "it holds several models with a config each, and its class was not tried with fewer K/V heads inside: save its language "
    "model alone, or add the type as docs/adding-a-family.md says": """
        audioflamingo3 blt chameleon dots3_note emu3 encoder-decoder fuyu gemma3n gemma4 gemma4_assistant
        gemma4_unified gemma4_unified_assistant glmasr granite_speech granite_speech_plus llama4
        moshi moss_transcribe_diarize musicflamingo nemo_speechlm pixtral qwen2_audio qwen3_5
        qwen3_5_moe qwen3_asr qwen4_exp speech-encoder-decoder t5gemma t5gemma2 vibevoice_asr
        vision-encoder-decoder voxtral voxtral_realtime
    """,
    "its layers differ in their K/V heads, which are counted by further config keys": """
        gemma4_text gemma4_unified_text inkling2_text inkling_text mimo_v2_flash
    """,
    "its layers differ in their number of query heads": "laguna",
    "its differential attention splits the values over pairs of K/V heads": "diffllama",
    "its attention mask is computed from the values, with parameters for each K/V head": "doge",
    "its query heads are experts, counted by the K/V heads": "jetmoe",
    "its sparse attention selects blocks of keys once for each K/V head": "minimax_m3_vl_text",
    "convolutions mix its queries and keys after the projections": "zaya",
}

RESTATED: Final[dict[str, str]] = {
    "Yi": "llama",
    "baichuan": "llama",
    "internlm": "llama",
    "internlm2": "llama",
    "open_llama": "llama",
    "minicpm": "granite",
    "phi-msft": "phi",
    "qwen": "qwen2",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
    "stablelm_epoch": "stablelm",
}
"""Model types that load only by the code in their checkpoints, and the stock type that computes the same;
`gqa-convert convert` rewrites the one as the other first."""

REFUSALS: Final[dict[str, Refusal]] = {
    model_type: Refusal(model_type, reason)
    for reason, model_types in _REFUSED.items()
    for model_type in model_types.split()
}
