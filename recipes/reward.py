"""Trains a reward model on preference pairs, to tell which of two answers is better.

    hybrid-engine reward --out runs/docs
    hybrid-engine reward --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --out runs/mine

The model is transformers' sequence classifier with one label on the body of `--model`; the score is that of the last
token. The loss of a pair is -log sigmoid(score(chosen) - score(rejected) - margin) (`rl/preferences.py`). The saved
config has the mean and standard deviation of the scores of good answers, with which PPO normalizes rewards. Without
--dataset the pairs are summary lines, one of which follows PEP 257: stage 2 of the PPO job.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.config.checks import check_divides
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import get_rank, get_world_size, on_rank_zero
from hybrid_engine.rl.preferences import bradley_terry_loss, centring_loss
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses, check_budget
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import Items, RunPasses, split
from hybrid_engine.rlhf.batches.sequences import recompute_activations
from hybrid_engine.rlhf.data.encoding import read_template
from hybrid_engine.rlhf.experience.evaluation import step_means
from hybrid_engine.rlhf.options.shared import is_due
from hybrid_engine.rlhf.options.supervised import RewardConfig as Config
from hybrid_engine.rlhf.planning.comparison import follow_memory, write_result
from hybrid_engine.rlhf.planning.reading import Learned, Read
from hybrid_engine.rlhf.rewards.learned import (
    ROWS_PER_PASS,
    build_classifier,
    load_scoring_tokenizer,
    save_normalised,
    score_tokens,
)
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
    move_aside,
    seed_everything,
)
from hybrid_engine.rlhf.tasks.corpus import Pair, PairCorpus, load_pair_corpus


def run(config: Config) -> Path:
    """Trains and saves the reward model unless its folder exists; returns the folder. Collective."""
    out, folder = Path(config.out), Path(config.out) / "reward"
    config = begin_run(config, "reward")
    if is_finished(folder, config.restart or is_lengthened(config, "reward")):
        return folder
    on_rank_zero(lambda: check_resume(out, config, "reward"))
    check_divides("batch_size", config.batch_size, get_world_size())
    seed_everything(config.seed)
    source = config.model or str(out / "sft")
    if not config.model and not Path(source).exists():
        raise ValueError(f"--out={config.out!r} has no sft; run `hybrid-engine sft` with it first, or give --model")
    tokenizer = load_scoring_tokenizer(source)
    if config.chat_template:
        tokenizer.chat_template = read_template(config.chat_template)
    corpus = load_pair_corpus(config, tokenizer, source)
    check_trainable(config, load_config(source), source)
    check_budget(config.tokens_per_micro_batch, [pair.lengths for pair in corpus.train])
    classifier = recompute_activations(build_classifier(source, tokenizer), config)
    model = add_adapter(classifier, config, "SEQ_CLS")
    say(f"Reward model: {len(corpus.train)} preference pairs, {config.epochs} epochs")

    if not config.resume:
        move_aside(out, results_of("reward"))
    schedule = Schedule.of(config, len(corpus.batches), "reward")
    say(schedule.describe())
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(config), lr_scheduler=schedule.build)
    pack_where_exact(engine, config)
    sizes = RunPasses.of(config)
    read = Read(first=engine.module.config, learned=Learned(Items.of(corpus.train), corpus.batches))
    memory = follow_memory("reward", config, read, sizes, [engine])
    saved = load_checkpoints({"model": engine}, out / checkpoints_of("reward"), config) if config.resume else SavedRun()
    started = time.perf_counter()
    log = RunLog(out / "reward-log", "Reward", len(corpus.batches), config, saved.step)
    best = train_loop(engine, tokenizer, corpus, config, sizes, log, saved)

    figures: dict[str, Any] = measure(engine, corpus.held_out, tokenizer, sizes) if corpus.held_out else {}
    figures |= {"best": best} if best else {}
    write_result(out / "reward-log" / "result.json", figures | {"seconds": time.perf_counter() - started}, memory)
    panels = {"loss": ["loss"], "accuracy": ["accuracy"]}
    plot_metrics(read_metrics(out / "reward-log" / "metrics.jsonl"), panels, out / "reward-log" / "plot.png")
    if corpus.held_out:
        accuracy = figures["held_out_accuracy"]
        say("Reward model: held-out accuracy " + ", ".join(f"{kind} {share:.2f}" for kind, share in accuracy.items()))
    save_normalised(engine, corpus.references, tokenizer, folder, sizes)
    mark_finished(config, "reward")
    return folder


def train_loop(
    engine: Any,
    tokenizer: PreTrainedTokenizerBase,
    corpus: PairCorpus,
    config: Config,
    sizes: RunPasses,
    log: RunLog,
    saved: SavedRun,
) -> dict[str, float]:
    """Trains on the pairs; every process takes its share of each batch, and scores chosen and rejected in one pass.

    Returns the step and the held-out accuracy of the best measurement so far; empty before the first.
    """
    best = dict(saved.state.get("best", {}))
    with log:
        for step in range(saved.step, len(corpus.batches)):
            engine.train()
            mine = [corpus.train[index] for index in corpus.batches[step][get_rank() :: get_world_size()]]
            rate = engine.get_lr()[0]
            passes = TrainingPasses([engine], Items.of(mine), sizes)
            for rows in passes:
                with passes.fitting():
                    engine.backward(passes.loss(partial(micro_batch_loss, engine, mine, tokenizer, config, rows)))
            engine.step()
            figures = step_means(passes.figures()) | {**gradient_figures(engine), "learning_rate": rate}
            if is_due(config.eval_every, step, len(corpus.batches)):
                measured = measure(engine, corpus.held_out, tokenizer, sizes)
                figures["held_out_accuracy"] = measured["held_out_accuracy"]["all"]
                if figures["held_out_accuracy"] > best.get("held_out_accuracy", -math.inf):
                    best = {"step": step + 1, "held_out_accuracy": figures["held_out_accuracy"]}
                    save_normalised(engine, corpus.references, tokenizer, Path(config.out) / "reward-best", sizes)
            log.write(step, figures, ["loss", "accuracy"])
            if is_due(config.save_every, step, len(corpus.batches)):
                folder = Path(config.out) / checkpoints_of("reward")
                save_checkpoints({"model": engine}, folder, step + 1, config, {"best": best})
    return best


def micro_batch_loss(
    engine: Any, mine: list[Pair], tokenizer: PreTrainedTokenizerBase, config: Config, rows: list[int]
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` of this process's pairs in the mean loss of a step; sum and count of each figure."""
    pairs = [mine[index] for index in rows]
    chosen, rejected = score_pairs(engine, pairs, tokenizer)
    margins = send_to_device(torch.tensor([pair.margin for pair in pairs]), chosen.device)
    losses = bradley_terry_loss(chosen, rejected, margins)
    losses = losses + config.center_coef * centring_loss(chosen, rejected)
    score = (chosen + rejected) / 2
    figures = {"loss": losses, "accuracy": chosen > rejected, "margin": chosen - rejected, "score": score}
    sums: DeviceFigures = {name: (values.detach().sum(), len(pairs)) for name, values in figures.items()}
    return losses.sum() / config.batch_size, sums


