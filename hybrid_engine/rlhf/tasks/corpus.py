"""The data of supervised training as tokens: examples of sft and pairs of the reward model."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_engine.rlhf.batches.packing import SharedPrompt
from hybrid_engine.rlhf.batches.sequences import NUM_POOLED, epochs_of_similar_length
from hybrid_engine.rlhf.data.encoding import Encoded, encode_completion, encode_pair, read_template
from hybrid_engine.rlhf.data.parts import check_parts, load_parts, prompt_text
from hybrid_engine.rlhf.data.prompts import keep_fitting, limit_of
from hybrid_engine.rlhf.data.reading import read_learned_rows, read_preference_rows
from hybrid_engine.rlhf.data.rows import LearnedRow, PreferenceRow, encode_each, texts_of, told_together
from hybrid_engine.rlhf.options.supervised import RewardConfig, SFTConfig
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer, num_positions
from hybrid_engine.rlhf.tasks import arithmetic, calculator
from hybrid_engine.rlhf.tasks.stdlib_docs import build_preferences, split, stdlib_examples, stdlib_row, stdlib_rows

Rows = tuple[list[LearnedRow], list[LearnedRow]]
TASKS: dict[str, Callable[[int], Rows]] = {
    "docs": lambda seed: stdlib_rows(),
    "sums": lambda seed: (arithmetic.training_rows(seed), arithmetic.held_out_work()),
    "calculator": lambda seed: (calculator.training_rows(seed), calculator.held_out_work()),
}
"""Training and held-out rows of the tasks that need no dataset, by a seed."""
TOKENIZERS = {"sums": arithmetic.build_tokenizer, "calculator": calculator.build_tokenizer}
"""Tokenizers of the tasks whose tokens are characters."""
NUM_REFERENCES = 512
"""Number of good answers whose scores define the normalization."""
MAX_POSITIONS = 512
"""Enough for any of the standard library's examples, and for two summaries after a prompt, with a token per byte."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The rows as tokens."""

    train: list[Encoded]
    held_out: list[Encoded]
    pad_token: int


@told_together()
def load_corpus(config: SFTConfig) -> tuple[PreTrainedTokenizerBase, Corpus]:
    """The tokenizer, loaded or trained on the training rows, and all rows as tokens, as a `SFTConfig` says.

    Raises:
        ValueError: a source that an option names cannot be read, a row cannot be learned or is too long.
    """
    train: list[LearnedRow]
    held_out: list[LearnedRow]
    if config.dataset is None:
        train, held_out = TASKS[config.task](config.seed)
    else:
        train, held_out = load_parts(config.source, read_learned_rows)
    train = train[: config.max_examples or None]
    if config.model:
        tokenizer, positions = load_tokenizer(config.model), num_positions(load_config(config.model))
    elif config.task in TOKENIZERS and config.dataset is None:
        tokenizer, positions = TOKENIZERS[config.task](), MAX_POSITIONS
    else:
        texts = (text for row in train for text in texts_of(row))
        tokenizer, positions = train_tokenizer(texts, config.vocab_size), MAX_POSITIONS
    if config.chat_template:
        tokenizer.chat_template = read_template(config.chat_template)
    model = f"--model={config.model!r}" if config.model else "what is made without --model"
    limit, encoded = limit_of(config.max_tokens, positions, model), []
    for part in (train, held_out):
        rows, tokens = encode_each(config, part, partial(encode_completion, tokenizer))
        encoded.append(keep_fitting(config, rows, tokens, limit)[1])
    if config.dataset is not None:
        check_parts(config.source, encoded[0], encoded[1])
    return tokenizer, Corpus(train=encoded[0], held_out=encoded[1], pad_token=tokenizer.pad_token_id)


def batches_of(config: SFTConfig, examples: list[Encoded]) -> list[list[int]]:
    """Indices of `examples`, by optimizer step of the whole run."""
    num_pooled = NUM_POOLED if config.group_by_length else 1
    lengths = [len(example) for example in examples]
    return epochs_of_similar_length(lengths, config.batch_size, config.num_epochs, config.seed, num_pooled)


