"""Preference recipes: the loss and the gradient of a step depend on its rows alone, not on how they are spread."""

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hybrid_engine
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.recipes import dpo, kto
from hybrid_engine.rl.preferences import PairLogprobs, PairLoss, build_loss
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.experience.answers import (
    LabelledAnswer,
    Reading,
    TrainingPair,
    all_logprobs,
    answers_of,
    held_out_figures,
    mismatch,
    pair_logprobs,
    refer_answers,
    refer_pairs,
    without_adapter,
)
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.training_reference import tiny_llama

PAD = 0
READING = Reading(PAD)
BETA = 0.3
DPO_LOSS = build_loss("conservative", BETA, 0.1, sft_weight=0.5)
KTO = kto.Config(beta=BETA, desirable_weight=0.5, undesirable_weight=2.0)
LEARNING_RATE = 0.5
NUM_ROWS = 8


@dataclass(frozen=True)
class Spread:
    """How the rows of a step are spread."""

    micro_batch_size: int = NUM_ROWS
    """rows of a forward pass on one process"""
    stage: int = 0
    reverse: bool = False


def random_tokens(generator: torch.Generator, longest: int) -> list[int]:
    length = int(torch.randint(1, longest + 1, (), generator=generator))
    return torch.randint(1, 65, (length,), generator=generator).tolist()


def answer(prompt: list[int], response: list[int]) -> Encoded:
    return Encoded(prompt_ids=prompt, response_ids=response)


def token_pairs(num_pairs: int = NUM_ROWS) -> list[EncodedPair]:
    generator = torch.Generator().manual_seed(4)
    sizes = (9, 7, 12)
    return [EncodedPair.of_tokens(*(random_tokens(generator, longest) for longest in sizes)) for _ in range(num_pairs)]


def training_pairs() -> list[TrainingPair]:
    """The reference is another model; one pair only fills the batch."""
    pairs = refer_pairs(tiny_llama(seed=1), token_pairs(), READING)
    return [*pairs[:-1], pairs[-1]._replace(weight=0.0)]


