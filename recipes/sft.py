"""Supervised fine-tuning: trains a model on the examples of a dataset.

    hybrid-engine sft --out runs/docs
    hybrid-engine sft --model Qwen/Qwen3-0.6B --dataset chats.jsonl --out runs/mine

The loss is the cross-entropy of the response's tokens, including the end-of-sequence token. Prompts are not learned,
nor are turns of a conversation other than the assistant's (`data/encoding.py`). Without --model a BPE tokenizer and a
small Llama are trained from scratch; without --dataset they learn a docstring's summary line from the signature, which
is stage 1 of the PPO job.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.config.checks import check_divides
from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size, on_rank_zero
from hybrid_engine.rl.losses import token_mean
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses, check_budget
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import Items, RunPasses, split, turns
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    build_sequences,
    recompute_activations,
    response_logprobs,
)
from hybrid_engine.rlhf.data.encoding import Encoded
from hybrid_engine.rlhf.options.shared import is_due
from hybrid_engine.rlhf.options.supervised import SFTConfig as Config
from hybrid_engine.rlhf.planning.comparison import follow_memory, write_result
from hybrid_engine.rlhf.planning.reading import Learned, Read
from hybrid_engine.rlhf.runs.checkpoints import (
    SavedRun,
    begin_run,
    check_resume,
    is_lengthened,
    load_checkpoints,
    mark_finished,
    save_checkpoints,
)
from hybrid_engine.rlhf.runs.engine_config import Schedule, build_engine_config, gradient_figures, largest_micro_batch
from hybrid_engine.rlhf.runs.run_checks import add_adapter, check_trainable
from hybrid_engine.rlhf.runs.run_folder import checkpoints_of, read_metrics, results_of
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import (
    is_finished,
    load_config,
    load_model,
    move_aside,
    save_stage,
    seed_everything,
)
from hybrid_engine.rlhf.tasks.corpus import FOR_TEXT, USUAL, Corpus, batches_of, build_small_llama, load_corpus


def run(config: Config) -> Path:
    """Trains and saves the model unless its folder exists; returns the folder. Collective."""
    out, folder = Path(config.out), Path(config.out) / "sft"
    config = begin_run(config, "sft")
    if is_finished(folder, config.restart or is_lengthened(config, "sft")):
        return folder
    on_rank_zero(lambda: check_resume(out, config, "sft"))
    check_divides("batch_size", config.batch_size, get_world_size())
    seed_everything(config.seed)
    tokenizer, corpus = load_corpus(config)
    batches = batches_of(config, corpus.train)
    check_budget(config.tokens_per_micro_batch, [(len(example),) for example in corpus.train])
    model = recompute_activations(load_or_build_model(config, tokenizer), config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"SFT: {len(corpus.train)} examples, {num_parameters / 1e6:.2f}M parameters, {config.num_epochs} epochs")

    if not config.resume:
        move_aside(out, results_of("sft"))
    schedule = Schedule.of(config, len(batches), "sft")
    say(schedule.describe())
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(config), lr_scheduler=schedule.build)
    pack_where_exact(engine, config)
    sizes = RunPasses.of(config)
    read = Read(first=engine.module.config, learned=Learned(Items.of(corpus.train), batches))
    memory = follow_memory("sft", config, read, sizes, [engine])
    saved = load_checkpoints({"model": engine}, out / checkpoints_of("sft"), config) if config.resume else SavedRun()
    started = time.perf_counter()
    log = RunLog(out / "sft-log", "SFT", len(batches), config, saved.step)
    best = train_loop(engine, tokenizer, corpus, batches, config, sizes, log, saved)

    seconds = time.perf_counter() - started
    measured = {"held_out_nats_per_token": held_out_loss(engine, corpus, sizes)} if corpus.held_out else {}
    result = {**measured, **({"best": best} if best else {}), "seconds": seconds}
    write_result(out / "sft-log" / "result.json", result, memory)
    plot_metrics(read_metrics(out / "sft-log" / "metrics.jsonl"), {"loss": ["loss"]}, out / "sft-log" / "plot.png")
    for loss in measured.values():
        say(f"SFT: held-out loss {loss:.3f} nats per token after {seconds:.0f} s")
    save_stage(engine, tokenizer, folder)
    mark_finished(config, "sft")
    return folder


def train_loop(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    batches: list[list[int]],
    config: Config,
    sizes: RunPasses,
    log: RunLog,
    saved: SavedRun,
) -> dict[str, float]:
    """Trains on the batches; every process takes its share of each. All learned tokens of a batch have the same weight.

    Returns the step and the held-out loss of the best measurement so far; empty before the first.
    """
    best = dict(saved.state.get("best", {}))
    with log:
        for step in range(saved.step, len(batches)):
            engine.train()
            num_tokens = sum(corpus.train[index].num_learned for index in batches[step])
            mine = [corpus.train[index] for index in batches[step][get_rank() :: get_world_size()]]
            rate = engine.get_lr()[0]
            passes = TrainingPasses([engine], Items.of(mine), sizes)
            for rows in passes:
                with passes.fitting():
                    compute = partial(micro_batch_loss, engine, mine, corpus.pad_token, num_tokens, rows)
                    engine.backward(passes.loss(compute))
            engine.step()
            loss = sum(gather_objects(sum(part["loss"][0] for part in passes.figures())))
            figures = {"loss": loss, **gradient_figures(engine), "learning_rate": rate}
            if is_due(config.eval_every, step, len(batches)):
                figures["held_out_loss"] = held_out_loss(engine, corpus, sizes)
                if figures["held_out_loss"] < best.get("held_out_loss", math.inf):
                    best = {"step": step + 1, "held_out_loss": figures["held_out_loss"]}
                    save_stage(engine, tokenizer, Path(config.out) / "sft-best")
            log.write(step, figures, [name for name in ("loss", "held_out_loss") if name in figures])
            if is_due(config.save_every, step, len(batches)):
                folder = Path(config.out) / checkpoints_of("sft")
                save_checkpoints({"model": engine}, folder, step + 1, config, {"best": best})
    return best


def micro_batch_loss(
    engine: Any, mine: list[Encoded], pad_token: int, num_tokens: int, rows: list[int]
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` of this process's examples in the loss of a step of `num_tokens`, also as a figure."""
    sequences = collate([mine[index] for index in rows], pad_token, engine.device)
    part = token_mean(-response_logprobs(engine, sequences), sequences.response_mask, num_tokens)
    return part, {"loss": (part.detach(), 1.0)}


