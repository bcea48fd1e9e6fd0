"""Attention kernels against the reference: every feature alone and several together, prefill and decode."""

import itertools

import pytest
import torch

from hybrid_engine.generation.core import Prefill, Prompt
from hybrid_engine.generation.step import pack_prefills
from hybrid_engine.ops import QKV, DecodeBatch, HeadWeights, KVBlocks, PrefillBatch, SoftmaxContextOp
from hybrid_engine.ops.dispatch import IS_INTERPRETED, Launch
from hybrid_engine.ops.softmax_context import rotary_table
from hybrid_engine.ops.softmax_context_kernels import SPLIT

pytestmark = pytest.mark.long

MAX_POSITIONS = 5000
FEATURES = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window over splits": {"window": SPLIT + 30},
    "softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "rotary": {"rotary_dim": 16},
    "interleaved rotary": {"rotary_dim": 16, "is_interleaved": True},
    "partial rotary": {"rotary_dim": 6},
    "partial interleaved rotary": {"rotary_dim": 6, "is_interleaved": True},
    "rms": {"qk_norm": "rms"},
    "rms in fp32": {"qk_norm": "rms_fp32"},
    "rms with offset": {"qk_norm": "rms_offset"},
    "gemma": {"qk_norm": "rms_offset", "rotary_dim": 16, "window": 20, "softcap": 3.0},
    "gpt-oss": {"rotary_dim": 16, "window": 9, "has_sinks": True},
    "glm": {"qk_norm": "rms", "rotary_dim": 8, "is_interleaved": True},
    "all": {
        "qk_norm": "rms", "rotary_dim": 10, "window": 300, "softcap": 2.0, "has_sinks": True, "has_alibi": True,
    },
}  # fmt: skip
COMBINED = ["plain", "gemma", "gpt-oss", "all"]


