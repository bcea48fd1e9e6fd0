"""The sampling kernels draw what the reference draws, and from the right distribution."""

from dataclasses import replace

import pytest
import torch
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hybrid_engine.ops import SampleOp, SamplingOptions, token_logprobs
from hybrid_engine.ops.sample import filter_logits, keyed_uniform

pytestmark = pytest.mark.long

OPTIONS = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top-k": {"do_sample": True, "top_k": 7},
    "top-p": {"do_sample": True, "top_p": 0.8},
    "min-p": {"do_sample": True, "min_p": 0.05},
    "all filters": {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalty and ends": {
        "do_sample": True, "repetition_penalty": 1.8, "min_new_tokens": 3, "eos_token_ids": (0, 2), "top_k": 9,
    },
    "greedy with penalty": {"do_sample": False, "repetition_penalty": 5.0},
}  # fmt: skip


def inputs(num_rows, vocab, device, scale=4.0):
    torch.manual_seed(num_rows + vocab)
    wide = torch.randn(num_rows, 2 * vocab, device=device) * scale
    logits = wide[:, :vocab]  # rows are not neighbours
    keys = torch.randint(-(2**62), 2**62, (num_rows,), device=device)
    draws = torch.arange(num_rows, device=device) % 6
    seen = torch.rand(num_rows + 3, vocab, device=device) < 0.3
    slots = torch.randperm(num_rows + 3, device=device)[:num_rows]
    return logits, keys, draws, seen, slots


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote is NaN, or a token beyond every vocabulary."""
    empty = torch.empty

    def fill(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch, "empty", fill)


@pytest.fixture
def small_chunks(monkeypatch):
    """Rows of a hundred tokens have two chunks, and a chunk two tiles; few candidates."""
    monkeypatch.setattr("hybrid_engine.ops.sample.MAX_KEPT", 8)
    monkeypatch.setattr("hybrid_engine.ops.sample.CHUNK", 64)
    monkeypatch.setattr("hybrid_engine.ops.sample.TILE", 32)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("vocab", [1, 63, 5000])
def test_kernels_draw_what_the_reference_draws(name, vocab, kernels):
    options = SamplingOptions(**OPTIONS[name])
    if vocab == 1:
        options = replace(options, eos_token_ids=())  # nothing would be left to draw
    op = SampleOp(options)
    given = inputs(5, vocab, kernels)
    tokens, logprobs = op(*given)
    expected, _ = op.reference(*given)
    assert tokens.tolist() == expected.tolist()
    exact = token_logprobs(given[0].double(), tokens, op.temperature)
    torch.testing.assert_close(logprobs, exact.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["plain", "all filters"])
def test_a_row_alone_draws_what_it_draws_in_a_batch(name, kernels):
    op = SampleOp(SamplingOptions(**OPTIONS[name]))
    logits, keys, draws, seen, slots = inputs(6, 300, kernels)
    tokens, logprobs = op(logits, keys, draws, seen, slots)
    for row in range(6):
        one = slice(row, row + 1)
        alone = op(logits[one], keys[one], draws[one], seen, slots[one])
        assert alone[0].item() == tokens[row].item() and alone[1].item() == logprobs[row].item()


FILTERS = {
    "none": {},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
    "all": {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.03},
}


@pytest.mark.parametrize("name", FILTERS)
def test_kernels_follow_the_filtered_distribution(name, kernels, small_chunks):
    """Pearson's chi-square, with the tokens expected fewer than five times together."""
    vocab, num_rows = 12, 20_000 if kernels.type == "cuda" else 40 if name == "all" else 100
    torch.manual_seed(1)
    logits = torch.randn(1, vocab, device=kernels)
    keys = torch.randint(-(2**62), 2**62, (num_rows,), device=kernels)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[name]
    tokens, _ = SampleOp(SamplingOptions(do_sample=True, **options))(
        logits.expand(num_rows, -1).contiguous(), keys, torch.zeros_like(keys)
    )
    temperature = options.pop("temperature")
    probs = filter_logits(logits / temperature, **options).softmax(-1)[0].double().cpu()
    counts = torch.bincount(tokens.cpu(), minlength=vocab).double()
    assert counts[probs == 0].sum() == 0
    common = probs * num_rows >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * num_rows
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1)).sum()
    freedom = len(expected) - 1
    assert freedom >= 2 and chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 6


