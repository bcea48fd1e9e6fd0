"""Every op: its Triton kernel against its torch reference and against the best PyTorch way to do the same.

    python benchmarks/bench_ops.py               # real shapes on a GPU, small ones on a CPU
    python benchmarks/bench_ops.py --only linear

Correctness comes first: kernel and PyTorch way must be as near to an fp64 reference as the reference in the timed
dtype is, within a factor of four and the rounding of a sum in fp32 (of n products about the root of n times that of
one, in whatever order). Then all ways take turns; the table gives the median microseconds of one call, the
ratio of the best PyTorch way to ours, and our share of the roofline: the larger of the op's bytes and operations (see
each op's docstring) over what a copy and a matrix product reach in the same run. On a CPU the kernels would be
interpreted and are left out: "ours" is the reference, which is what runs there. On a GPU calls are recorded as a
graph, as decode steps are, and its replay is timed by events, over inputs that together exceed the second-level
cache; ways that read the device on the host cannot be recorded and are timed with their launches.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from common import DTYPES, Ceilings, append_rows, environment, measure_ceilings, parse_run, run_options, timed
from rich.console import Console
from rich.table import Table

from hybrid_engine.ops import (
    NORM_OPS,
    QKV,
    BlockCopyOp,
    DecodeBatch,
    KVBlocks,
    MLPGemmOp,
    PrefillBatch,
    QKVGemmOp,
    SampleOp,
    SamplingOptions,
    SoftmaxContextOp,
    VectorMatMulOp,
    token_logprobs,
)
from hybrid_engine.ops.expert_gemm import ExpertGemmOp
from hybrid_engine.ops.moe_gating import MoEGatingOp
from hybrid_engine.ops.softmax_context import apply_rotary, rotary_table

# Bytes of input sets that are rotated on a GPU, so that no call finds its input in the second-level cache.
ROTATED_BYTES = 2**28
# Of a timed run.
CALLS = 20


@dataclass
class Case:
    """One op on one shape. Ways take an input set; the first is ours, `reference` its definition."""

    name: str
    make: Callable[[], tuple]
    ours: Callable
    reference: Callable
    rivals: dict[str, Callable]
    num_bytes: float
    flops: float
    output: Callable = field(default=lambda result: result)  # the tensor that is compared
    is_compared: bool = True  # rivals that draw other random numbers, or work in place, are not
    unrecorded: tuple[str, ...] = ()  # ways that read the device on the host
    terms: int = 1  # products that are summed for one number of the output


def linear_cases(dtype: torch.dtype, device: str, is_small: bool) -> list[Case]:
    """Output projections, norm with query-key-value, and the MLP, of a Llama 8B on a GPU."""
    hidden, mlp, kv = (256, 512, 128) if is_small else (4096, 14_336, 1024)
    cases = []
    for rows in (1, 16, 64, 128, 256):

        def randn(*shape):
            return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(dtype)

        def linear_inputs(rows=rows):
            return randn(rows, mlp), randn(hidden, mlp).t(), None, randn(rows, hidden)

        element = dtype.itemsize
        op = VectorMatMulOp()
        cases.append(
            Case(
                f"linear with residual, {rows} rows", linear_inputs, op, op.reference,
                {
                    "F.linear and a sum": lambda x, w, _, residual: F.linear(x, w.t()) + residual,
                    "torch.addmm": lambda x, w, _, residual: torch.addmm(residual, x, w),
                },
                hidden * mlp * element, 2 * rows * hidden * mlp, terms=mlp,
            )
        )  # fmt: skip

        def qkv_inputs(rows=rows):
            weights = [randn(size, hidden).t() for size in (hidden, kv, kv)]
            return randn(rows, hidden), weights, torch.ones(hidden, device=device, dtype=dtype)

        qkv = QKVGemmOp("rms", 1e-6, hidden // 64, kv // 64, 64)

        def qkv_torch(x, weights, gamma):
            normed = F.rms_norm(x, (x.shape[-1],), gamma, 1e-6)
            return [F.linear(normed, weight.t()) for weight in weights]

        cases.append(
            Case(
                f"norm and qkv, {rows} rows", qkv_inputs,
                lambda x, w, g, op=qkv: op(x, w, [None] * 3, g, None)[0][0].flatten(1),
                lambda x, w, g, op=qkv: op.reference(x, w, [None] * 3, g, None)[0][0].flatten(1),
                {"F.rms_norm, F.linear": lambda *given: qkv_torch(*given)[0]},
                hidden * (hidden + 2 * kv) * element, 2 * rows * hidden * (hidden + 2 * kv), terms=hidden,
            )
        )  # fmt: skip

        def mlp_inputs(rows=rows):
            return (
                randn(rows, hidden), randn(mlp, hidden).t(), randn(mlp, hidden).t(), randn(hidden, mlp).t(),
                torch.ones(hidden, device=device, dtype=dtype),
            )  # fmt: skip

        gemm = MLPGemmOp("rms", 1e-6, "silu", adds_residual=True)

        def mlp_call(call):
            return lambda x, gate, up, down, gamma: call(
                x, None, (gate, None), (up, None), (down, None), gamma, None
            )[0]  # fmt: skip

        def mlp_torch(x, gate, up, down, gamma):
            normed = F.rms_norm(x, (x.shape[-1],), gamma, 1e-6)
            return x + F.linear(F.silu(F.linear(normed, gate.t())) * F.linear(normed, up.t()), down.t())

        cases.append(
            Case(
                f"MLP, {rows} rows", mlp_inputs, mlp_call(gemm), mlp_call(gemm.reference), {"F.linear": mlp_torch},
                3 * hidden * mlp * element, 6 * rows * hidden * mlp, terms=mlp,
            )
        )  # fmt: skip
    return cases


def attention_cases(dtype: torch.dtype, device: str, is_small: bool) -> list[Case]:
    """Decode over a paged workspace and packed prefill, grouped heads."""
    heads, kv_heads, dim = (4, 2, 32) if is_small else (32, 8, 128)
    block_size, element = 64, dtype.itemsize
    op = SoftmaxContextOp(heads, kv_heads, dim, dim**-0.5)
    cases = []

    def split(rows):
        q = torch.randn(rows, kv_heads, heads // kv_heads, dim, device=device).to(dtype)
        return q, *(torch.randn(rows, kv_heads, dim, device=device).to(dtype) for _ in range(2))

    for rows, context in ((1, 128), (4, 128)) if is_small else ((1, 2048), (32, 2048), (64, 2048)):
        num_blocks = rows * context // block_size

        def inputs(rows=rows, context=context, num_blocks=num_blocks):
            cache = torch.randn(2, num_blocks, kv_heads, block_size, dim, device=device).to(dtype)
            batch = DecodeBatch(
                tokens=torch.zeros(rows, dtype=torch.int64, device=device),
                positions=torch.full((rows,), context - 1, device=device),
                block_tables=torch.randperm(num_blocks, device=device).view(rows, -1),
                context=context,
                is_identity=False,
            )
            q, k, v = split(rows)
            newest = batch.block_tables[:, -1]  # SDPA reads the workspace as it lies; ours writes the newest token
            cache[0, newest, :, -1], cache[1, newest, :, -1] = k, v
            return q, k, v, cache, batch

        def sdpa(q, k, v, cache, batch):
            keys, values = (part[batch.block_tables].transpose(1, 2).flatten(2, 3) for part in cache)
            return F.scaled_dot_product_attention(
                q.flatten(1, 2).unsqueeze(2), keys, values, scale=dim**-0.5, enable_gqa=True
            ).flatten(1)

        cases.append(
            Case(
                f"decode attention, {rows} x {context}", inputs,
                lambda q, k, v, c, b: op(QKV(q, k, v), KVBlocks(*c), b),
                lambda q, k, v, c, b: op.reference(QKV(q, k, v), KVBlocks(*c), b),
                {"gather, SDPA": sdpa}, 2 * rows * context * kv_heads * dim * element,
                4 * rows * context * heads * dim,
            )
        )  # fmt: skip
    lengths = (48, 64) if is_small else (512, 1024, 768, 2048)
    total = sum(lengths)

    def prefill_inputs():
        ends = torch.tensor(lengths).cumsum(0)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        cache = torch.zeros(2, total // block_size + 1, kv_heads, block_size, dim, device=device, dtype=dtype)
        places = torch.arange(total, device=device)
        batch = PrefillBatch(
            tokens=places, positions=positions, write_blocks=places // block_size,
            write_offsets=places % block_size, lengths=lengths, starts=F.pad(ends, (1, 0)).int().to(device),
            wanted=(ends - 1).to(device), row_lengths=positions + 1,
        )  # fmt: skip
        return *split(total), cache, batch

    def one_by_one(q, k, v, cache, batch):
        parts = zip(*(x.split(lengths) for x in (q.flatten(1, 2), k, v)), strict=True)
        contexts = [
            F.scaled_dot_product_attention(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                scale=dim**-0.5,
                enable_gqa=True,
            ).transpose(0, 1)
            for q, k, v in parts
        ]
        return torch.cat(contexts).flatten(1)

    cases.append(
        Case(
            f"prefill attention, {total} tokens", prefill_inputs,
            lambda q, k, v, c, b: op(QKV(q, k, v), KVBlocks(*c), b),
            lambda q, k, v, c, b: op.reference(QKV(q, k, v), KVBlocks(*c), b), {"SDPA one by one": one_by_one},
            total * (2 * heads + 4 * kv_heads) * dim * element, sum(2 * n * n * heads * dim for n in lengths),
        )
    )  # fmt: skip
    return cases


def small_cases(dtype: torch.dtype, device: str, is_small: bool) -> list[Case]:
    """Norms, rotary, sampling, block copies, experts."""
    hidden, vocab, rows = (256, 4096, 32) if is_small else (4096, 128_256, 32)
    element = dtype.itemsize
    cases = []
    for kind in ("rms", "layer"):
        op = NORM_OPS[kind](1e-6)

        def norm_inputs(kind=kind):
            gamma = torch.ones(hidden, device=device, dtype=dtype)
            return torch.randn(rows, hidden, device=device).to(dtype), gamma, gamma * 0 if kind == "layer" else None

        def norm_torch(x, gamma, beta, kind=kind):
            if kind == "layer":
                return F.layer_norm(x, (hidden,), gamma, beta, 1e-6)
            return F.rms_norm(x, (hidden,), gamma, 1e-6)

        cases.append(
            Case(
                f"{kind} norm, {rows} rows",
                norm_inputs,
                op,
                op.reference,
                {"torch": norm_torch},
                2 * rows * hidden * element,
                5 * rows * hidden,
            )
        )

    cos, sin = (row.to(device) for row in rotary_table(torch.rand(32), 1.0, rows, dtype))

    def halves(x):
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None, :32], sin[:, None, 32:]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    cases.append(
        Case(
            f"rotary, {rows} rows", lambda: (torch.randn(rows, 6, 64, device=device).to(dtype),),
            lambda x: apply_rotary(x, cos, sin), lambda x: apply_rotary(x, cos, sin), {"halves": halves},
            2 * rows * 6 * 64 * element, 4 * rows * 6 * 64,
        )
    )  # fmt: skip
    filters = (("plain", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9), ("top-p 0.9", 0, 0.9))
    for name, top_k, top_p in filters:
        sample = SampleOp(SamplingOptions(do_sample=True, top_k=top_k, top_p=top_p))
        keys, draws = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)

        def multinomial(x, top_k=top_k, top_p=top_p):
            if top_p < 1:
                values, order = x.sort(descending=True)
                kept = (values.softmax(-1).cumsum(-1) - values.softmax(-1) < 0.9) & (
                    torch.arange(x.shape[-1], device=x.device) < (top_k or x.shape[-1])
                )
                x = torch.full_like(x, float("-inf")).scatter(-1, order, values.masked_fill(~kept, float("-inf")))
            tokens = torch.multinomial(x.softmax(-1), 1).squeeze(-1)
            return tokens, token_logprobs(x, tokens)

        cases.append(
            Case(
                f"sample {name}, {rows} rows", lambda: (torch.randn(rows, vocab, device=device) * 3,),
                lambda x, op=sample, k=keys, d=draws: op(x, k, d),
                lambda x, op=sample, k=keys, d=draws: op.reference(x, k, d), {"softmax, multinomial": multinomial},
                rows * vocab * 4, 3 * rows * vocab, output=lambda result: result[1], is_compared=False,
            )
        )  # fmt: skip
    layers, tokens = (2, 64) if is_small else (32, 64)
    numbers = torch.tensor([[0, 1, 2], [5, 6, 7], [tokens] * 3], device=device)
    copy = BlockCopyOp()

    def block_by_block(workspace):
        for source, target in ((0, 5), (1, 6), (2, 7)):
            workspace[:, target].copy_(workspace[:, source])
        return workspace

    def copied(workspace):
        copy(workspace, *numbers)
        return workspace

    def copied_reference(workspace):
        copy.reference(workspace, *numbers)
        return workspace

    cases.append(
        Case(
            "copy of 3 blocks", lambda: (torch.randn(2 * layers, 8, 8, tokens, 64, device=device).to(dtype),),
            copied, copied_reference, {"one by one": block_by_block}, 2 * 3 * 2 * layers * 8 * tokens * 64 * element, 0,
            unrecorded=("reference",),
        )
    )  # fmt: skip
    experts, top_k, mlp = (8, 2, 512) if is_small else (64, 8, 1024)
    gating, gemm = MoEGatingOp(experts, top_k), ExpertGemmOp("silu", "halves")

    def expert_inputs():
        return (
            torch.randn(rows, hidden, device=device).to(dtype),
            # All different also in 16 bits: of equal ones each way may take another.
            torch.rand(rows, experts, device=device).argsort(1).to(dtype) / 16,
            (torch.randn(experts, 2 * mlp, hidden, device=device) / hidden**0.5).to(dtype),
            (torch.randn(experts, hidden, mlp, device=device) / mlp**0.5).to(dtype),
        )  # fmt: skip

    def run(gate, product):
        return lambda x, logits, up, down: product(
            x, gate(logits), up.transpose(1, 2), None, down.transpose(1, 2), None
        ).sum(1)  # fmt: skip

    def loop(x, logits, up, down):
        weights, chosen = logits.float().softmax(-1).topk(top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        output = torch.zeros_like(x)
        for expert in range(experts):
            token, slot = torch.where(chosen == expert)
            gate, inner = F.linear(x[token], up[expert]).chunk(2, dim=-1)
            product = F.linear(F.silu(gate) * inner, down[expert]) * weights[token, slot, None]
            output.index_add_(0, token, product)
        return output

    cases.append(
        Case(
            f"experts, {rows} rows, {top_k} of {experts}", expert_inputs, run(gating, gemm),
            run(gating.reference, gemm.reference), {"a loop over experts": loop},
            min(experts, rows * top_k) * 3 * hidden * mlp * element, 6 * rows * top_k * hidden * mlp,
            unrecorded=("reference", "a loop over experts"),
        )
    )  # fmt: skip
    return cases


def check(case: Case, ways: dict[str, Callable], dtype: torch.dtype) -> None:
    """Raises RuntimeError where a way is further from fp64 than four times the reference's own error."""
    given = case.make()

    def copies(convert):
        def one(value):
            if isinstance(value, torch.Tensor):
                return convert(value.clone()) if value.is_floating_point() else value.clone()
            return [one(item) for item in value] if isinstance(value, list) else value

        return tuple(one(value) for value in given)

    exact = case.output(case.reference(*copies(lambda tensor: tensor.double())))
    own = (case.output(case.reference(*copies(lambda tensor: tensor))).double() - exact).abs().max()
    for name, way in ways.items():
        if not case.is_compared and name not in ("ours", "reference"):
            continue
        error = (case.output(way(*copies(lambda tensor: tensor))).double() - exact).abs().max()
        rounding = torch.finfo(dtype).eps + case.terms**0.5 * torch.finfo(torch.float32).eps
        floor = rounding * exact.abs().max()
        if not error <= 4 * own + floor:
            raise RuntimeError(f"{case.name}, {name}: error {error:.3g}, the reference's own is {own:.3g}")


