"""Latent attention: absorbed and expanded, by every implementation, against a program of loops in fp64."""

import pytest
import torch

from hybrid_engine.ops import (
    Context,
    DecodeBatch,
    Expansion,
    LatentAttentionOp,
    LatentHeads,
    MixedBatch,
    PrefillBatch,
)
from hybrid_engine.ops.latent_attention_kernels import LatentNumbers, decode_by_kernels
from hybrid_engine.ops.softmax_context import rotary_table
from hybrid_engine.ops.softmax_context_kernels import SPLIT

BLOCK = 4
SIZES = {  # heads, L, R, Dk, Dv
    "plain": (3, 12, 4, 6, 5),
    "wide values": (2, 8, 2, 3, 9),
    "many heads": (20, 24, 8, 4, 4),
}


@pytest.fixture(params=["compiled", "torch"])
def device(request, monkeypatch):
    """The CPU, with compiled functions and without."""
    if request.param == "torch":
        monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    return "cpu"


class Sequences:
    """Sequences of random projections in fp64, and blocks that hold the latents of the tokens that were fed."""

    def __init__(self, lengths, sizes=SIZES["plain"], is_interleaved=True, has_bias=False, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).double()

        self.sizes, self.is_interleaved, self.dtype, self.lengths = sizes, is_interleaved, dtype, lengths
        num_heads, latent, rotary, key, value = sizes
        self.op = LatentAttentionOp(num_heads, latent, rotary, key, value, 0.4, is_interleaved)
        self.weight = random(num_heads * (key + value), latent) / latent**0.5
        self.bias = random(num_heads * (key + value)) if has_bias else None
        self.frequencies = torch.logspace(0, -1, rotary // 2, dtype=torch.float64)
        self.q = [random(n, num_heads, key + rotary) for n in lengths]
        self.fused = [random(n, latent + rotary) for n in lengths]
        num_blocks = [-(-n // BLOCK) for n in lengths]
        order = torch.randperm(sum(num_blocks) + 1, generator=generator)
        self.tables = [order[sum(num_blocks[:i]) :][: num_blocks[i]] for i in range(len(lengths))]
        self.cache = torch.full((len(order), 1, BLOCK, rotary + latent), 1e3).to(dtype)

    def rotated(self, x, positions):
        """Pairs turned by the angles of their positions, as complex numbers."""
        pairs = x.unflatten(-1, (-1, 2)) if self.is_interleaved else torch.stack(x.chunk(2, -1), -1)
        turns = torch.polar(torch.tensor(1.0, dtype=torch.float64), positions.double()[:, None] * self.frequencies)
        turned = torch.view_as_complex(pairs.contiguous()) * (turns[:, None] if x.dim() == 3 else turns)
        return torch.view_as_real(turned).flatten(-2)

    def expected(self, index, start, stop):
        """The context of the tokens from `start` to `stop` of a sequence: `[stop - start, H * Dv]`, in loops."""
        num_heads, latent, _, key, _ = self.sizes
        positions = torch.arange(self.lengths[index])
        fused = self.fused[index]
        keys = self.rotated(fused[:, latent:], positions)
        expanded = fused[:, :latent] @ self.weight.t() + (0.0 if self.bias is None else self.bias)
        expanded = expanded.unflatten(1, (num_heads, -1))
        rows = []
        for i in range(start, stop):
            q, turned = self.q[index][i, :, :key], self.rotated(self.q[index][i : i + 1, :, key:], positions[i : i + 1])
            for head in range(num_heads):
                scores = (expanded[: i + 1, head, :key] @ q[head] + keys[: i + 1] @ turned[0, head]) * 0.4
                rows.append(scores.softmax(0) @ expanded[: i + 1, head, key:])
        return torch.stack(rows).view(stop - start, -1)

    def fill(self, index, stop):
        """Writes the first `stop` tokens of a sequence to the cache."""
        latent = self.sizes[1]
        fused, (blocks, offsets) = self.fused[index][:stop], self.places([(index, 0, stop)])
        rows = torch.cat((self.rotated(fused[:, latent:], torch.arange(stop)), fused[:, :latent]), 1)
        self.cache[blocks, 0, offsets] = rows.to(self.cache)

    def feed(self, batch, spans, num_added=0):
        """The op's context of the spans `(sequence, start, stop)`, with rows of padding after them."""
        latent = self.sizes[1]
        device = self.cache.device
        q = torch.cat([self.q[i][a:b] for i, a, b in spans]).to(self.dtype).to(device)
        fused = torch.cat([self.fused[i][a:b] for i, a, b in spans]).to(self.dtype).to(device)
        inverse = self.frequencies.float().to(device)
        cos, sin = rotary_table(inverse, 1.0, max(self.lengths), self.dtype, self.is_interleaved)
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans]).to(device)
        q, fused = (torch.cat((x, x[:num_added])) for x in (q, fused))
        new = LatentHeads(q, fused[:, latent:], fused[:, :latent], (cos[positions], sin[positions]))
        bias = None if self.bias is None else self.bias.to(self.dtype).to(device)
        weight = self.weight.to(self.dtype).to(device).t()
        return self.op(new, self.cache, batch, Expansion(weight, bias)).double().cpu()

    def prefill(self, spans):
        device = self.cache.device
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        blocks, offsets = self.places([(i, a, b) for i, a, b in spans])
        lengths = tuple(b - a for _, a, b in spans)
        context = None
        if any(a for _, a, _ in spans):
            context_lengths = tuple(b for _, _, b in spans)
            places = (place.to(device) for place in self.places([(i, 0, b) for i, _, b in spans]))
            context = Context(*places, context_lengths, starts_of(context_lengths).to(device))
        return PrefillBatch(
            tokens=positions.to(device), positions=positions.to(device), write_blocks=blocks.to(device),
            write_offsets=offsets.to(device), lengths=lengths, starts=starts_of(lengths).to(device),
            wanted=starts_of(lengths)[1:].long().to(device) - 1, row_lengths=positions.to(device) + 1, context=context,
        )  # fmt: skip

    def places(self, spans):
        blocks = torch.cat([self.tables[i][torch.arange(a, b) // BLOCK] for i, a, b in spans])
        return blocks, torch.cat([torch.arange(a, b) % BLOCK for _, a, b in spans])

    def decode(self, spans):
        device = self.cache.device
        positions = torch.tensor([a for _, a, _ in spans])
        tables = torch.zeros(len(spans), max(len(table) for table in self.tables), dtype=torch.int64)
        for row, (i, _, _) in enumerate(spans):
            tables[row, : len(self.tables[i])] = self.tables[i]
        return DecodeBatch(
            tokens=positions.to(device), positions=positions.to(device), block_tables=tables.to(device),
            context=int(positions.max()) + 1, is_identity=False,
        )  # fmt: skip

    def check(self, batch, spans, bound=1e-5):
        actual = self.feed(batch, spans)
        expected = torch.cat([self.expected(*span) for span in spans])
        assert float((actual - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check_rollout(sequences, device, chunks=(2, 9), num_decoded=6, bound=1e-5):
    """Prompts, chunks of them, and single tokens, alone and together with a prompt."""
    sequences.cache = sequences.cache.to(device)
    prompt = sequences.lengths[0] - sum(chunks) - num_decoded
    spans = [(0, 0, prompt), (1, 0, sequences.lengths[1] - 1)]
    sequences.check(sequences.prefill(spans), spans, bound)
    at = prompt
    for size in chunks:
        spans = [(0, at, at + size)]
        sequences.check(sequences.prefill(spans), spans, bound)
        at += size
    other = sequences.lengths[1] - 1
    spans = [(1, other, other + 1), (0, at, at + 1)]
    sequences.check(sequences.decode(spans), spans, bound)
    decoded, packed = [(0, at + 1, at + 2)], [(2, 0, sequences.lengths[2])]
    mixed = MixedBatch(decode=sequences.decode(decoded), prefill=sequences.prefill(packed))
    sequences.check(mixed, decoded + packed, bound)
    for i in range(at + 2, at + num_decoded):
        sequences.check(sequences.decode([(0, i, i + 1)]), [(0, i, i + 1)], bound)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_latents_give_the_numbers_of_the_expanded_form(device, name, has_bias, is_interleaved):
    check_rollout(Sequences((30, 6, 4), SIZES[name], is_interleaved, has_bias), device)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "many heads"])
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_the_kernels_give_the_numbers_of_the_expanded_form(kernels, name, is_interleaved):
    check_rollout(Sequences((20, 6, 4), SIZES[name], is_interleaved), kernels, chunks=(3,), num_decoded=4)


@pytest.mark.long
def test_the_kernel_splits_long_contexts(kernels):
    sequences = Sequences((SPLIT + 30, 3), SIZES["many heads"])
    sequences.fill(0, SPLIT + 29)
    sequences.fill(1, 2)
    sequences.cache = sequences.cache.to(kernels)
    spans = [(1, 2, 3), (0, SPLIT + 29, SPLIT + 30)]
    sequences.check(sequences.decode(spans), spans)


def test_a_chunk_is_absorbed_or_expanded_by_its_length():
    op = LatentAttentionOp(128, 512, 64, 128, 128, 1.0)
    chosen = [n for n in range(1, 400) if op.is_absorbed((n,), (100_000 + n,))]
    assert chosen == list(range(1, 171))
    assert not op.is_absorbed((300, 200), (300, 200))
    assert op.is_absorbed((1,), (2,))
    op = Sequences((30,)).op
    assert op.is_absorbed((2,), (15,)) and not op.is_absorbed((9,), (24,))  # the chunks that check_rollout feeds


def test_bfloat16_is_within_its_rounding(device):
    check_rollout(Sequences((30, 6, 4), dtype=torch.bfloat16), device, bound=0.02)


def test_padding_of_a_prefill_has_no_context(device):
    sequences, spans = Sequences((5,)), [(0, 0, 5)]
    batch = sequences.prefill(spans)
    expected = sequences.feed(batch, spans)
    padded = sequences.feed(batch, spans, num_added=3)
    assert torch.equal(padded[:5], expected)
    assert padded.shape[0] == 8 and not padded[5:].any()


def test_a_row_does_not_depend_on_the_others(device):
    sequences = Sequences((9, 14, 3))
    prompts = [(i, 0, n - 1) for i, n in enumerate(sequences.lengths)]
    sequences.feed(sequences.prefill(prompts), prompts)
    spans = [(i, n - 1, n) for i, n in enumerate(sequences.lengths)]
    together = sequences.feed(sequences.decode(spans), spans)
    for row, span in enumerate(spans):
        torch.testing.assert_close(sequences.feed(sequences.decode([span]), [span])[0], together[row])


def test_tensors_that_the_kernel_cannot_read_are_named(kernels):
    numbers = LatentNumbers(2, 16, 8, 1.0, True)
    good = {
        "absorbed": torch.zeros(1, 2, 16), "to_rotate": torch.zeros(1, 2, 8),
        "rows": (torch.zeros(1, 8), torch.zeros(1, 16)), "rotary": (torch.zeros(1, 8), torch.zeros(1, 8)),
        "cache": torch.zeros(1, 1, BLOCK, 24),
    }  # fmt: skip
    batch = Sequences((2,)).decode([(0, 0, 1)])
    for name, value, message in [
        ("absorbed", torch.zeros(1, 3, 16), r"absorbed queries has shape \[1, 3, 16\]; expected \[1, 2, 16\]"),
        ("cache", torch.zeros(1, 1, BLOCK, 16), r"the cache of latents has shape .* expected \[any, 1, any, 24\]"),
        ("rows", (torch.zeros(1, 8), torch.zeros(1, 16).half()), "latents is torch.float16; expected torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode_by_kernels(numbers, batch=batch, **{**good, name: value})