def score_pairs(
    engine: Any, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the chosen and of the rejected answers, each `[pairs]`."""
    tokens = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    chosen, rejected = score_tokens(engine, tokens, tokenizer).chunk(2)
    return chosen, rejected


@torch.no_grad()
def measure(engine: Any, pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, sizes: RunPasses) -> dict[str, Any]:
    """Mean loss, and the share of pairs whose chosen answer scores higher, over all pairs and by kind of fault."""
    engine.eval()

    def losses_and_hits(part: Sequence[Pair]) -> tuple[float, list[bool]]:
        chosen, rejected = score_pairs(engine, part, tokenizer)
        margins = torch.tensor([pair.margin for pair in part], device=chosen.device)
        return bradley_terry_loss(chosen, rejected, margins).sum().item(), (chosen > rejected).tolist()

    most = 2 * ROWS_PER_PASS  # two sequences per pair
    found = sizes.without_gradients(lambda rows: split(pairs, max(1, rows // 2)), losses_and_hits, most)
    hits = defaultdict(list)
    for pair, hit in zip(pairs, (hit for _, part in found for hit in part), strict=True):
        for kind in filter(None, ("all", pair.kind)):
            hits[kind].append(hit)
    accuracy = {kind: sum(of_kind) / len(of_kind) for kind, of_kind in sorted(hits.items())}
    return {"held_out_accuracy": accuracy, "held_out_loss": sum(loss for loss, _ in found) / len(pairs)}


def engine_config(config: Config) -> dict[str, Any]:
    """The DeepSpeed config of the model."""
    return build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=largest_micro_batch(config.batch_size // get_world_size(), config.micro_batch_size),
        learning_rate=config.peak_learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
    )
