"""Answers prompts: from a file into a file, or line by line in the terminal.

    hybrid-engine generate --model runs/sums/actor --prompts problems.jsonl --out answers.jsonl
    torchrun --nproc-per-node 4 -m hybrid_engine.cli.cli generate --tp 2 --pp 2 --model ... --prompts ... --out ...
    echo "Once upon a time" | hybrid-engine generate --model gpt2 --prompts - --out -

All rows go through one continuously refilled batch. Finished rows are written at once: after a kill the same command
continues with the remaining rows, and the file is the same as without the kill.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_rank, on_rank_zero
from hybrid_engine.generation.core import Prompt, Sequence, prompt_digest, sample_keys
from hybrid_engine.generation.detokenize import answer_text, end_token_ids
from hybrid_engine.generation.live.batches import LiveBatch
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions, read_options
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow, each_good, told_together
from hybrid_engine.rlhf.experience.answering import (
    TERMINAL,
    Journal,
    join,
    load_answering,
    load_answering_tokenizer,
    load_shared,
    most_tokens,
    opened,
    read_lines,
    run_sequences,
    telling,
    write_answer,
)
from hybrid_engine.rlhf.options.answering import GenerateConfig as Config
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import load_config

WITHOUT_EFFECT = ("out", "restart", "max_running", "tp", "pp")
"""Options that do not affect the answers."""


def run(config: Config) -> Path | None:
    """Answers all prompts; returns the file of the answers, None if they went to the terminal."""
    join(config.tp, config.pp, "generate")
    if TERMINAL in (config.prompts, config.out):
        answer_in_terminal(config)
        return None
    tokenizer, longest = load_answering_tokenizer(config), most_tokens(load_config(str(config.model)))
    with told_together():
        rows, prompts = encode_rows(config, tokenizer, read_prompt_rows(config.source), longest)
    out = Path(str(config.out))
    journal = on_rank_zero(lambda: Journal(out, identity_of(config, rows), config.restart, default_options()))
    left = [number for number in range(len(rows)) if number not in journal.finished]
    if len(left) < len(rows):
        say(f"{len(rows) - len(left)} of {len(rows)} rows are already answered")
    begin, num_tokens = time.perf_counter(), 0
    if left:
        adapters = {} if config.adapter is None else {"default": config.adapter}
        loaded = load_shared(config, config.tp, config.pp, adapters) if config.is_shared else load_answering(config)
        engine, tokenizer = loaded
        begin = time.perf_counter()
        num_tokens = answer_rows(config, engine, tokenizer, rows, prompts, left, journal)
    on_rank_zero(journal.publish)
    seconds = time.perf_counter() - begin
    say(f"{len(rows)} rows in {out}; {num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens/s")
    return out


def answer_rows(
    config: Config,
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[PromptRow],
    prompts: list[list[int]],
    left: list[int],
    journal: Journal,
) -> int:
    """Answers the rows in `left` into `journal`, on rank 0; returns the number of generated tokens.

    `prompts`: the tokens of every row's prompt.
    """
    sequences = build_sequences(config, read_sampling(config, engine, tokenizer), prompts)
    given = [sequence for number in left for sequence in sequences[number]]
    with progress_bar(is_shown=get_rank() == 0) as bar:
        task = bar.add_task("rows", total=len(rows), completed=len(rows) - len(left))

        def add(number: int) -> None:
            journal.add(number, answer_of(rows[number], sequences[number], tokenizer))
            bar.advance(task)

        if config.is_shared:
            tell = telling({number: sequences[number] for number in left}, add)
            run_sequences(engine.generator, given, config.max_running, tell)
        else:
            with live_batch(engine.generator, longest_of(sequences), config.max_running, caller="generate") as batch:
                batch.add(given)
                for number in finished_rows(batch, sequences):
                    add(number)
    return sum(len(sequence.tokens) for sequence in given)


def identity_of(config: Config, rows: list[PromptRow]) -> dict[str, Any]:
    """The data that the answers depend on: the options and a hash of the rows."""
    read = json.dumps([[row.prompt, dict(row.columns)] for row in rows], default=str).encode()
    options = {name: value for name, value in asdict(config).items() if name not in WITHOUT_EFFECT}
    return options | {"rows": hashlib.sha256(read).hexdigest()}


def default_options() -> dict[str, Any]:
    """The default of every option."""
    return {option.name: option.default for option in fields(Config) if option.default is not MISSING}


def read_sampling(config: Config, engine: Any, tokenizer: PreTrainedTokenizerBase) -> GenerationOptions:
    """The engine's options; ValueError for one out of range. Ids that the model's config suppresses stay suppressed."""
    sampled = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    vocab_size, defaults = engine.config.get_text_config().vocab_size, engine.generation_config
    given = {"max_new_tokens": config.max_new_tokens, "suppress_tokens": defaults.suppress_tokens}
    given |= {"eos_token_id": end_token_ids(engine, tokenizer)}
    return read_options(given | (sampled if config.temperature > 0 else {}), 0, vocab_size)


def encode_rows(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: list[PromptRow], longest: int
) -> tuple[list[PromptRow], list[list[int]]]:
    """The rows that can be answered within `longest` tokens, and the tokens of their prompts.

    Raises:
        ValueError: there are other rows, and they may not be left out.
    """
    encode = partial(encode_fitting, config, tokenizer, longest)
    return each_good(rows, encode, config.source.shown, skips=config.skip_bad_rows)


def encode_fitting(config: Config, tokenizer: PreTrainedTokenizerBase, longest: int, row: PromptRow) -> list[int]:
    """The tokens of a prompt; ValueError if it has none, or leaves no room for its answer within `longest`."""
    tokens = encode_prompt(tokenizer, row)
    if len(tokens) + config.max_new_tokens > longest:
        raise ValueError(
            f"{row.place}: a prompt of {len(tokens)} tokens and --max-new-tokens={config.max_new_tokens} exceed the "
            f"{longest} that the model takes; shorten the prompt or lower --max-new-tokens"
        )
    return tokens


def build_sequences(config: Config, options: GenerationOptions, prompts: list[list[int]]) -> list[list[Sequence]]:
    """The future answers to each prompt; their noise does not depend on what is answered already."""
    keys = sample_keys(config.seed, [prompt_digest(tokens) for tokens in prompts], [], config.num_samples)
    sequences = []
    for number, tokens in enumerate(prompts):
        prompt = Prompt(tokens)
        places = range(number * config.num_samples, (number + 1) * config.num_samples)
        sequences.append([Sequence(prompt, place, options, keys[place]) for place in places])
    return sequences


def longest_of(sequences: list[list[Sequence]]) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(len(s.prompt.tokens) + s.options.max_new_tokens for row in sequences for s in row)


def finished_rows(batch: LiveBatch, sequences: list[list[Sequence]]) -> Iterator[int]:
    """The rows in the order in which their last answers end; RuntimeError if the logits are not finite."""
    row_of = {sequence: number for number, row in enumerate(sequences) for sequence in row}
    num_left = [len(row) for row in sequences]
    while batch.has_work:
        for told in batch.turn():
            number = row_of[told.sequence]
            if told.finish_reason == "error":
                raise RuntimeError(f"row {number + 1}: the model's logits are not finite; check the weights")
            num_left[number] -= told.finish_reason is not None
            if told.finish_reason is not None and num_left[number] == 0:
                yield number


def answer_of(row: PromptRow, sequences: list[Sequence], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The line of the result for a row."""
    return {
        "prompt": row.prompt,
        **row.columns,
        "responses": [answer_text(tokenizer, s.tokens, s.options.eos_token_ids) for s in sequences],
        "finish_reasons": [sequence.finish_reason for sequence in sequences],
        "num_tokens": [len(sequence.tokens) for sequence in sequences],
    }