def build_timer(way: Callable, inputs: list[tuple], device: str, is_recorded: bool) -> Callable[[], float]:
    """Gives the microseconds of one call; each call takes the next input."""

    def run() -> None:
        for call in range(CALLS):
            way(*inputs[call % len(inputs)])

    for given in inputs[:3]:
        way(*given)
    if torch.device(device).type != "cuda":
        return lambda: timed(run, device)[0] / CALLS * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    if is_recorded:
        with torch.cuda.graph(graph):
            run()

    def microseconds() -> float:
        start.record()
        graph.replay() if is_recorded else run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / CALLS * 1e3

    microseconds()  # the first replay uploads the graph
    return microseconds


def measure(case: Case, args: argparse.Namespace, ceilings: Ceilings) -> dict:
    """One row."""
    ways = {"ours": case.ours, "reference": case.reference, **case.rivals}
    with torch.no_grad():
        check(case, ways, DTYPES[args.dtype])
        sets = min(32, max(1, int(ROTATED_BYTES // max(case.num_bytes, 1)))) if args.device != "cpu" else 1
        inputs = [case.make() for _ in range(sets)]
        timers = {
            name: build_timer(way, inputs, args.device, name not in case.unrecorded) for name, way in ways.items()
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, timer in timers.items():
                times[name].append(timer())
    median = {name: statistics.median(values) for name, values in times.items()}
    rival = min(case.rivals, key=lambda name: median[name])
    roof = max(case.num_bytes / ceilings.bytes_per_second, case.flops / ceilings.flops_per_second) * 1e6
    return {
        "op": case.name, "dtype": args.dtype, "ours_us": round(median["ours"], 2),
        "reference_us": round(median["reference"], 2), "best_torch": rival, "best_torch_us": round(median[rival], 2),
        "times_best_torch": round(median[rival] / median["ours"], 2),
        "share_of_roofline": round(roof / median["ours"], 3),
    }  # fmt: skip


def main() -> int:
    """Measures, prints, writes; 1 when an op could not be measured."""
    parser = run_options(__doc__, repeats=11)
    is_cuda = torch.cuda.is_available()
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if is_cuda else "float32")
    args = parse_run(parser, "ops")
    dtype, is_small = DTYPES[args.dtype], args.small or args.device == "cpu"
    ceilings = measure_ceilings(args.device, dtype, args.small)
    torch.manual_seed(0)
    builders = (linear_cases, attention_cases, small_cases)
    cases = [case for build in builders for case in build(dtype, args.device, is_small) if args.only in case.name]
    rows, failed = [], []
    for case in cases:
        try:
            rows.append(measure(case, args, ceilings))
        except Exception as error:  # the next op may well run
            failed.append(case.name)
            print(f"{case.name} FAILED: {type(error).__name__}: {error}", flush=True)
            continue
        print(rows[-1], flush=True)
        # At once, and not when all is done: what has been measured stays, whatever the next op does.
        append_rows(args.csv, [rows[-1] | environment(args.device)])
    if not rows:
        return 1
    table = Table(*(column.replace("_", " ") for column in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)
    print(f"ceilings: {ceilings.bytes_per_second / 1e9:.1f} GB/s, {ceilings.flops_per_second / 1e12:.2f} TFLOP/s")
    faster = sum(row["times_best_torch"] > 1 for row in rows)
    told = f"; FAILED: {', '.join(failed)}" if failed else ""
    print(f"{len(rows)} ops measured, {faster} faster than PyTorch's best way{told}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
