"""The divergence of two heads' distributions without logits: time and peak memory of a forward and backward pass.

    python benchmarks/bench_divergence.py --threads 2      # 2048 tokens, hidden size 1024, vocabulary 131072
    python benchmarks/bench_divergence.py --beta 0 --vocabulary 8192

fp32 on a CPU, bf16 on a GPU. The student's head is trained or frozen, the teacher is always frozen. Timed in turn with
forward and backward passes of `linear_log_prob` on each head, the student's trained or frozen as here and the teacher's
frozen, whose time is the goal times 1.2. Extra memory is the peak of the process beyond what it held before, less the
gradients that are returned, and its goal an eighth of one model's logits; it is measured in a process of its own. The
gradients are compared with those of whole logits on a part of the tokens before anything is timed.
"""

from functools import partial
from typing import NamedTuple

import torch
from common import Quantiles, append_rows, environment, parse_run, peak_memory, run_options, timed
from processes import run_fresh
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from hybrid_engine.ops.linear_divergence import HeadStates, linear_divergence
from hybrid_engine.ops.linear_log_prob import linear_log_prob

WAYS = ("divergence", "log-probabilities of both")


class Problem(NamedTuple):
    """The sizes of two heads and of what they are given."""

    num_tokens: int
    hidden: int
    vocabulary: int
    is_trained: bool
    beta: float
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def head(self, seed: int) -> HeadStates:
        """Hidden states of a model and its head."""
        generator = torch.Generator(self.device).manual_seed(seed)
        draw = partial(torch.randn, device=self.device, dtype=self.dtype, generator=generator)
        weight = draw(self.vocabulary, self.hidden).mul_(self.hidden**-0.5)
        return HeadStates(draw(self.num_tokens, self.hidden), weight)

    def heads(self) -> tuple[HeadStates, HeadStates]:
        """The student's and the teacher's."""
        student, teacher = self.head(0), self.head(1)
        student.hidden.requires_grad_()
        student.weight.requires_grad_(self.is_trained)
        return student, teacher


def gradients(of: torch.Tensor, head: HeadStates) -> list[torch.Tensor]:
    """Gradients of the mean."""
    wanted = [x for x in (head.hidden, head.weight) if x.requires_grad]
    return list(torch.autograd.grad(of.mean(), wanted))


def one_pass(way: str, problem: Problem, student: HeadStates, teacher: HeadStates) -> list[torch.Tensor]:
    """The gradients of the student."""
    if way == WAYS[0]:
        values = linear_divergence(student.hidden, student.weight, teacher, problem.beta)
        return gradients(values, student)
    targets = torch.arange(problem.num_tokens, device=problem.device) % problem.vocabulary
    teacher = teacher._replace(hidden=teacher.hidden.requires_grad_())
    for head in (teacher, student):
        found = gradients(linear_log_prob(head.hidden, head.weight, targets).logprobs, head)
    teacher.hidden.requires_grad_(False)
    return found


def check(problem: Problem) -> None:
    """AssertionError if the gradients differ from those of whole logits by more than rounding."""
    problem = problem._replace(num_tokens=min(problem.num_tokens, 64))
    student, teacher = problem.heads()
    log_q = functional.linear(student.hidden, student.weight).float().log_softmax(-1)
    log_p = functional.linear(teacher.hidden, teacher.weight).float().log_softmax(-1)
    kl = partial(functional.kl_div, reduction="none", log_target=True)
    if problem.beta in (0, 1):
        values = kl(log_q, log_p) if problem.beta == 0 else kl(log_p, log_q)
    else:
        log_m = (problem.beta * log_p.exp() + (1 - problem.beta) * log_q.exp()).log()
        values = problem.beta * kl(log_m, log_p) + (1 - problem.beta) * kl(log_m, log_q)
    near = 1e-4 if problem.dtype == torch.float32 else 0.05
    expected = gradients(values.sum(-1), student)
    for found, wanted in zip(one_pass(WAYS[0], problem, student, teacher), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=near, atol=near * wanted.abs().max().item())


def extra_bytes(problem: Problem) -> int:
    """What a pass holds at its peak beyond inputs and gradients; for a process of its own."""
    small = problem._replace(vocabulary=64)
    one_pass(WAYS[0], small, *small.heads())  # libraries take their buffers
    student, teacher = problem.heads()
    with peak_memory(problem.device) as peak:
        found = one_pass(WAYS[0], problem, student, teacher)
    return peak.num_bytes - sum(gradient.nbytes for gradient in found)


def main() -> None:
    """Prints a table with the ratios and adds the rows to the CSV."""
    parser = run_options(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, help="default 2048, with --small 64")
    parser.add_argument("--hidden", type=int, help="default 1024, with --small 32")
    parser.add_argument("--vocabulary", type=int, help="default 131072, with --small 500")
    parser.add_argument("--beta", type=float, nargs="+", default=[1.0], help="0 is forward, 1 reverse KL (default 1)")
    args = parse_run(parser, "divergence")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    small, full = (64, 32, 500), (2048, 1024, 131072)
    given = args.tokens, args.hidden, args.vocabulary
    sizes = tuple(one or other for one, other in zip(given, small if args.small else full, strict=True))
    table = Table("beta", "head", "median s", "of both", "extra MiB", "of logits", title=f"N, E, V = {sizes}")
    rows = []
    for beta in args.beta:
        for is_trained in (False, True):
            problem = Problem(sizes[0], sizes[1], sizes[2], is_trained, beta, args.device, dtype)
            check(problem)
            heads, samples = problem.heads(), {way: list[float]() for way in WAYS}
            for _ in range(args.repeats):
                for way, found in samples.items():
                    found.append(timed(partial(one_pass, way, problem, *heads), problem.device)[0])
            extra = run_fresh(extra_bytes, 1, args.device, args.threads, problem)[0]
            ratio = Quantiles.of([own / other for own, other in zip(*samples.values(), strict=True)])
            of_logits = extra / (problem.num_tokens * problem.vocabulary * dtype.itemsize)
            own = Quantiles.of(samples[WAYS[0]])
            head = "trained" if is_trained else "frozen"
            row = f"{own.p50:.3f}", f"{ratio.p50:.2f}", f"{extra / 2**20:.0f}", f"{of_logits:.3f}"
            table.add_row(f"{beta:g}", head, *row)
            figures = {"p50": own.p50, "of_both_p20": ratio.p20, "of_both_p50": ratio.p50, "of_both_p80": ratio.p80}
            rows.append({**problem._asdict(), **figures, "extra_bytes": extra, "of_logits": of_logits,
                         "threads": torch.get_num_threads(), **environment(args.device)})  # fmt: skip
    Console().print(table)
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