def answer_in_terminal(config: Config) -> None:
    """Reads from or writes to the terminal, or both: one prompt after another, with text as it is generated."""
    rows = None if config.prompts == TERMINAL else read_prompt_rows(config.source)
    engine, tokenizer = load_answering(config)
    options = read_sampling(config, engine, tokenizer)
    with opened(str(config.out)) as out, live_batch(engine.generator, max_running=1, caller="generate") as batch:
        prompts = (
            encode_lines(config, tokenizer, batch.longest)
            if rows is None
            else encode_rows(config, tokenizer, rows, batch.longest)[1]
        )
        for number, tokens in enumerate(prompts):
            for key in sample_keys(config.seed, [prompt_digest(tokens)], [], config.num_samples):
                write_answer(batch, Sequence(Prompt(tokens), number, options, key), tokenizer, out)


def encode_lines(config: Config, tokenizer: PreTrainedTokenizerBase, longest: int) -> Iterator[list[int]]:
    """The tokens of the terminal's lines as they are typed; one that cannot be used ends the run, or is left out."""
    for row in read_lines(config.source):
        try:
            yield encode_fitting(config, tokenizer, longest, row)
        except ValueError as error:
            if not config.skip_bad_rows:
                raise
            say(f"--skip-bad-rows: {error}")


def progress_bar(is_shown: bool) -> Progress:
    """A progress bar of answered rows, with the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        disable=not is_shown,
    )
