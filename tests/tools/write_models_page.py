"""Writes docs/models.md from what the family checks measure here: `python -m tests.tools.write_models_page`.

With names of families as arguments only these are measured, and the page keeps the rows of the others.

For every family of model_families.py: greedy tokens and log-probabilities against transformers' own model in fp32,
the error of bf16 against the model's own bf16 error, LoRA on every linear against peft, and generation shared by
two processes (`inference_tp_size` 2 under ZeRO stage 3).
"""

import logging
import platform
import sys
import warnings
from pathlib import Path

import torch
import transformers

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.family_checks import adapted
from tests.support.model_families import BUILDERS, DISAGREEING, FALLBACKS, FEATURES, MORE_BUILDERS
from tests.support.models import PAD, build_model, module_logprobs, padded_prompts, randomised

FAMILIES = [*BUILDERS, *MORE_BUILDERS]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
GREEDY = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PAD, "eos_token_id": None}
HEAD = """# Model families

Written by `python -m tests.tools.write_models_page`; the same checks run in the test suite, those of *bf16* and *two
ranks* for one family of each kind of layer. Models are small and random, with the features named here switched on,
prompts padded on the left. *fp32* is the largest difference of a
token's log-probability from the model's own forward, where all greedy tokens are transformers' own. *bf16* is the mean
error against fp32 over the model's own. *LoRA*: peft adapters on every linear (experts apart), same greedy tokens.
*Two ranks*: one generation shared by two processes that each hold half of every layer (`inference_tp_size`), same
tokens. Any other decoder-only model generates through its own `generate()`; [adding a family](adding-a-model.md)
takes one file.

"""

FALLBACK_HEAD = """

## On their own generate()

Families that have no containers for now, with the reason that the engine logs. The figure is the largest difference of
the log-probabilities of `generate()` under padded prompts from the model's own forward: where it is large, the model's
code computes something else in a cached, padded step than in a forward pass.

"""


DISAGREEMENT_HEAD = """

## Where transformers disagrees with itself

Options with which a model's own `generate()`, whose steps are cached and padded, computes something else than its own
forward over the row alone. Containers compute the latter. The figures are the largest difference of log-probabilities
from that forward, of the model's own `generate()` and of the containers.

"""


def build_engine(model, **config):
    """An engine in eval mode."""
    engine, *_ = hybrid_engine.initialize(
        model=model, config={"train_batch_size": 6, "hybrid_engine": {"enabled": True}} | config
    )
    return engine.eval()


def shared_rollouts(rank, world_size, families):
    """Greedy tokens of this rank's prompts with every layer split over the ranks, or what keeps a family from it."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
    results = {}
    for family in families:
        hybrid = {"enabled": True, "inference_tp_size": world_size}
        config = {"zero_optimization": {"stage": 3}, "hybrid_engine": hybrid, "gradient_accumulation_steps": 1}
        try:
            engine = build_engine(build_model(family), **config)
            if engine.generator.fallback_reason is not None:
                raise ValueError(engine.generator.fallback_reason)
            results[family] = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        except ValueError as error:
            results[family] = str(error)
    return results


def rollout(engine):
    """Greedy tokens and their log-probabilities."""
    input_ids, mask = padded_prompts()
    return engine.generate(input_ids=input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)


def measure(family, shared):
    """One row of the table."""
    input_ids, mask = padded_prompts()
    own = build_model(family)
    expected = own.generate(input_ids, attention_mask=mask, **GREEDY)
    engine = build_engine(build_model(family))
    output = rollout(engine)
    exact = module_logprobs(own, output.sequences, mask)
    same = torch.equal(output.sequences, expected) and engine.generator.fallback_reason is None
    fp32 = f"{(output.logprobs - exact).abs().max():.0e}" if same else "differs"

    engine = build_engine(build_model(family), bf16={"enabled": True})
    half = rollout(engine)
    exact = module_logprobs(own, half.sequences, mask)
    own_error = (module_logprobs(engine.module, half.sequences, mask) - exact).abs().mean()
    bf16 = f"{(half.logprobs - exact).abs().mean() / own_error:.2f}"

    peft_tokens = adapted(build_model(family)).generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
    lora = (
        "yes" if torch.equal(rollout(build_engine(adapted(build_model(family)))).sequences, peft_tokens) else "differs"
    )
    parts = [part[family] for part in shared]
    if all(isinstance(part, torch.Tensor) for part in parts):
        ranks = "yes" if torch.equal(torch.cat(parts), expected) else "differs"
    else:
        ranks = f"no: {next(part for part in parts if isinstance(part, str))}"
    return family, FEATURES[family], fp32, bf16, lora, ranks


def measure_fallback(family):
    """One row of the table of families without containers."""
    _, mask = padded_prompts()
    engine = build_engine(randomised(FALLBACKS[family]))
    reason = engine.generator.fallback_reason.partition(";")[0]
    output = rollout(engine)
    own = module_logprobs(randomised(FALLBACKS[family]), output.sequences, mask)
    return family, reason, f"{(output.logprobs - own).abs().max():.0e}"


def logprobs_alone(model, sequences, mask):
    """Log-probabilities of the responses `[B, T]` by the model's own forward over each row without padding."""
    num_new, rows = sequences.shape[1] - mask.shape[1], []
    for sequence, real in zip(sequences, mask.bool(), strict=True):
        row = torch.cat((sequence[: mask.shape[1]][real], sequence[mask.shape[1] :]))
        with torch.no_grad():
            logprobs = model(row[None], use_cache=False).logits[0].double().log_softmax(-1)
        rows.append(logprobs[-num_new - 1 : -1].gather(1, row[-num_new:, None])[:, 0])
    return torch.stack(rows)


