"""Whether losses and gradients are TRL's: its GRPO, GMPO, RLOO and DPO trainers beside this project, on one batch.

    python benchmarks/compare_trl.py

One tiny random Llama, the same prompts, answers, rewards and reference for both. TRL's trainers tokenize, score and
compute advantages, loss and gradients by their own code; only what they would sample is given to them, and the
log-probabilities of an earlier policy, so that ratios leave 1 and clips take hold. One reward function has no opinion
on one answer. Nothing is timed.

Differences are absolute for the loss, and for gradients over all parameters relative to the largest gradient.
"""

import argparse
import copy
import csv
import os
import sys
import tempfile
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from common import RESULTS
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybrid_engine.rl.losses import count_step
from hybrid_engine.rl.preferences import PairLogprobs, build_loss
from hybrid_engine.rlhf.algorithms import (
    Coefficients,
    PolicyBatch,
    choose_tokens,
    compute_advantages,
    correction_weights,
    policy_figures,
    policy_objective,
)
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    build_sequences,
    response_logprobs,
    response_logprobs_and_entropy,
)
from hybrid_engine.rlhf.options.algorithm import UNCLIPPED_LOSSES, Algorithm

TOLERANCE = 1e-5
G, MAX_LENGTH, VOCAB = 4, 8, 40
PROMPTS = ["w1 w2 w3", "w4 w5"]
REWARDS = [1.0, 0.0, 0.25, None, 0.5, -1.0, 3.0, 0.0]
LARGE_REWARDS = [100.0, 300.0, None, None, 20.0, 0.0, 50.0, 90.0]
"""A second reward, for several that are normalized one by one."""
WEIGHTS = [1.0, 0.5]
ANSWERS = [
    "w7 w8 w9 w7 w8 w9 w7 w6",
    "w9",
    "w11 w12 w13 w2",
    "w5 w6",
    "w20 w21",
    "w1 w1 w1 w4 w2 w9 w8",
    "w3",
    "w4 w30 w31",
]


class Compared(NamedTuple):
    """One row of the table."""

    trainer: str
    options: str
    ours: str
    loss_difference: float
    gradient_difference: float

    @property
    def agrees(self) -> bool:
        """Whether both differences are within the tolerance."""
        return max(self.loss_difference, self.gradient_difference) <= TOLERANCE


class Models(NamedTuple):
    """The policy being trained, the one that sampled and the reference; `folder` holds the first."""

    policy: LlamaForCausalLM
    old: LlamaForCausalLM
    reference: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    folder: str


def build_models(folder: str) -> Models:
    """Random models a step apart, and a tokenizer of words."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index + 2 for index in range(VOCAB - 2)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, pad_token_id=0, eos_token_id=1, initializer_range=0.2, **sizes)
    policy = LlamaForCausalLM(config)
    old, reference = moved(policy, 0.02), moved(policy, 0.03)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Models(policy, old, reference, tokenizer, folder)


def moved(model: LlamaForCausalLM, distance: float) -> LlamaForCausalLM:
    """A copy with noise on every weight."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(torch.randn_like(parameter) * distance)
    return copied


