"""Stage 2: a reward model learns from preference pairs which summary line follows PEP 257.

    hybrid-engine reward --out runs/docs

The model is transformers' own sequence classifier with one label on the body of the SFT model (or of `--model`); it
reads the score at the last token. The loss of a pair is -log sigmoid(score(chosen) - score(rejected)) (Bradley-Terry;
Ouyang et al., arXiv 2203.02155, equation 1). Mean and standard deviation of the scores of real summaries are kept in
the saved config, so that PPO sees rewards of mean 0 and deviation 1 there.
"""

import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.recipes.data.encoding import encode_completion, encode_pair
from hybrid_engine.recipes.data.held_out import prompt_text
from hybrid_engine.recipes.data.rows import CompletionRow, PreferenceRow
from hybrid_engine.recipes.data.sequences import batches_of_similar_length
from hybrid_engine.recipes.runs.checks import check_above, check_at_least, check_divides
from hybrid_engine.recipes.runs.engine_config import build_engine_config
from hybrid_engine.recipes.runs.options import RunOptions
from hybrid_engine.recipes.runs.run_log import RunLog, say, write_json
from hybrid_engine.recipes.runs.stages import (
    is_finished,
    load_config,
    load_model,
    load_tokenizer,
    move_aside,
    num_positions,
    save_stage,
    score_head,
    seed_everything,
)
from hybrid_engine.recipes.tasks.stdlib_docs import split, stdlib_examples
from hybrid_engine.recipes.tasks.stdlib_pairs import build_preferences


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    """Trains a reward model on pairs of summary lines: one that follows PEP 257, one that does not.

        hybrid-engine reward --out runs/docs

    It is a sequence classifier with one label on the body of the model in sft/ below --out, or of --model. It is left
    in reward/ below --out, a Hugging Face folder, the figures of the training in reward-log/.
    """

    model: str | None = None
    """Hugging Face name or folder whose body is trained; default: the run's sft"""
    epochs: int = 1
    """passes over the pairs"""
    batch_size: int = 32
    """pairs of an optimizer step over all processes"""
    learning_rate: float = 3e-4
    """peak of the linear schedule"""
    max_examples: int = 0
    """make pairs of only so many training examples; 0 uses all"""
    max_pairs: int = 2560
    """train on a random sample of so many pairs; 0 uses all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch_size"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("max_examples", "max_pairs"):
            check_at_least(name, getattr(self, name), 0)
        check_above("learning_rate", self.learning_rate, 0)


def run(config: Config) -> Path:
    """Trains and saves the reward model unless its folder exists; returns the folder. Collective."""
    folder = Path(config.out) / "reward"
    hybrid_engine.init_distributed()
    if is_finished(folder, config.restart):
        return folder
    check_divides("batch_size", config.batch_size, get_world_size())
    seed_everything(config.seed)
    source = config.model or str(folder.with_name("sft"))
    if not config.model and not Path(source).exists():
        raise ValueError(f"--out={config.out!r} has no sft; run `hybrid-engine sft` with it first, or give --model")
    tokenizer = load_tokenizer(source)
    check_pad_token(tokenizer, source)
    train, held_out = split(stdlib_examples())
    train = train[: config.max_examples or None]
    pairs = build_preferences(train, config.seed)
    random.shuffle(pairs)
    pairs = pairs[: config.max_pairs or None]
    if len(pairs) < config.batch_size:
        raise ValueError(
            f"--batch-size={config.batch_size} must not exceed the {len(pairs)} preference pairs; lower it"
        )
    check_lengths(pairs, tokenizer, source)
    model = build_reward_model(source, tokenizer)
    num_steps = config.epochs * (len(pairs) // config.batch_size)
    say(f"Reward model: {len(pairs)} preference pairs of {len(train)} signatures, {config.epochs} epochs")

    engine_config = build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=config.batch_size // get_world_size(),
        learning_rate=config.learning_rate,
        num_steps=num_steps,
        warmup_steps=min(20, num_steps),
        zero_stage=config.zero_stage,
    )
    move_aside(folder.parent, [folder.name, "reward-log"])
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config)
    started = time.perf_counter()
    train_loop(engine, pairs, tokenizer, config, RunLog(folder.parent / "reward-log", "Reward", num_steps, config))
    accuracy = accuracy_by_kind(engine, build_preferences(held_out, config.seed), tokenizer)
    model.config.score_mean, model.config.score_std = score_statistics(engine, train[:512], tokenizer)
    write_json(
        folder.parent / "reward-log" / "result.json",
        {"held_out_accuracy": accuracy, "seconds": time.perf_counter() - started},
    )
    say("Reward model: held-out accuracy " + ", ".join(f"{kind} {share:.2f}" for kind, share in accuracy.items()))
    save_stage(engine, tokenizer, folder)
    return folder


def train_loop(
    engine, pairs: list[PreferenceRow], tokenizer: PreTrainedTokenizerBase, config: Config, log: RunLog
) -> None:
    """Every process takes its pairs of each batch; chosen and rejected go through the model together."""
    generator = torch.Generator().manual_seed(config.seed)
    lengths = [len(prompt_text(pair.prompt)) + max(map(len, (pair.chosen, pair.rejected))) for pair in pairs]
    engine.train()
    with log:
        for _ in range(config.epochs):
            for batch in batches_of_similar_length(lengths, config.batch_size, generator):
                margins = score_margins(engine, [pairs[i] for i in batch[get_rank() :: get_world_size()]], tokenizer)
                loss = -logsigmoid(margins).mean()
                engine.backward(loss)
                engine.step()
                figures = {"loss": loss.item(), "accuracy": (margins > 0).float().mean().item()}
                log.write(
                    engine.global_steps - 1, {**figures, "grad_norm": engine.get_global_grad_norm()}, list(figures)
                )


def build_reward_model(source: str, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """A sequence classifier with one label on the body of `source`, without dropout; its head N(0, 1/(d+1)).

    The head's initialisation is that of Stiennon et al., arXiv 2009.01325 (after Huang et al., "N implementation
    details", item 3).
    """
    model = load_model(AutoModelForSequenceClassification, source, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    head = score_head(model, "model", source)
    torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    return model


def score_margins(engine, pairs: list[PreferenceRow], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """`[pairs]`: score of the chosen response less score of the rejected one."""
    encoded = [encode_pair(tokenizer, pair) for pair in pairs]
    tokens = [pair.prompt_ids + pair.chosen_ids for pair in encoded]
    tokens += [pair.prompt_ids + pair.rejected_ids for pair in encoded]
    chosen, rejected = score_tokens(engine, tokens, tokenizer).chunk(2)
    return chosen - rejected


def score_tokens(engine, tokens: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """`[B]`: the scores of prompts with finished responses, read at the last token of each."""
    batch = tokenizer.pad({"input_ids": tokens}, padding_side="right", return_tensors="pt").to(engine.device)
    return engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).float()


@torch.no_grad()
def accuracy_by_kind(engine, pairs: list[PreferenceRow], tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Share of pairs whose chosen response scores higher, for each kind of fault and for all."""
    engine.eval()
    hits = defaultdict(list)
    for start in range(0, len(pairs), 64):
        batch = pairs[start : start + 64]
        for pair, margin in zip(batch, score_margins(engine, batch, tokenizer).tolist(), strict=True):
            hits[pair.columns["kind"]].append(margin > 0)
            hits["all"].append(margin > 0)
    return {kind: sum(found) / len(found) for kind, found in sorted(hits.items())}


