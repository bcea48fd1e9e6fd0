"""Models without containers on two processes, whole and with layers gathered one by one: rows, groups, served.

Each process answers rows of its own, with what one process alone would answer all of them.
"""

import pytest
import torch
from transformers.models.mamba import modeling_mamba

import hybrid_engine
from hybrid_engine.generation.rollout import module_rollouts
from tests.generation.live.test_own import MODELS
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import run_distributed
from tests.support.models import PAD, randomised
from tests.support.one_rank import Broken, check_error, outcome

SETTINGS = {"whole": (0, True), "gathered": (3, True), "streamed": (3, False)}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7]]
"""Two of the first process, one, which the other has too, of the second."""
LENGTHS = [3, 9, 5]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, "return_dict_in_generate": True}
SAMPLED = {**GREEDY, "do_sample": True, "num_return_sequences": 2, "seed": 5}


def build(name, stage, pinned):
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 64, "pin_parameters": pinned},
    }
    return hybrid_engine.initialize(model=randomised(MODELS[name]), config=config)[0].eval()


def padded(rows):
    width = max(len(PROMPTS[row]) for row in rows)
    ids = torch.tensor([[PAD] * (width - len(PROMPTS[row])) + PROMPTS[row] for row in rows])
    return ids, (ids != PAD).long()


def answers(engine, rows, options, lengths=LENGTHS):
    """Tokens and log-probabilities of each sample of `rows`, each row of a length of its own."""
    ids, mask = padded(rows)
    row_options = [{"max_new_tokens": lengths[row]} for row in rows]
    output = engine.generate(ids, attention_mask=mask, row_options=row_options, prompt_logprobs=0, **options)
    found, num_samples = [], len(output.lengths) // len(rows)
    for sample, length in enumerate(output.lengths.tolist()):
        tokens = output.sequences[sample, ids.shape[1] : ids.shape[1] + length]
        scores = output.prompt_logprobs[sample // num_samples]
        found.append((tokens.tolist(), output.logprobs[sample, :length], scores))
    return found


def groups(engine, rows, options):
    ids, mask = padded(rows)
    options = {name: value for name, value in options.items() if name != "return_dict_in_generate"}
    with engine.generate_async(ids, mask, max_new_tokens=4 + 3 * len(rows), **options) as rollout:
        return {group.index: [answer.tokens for answer in group.answers] for group in rollout}


def served(rank):
    """What each process's own server answers while the other one answers another question, or waits."""
    results, tokenizer = {}, build_chat_tokenizer()
    for kind, setting in SETTINGS.items():
        with build("mamba", *setting).serving(tokenizer, model_name="mamba") as server, server.client() as client:
            for length in (4, 20)[: 2 - rank]:
                answer = client.completions.create(
                    model="mamba", prompt=[5, 6, 7 + rank], max_tokens=length, temperature=0
                )
                results[kind, length] = answer.choices[0].text
    return results


def both(rank, world_size):
    rows, results = ([0, 1], [2])[rank], {}
    for name in MODELS:
        for kind, setting in SETTINGS.items():
            engine = build(name, *setting)
            assert engine.generator.fallback_reason is not None
            results[name, kind] = {
                "greedy": answers(engine, rows, GREEDY),
                "sampled": answers(engine, rows, SAMPLED),
                "groups": groups(engine, rows, SAMPLED),
                "errors": errors(engine, rank, rows) if name == "mamba" and kind == "streamed" else None,
            }
    return {**results, "served": served(rank)}


def errors(engine, rank, rows):
    """An error of one process in the middle of a pass and between two; what both hear, and whether they go on."""
    expected, found = answers(engine, rows, GREEDY), []
    for who in range(2):
        for owner, name, calls in ((modeling_mamba, "causal_conv1d_update", 1), (module_rollouts, "is_ended", 4)):
            with Broken(owner, name, MemoryError("no"), calls if rank == who else 10**9):
                error = outcome(lambda: answers(engine, rows, GREEDY))
            found.append((error, same(answers(engine, rows, GREEDY), expected)))
    return found


def same(first, second):
    return [tokens for tokens, *_ in first] == [tokens for tokens, *_ in second]


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(both, 2, seconds=60)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_two_processes_are_the_models_own(ranks, name, kind):
    reference = randomised(MODELS[name])
    found = [sample for results in ranks for sample in results[name, kind]["greedy"]]
    assert len(found) == len(PROMPTS)
    for prompt, length, (tokens, logprobs, scores) in zip(PROMPTS, LENGTHS, found, strict=True):
        ids = torch.tensor([prompt])
        output = reference.generate(ids, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=PAD)
        assert tokens == output[0, len(prompt) :].tolist()
        with torch.no_grad():
            every = reference(output).logits[0, :-1].log_softmax(-1).gather(1, output[0, 1:, None])[:, 0]
        assert torch.allclose(logprobs, every[len(prompt) - 1 :], atol=1e-4)
        assert torch.allclose(scores[-len(prompt) :][1:], every[: len(prompt) - 1], atol=1e-4)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_drawn_rows_of_two_processes_are_those_of_one(ranks, name, kind):
    alone = build(name, 0, True)
    expected = answers(alone, [0, 1, 2], SAMPLED)
    assert same([sample for results in ranks for sample in results[name, kind]["sampled"]], expected)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_groups_come_to_each_process_as_it_asks(ranks, name, kind):
    alone = build(name, 0, True)
    for results, rows in zip(ranks, ([0, 1], [2]), strict=True):
        expected = answers(alone, [0, 1, 2], SAMPLED, [4 + 3 * len(rows)] * 3)
        assert results[name, kind]["groups"] == {
            index: [tokens for tokens, *_ in expected[2 * row : 2 * row + 2]] for index, row in enumerate(rows)
        }


def test_an_error_of_one_process_in_or_between_passes_is_raised_on_both_and_they_go_on(ranks):
    first, second = (results["mamba", "streamed"]["errors"] for results in ranks)
    assert len(first) == len(second) == 4
    for who, *parts in zip((0, 0, 1, 1), first, second, strict=True):
        check_error(parts, who, "in passes")
        assert all(is_right_afterwards for _, is_right_afterwards in parts)


def test_each_process_serves_at_an_address_of_its_own(ranks):
    reference, tokenizer = randomised(MODELS["mamba"]), build_chat_tokenizer()
    for rank, results in enumerate(ranks):
        assert len(results["served"]) == 3 * (2 - rank)
        for (_, length), text in results["served"].items():
            ids = torch.tensor([[5, 6, 7 + rank]])
            tokens = reference.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=PAD)[0, 3:]
            assert text == tokenizer.decode(tokens, skip_special_tokens=True)