def labelled_answers() -> list[LabelledAnswer]:
    """The answers of half of the pairs."""
    answers = answers_of(token_pairs()[: NUM_ROWS // 2])
    labels = [index < NUM_ROWS // 2 for index in range(NUM_ROWS)]
    return refer_answers(tiny_llama(seed=1), answers, labels, 7, READING)


def build_engine(model: torch.nn.Module, spread: Spread):
    """Steps of plain gradient descent: what a parameter moved by tells its gradient."""
    config = {
        "train_batch_size": NUM_ROWS,
        "train_micro_batch_size_per_gpu": spread.micro_batch_size,
        "zero_optimization": {"stage": spread.stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
    }
    return hybrid_engine.initialize(model=model, config=config)[0]


def gradients_of_a_step(engine, take_step) -> dict[str, torch.Tensor]:
    before = {name: full_tensor(value).clone() for name, value in engine.module.named_parameters()}
    take_step()
    after = {name: full_tensor(value) for name, value in engine.module.named_parameters()}
    return {name: (before[name] - after[name]) / LEARNING_RATE for name in before}


def dpo_step(spread: Spread, loss_of: PairLoss = DPO_LOSS) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The figures of one step of the recipe on all pairs, and the gradient that it stepped along."""
    engine = build_engine(tiny_llama(), spread)
    pairs = training_pairs()
    mine = (pairs[::-1] if spread.reverse else pairs)[get_rank() :: get_world_size()]
    figures = {}
    gradients = gradients_of_a_step(
        engine, lambda: figures.update(dpo.update(engine, mine, NUM_ROWS - 1, loss_of, READING))
    )
    return figures, gradients


def wpo_step(spread: Spread) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The same with WPO's weights."""
    return dpo_step(spread, replace(DPO_LOSS, is_weighted=True))


def kto_step(spread: Spread) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The same of KTO, on the answers of the pairs."""
    engine = build_engine(tiny_llama(), spread)
    rows = labelled_answers()
    mine = (rows[::-1] if spread.reverse else rows)[get_rank() :: get_world_size()]
    figures = {}
    gradients = gradients_of_a_step(engine, lambda: figures.update(kto.update(engine, mine, NUM_ROWS, KTO, READING)))
    return figures, gradients


def plain_logprob(model, answer: Encoded) -> torch.Tensor:
    """One row, nothing padded."""
    ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
    logits = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids)[:, None]).sum()


def plain_alignment(model, answer: Encoded) -> torch.Tensor:
    """The mean over tokens of log p(token) - log sum p^2."""
    ids = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
    logprobs = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
    taken = logprobs.gather(1, torch.tensor(answer.response_ids)[:, None]).squeeze(1)
    return (taken - logprobs.exp().square().sum(dim=1).log()).mean()


def plain_wpo_loss(model) -> torch.Tensor:
    with torch.no_grad():
        pairs = [pair.tokens for pair in training_pairs()[:-1]]
        weights = torch.stack([sum(plain_alignment(model, answer) for answer in pair).exp() for pair in pairs])
    return plain_dpo_loss(model, weights)


def plain_dpo_loss(model, weights=None) -> torch.Tensor:
    pairs = training_pairs()[:-1]
    logprobs = torch.stack([plain_logprob(model, answer) for answer in answers_of([pair.tokens for pair in pairs])])
    references = torch.tensor([(pair.chosen_ref, pair.rejected_ref) for pair in pairs])
    lengths = torch.tensor([[len(answer.response_ids) for answer in pair.tokens] for pair in pairs])
    return DPO_LOSS(PairLogprobs(*logprobs.chunk(2), *references.unbind(1), *lengths.unbind(1), weights)).mean()


def plain_kto_loss(model) -> torch.Tensor:
    rows = labelled_answers()
    with torch.no_grad():
        ratios = [plain_logprob(model, row.mismatched) - row.mismatched_ref for row in rows]
        point = torch.stack(ratios).mean()
    assert point > 0  # else the clamp would hide it
    losses = []
    for row in rows:
        reward = BETA * (plain_logprob(model, row.answer) - row.logprob_ref - point)
        losses.append(0.5 * (1 - torch.sigmoid(reward)) if row.is_desirable else 2 * (1 - torch.sigmoid(-reward)))
    return torch.stack(losses).mean()


STEPS = {"dpo": (dpo_step, plain_dpo_loss), "wpo": (wpo_step, plain_wpo_loss), "kto": (kto_step, plain_kto_loss)}


def plain_step(loss_of) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient of rows that are read one by one."""
    model = tiny_llama()
    loss = loss_of(model)
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters()}


def assert_same_step(step, expected):
    (figures, gradients), (loss, expected_gradients) = step, expected
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    largest = float(max(value.abs().max() for value in expected_gradients.values()))
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("recipe", STEPS)
def test_a_step_is_that_of_rows_read_one_by_one_however_they_are_split_padded_and_ordered(recipe):
    take_step, loss_of = STEPS[recipe]
    expected = plain_step(loss_of)
    for spread in (Spread(), Spread(micro_batch_size=2), Spread(micro_batch_size=1, reverse=True)):
        assert_same_step(take_step(spread), expected)


def steps_of_every_spread(rank, world_size, spreads):
    return {(recipe, spread): STEPS[recipe][0](spread) for recipe in STEPS for spread in spreads}


def test_two_processes_take_the_step_of_one():
    spreads = [Spread(micro_batch_size=4), Spread(micro_batch_size=2, stage=3, reverse=True)]
    first, second = run_distributed(steps_of_every_spread, 2, spreads)
    for (recipe, spread), step in first.items():
        assert_same_step(step, plain_step(STEPS[recipe][1]))
        assert step[0] == second[recipe, spread][0]


def test_log_probabilities_of_many_answers_are_those_of_each_alone():
    model, answers = tiny_llama(), answers_of(token_pairs(40))
    logprobs = all_logprobs(model, answers, READING)
    with torch.no_grad():
        assert logprobs == pytest.approx([float(plain_logprob(model, answer)) for answer in answers], rel=1e-5)


def test_under_a_disabled_adapter_a_model_is_its_own_reference():
    base = tiny_llama()
    expected = refer_pairs(base, token_pairs(), READING)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with without_adapter(model):
        assert refer_pairs(model, token_pairs(), READING) == expected
    assert refer_pairs(model, token_pairs(), READING) != expected
    with without_adapter(base):
        assert refer_pairs(base, token_pairs(), READING) == expected


def test_held_out_figures_are_those_of_all_pairs_at_once():
    model = tiny_llama()
    pairs = refer_pairs(model, token_pairs(40), READING)
    figures = held_out_figures(model, pairs, build_loss("sigmoid", BETA), READING)
    assert figures["loss"] == pytest.approx(math.log(2)) and figures["accuracy"] == 0.5
    assert figures["chosen_reward"] == figures["rejected_reward"] == 0
    chosen = [plain_logprob(model, pair.chosen).item() for pair in token_pairs(40)]
    assert figures["chosen_logprob"] == pytest.approx(sum(chosen) / 40, rel=1e-5)


@pytest.mark.parametrize("label", [True, False])
def test_a_step_of_kto_with_answers_of_one_kind_has_no_figures_of_the_other(label):
    rows = [row._replace(is_desirable=label) for row in labelled_answers()]
    engine = build_engine(tiny_llama(), Spread())
    present, absent = ("chosen_reward", "rejected_reward")[:: 1 if label else -1]
    for figures in (kto.update(engine, rows, NUM_ROWS, KTO, READING), kto.held_out_figures(engine, rows, KTO, READING)):
        assert not {absent, "reward_margin"} & figures.keys() and {present, "loss", "accuracy"} <= figures.keys()


def test_only_what_the_template_marks_is_counted_of_an_answer_and_of_a_mismatched_one():
    model, prompt, response = tiny_llama(), [3, 4], [5, 6, 7, 8]
    masked = Encoded(prompt_ids=prompt, response_ids=response, loss_mask=[True, False, False, True])
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, 1:-1].log_softmax(-1)
    expected = (logits[0, 5] + logits[3, 8]).item()
    assert all_logprobs(model, [masked, answer([9], [10])], READING)[0] == pytest.approx(expected, rel=1e-5)
    pair = EncodedPair(masked, answer(prompt, [5, 9]))
    (training_pair,) = refer_pairs(model, [pair], READING)
    of_pair = pair_logprobs(model, [training_pair], READING)
    assert of_pair.chosen.item() == training_pair.chosen_ref == pytest.approx(expected, rel=1e-5)
    assert (of_pair.chosen_lengths.tolist(), of_pair.rejected_lengths.tolist()) == ([2], [2])
    (other, _) = mismatch([answer([1], [2]), masked], seed=0)
    assert (other.prompt_ids, other.response_ids, other.loss_mask) == ([1], response, masked.loss_mask)


def test_a_mismatched_answer_is_another_prompts_and_is_chosen_once():
    answers = [answer([index // 2], [index]) for index in range(6)]
    found = mismatch(answers, seed=3)
    assert [answer.prompt_ids for answer in found] == [answer.prompt_ids for answer in answers]
    assert all(other.response_ids[0] // 2 != answer.prompt_ids[0] for answer, other in zip(answers, found, strict=True))
    assert found == mismatch(answers, seed=3)
    with pytest.raises(ValueError, match="has a single prompt"):
        mismatch([answer([1], [2]), answer([1], [3])], seed=0)