def measure_disagreement(name):
    """One row of the table of models whose code disagrees with itself."""
    reason, build = DISAGREEING[name]
    input_ids, mask = padded_prompts()
    own = randomised(build)
    found = own.generate(input_ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **GREEDY)
    scores = torch.stack(found.logits, 1).double().log_softmax(-1)
    logprobs = scores.gather(2, found.sequences[:, mask.shape[1] :, None])[..., 0]
    difference = (logprobs - logprobs_alone(own, found.sequences, mask)).abs().max()
    engine = build_engine(randomised(build))
    assert engine.generator.fallback_reason is None, engine.generator.fallback_reason
    output = rollout(engine)
    ours = (output.logprobs - logprobs_alone(own, output.sequences, mask)).abs().max()
    return name, reason, f"{difference:.0e}", f"{ours:.0e}"


def others_with_indexers():
    """A sentence about the families whose attention chooses its keys, and that are not measured here."""
    folders = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    names = {file.parent.name for file in folders if "Indexer(" in file.read_text()} - set(FALLBACKS)
    listed = ", ".join(f"`{name}`" for name in sorted(names))
    return f"\n\nThe attention of these chooses its keys by an indexer too, and the log says so: {listed}."


def in_table(rows):
    """The rows in Markdown, the first of which is the head."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *others))


def known_rows():
    """The rows of the page's first table by family."""
    lines = PAGE.read_text().partition("\n## ")[0].splitlines()
    cells = [tuple(line.strip("| ").split(" | ")) for line in lines if line.startswith("| ")]
    return {row[0]: row for row in cells if row[0] in FAMILIES}


def main():
    """Measures families and writes the page; fails if any differs."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    measured = sys.argv[1:] or FAMILIES
    shared = run_distributed(shared_rollouts, 2, measured)
    by_family = known_rows() if sys.argv[1:] else {}
    for family in measured:
        by_family[family] = measure(family, shared)
        print(*by_family[family], sep=" | ", flush=True)
    rows = [by_family[family] for family in FAMILIES if family in by_family]
    table = in_table([("family", "features", "fp32", "bf16", "LoRA", "two ranks"), *rows])
    fallbacks = in_table([("family", "reason", "difference"), *map(measure_fallback, FALLBACKS)])
    head = ("family", "its code", "generate()", "containers")
    disagreements = in_table([head, *map(measure_disagreement, DISAGREEING)])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    parts = (HEAD, table, FALLBACK_HEAD, fallbacks, others_with_indexers(), DISAGREEMENT_HEAD, disagreements)
    PAGE.write_text(f"{''.join(parts)}\n\nMeasured on a CPU with {versions}.\n")
    if "differs" in table:
        sys.exit("some family differs from transformers")


if __name__ == "__main__":
    main()
