"""vLLM, in this process."""

from .client import NEW_TOKENS, Answer, Request


def answer(request: Request) -> Answer:
    """Load the checkpoint in float32 and decode; only tokens are compared, since vLLM shows log-probabilities alone."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(request.folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=max(map(len, request.sequences)) + 1,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in request.prompts], greedy, use_tqdm=False)
    return Answer([list(each.outputs[0].token_ids) for each in made], None)