@torch.no_grad()
def held_out_loss(engine: Any, corpus: Corpus, sizes: RunPasses) -> float:
    """Mean cross-entropy in nats per learned token of the held-out rows, at least one; collective."""
    engine.eval()

    def loss_sum(turn: tuple[Sequence[Encoded], bool]) -> tuple[float, int]:
        examples, counts = turn
        sequences = collate(examples, corpus.pad_token, engine.device)
        loss = -response_logprobs(engine, sequences).sum().item()
        return (loss, int(sequences.response_mask.sum())) if counts else (0.0, 0)

    found = sizes.without_gradients(lambda rows: turns(split(corpus.held_out, rows)), loss_sum)
    mine = [sum(values) for values in zip(*found, strict=True)]
    total, num_tokens = (sum(values) for values in zip(*gather_objects(mine), strict=True))
    return total / num_tokens


def load_or_build_model(config: Config, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The model of `--model`, with an adapter if the options say so, or a small one from scratch."""
    if not config.model:
        first = FOR_TEXT if config.task == "docs" else USUAL
        return build_small_llama(tokenizer, config.hidden_size, config.num_layers, first)
    check_trainable(config, load_config(config.model), config.model)
    return add_adapter(load_model(AutoModelForCausalLM, config.model), config)


def engine_config(config: Config) -> dict[str, Any]:
    """The DeepSpeed config of the model."""
    return build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=largest_micro_batch(config.batch_size // get_world_size(), config.micro_batch_size),
        learning_rate=config.peak_learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        weight_decay=0.1,
    )


def collate(examples: Sequence[Encoded], pad_token: int, device: torch.device) -> Sequences:
    """A padded batch, whose response mask is True on learned tokens."""
    return build_sequences(
        [example.prompt_ids for example in examples],
        [example.response_ids for example in examples],
        pad_token,
        device,
        [example.loss_mask for example in examples],
    )