def token_ids(found: Models, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, without special tokens."""
    return [found.tokenizer(text)["input_ids"] for text in texts]


def answers(found: Models) -> list[list[int]]:
    """Token ids of the answers; all but the first, which is cut off, end with the end-of-sequence token."""
    first, *others = token_ids(found, ANSWERS)
    return [first, *([*ids, 1] for ids in others)]


def sampled(found: Models) -> Sequences:
    """The groups as the recipes have them."""
    prompts = [ids for ids in token_ids(found, PROMPTS) for _ in range(G)]
    return build_sequences(prompts, answers(found), 0, torch.device("cpu"))


def gradients(model: nn.Module) -> torch.Tensor:
    """All gradients of a model, which are then forgotten."""
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return flat


def compare(
    theirs: tuple[torch.Tensor, torch.Tensor], ours: tuple[torch.Tensor, torch.Tensor], by_value: bool = True
) -> tuple[float, float]:
    """The difference of the losses, 0 unless they are compared `by_value`, and that of the gradients."""
    largest = theirs[1].abs().max()
    assert largest > 0, "nothing to compare"
    return (theirs[0] - ours[0]).abs().item() * by_value, ((theirs[1] - ours[1]).abs().max() / largest).item()


# What TRL computes


def rewards(completions: list[str], **_: Any) -> list[float | None]:
    """The given rewards, whatever the answers."""
    return REWARDS[: len(completions)]


def large_rewards(completions: list[str], **_: Any) -> list[float | None]:
    """The given second rewards, whatever the answers."""
    return LARGE_REWARDS[: len(completions)]


def of_group_trainer(
    name: str, found: Models, options: dict[str, Any], is_on_policy: bool, sampler: list[list[float]] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradients of TRL's trainer `name` on the answers; `sampler` stands for what vLLM would say."""
    import trl
    import trl.experimental.gmpo
    from datasets import Dataset

    fixed, module = answers(found), trl.experimental.gmpo if name == "GMPO" else trl

    class GivenAnswers(getattr(module, f"{name}Trainer")):  # type: ignore[misc]
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return fixed if name == "RLOO" else (fixed, sampler)

    functions = [rewards]
    if "multi_objective_aggregation" in options:
        functions, options = [rewards, large_rewards], {**options, "reward_weights": WEIGHTS}
    common = {"num_generations": G, "max_completion_length": MAX_LENGTH, "per_device_train_batch_size": len(fixed)}
    arguments = getattr(module, f"{name}Config")(
        output_dir=found.folder, report_to=[], use_cpu=True, bf16=False, disable_dropout=True, **common, **options
    )
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GivenAnswers(
        model=found.folder, reward_funcs=functions, args=arguments, train_dataset=data, processing_class=found.tokenizer
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(found.reference.state_dict())
    if sampler is not None:
        trainer.use_vllm = True
    model = trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": text} for text in PROMPTS for _ in range(G)])
    if not is_on_policy:
        earlier = response_logprobs(found.old, sampled(found)).detach()
        inputs |= {"old_logps": earlier.sum(dim=1)} if name == "RLOO" else {"old_per_token_logps": earlier}
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return loss.detach(), gradients(model)


def of_dpo_trainer(found: Models, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradients of `DPOTrainer` on pairs of the answers."""
    import trl
    from datasets import Dataset

    rows = [{"prompt": prompt, "chosen": " " + a, "rejected": " " + b} for prompt, a, b in pairs()]
    arguments = trl.DPOConfig(
        output_dir=found.folder, report_to=[], use_cpu=True, bf16=False, max_length=None, **options
    )
    reference = copy.deepcopy(found.reference)
    trainer = trl.DPOTrainer(
        model=found.folder,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=found.tokenizer,
    )
    model = trainer.model.train()
    examples = [trainer.train_dataset[index] for index in range(len(rows))]
    loss = trainer.compute_loss(model, trainer.data_collator(examples))
    loss.backward()
    return loss.detach(), gradients(model)


def pairs() -> list[tuple[str, str, str]]:
    """Prompt, chosen and rejected answer."""
    return [
        (PROMPTS[0], ANSWERS[0], ANSWERS[1]),
        (PROMPTS[1], ANSWERS[4], ANSWERS[5]),
        (PROMPTS[1], ANSWERS[6], ANSWERS[7]),
    ]


# What this project computes


def of_algorithm(
    algorithm: Algorithm, found: Models, is_on_policy: bool, sampler: list[list[float]] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradients as `recipes/grpo.py` has them."""
    batch, model = sampled(found), copy.deepcopy(found.policy)
    mask = batch.response_mask
    logprobs = response_logprobs(model, batch)
    logprobs_ref = response_logprobs(found.reference, batch).detach()
    policy_old = logprobs.detach()
    logprobs_old = policy_old if is_on_policy else response_logprobs(found.old, batch).detach()
    columns = [[nan if reward is None else reward for reward in column] for column in (REWARDS, LARGE_REWARDS)]
    scores = torch.tensor(columns).T if algorithm.is_decoupled else torch.tensor(columns[0])
    # TRL's RLOO takes the KL of the policy that it has just sampled from.
    told = G, policy_old, logprobs_ref, mask, algorithm.kl_coef
    advantages = compute_advantages(algorithm, scores, *told, reward_weights=torch.tensor(WEIGHTS))
    weights = None
    if sampler is not None:
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in sampler], batch_first=True)
        weights = correction_weights(algorithm, 1.0, policy_old, padded, mask)
    entropy = response_logprobs_and_entropy(model, batch)[1]
    tokens = PolicyBatch(
        logprobs=logprobs,
        logprobs_old=logprobs_old,
        advantages=advantages,
        mask=mask,
        logprobs_ref=logprobs_ref,
        weights=weights,
        entropy=entropy if algorithm.entropy_coef else None,
    )
    # TRL chooses by the entropies of the policy being trained.
    tokens = choose_tokens(algorithm, tokens, entropy.detach())
    clipped = policy_figures(algorithm, tokens)["clip_fraction"]
    has_clip = not is_on_policy and algorithm.policy_loss not in UNCLIPPED_LOSSES
    assert not has_clip or 0.1 < clipped < 0.9, f"{clipped=}: the clip is to be seen at work, and the ratio too"
    # Two micro-batches; TRL counts a sequence without a reward like all others.
    counts = count_step(mask, MAX_LENGTH)
    parts = [
        PolicyBatch(*(None if value is None else value[rows] for value in tokens))
        for rows in (slice(0, 3), slice(3, None))
    ]
    loss = sum(policy_objective(algorithm, part, counts, Coefficients.first(algorithm)) for part in parts)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.detach(), gradients(model)


def of_pair_loss(found: Models, name: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradients as `recipes/dpo.py` has them."""
    model = copy.deepcopy(found.policy)
    prompts, chosen, rejected = zip(*pairs(), strict=True)
    sums, lengths = [], []
    for texts in (chosen, rejected):
        ids = [[*answer, 1] for answer in token_ids(found, list(texts))]
        batch = build_sequences(token_ids(found, list(prompts)), ids, 0, torch.device("cpu"))
        sums += [
            response_logprobs(model, batch).sum(dim=1),
            response_logprobs(found.reference, batch).sum(dim=1).detach(),
        ]
        lengths.append(batch.response_mask.sum(dim=1))
    loss = build_loss(name, **options)(PairLogprobs(sums[0], sums[2], sums[1], sums[3], *lengths)).mean()
    loss.backward()
    return loss.detach(), gradients(model)


# The rows

GRPO_ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"preset": "trl", "correction": "none"}),
    ({"epsilon_high": 0.28, "scale_rewards": "batch"}, {"preset": "trl", "clip_high": 0.28, "scale": "batch-std"}),
    (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"preset": "deepseekmath", "scale_eps": 1e-4},
    ),
    (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
        {"preset": "deepseekmath", "scale_eps": 1e-4, "kl_unbiased": True},
    ),
    ({"loss_type": "bnpo"}, {"preset": "trl", "aggregation": "token-mean"}),
    ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"preset": "dr-grpo"}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
        {"preset": "trl", "policy_loss": "gspo", "clip_low": 0.02, "clip_high": 0.03,
         "aggregation": "sequence-mean-token-mean"},
    ),
    (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"preset": "trl", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.2},
    ),
    ({"entropy_coef": 0.05}, {"preset": "trl", "entropy_coef": 0.05}),
    (
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"preset": "trl", "reward_aggregation": "normalize-then-sum"},
    ),
    ({"top_entropy_quantile": 0.3}, {"preset": "trl", "top_entropy": 0.3}),
    ({"off_policy_mask_threshold": 0.002}, {"preset": "trl", "off_policy_threshold": 0.002}),
    ({"loss_type": "sapo"}, {"preset": "sapo", "scale_eps": 1e-4}),
    (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
        {"preset": "luspo", "scale_eps": 1e-4, "clip_low": 0.02, "clip_high": 0.03},
    ),
    ({"loss_type": "vespo"}, {"preset": "vespo", "scale_eps": 1e-4}),
    ({"epsilon": 0.05}, {"preset": "gmpo", "scale_eps": 1e-4, "clip_low": 0.05, "clip_high": 0.05}),
]  # fmt: skip
"""TRL's options of GRPO, and ours."""

CORRECTION_ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"preset": "trl"}),
    *(
        (
            {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.1},
            {"preset": "trl", "correction": word, "correction_high": 1.1},
        )
        for mode, word in {
            "token_truncate": "truncated",
            "token_mask": "masked",
            "sequence_truncate": "sequence-truncated",
        }.items()
    ),
]
"""The same where a sampler's log-probabilities are not the trainer's."""