def cdf_distance(probs, token, target):
    """How far `target` lies outside the token's part of the cumulative distribution, in fp64."""
    end = probs[: token + 1].sum()
    return max(float(end - probs[token] - target), float(target - end), 0.0)


@pytest.mark.parametrize("name", ["plain", "top-p", "all filters", "penalty and ends"])
def test_tokens_differ_from_exact_ones_at_boundaries_only(name, kernels, small_chunks):
    op = SampleOp(SamplingOptions(**OPTIONS[name]))
    num_rows = 2000 if kernels.type == "cuda" else 10
    logits, keys, draws, seen, slots = inputs(num_rows, 100, kernels, scale=2.0)
    tokens, _ = op(logits, keys, draws, seen, slots)
    differ = tokens != op.reference(logits, keys, draws, seen, slots)[0]
    assert differ.sum() <= num_rows // 1000
    with op._adjusted(logits, draws, seen, slots) as adjusted:
        scaled = adjusted / op.temperature
    probs = filter_logits(scaled, op.options.top_k, op.options.top_p, op.options.min_p).double().softmax(-1).cpu()
    for row, (token, target) in enumerate(zip(tokens.tolist(), keyed_uniform(keys, draws).tolist(), strict=True)):
        assert probs[row, token] > 0 and cdf_distance(probs[row], token, target) < 1e-6


@pytest.mark.parametrize("top_k, top_p, min_p", [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (30, 0.8, 0.03)])
def test_filters_keep_what_transformers_keeps(top_k, top_p, min_p):
    logits = torch.randn(50, 200) * 3
    expected = logits
    for wanted, warper in (
        (top_k, lambda: TopKLogitsWarper(top_k)),
        (top_p < 1, lambda: TopPLogitsWarper(top_p)),
        (min_p, lambda: MinPLogitsWarper(min_p)),
    ):
        expected = warper()(None, expected) if wanted else expected
    assert torch.equal(filter_logits(logits, top_k, top_p, min_p), expected)


def test_equal_logits_stay_or_go_together_and_the_first_is_the_likeliest(kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 2.0]], device=kernels).expand(8, -1).contiguous()
    keys, draws = torch.arange(8, device=kernels), torch.zeros(8, dtype=torch.int64, device=kernels)
    for op in (
        SampleOp(SamplingOptions(do_sample=True, top_k=1)),
        SampleOp(SamplingOptions(do_sample=True, top_p=1e-6)),
        SampleOp(SamplingOptions(do_sample=True, min_p=1.0)),
    ):
        assert set(op(logits, keys, draws)[0].tolist()) == set(op.reference(logits, keys, draws)[0].tolist()) == {1, 2}
    assert SampleOp(SamplingOptions(do_sample=False))(logits, keys, draws)[0].unique().tolist() == [1]


def test_logits_that_are_not_finite_stay_in_the_vocabulary(kernels):
    logits = torch.randn(3, 50, device=kernels)
    logits[0, 7] = float("nan")
    logits[1] = float("nan")
    logits[2, 1:] = float("-inf")
    keys, draws = torch.arange(3, device=kernels), torch.zeros(3, dtype=torch.int64, device=kernels)
    for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 5}):
        tokens, logprobs = SampleOp(SamplingOptions(**options))(logits, keys, draws)
        assert ((tokens >= 0) & (tokens < 50)).all()
        assert logprobs[:2].isnan().all() and tokens[2] == 0 and logprobs[2] == 0