class Pair(NamedTuple):
    """Two answers, each after its prompt."""

    chosen: list[int]
    rejected: list[int]
    margin: float
    """The margin by which the scores should differ; 0 if the dataset has none."""
    kind: str | None
    """The fault of the rejected answer; None if it is not known."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each answer, with its prompt."""
        return len(self.chosen), len(self.rejected)

    @property
    def prompts(self) -> tuple[SharedPrompt, ...]:
        """Empty prompts, since nothing is known to be shared: a score is read from the whole."""
        return (SharedPrompt(None, 0),) * 2

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer answer, with its prompt."""
        return max(self.lengths)


def build_pair(tokenizer: PreTrainedTokenizerBase, row: PreferenceRow, kind_column: str | None = None) -> Pair:
    """The row as tokens; the column `kind_column` names the fault of the rejected answer."""
    chosen, rejected = (answer.prompt_ids + answer.response_ids for answer in encode_pair(tokenizer, row))
    return Pair(chosen, rejected, row.margin or 0.0, row.columns[kind_column] if kind_column else None)


def num_characters(row: PreferenceRow) -> int:
    """Characters of the prompt with the longer answer, by which batches are sorted."""
    return len(prompt_text(row.prompt)) + max(len(prompt_text(row.chosen)), len(prompt_text(row.rejected)))


@dataclass(frozen=True, kw_only=True)
class PairCorpus:
    """The pairs of a run."""

    train: list[Pair]
    held_out: list[Pair]
    references: list[list[int]]
    """Good answers after their prompts, by which scores are normalized."""
    batches: list[list[int]]
    """Indices of `train`, by optimizer step."""


@told_together()
def load_pair_corpus(config: RewardConfig, tokenizer: PreTrainedTokenizerBase, source: str) -> PairCorpus:
    """All pairs as tokens, as a `RewardConfig` says; `source` is the model whose body is trained.

    Raises:
        ValueError: `--dataset` cannot be read, or a row is not a pair or is too long.
    """
    if config.dataset is None:
        train_examples, held_out_examples = split(stdlib_examples())
        train_examples = train_examples[: config.max_examples or None]
        train, held_out = (build_preferences(part, config.seed) for part in (train_examples, held_out_examples))
        good = [encode_completion(tokenizer, stdlib_row(example)) for example in train_examples[:NUM_REFERENCES]]
        references = [answer.prompt_ids + answer.response_ids for answer in good]
    else:
        train, held_out = load_parts(config.source, read_preference_rows)
    random.Random(config.seed).shuffle(train)
    train = train[: config.num_pairs or None]
    limit = limit_of(config.max_tokens, num_positions(load_config(source)), f"--model={source!r}")
    encoded = []
    for part in (train, held_out):
        encode = partial(build_pair, tokenizer, kind_column=None if config.dataset else "kind")
        encoded.append(keep_fitting(config, *encode_each(config, part, encode), limit))
    (train, pairs), (_, held_out_pairs) = encoded
    if config.dataset is not None:
        check_parts(config.source, pairs, held_out_pairs)
        references = [pair.chosen for pair in pairs[:NUM_REFERENCES]]
    lengths = [num_characters(row) for row in train]
    batches = epochs_of_similar_length(lengths, config.batch_size, config.epochs, config.seed)
    return PairCorpus(train=pairs, held_out=held_out_pairs, references=references, batches=batches)


class FirstWeights(NamedTuple):
    """The initialization of a model's weights."""

    linear_std: float
    embedding_std: float
    scales_residual: bool
    """Whether the outputs of a layer to the residual stream are initialized smaller for more layers, as in GPT-2
    (Radford et al. 2019, section 2.3).
    """


USUAL = FirstWeights(0.02, 0.02, scales_residual=False)
"""The initialization of transformers."""


FOR_TEXT = FirstWeights(0.05, 0.5, scales_residual=True)
"""For words and a narrow model: two epochs of summaries from these weights reach the result of five from the usual
ones. Not for models of characters, which learn sums from both, but learn less from rewards: online DPO reached 57%
right instead of 99%.
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
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
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=MAX_POSITIONS
    )


def build_small_llama(
    tokenizer: PreTrainedTokenizerBase, hidden_size: int, num_layers: int, first: FirstWeights = USUAL
) -> LlamaForCausalLM:
    """A newly initialized Llama with grouped-query attention, heads of dimension 32 and no dropout.

    Args:
        tokenizer: its vocabulary is the model's.
        hidden_size: a multiple of 64, two heads.
        num_layers: transformer layers.
        first: the standard deviations of its initial weights.
    """
    num_heads = hidden_size // 32
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=-(-hidden_size * 8 // 3 // 64) * 64,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=MAX_POSITIONS,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            tie_word_embeddings=False,
            initializer_range=first.linear_std,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight *= first.embedding_std / first.linear_std
        for layer in model.model.layers if first.scales_residual else ():
            layer.self_attn.o_proj.weight *= (2 * num_layers) ** -0.5
            layer.mlp.down_proj.weight *= (2 * num_layers) ** -0.5
    return model
