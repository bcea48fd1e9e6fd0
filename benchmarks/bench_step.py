"""One GRPO step, rollout and update: this project's recipe against TRL's trainer, and the least the machine could do.

    python benchmarks/bench_step.py --threads 2

Both train one Llama on the same prompts, in fp32, with groups of 8, a reference and AdamW in micro-batches of as many
rows, TRL by its own `GRPOTrainer`, we by the functions of `recipes/grpo.py`. The model counts down (countdown.py): at
fixed lengths both sample the very same tokens, with long tails both draw lengths of one log-normal distribution. The
learning rate is so small that it goes on counting. The steps are taken in turns, each side's in a process of its own
(`step_sides.py`): ours keeps what it frees, as its command does, and TRL's has glibc's defaults.

What is timed of a step: generation; the reference's forward pass; the policy's forward passes with the loss; backward
passes; the optimizer's step; the rest is what is left of the whole. The least for each is its bytes and flops, as the
weights and the tokens without padding give them, at the speed that copies and matrix products reach on this machine.
"""

import dataclasses
import statistics
import tempfile
from typing import Any

import torch
from common import (
    FULL,
    SMALL,
    Ceilings,
    Shape,
    add_shape_options,
    append_rows,
    chosen_shape,
    environment,
    measure_ceilings,
    parse_run,
    run_options,
)
from countdown import build_countdown_model, build_prompts, log_normal_mu, log_normal_probabilities, start_token
from rich.console import Console
from rich.table import Table
from roofline import rollout_passes
from step_sides import G, Job, Step, take_turns
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MEAN_SHARE, SIGMA = 0.3, 0.8
"""Of the long-tailed lengths: the mean as a share of the longest, and the deviation of the logarithm."""
WARM_UP = 2  # pairs of steps in which memory grows to what a step takes
PHASES = ("generation", "reference", "forward", "backward", "optimizer")


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token n is the word `wn`."""
    plain = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocab)}, unk_token="w1"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=f"w{vocab - 1}", eos_token="w0")


def least_seconds(model: LlamaForCausalLM, shape: Shape, lengths: list[int], ceilings: Ceilings) -> dict[str, float]:
    """Seconds that each phase takes at least, for answers of `lengths`; each sequence is read with its prompt."""
    passes = rollout_passes(model, len(lengths) // G, shape.prompt_tokens, lengths)
    config, size = model.config, sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings().weight.numel()
    body = size - head - model.get_input_embeddings().weight.numel()
    attention = 4 * config.num_hidden_layers * config.hidden_size
    tokens = sum(shape.prompt_tokens + length for length in lengths)
    pairs = sum((shape.prompt_tokens + length) ** 2 / 2 for length in lengths)
    forward = (2 * body * tokens + 2 * head * sum(lengths) + attention * pairs) / ceilings.flops_per_second
    # AdamW reads weight, gradient and two moments and writes all but the gradient.
    optimizer = 7 * size * 4 / ceilings.bytes_per_second
    return {
        "generation": sum(one.seconds(ceilings) for one in passes),
        "reference": forward,
        "forward": forward,
        "backward": 2 * forward,
        "optimizer": optimizer,
    }


def summary(steps: list[Step]) -> dict[str, float]:
    """Medians of each phase, of the rest and of the whole."""
    seconds = [
        step.seconds | {"rest": step.seconds["whole"] - sum(step.seconds[phase] for phase in PHASES)} for step in steps
    ]
    return {name: statistics.median(one[name] for one in seconds) for name in (*PHASES, "rest", "whole")}


def main() -> None:
    """Takes the steps of both cases, prints and records them."""
    parser = run_options(__doc__)
    add_shape_options(parser, dataclasses.replace(FULL, prompts=4), dataclasses.replace(SMALL, prompts=2))
    parser.add_argument("--only", default="", help='the case whose name contains this: "fixed" or "long tail"')
    parser.add_argument(
        "--tokens-per-micro-batch", type=int, default=0, help="ours packs so many tokens a pass (0: rows)"
    )
    args = parse_run(parser, "step")
    shape = chosen_shape(args, dataclasses.replace(FULL, prompts=4), dataclasses.replace(SMALL, prompts=2))
    ceilings = measure_ceilings("cpu", torch.float32, args.small)
    mean = MEAN_SHARE * shape.new_tokens
    probabilities = log_normal_probabilities(shape.new_tokens, log_normal_mu(shape.new_tokens, mean, SIGMA), SIGMA)
    model = build_countdown_model(shape, probabilities)
    cases = {"fixed lengths": shape.new_tokens + 1, "long tail": start_token(shape)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        word_tokenizer(shape.vocab).save_pretrained(folder)
        for name, last in cases.items():
            if args.only not in name:
                continue
            ids = build_prompts(shape, torch.full((shape.prompts,), last))
            prompts = [" ".join(f"w{token}" for token in row) for row in ids.tolist()]
            job = Job(
                folder=folder, prompts=prompts, shape=shape, tokens_per_micro_batch=args.tokens_per_micro_batch,
                num_steps=WARM_UP + args.repeats, threads=torch.get_num_threads(),
            )  # fmt: skip
            rows += report(name, take_turns(job)[WARM_UP:], model, shape, ceilings)
    same = environment("cpu") | dataclasses.asdict(shape) | {"tokens_per_micro_batch": args.tokens_per_micro_batch}
    append_rows(args.csv, [same | row for row in rows])


def report(
    case: str, pairs: list[tuple[Step, Step]], model: LlamaForCausalLM, shape: Shape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Prints one case; its rows."""
    sides = {"ours": [ours for ours, _ in pairs], "TRL": [theirs for _, theirs in pairs]}
    found = {side: summary(steps) for side, steps in sides.items()}
    tokens = {side: statistics.mean(sum(step.lengths) for step in steps) for side, steps in sides.items()}
    per_step = [least_seconds(model, shape, step.lengths, ceilings) for step in sides["ours"]]
    least = {phase: statistics.median(one[phase] for one in per_step) for phase in PHASES}
    ratio = statistics.median(theirs.seconds["whole"] / ours.seconds["whole"] for ours, theirs in pairs)
    table = Table(
        "phase", "ours s", "share", "TRL s", "share", "least s", title=f"{case}: TRL's step / ours = {ratio:.2f}"
    )
    for phase in (*PHASES, "rest", "whole"):
        cells = [
            f"{value:.3f}"
            for side in found
            for value in (found[side][phase], found[side][phase] / found[side]["whole"])
        ]
        table.add_row(phase, *cells, f"{least[phase]:.3f}" if phase in least else "")
    table.add_row("answer tokens", f"{tokens['ours']:.0f}", "", f"{tokens['TRL']:.0f}", "", "")
    Console(width=100).print(table)
    return [
        {"case": case, "side": side, "phase": phase, "seconds": round(found[side][phase], 4),
         "least_seconds": round(least.get(phase, 0.0), 4), "tokens": round(tokens[side]), "step_ratio": round(ratio, 3)}
        for side in sides for phase in (*PHASES, "rest", "whole")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