@pytest.fixture(autouse=True)
def _poisoned():
    """torch.empty and its kin give NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Case:
    """An op with random inputs for `num_tokens` tokens, in fp64; `run` rounds them."""

    def __init__(self, device, num_tokens, heads=(4, 2), dim=16, block_size=16, num_blocks=1, **features):
        self.has = {name: features.pop(name, False) for name in ("has_sinks", "has_alibi")}
        self.rotary_dim, num_heads, num_kv = features.pop("rotary_dim", 0), *heads
        self.device, self.is_interleaved = device, features.get("is_interleaved", False)
        self.op = SoftmaxContextOp(*heads, dim, scale=0.4, qk_norm_eps=1e-6, **features)

        def random(*shape):
            return torch.randn(*shape, dtype=torch.float64, device=device)

        # Slices of one projection: strided rows.
        fused = random(num_tokens, num_heads + 2 * num_kv, dim)
        self.q = fused[:, :num_heads].unflatten(1, (num_kv, -1))
        self.k, self.v = fused[:, num_heads:].chunk(2, 1)
        self.gammas = (random(dim), random(dim)) if features.get("qk_norm") else (None, None)
        self.sinks = random(num_heads) if self.has["has_sinks"] else None
        self.alibi = random(num_heads).abs() * 0.1 if self.has["has_alibi"] else None
        self.kv = random(2, num_blocks, num_kv, block_size, dim)

    def run(self, run, batch, dtype, exact_of=None):
        """The context and the workspace afterwards, by `run` in `dtype`, of inputs rounded to `exact_of`."""

        def cast(x):
            return None if x is None else x.to(exact_of or dtype).to(dtype)

        rotary = None
        if self.rotary_dim:
            inv_freq = 1 / 10000 ** (torch.arange(0, self.rotary_dim, 2, device=self.device) / self.rotary_dim)
            table = rotary_table(inv_freq, 1.1, MAX_POSITIONS, exact_of or dtype, self.is_interleaved)
            rotary = tuple(part[batch.positions].to(dtype) for part in table)
        kv = cast(self.kv).clone()
        alibi = None if self.alibi is None else self.alibi.float()
        gammas = map(cast, self.gammas)
        q, k, v = (cast(x) for x in (self.q, self.k, self.v))
        weights = HeadWeights(*gammas, cast(self.sinks), alibi)
        return run(QKV(q, k, v, rotary), KVBlocks(*kv.unbind()), batch, weights), kv

    def check(self, batch, dtype):
        """Kernel against reference in `dtype`, and both against fp64."""
        exact = self.run(self.op.reference, batch, torch.float64, exact_of=dtype)
        reference = self.run(self.op.reference, batch, dtype)
        kernel = self.run(self.op, batch, dtype)
        for parts in zip(kernel, reference, exact, strict=True):
            assert_within_own_error(*parts)
        return kernel


def assert_within_own_error(kernel, reference, exact):
    """The kernel is as near to fp64 as the reference is in that dtype, up to a small factor."""
    assert kernel.dtype == reference.dtype
    assert kernel.shape == reference.shape

    def error(actual):
        return float((actual.double() - exact.double()).abs().max())

    # The interpreter cuts bf16 off where the hardware rounds.
    factor = 8 if IS_INTERPRETED and reference.dtype == torch.bfloat16 else 3
    assert error(kernel) <= factor * error(reference) + 2e-6 * float(exact.abs().max())


def decode_batch(device, positions, block_size, trash=0):
    """Rows at `positions` with scattered blocks, then `trash` rows that pad; and how many blocks there are."""
    context = max(positions) + 1
    columns = -(-context // block_size)
    num_blocks = len(positions) * columns + 1
    tables = torch.randperm(num_blocks - 1)[: len(positions) * columns].view(len(positions), columns)
    tables = torch.cat([tables, torch.full((trash, columns), num_blocks - 1)])
    places = torch.tensor([*positions, *[0] * trash])
    return DecodeBatch(
        tokens=places.to(device),
        positions=places.to(device),
        block_tables=tables.to(device),
        context=context,
        is_identity=False,
    ), num_blocks


def continued_batch(device, parts, block_size):
    """The tokens from `first` to below `last` of sequences with scattered blocks; and how many blocks there are."""
    columns = -(-max(last for _, last in parts) // block_size)
    tables = torch.randperm(len(parts) * columns).view(len(parts), columns).tolist()
    prompts = [Prompt(list(range(last))) for _, last in parts]
    prefills = [
        Prefill(prompt, prompt.tokens, blocks, *part)
        for prompt, blocks, part in zip(prompts, tables, parts, strict=True)
    ]
    return pack_prefills(prefills, block_size, False, torch.device(device)), len(parts) * columns


def prefill_batch(device, lengths, block_size):
    """Sequences with scattered blocks; and how many blocks there are."""
    columns = -(-max(lengths) // block_size)
    tables = torch.randperm(len(lengths) * columns).view(len(lengths), columns)
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ends = torch.tensor(lengths).cumsum(0)
    return PrefillBatch(
        tokens=positions.to(device),
        positions=positions.to(device),
        write_blocks=tables[rows, positions // block_size].to(device),
        write_offsets=(positions % block_size).to(device),
        lengths=tuple(lengths),
        starts=torch.nn.functional.pad(ends, (1, 0)).int().to(device),
        wanted=(ends - 1).to(device),
        row_lengths=(positions + 1).to(device),
    ), len(lengths) * columns


@pytest.mark.parametrize("features", FEATURES)
def test_decode_equals_the_reference_with_every_feature(kernels, features):
    batch, num_blocks = decode_batch(kernels, [0, 3, 20, SPLIT + 41], 64)
    case = Case(kernels, 4, block_size=64, num_blocks=num_blocks, **FEATURES[features])
    case.check(batch, torch.float32)


@pytest.mark.parametrize("features", FEATURES)
def test_prefill_equals_the_reference_with_every_feature(kernels, features):
    batch, num_blocks = prefill_batch(kernels, [1, 33, 7], 8)
    Case(kernels, 41, block_size=8, num_blocks=num_blocks, **FEATURES[features]).check(batch, torch.float32)


@pytest.mark.parametrize("features", FEATURES)
def test_what_follows_on_a_prefilled_beginning_equals_the_reference_with_every_feature(kernels, features):
    batch, num_blocks = continued_batch(kernels, [(0, 7), (40, 41), (20, 53), (3, 4)], 8)
    Case(kernels, 42, block_size=8, num_blocks=num_blocks, **FEATURES[features]).check(batch, torch.float32)


@pytest.mark.parametrize("features", COMBINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_in_chunks_is_attended_like_a_whole_one(kernels, features, dtype):
    length, edges = 150, [0, 40, 41, 150]
    whole, num_blocks = continued_batch(kernels, [(0, length)], 16)
    case = Case(kernels, length, block_size=16, num_blocks=num_blocks, **FEATURES[features])
    expected, kv = case.run(case.op, whole, dtype)
    q, k, v = case.q, case.k, case.v
    table = whole.write_blocks[::16].tolist()
    contexts = []
    for first, last in itertools.pairwise(edges):
        prompt = Prompt(list(range(length)))
        chunk = pack_prefills([Prefill(prompt, prompt.tokens, table, first, last)], 16, False, torch.device(kernels))
        case.q, case.k, case.v = (x[first:last] for x in (q, k, v))
        context, written = case.run(case.op, chunk, dtype)
        case.kv = written.double()
        contexts.append(context)
    assert torch.equal(case.kv.to(dtype), kv)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(torch.cat(contexts), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("features", COMBINED)
def test_sixteen_bits_are_no_further_from_fp64_than_the_reference(kernels, features, dtype):
    batch, num_blocks = decode_batch(kernels, [0, 7, SPLIT + 9], 16)
    Case(kernels, 3, block_size=16, num_blocks=num_blocks, **FEATURES[features]).check(batch, dtype)
    batch, num_blocks = prefill_batch(kernels, [5, 40], 16)
    Case(kernels, 45, block_size=16, num_blocks=num_blocks, **FEATURES[features]).check(batch, dtype)
    batch, num_blocks = continued_batch(kernels, [(30, 35), (0, 40)], 16)
    Case(kernels, 45, block_size=16, num_blocks=num_blocks, **FEATURES[features]).check(batch, dtype)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 1000])
def test_blocks_of_any_size(kernels, block_size):
    batch, num_blocks = decode_batch(kernels, [0, 63, 64, 100], block_size)
    Case(kernels, 4, block_size=block_size, num_blocks=num_blocks).check(batch, torch.float32)
    batch, num_blocks = prefill_batch(kernels, [3, 18], block_size)
    Case(kernels, 21, block_size=block_size, num_blocks=num_blocks).check(batch, torch.float32)


@pytest.mark.parametrize(
    ("heads", "dim"),
    [((1, 1), 8), ((3, 3), 10), ((20, 1), 63), ((2, 2), 80), ((4, 2), 96), ((1, 1), 256), ((2, 1), 512)],
)
def test_heads_of_any_number_and_size(kernels, heads, dim):
    features = {"rotary_dim": dim // 4 * 2, "qk_norm": "rms"}
    batch, num_blocks = decode_batch(kernels, [2, 40], 16)
    Case(kernels, 2, heads, dim, 16, num_blocks, **features).check(batch, torch.float32)
    batch, num_blocks = prefill_batch(kernels, [1, 19], 16)
    Case(kernels, 20, heads, dim, 16, num_blocks, **features).check(batch, torch.float32)


@pytest.mark.parametrize("features", [{}, {"window": 700, "has_sinks": True}], ids=["all", "window and sinks"])
def test_a_context_of_more_splits_than_are_merged_at_once(kernels, features):
    batch, num_blocks = decode_batch(kernels, [17 * SPLIT + 3, 9], 64)
    Case(kernels, 2, (2, 1), block_size=64, num_blocks=num_blocks, **features).check(batch, torch.float32)


def test_a_prompt_of_several_tiles(kernels):
    batch, num_blocks = prefill_batch(kernels, [200, 1, 130], 64)
    Case(kernels, 331, (2, 1), block_size=64, num_blocks=num_blocks).check(batch, torch.float32)


def test_places_beyond_a_row_are_never_read(kernels):
    """NaN lies wherever a row has not written: in its own blocks, in others', and where its new token goes."""
    batch, num_blocks = decode_batch(kernels, [0, 30, SPLIT + 41], 16)
    case = Case(kernels, 3, block_size=16, num_blocks=num_blocks, **FEATURES["all"])
    expected, _ = case.run(case.op, batch, torch.float32)
    written = torch.zeros(num_blocks, 16, dtype=torch.bool)
    for row, position in enumerate(batch.positions.tolist()):
        places = torch.arange(position)
        written[batch.block_tables[row].cpu()[places // 16], places % 16] = True
    case.kv = case.kv.masked_fill(~written.to(kernels)[:, None, :, None], torch.nan)
    context, _ = case.run(case.op, batch, torch.float32)
    assert torch.equal(context, expected)


def test_rows_that_pad_a_bucket_write_the_trash_block_and_nothing_else(kernels):
    batch, num_blocks = decode_batch(kernels, [4, 37], 8, trash=3)
    case = Case(kernels, 5, block_size=8, num_blocks=num_blocks)
    case.k[2:], case.v[2:] = case.k[2].clone(), case.v[2].clone()  # the last one to write is not defined
    context, kv = case.check(batch, torch.float32)
    assert context.isfinite().all()
    before = case.kv.float()
    written = (kv != before).any(-1).any(2).any(0).nonzero().tolist()
    tables = batch.block_tables.tolist()
    assert sorted(written) == sorted([[tables[0][0], 4], [tables[1][37 // 8], 37 % 8], [num_blocks - 1, 0]])


@pytest.mark.parametrize("features", COMBINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_row_is_the_same_to_the_bit_alone_and_in_any_batch(kernels, features, dtype):
    positions = [0, 5, SPLIT - 1, SPLIT, 2 * SPLIT + 9]
    batch, num_blocks = decode_batch(kernels, positions, 16)
    case = Case(kernels, 5, block_size=16, num_blocks=num_blocks, **FEATURES[features])
    together, _ = case.run(case.op, batch, dtype)
    whole = case.q, case.k, case.v
    for row, position in enumerate(positions):
        case.q, case.k, case.v = (x[row : row + 1] for x in whole)
        one = slice(row, row + 1)
        alone = DecodeBatch(
            tokens=batch.tokens[one],
            positions=batch.positions[one],
            block_tables=batch.block_tables[one],
            context=position + 1,
            is_identity=False,
        )
        assert torch.equal(case.run(case.op, alone, dtype)[0][0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prefilled_row_is_the_same_to_the_bit_alone_and_in_any_batch(kernels, dtype):
    lengths = [3, 150, 20]
    batch, num_blocks = prefill_batch(kernels, lengths, 16)
    case = Case(kernels, sum(lengths), (2, 1), block_size=16, num_blocks=num_blocks, **FEATURES["all"])
    together = case.run(case.op, batch, dtype)[0].split(lengths)
    whole = [x.split(lengths) for x in (case.q, case.k, case.v)]
    for row, length in enumerate(lengths):
        case.q, case.k, case.v = (parts[row] for parts in whole)
        alone, _ = prefill_batch(kernels, [length], 16)
        assert torch.equal(case.run(case.op, alone, dtype)[0], together[row])


def test_one_launch_decodes_a_split_and_two_decode_any_context(kernels, monkeypatch):
    launched, start = [], Launch.__call__

    def count(launch, *args):
        launched.append(launch.kernel)
        start(launch, *args)

    monkeypatch.setattr(Launch, "__call__", count)
    for position, expected in ((SPLIT - 1, 1), (SPLIT, 2), (3 * SPLIT, 2)):
        batch, num_blocks = decode_batch(kernels, [position], 64)
        case = Case(kernels, 1, (2, 1), block_size=64, num_blocks=num_blocks, **FEATURES["all"])
        case.run(case.op, batch, torch.float32)
        assert len(launched) == expected
        launched.clear()


def test_heads_beyond_the_kernel_run_on_the_reference_and_say_so(kernels, caplog):
    batch, num_blocks = decode_batch(kernels, [2, 5], 16)
    case = Case(kernels, 2, (2, 1), 520, 16, num_blocks)
    actual, expected = (case.run(run, batch, torch.float32)[0] for run in (case.op, case.op.reference))
    assert torch.equal(actual, expected)
    assert "heads of 520" in caplog.text


def change(name, how):
    """Arguments of a call with one tensor made unfit."""

    def apply(arguments):
        arguments[name] = how(arguments[name])

    return apply


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (change("q", lambda q: q.flatten(1, 2)), r"q has shape \[2, 4, 16\]; expected \[any, 2, 2, 16\]"),
        (change("k", lambda k: k.half()), "k is torch.float16; expected torch.float32"),
        (change("v", lambda v: v.transpose(1, 2).contiguous().transpose(1, 2)), "v has strides"),
        (change("keys", lambda keys: keys.half()), "the workspace of k is torch.float16"),
        (change("values", lambda values: values[:, :1]), "the workspace of v has shape"),
        (change("values", lambda values: values.clone()[:, :, ::2]), "keys and values have strides"),
        (change("rotary", lambda rotary: [part.double() for part in rotary]), "cos is torch.float64"),
        (change("rotary", lambda rotary: [part.repeat(1, 2) for part in rotary]), "cos has 32 dimensions"),
        (change("q_gamma", lambda gamma: None), "q_gamma is None; qk_norm='rms'"),
        (change("k_gamma", lambda gamma: gamma[:5]), r"k_gamma has shape \[5\]; expected \[16\]"),
        (change("sinks", lambda sinks: sinks[:2]), r"sinks has shape \[2\]; expected \[4\]"),
        (change("alibi", lambda alibi: alibi.half()), "alibi is torch.float16; expected torch.float32"),
    ],
)  # fmt: skip
def test_an_unfit_tensor_is_named_before_the_launch(kernels, unfit, message):
    op = SoftmaxContextOp(4, 2, 16, scale=1.0, qk_norm="rms", qk_norm_eps=1e-6)
    batch, num_blocks = decode_batch(kernels, [2, 5], 16)
    keys, values = torch.zeros(2, num_blocks, 2, 16, 16, device=kernels)
    shapes = {"q": (2, 2, 2, 16), "k": (2, 2, 16), "v": (2, 2, 16), "q_gamma": (16,), "k_gamma": (16,)}
    shapes |= {"sinks": (4,), "alibi": (4,)}
    arguments = {name: torch.zeros(shape, device=kernels) for name, shape in shapes.items()}
    arguments |= {"keys": keys, "values": values}
    arguments["rotary"] = torch.zeros(2, 16, device=kernels), torch.zeros(2, 16, device=kernels)

    def run():
        parts = [kind(*map(arguments.get, kind._fields)) for kind in (QKV, KVBlocks, HeadWeights)]
        return op(*parts[:2], batch, parts[2])

    run()
    unfit(arguments)
    with pytest.raises(ValueError, match=message):
        run()
