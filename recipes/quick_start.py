"""Continues two prompts on four processes: two pipeline stages with half of the layers each, tensor parallel over two.

    torchrun --nproc-per-node 4 recipes/quick_start.py CHECKPOINT TOKENIZER

CHECKPOINT is a folder of Megatron's, saved on any number of processes, or one of transformers; TOKENIZER is a source
for `AutoTokenizer`. Each process reads only its part of the weights. See `docs/generation.md`.
"""

import sys

from transformers import AutoTokenizer

import hybrid_engine
from hybrid_engine.generation import (
    CommonInferenceParams,
    GPTInferenceWrapper,
    SimpleTextGenerationStrategy,
    choose_backend,
    common_generate,
)
from hybrid_engine.inference.checkpoint import build_empty_model

PROMPTS = ["How large is the universe?", "Once upon a time"]


def main(checkpoint: str, tokenizer_name: str) -> None:
    """Prints each prompt with the model's continuation."""
    model = build_empty_model(checkpoint)
    engine = hybrid_engine.init_inference(
        model, checkpoint=checkpoint, tensor_parallel={"tp_size": 2}, pipeline_parallel_size=2
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, trust_remote_code=False)
    strategy = SimpleTextGenerationStrategy(GPTInferenceWrapper(engine), tokenizer)
    params = CommonInferenceParams(temperature=0.8, num_tokens_to_generate=30)
    result = common_generate(choose_backend(strategy, random_seed=0), PROMPTS, params)
    for text in result.get("prompts_plus_generations_detokenized", []):  # only on rank 0
        print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