DPO_ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "sigmoid", "beta": 0.1}, {"name": "sigmoid", "beta": 0.1}),
    ({"loss_type": "hinge", "beta": 0.1}, {"name": "hinge", "beta": 0.1}),
    ({"loss_type": "ipo", "beta": 0.1}, {"name": "ipo-length-normalised", "beta": 0.1}),
    (
        {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.1},
        {"name": "robust", "beta": 0.1, "label_smoothing": 0.1},
    ),
    (
        {"loss_type": "exo_pair", "beta": 0.1, "label_smoothing": 0.1},
        {"name": "exo", "beta": 0.1, "label_smoothing": 0.1},
    ),
    *(
        ({"loss_type": theirs, "beta": 0.1}, {"name": ours, "beta": 0.1})
        for theirs, ours in {
            "sigmoid_norm": "sigmoid-length-normalised",
            "apo_zero": "apo-zero",
            "apo_down": "apo-down",
            "nca_pair": "nca",
            "bco_pair": "bco",
            "discopop": "discopop",
        }.items()
    ),
    ({"loss_type": "sppo_hard", "beta": 1.0}, {"name": "sppo", "beta": 1.0}),  # at 0.1 its value is 50
]


def compare_all(found: Models) -> list[Compared]:
    """Every row; a policy that sampled elsewhere is left out where TRL's own ratio is wanted."""
    rows = []
    sampler = [row[: len(ids)].tolist() for row, ids in zip(
        response_logprobs(found.old, sampled(found)).detach(), answers(found), strict=True)]  # fmt: skip
    for given, is_on_policy, drawn in [(GRPO_ROWS, False, None), (CORRECTION_ROWS, True, sampler)]:
        for options, choices in given:
            algorithm = Algorithm.from_options(choices)
            trainer = "GMPO" if algorithm.policy_loss == "gmpo" else "GRPO"
            theirs = of_group_trainer(trainer, found, options, is_on_policy, drawn)
            difference = compare(theirs, of_algorithm(algorithm, found, is_on_policy, drawn))
            shown = written({"use_vllm": True, **options} if drawn else options)
            rows.append(Compared(trainer, shown, written(choices), *difference))
    # REINFORCE has the gradient of a ratio that is 1, and another value.
    for choices, is_on_policy in [({"policy_loss": "sequence-clip"}, False), ({}, True)]:
        algorithm = Algorithm.from_options({"preset": "rloo", **choices})
        theirs = of_group_trainer("RLOO", found, {}, is_on_policy, None)
        difference = compare(theirs, of_algorithm(algorithm, found, is_on_policy, None), by_value=not is_on_policy)
        rows.append(
            Compared(
                "RLOO",
                "defaults, first update" if is_on_policy else "defaults, later update",
                written({"preset": "rloo", **choices}),
                *difference,
            )
        )
    for options, chosen in DPO_ROWS:
        difference = compare(of_dpo_trainer(found, options), of_pair_loss(found, **chosen))
        rows.append(Compared("DPO", written(options), written(chosen), *difference))
    return rows


def written(options: dict[str, Any]) -> str:
    """Options in one line."""
    return " ".join(f"{name}={value}" for name, value in options.items()) or "defaults"


def write_csv(rows: list[Compared], path: Path, versions: str) -> None:
    """The table as a file, which replaces an earlier one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Compared._fields, "agrees", "versions"])
        writer.writerows([*row[:3], *(f"{number:.1e}" for number in row[3:]), row.agrees, versions] for row in rows)


def main() -> int:
    """Prints the table; 1 if a row does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS / "trl.csv", help="where the rows are written")
    options = parser.parse_args()
    try:
        import trl
    except ImportError:
        print("TRL is not installed; pip install trl, then run this again", file=sys.stderr)
        return 2
    versions = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        rows = compare_all(build_models(folder))
    table = Table("trainer", "TRL's options", "ours", "loss", "gradient", title=versions)
    for row in rows:
        style = None if row.agrees else "red"
        table.add_row(*row[:3], f"{row.loss_difference:.1e}", f"{row.gradient_difference:.1e}", style=style)
    Console(width=200).print(table)
    write_csv(rows, options.csv, versions)
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
