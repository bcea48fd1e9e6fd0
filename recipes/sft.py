"""Stage 1: a BPE tokenizer and a small Llama learn to write a docstring's summary line from the signature.

    hybrid-engine sft --out runs/docs

The loss is the cross-entropy of the summary's tokens and the end-of-sequence token behind them; the prompt is only
read. The result is `sft/` below `--out`: a Hugging Face folder with the model and its tokenizer.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import hybrid_engine
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.recipes.data.sequences import (
    Sequences,
    batches_of_similar_length,
    build_sequences,
    response_logprobs,
)
from hybrid_engine.recipes.runs.checks import check_above, check_at_least, check_divides
from hybrid_engine.recipes.runs.engine_config import build_engine_config
from hybrid_engine.recipes.runs.options import RunOptions
from hybrid_engine.recipes.runs.run_log import RunLog, say, write_json
from hybrid_engine.recipes.runs.stages import is_finished, move_aside, save_stage, seed_everything
from hybrid_engine.recipes.tasks.stdlib_docs import DocExample, split, stdlib_examples
from hybrid_engine.rl.aggregation import token_mean

MAX_POSITIONS = 512
"""Enough for any example, and for two summaries behind a prompt, if each byte is a token."""


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    """Trains a tokenizer and a small Llama to write a docstring's summary line from a signature.

        hybrid-engine sft --out runs/docs

    The examples are the functions of Python's own standard library; nothing is downloaded. The model and its tokenizer
    are left in sft/ below --out, a Hugging Face folder, the figures of the training in sft-log/.
    """

    vocab_size: int = 2048
    """tokens of the BPE vocabulary"""
    hidden_size: int = 192
    """width of the model; a multiple of 64, two heads of 32"""
    num_layers: int = 5
    """transformer layers"""
    epochs: int = 5
    """passes over the training examples"""
    batch_size: int = 16
    """examples of an optimizer step over all processes"""
    learning_rate: float = 1.5e-3
    """peak of the linear schedule"""
    max_examples: int = 0
    """use only so many training examples; 0 uses all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_layers", "epochs", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("vocab_size", self.vocab_size, 300)
        check_at_least("max_examples", self.max_examples, 0)
        check_above("learning_rate", self.learning_rate, 0)
        check_divides("hidden_size", self.hidden_size, 64)


def run(config: Config) -> Path:
    """Trains and saves the model unless its folder exists; returns the folder. Collective."""
    folder = Path(config.out) / "sft"
    hybrid_engine.init_distributed()
    if is_finished(folder, config.restart):
        return folder
    check_divides("batch_size", config.batch_size, get_world_size())
    seed_everything(config.seed)
    train, held_out = split(stdlib_examples())
    train = train[: config.max_examples or None]
    num_steps = config.epochs * num_batches(len(train), config.batch_size)
    tokenizer = train_tokenizer(train, config.vocab_size)
    encoded = [encode_example(tokenizer, example) for example in train]
    model = build_small_llama(config, tokenizer)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"SFT: {len(train)} signatures, {num_parameters / 1e6:.2f}M parameters, {config.epochs} epochs")

    engine_config = build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=config.batch_size // get_world_size(),
        learning_rate=config.learning_rate,
        num_steps=num_steps,
        warmup_steps=min(50, num_steps),
        zero_stage=config.zero_stage,
        weight_decay=0.1,
    )
    move_aside(folder.parent, [folder.name, "sft-log"])
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config)
    started = time.perf_counter()
    train_loop(
        engine, encoded, tokenizer.pad_token_id, config, RunLog(folder.parent / "sft-log", "SFT", num_steps, config)
    )
    loss = held_out_loss(engine, [encode_example(tokenizer, example) for example in held_out], tokenizer.pad_token_id)
    figures = {"held_out_nats_per_token": loss, "seconds": time.perf_counter() - started}
    write_json(folder.parent / "sft-log" / "result.json", figures)
    say(f"SFT: held-out loss {loss:.3f} nats per token after {figures['seconds']:.0f} s")
    save_stage(engine, tokenizer, folder)
    return folder


def train_loop(engine, encoded: list[tuple[list[int], list[int]]], pad_token: int, config: Config, log: RunLog) -> None:
    """Every process takes its rows of each batch; the loss weighs every token of the whole batch alike."""
    generator = torch.Generator().manual_seed(config.seed)
    lengths = [len(prompt) + len(response) for prompt, response in encoded]
    engine.train()
    with log:
        for _ in range(config.epochs):
            for batch in batches_of_similar_length(lengths, config.batch_size, generator):
                num_tokens = sum(len(encoded[index][1]) for index in batch)
                mine = [encoded[index] for index in batch[get_rank() :: get_world_size()]]
                sequences = collate(mine, pad_token, engine.device)
                loss = token_mean(-response_logprobs(engine, sequences), sequences.response_mask, num_tokens)
                # The engine averages gradients over the processes; the loss is their sum.
                engine.backward(loss * get_world_size())
                engine.step()
                figures = {"loss": loss.item() * get_world_size(), "grad_norm": engine.get_global_grad_norm()}
                log.write(engine.global_steps - 1, {**figures, "learning_rate": engine.get_lr()[0]}, ["loss"])


@torch.no_grad()
def held_out_loss(engine, encoded: list[tuple[list[int], list[int]]], pad_token: int) -> float:
    """Mean cross-entropy in nats per summary token; every process computes all of it."""
    engine.eval()
    total, num_tokens = 0.0, 0
    for start in range(0, len(encoded), 64):
        sequences = collate(encoded[start : start + 64], pad_token, engine.device)
        total -= response_logprobs(engine, sequences).sum().item()
        num_tokens += int(sequences.response_mask.sum())
    return total / num_tokens


def train_tokenizer(examples: list[DocExample], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a pad token of its own, so that the end-of-sequence token is learned."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for example in examples for text in (example.prompt, example.summary)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=MAX_POSITIONS
    )


def build_small_llama(config: Config, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama with grouped-query attention, heads of width 32 and no dropout, freshly initialised."""
    num_heads = config.hidden_size // 32
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=-(-config.hidden_size * 8 // 3 // 64) * 64,
            num_hidden_layers=config.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=MAX_POSITIONS,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )


def encode_example(tokenizer: PreTrainedTokenizerBase, example: DocExample) -> tuple[list[int], list[int]]:
    """Prompt tokens, and summary tokens with the end-of-sequence token behind them."""
    prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    summary = tokenizer(example.summary, add_special_tokens=False)["input_ids"]
    return prompt, [*summary, tokenizer.eos_token_id]


def collate(encoded: list[tuple[list[int], list[int]]], pad_token: int, device: torch.device) -> Sequences:
    """A padded batch of `encode_example`'s pairs."""
    return build_sequences([pair[0] for pair in encoded], [pair[1] for pair in encoded], pad_token, device)


def num_batches(num_examples: int, batch_size: int) -> int:
    """Optimizer steps of one epoch; ValueError if there is none."""
    if num_examples < batch_size:
        raise ValueError(f"--batch-size={batch_size} must not exceed the {num_examples} training examples; lower it")
    return num_examples // batch_size