@torch.no_grad()
def score_statistics(engine, examples: list, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
    """Mean and standard deviation of the scores of the examples' own summaries."""
    engine.eval()
    encoded = [
        encode_completion(tokenizer, CompletionRow(prompt=example.prompt, completion=example.summary))
        for example in examples
    ]
    tokens = [row.prompt_ids + row.response_ids for row in encoded]
    scores = [score_tokens(engine, tokens[start : start + 64], tokenizer) for start in range(0, len(tokens), 64)]
    joined = torch.cat(scores)
    return joined.mean().item(), joined.std().item()


def check_lengths(pairs: list[PreferenceRow], tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """ValueError where a pair has more tokens than `source` has positions."""
    limit = num_positions(load_config(source))
    encoded = [encode_pair(tokenizer, pair) for pair in pairs]
    longest = max(len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in encoded)
    if limit is not None and longest > limit:
        raise ValueError(
            f"--model={source!r} has {limit} positions, and a prompt with its summary has up to {longest} tokens; "
            "use a model with more positions"
        )


def check_pad_token(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """ValueError unless padding can be told from the end-of-sequence token, where the score is read."""
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            f"--model={source!r} pads with its eos_token {tokenizer.eos_token!r}; the score is read at the last token "
            "that is not padding, so pad must differ: set another pad_token in its tokenizer"
        )
