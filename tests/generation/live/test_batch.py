"""A batch that sequences join and leave while it runs, in the model's own dtype."""

from types import SimpleNamespace

import pytest
import torch

import hybrid_engine
from hybrid_engine.generation import output as rollout_output
from hybrid_engine.generation.core import Prompt, Sequence, prompt_digest, sample_keys
from hybrid_engine.generation.live.batches import ContainerBatch, StreamedBatch
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.rollout.module_rollouts import FAILED, LEFT
from tests.support.models import build_model

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [4], [20, 21, 22, 23], [30, 31]]
OPTIONS = GenerationOptions(max_new_tokens=20, do_sample=True)


def sequences_for(prompts):
    keys = sample_keys(3, [prompt_digest(prompt) for prompt in PROMPTS], [], 1)
    return [Sequence(Prompt(PROMPTS[row]), row, OPTIONS, keys[row]) for row in prompts]


def run(engine, order, arrivals, cancelled):
    """The sequences by their prompts; `arrivals[i]` is the turn in which the i-th of `order` joins."""
    wanted = dict(zip(order, sequences_for(order), strict=True))
    with live_batch(engine.generator, 32, 3) as batch:
        turn = 0
        while batch.has_work or turn <= max(arrivals):
            joining = [wanted[row] for row, at in zip(order, arrivals, strict=True) if at == turn]
            batch.add(joining)
            if turn == max(arrivals) + 2:
                batch.cancel([wanted[row] for row in cancelled])
            if batch.has_work:
                batch.turn()
            turn += 1
    return {row: sequence for row, sequence in wanted.items() if row not in cancelled}


def logprobs_of(model, sequence):
    """By one forward pass of the model itself."""
    tokens = torch.tensor([sequence.prompt.tokens + sequence.tokens])
    with torch.no_grad():
        logprobs = model(tokens).logits.float().log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None]).squeeze(1)
    return logprobs[len(sequence.prompt.tokens) - 1 :]


@pytest.mark.parametrize(
    ("order", "arrivals", "cancelled"),
    [
        ([0, 1, 2, 3, 4, 5], [0] * 6, []),
        ([5, 4, 3, 2, 1, 0], [0, 1, 1, 4, 9, 9], []),
        ([2, 0, 4, 5, 1, 3], [0, 0, 3, 3, 5, 5], [0, 3]),
    ],
)
def test_in_bf16_company_and_arrival_change_log_probabilities_within_the_models_own_error(order, arrivals, cancelled):
    """Rounding may tip a token, and what follows is another answer: so each is judged by its own tokens."""
    own, exact = build_model().bfloat16(), build_model().bfloat16().float()
    engine = hybrid_engine.init_inference(own, dtype="bf16", max_out_tokens=64)
    found = run(engine, order, arrivals, cancelled)
    assert len(found) == len(PROMPTS) - len(cancelled)
    errors, own_errors = [], []
    for sequence in found.values():
        assert len(sequence.logprobs) == len(sequence.tokens) == OPTIONS.max_new_tokens
        expected = logprobs_of(exact, sequence)
        errors.append((torch.tensor(sequence.logprobs) - expected).abs())
        own_errors.append((logprobs_of(own, sequence) - expected).abs())
    errors, own_errors = torch.cat(errors), torch.cat(own_errors)
    assert errors.mean() <= 1.25 * own_errors.mean() and errors.max() <= 2 * own_errors.max()


def test_prompts_are_scored_in_parts_and_others_are_answered_between_them(monkeypatch):
    monkeypatch.setitem(rollout_output.MOST_TOKENS, "cpu", 2)
    model = build_model()
    engine = hybrid_engine.init_inference(model, max_out_tokens=64)
    options = GenerationOptions(max_new_tokens=3)
    prompt = Prompt(list(range(5, 30)), num_tops=2)  # 12 parts
    scored, left, other = (Sequence(given, row, options) for row, given in enumerate((prompt, prompt, Prompt([5, 6]))))
    with live_batch(engine.generator, 32, 3) as batch:
        batch.add([scored, left, other])
        while other.finish_reason is None:
            batch.turn()
        assert prompt.scores is None and not scored.tokens and batch.num_waiting == 2
        batch.cancel([left])
        while batch.has_work:
            batch.turn()
    assert len(scored.tokens) == 3 and not left.tokens
    with torch.no_grad():
        expected = model(torch.tensor([prompt.tokens])).logits[0, :-1].log_softmax(-1)
    found = torch.tensor(prompt.scores.logprobs)
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(prompt.tokens)[1:, None]).squeeze(1))
    tops = torch.tensor([[value for _, value in pairs] for pairs in prompt.scores.tops])
    torch.testing.assert_close(tops, expected.topk(2).values)


def test_what_is_taken_out_before_its_prompt_is_scored_goes_on_in_another_batch():
    engine = hybrid_engine.init_inference(build_model(), max_out_tokens=64)
    sequence = Sequence(Prompt([5, 6, 7], num_tops=0), 0, GenerationOptions(max_new_tokens=3))
    with live_batch(engine.generator, 32, 3) as batch:
        batch.add([sequence])
        assert batch.take_out() == [] and not batch.has_work and sequence.finish_reason is None
        batch.add([sequence])
        while batch.has_work:
            batch.turn()
    assert len(sequence.tokens) == 3 and len(sequence.prompt.scores.logprobs) == 2


class Others:
    """Processes that gather layers with this one, and do as it does; `heard` is what it told them."""

    def __init__(self):
        self.heard = []

    def highest(self, states):
        self.heard += states
        return states

    def raise_together(self, error):
        raise error


@pytest.mark.parametrize(("error", "heard"), [(None, [LEFT]), (KeyError("of whoever listens"), [FAILED])])
def test_whoever_leaves_a_streamed_batch_tells_the_others_by_an_error_too(error, heard):
    others = Others()
    batch = StreamedBatch(ContainerBatch(None, SimpleNamespace(scheduler=None), 8), None, others)
    try:
        with batch.leaving():
            if error is not None:
                raise error
    except KeyError as raised:
        assert raised is error
    assert others.heard == heard
