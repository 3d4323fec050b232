"""Train the bundled demo checkpoint: a small Llama-style model with 12 K/V heads, on the Python
standard library's sources.

    python recipes/demo/train.py gqa_convert/demo_checkpoint

It needs no network and no GPU. What it printed, how long it took and the loss it reached are in
`training.json` beside the weights.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gqa_convert.data.files import Fields, Files
from gqa_convert.data.folders import source_files

END, PAD = "<|endoftext|>", "<|pad|>"
VOCABULARY = 2048
CONTEXT = 512  # tokens
HELD_OUT_TOKENS = 100_000


def read_texts(paths: list[Path]) -> list[str]:
    """The texts of the files, without those that are nearly empty or not UTF-8, as some data of
    tests.
    """
    return [
        piece.text for piece in Files("the standard library", paths, lenient=True).pieces(Fields())
    ]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """All texts, each closed by the end token, as one array of token ids."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate(
        [np.array([*ids, tokenizer.eos_token_id], dtype=np.int64) for ids in encoded]
    )


def mean_loss(model: LlamaForCausalLM, ids: np.ndarray) -> float:
    """Nats per token, in blocks that overlap by one token, so that each but the first is scored
    once.
    """
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, CONTEXT - 1):
            block = torch.from_numpy(ids[start : start + CONTEXT])[None]
            total += float(model(input_ids=block, labels=block).loss) * (block.shape[1] - 1)
    return total / (len(ids) - 1)


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=5,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        initializer_range=0.04,
    )


def learning_rate_factor(
    step: int, steps: int, warmup: int = 50, decay_share: float = 0.5
) -> float:
    """Warm-up, constant, then a linear decay to zero over the last share of the steps."""
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (steps - step) / (decay_share * steps))


def make_portable(folder: Path) -> None:
    """Add the config keys that software older than transformers 5 reads, and let everybody read the
    files.
    """
    for name, keys in (
        ("config.json", {"rope_theta": 10000.0, "torch_dtype": "bfloat16"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=2) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--tokens", type=float, default=20e6, help="training tokens; the text is repeated as needed"
    )
    parser.add_argument("--batch", type=int, default=16, help="blocks of 512 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists already: name a new folder")

    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    texts = read_texts(source_files(held_out=False, with_tests=True))
    rng.shuffle(texts)
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, read_texts(source_files(held_out=True)))
    model = LlamaForCausalLM(configuration())
    parameters = sum(p.numel() for p in model.parameters())
    steps = math.ceil(arguments.tokens / (arguments.batch * CONTEXT))
    print(f"{parameters:,} parameters, {len(stream):,} tokens of text, {steps} steps", flush=True)

    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps)
    )
    compiled = torch.compile(model)
    starts = np.arange(0, len(stream) - CONTEXT, CONTEXT)
    order: list[int] = []
    began = time.monotonic()
    for step in range(steps):
        if len(order) < arguments.batch:
            order += (
                (rng.permutation(starts) + rng.integers(0, CONTEXT))
                .clip(max=len(stream) - CONTEXT)
                .tolist()
            )
        chosen, order = order[: arguments.batch], order[arguments.batch :]
        ids = torch.from_numpy(np.stack([stream[at : at + CONTEXT] for at in chosen]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"step {step} loss {loss.item():.3f} after {seconds:.0f} s", flush=True)

    seconds = time.monotonic() - began
    model = model.to(torch.bfloat16)
    loss = mean_loss(model.eval(), held_out[:HELD_OUT_TOKENS])
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    make_portable(arguments.output)
    record = {
        "recipe": "recipes/demo/train.py",
        "text": "sources of the Python standard library, one file in twenty held out",
        "parameters": parameters,
        "text_tokens": len(stream),
        "training_tokens": steps * arguments.batch * CONTEXT,
        "held_out_loss_nats_per_token": round(loss, 4),
        "training_seconds": round(seconds),
        "hardware": f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
    }
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