def test_rows_of_which_nothing_may_be_drawn_give_the_references_token(kernels):
    keys, draws = torch.arange(2, device=kernels), torch.zeros(2, dtype=torch.int64, device=kernels)
    logits = torch.zeros(2, 3, device=kernels)
    for options in ({"do_sample": False}, {"do_sample": True}, {"do_sample": True, "top_k": 2, "top_p": 0.5}):
        op = SampleOp(SamplingOptions(**options, min_new_tokens=1, eos_token_ids=(0, 1, 2)))
        tokens, logprobs = op(logits, keys, draws)
        assert tokens.tolist() == op.reference(logits, keys, draws)[0].tolist()
        torch.testing.assert_close(logprobs, -torch.tensor([3.0, 3.0], device=kernels).log())


def test_a_top_p_just_below_one_keeps_all_though_the_rounded_sum_stays_below_one():
    torch.manual_seed(0)
    kept = filter_logits(torch.randn(4, 1000) * 0.5, top_k=0, top_p=1 - 2**-24, min_p=0.0).isfinite()
    assert (kept.sum(1) >= 999).all()


@pytest.mark.parametrize("name", OPTIONS)
def test_two_launches_whatever_the_filters(name, kernels):
    from tests.support.tape import count_launches

    given = inputs(2, 100, kernels)
    launches = count_launches(lambda: SampleOp(SamplingOptions(**OPTIONS[name]))(*given))
    assert [name for name in launches if name not in ("fill_", "lift_fresh")] == ["kernel", "kernel"]


@pytest.mark.parametrize("kept", [2, 8])
@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_k": 30, "top_p": 0.95}, {"min_p": 0.2}], ids=str)
def test_candidates_and_the_whole_row_give_one_answer(options, kept, kernels, monkeypatch):
    """Logits on a grid: most of a chunk's smallest candidates have equals, some of them in other chunks."""
    for name, size in (("CHUNK", 64), ("MAX_KEPT", kept), ("TILE", 64)):
        monkeypatch.setattr(f"hybrid_engine.ops.sample.{name}", size)
    logits, keys, draws, *_ = inputs(3, 150, kernels)
    logits = (logits / 2).round() / 2
    logits[0], logits[1, 5:] = 1.5, float("-inf")
    op = SampleOp(SamplingOptions(do_sample=True, **options))
    tokens, _ = op(logits, keys, draws)
    assert tokens.tolist() == op.reference(logits, keys, draws)[0].tolist()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": lambda x: x.half()}, "logits is torch.float16; expected torch.float32"),
        ({"keys": lambda x: x.int()}, "keys is torch.int32; expected torch.int64"),
        ({"draws": lambda x: x[:-1]}, r"draws has shape \[4\]; expected \[5\]"),
        ({"seen": lambda x: x[:, :-1]}, r"seen has shape \[8, 62\]; expected \[any, 63\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_before_a_launch(change, message, kernels):
    names = ("logits", "keys", "draws", "seen", "slots")
    given = dict(zip(names, inputs(5, 63, kernels), strict=True))
    given |= {name: alter(given[name]) for name, alter in change.items()}
    with pytest.raises(ValueError, match=message):
        SampleOp(SamplingOptions(do_sample=True, repetition_penalty=1.5))(*(given[name] for name in names))


def test_a_vocabulary_beyond_the_kernel_goes_to_the_reference_and_says_so(kernels, monkeypatch, caplog):
    monkeypatch.setattr("hybrid_engine.ops.sample.MAX_CHUNKS", 1)
    given = inputs(2, 4097, kernels)
    tokens, _ = SampleOp(SamplingOptions(do_sample=True))(*given)
    assert tokens.tolist() == SampleOp(SamplingOptions(do_sample=True)).reference(*given)[0].tolist()
    assert "a vocabulary of 4097 tokens is beyond the sampling kernel's 4096" in caplog.text
