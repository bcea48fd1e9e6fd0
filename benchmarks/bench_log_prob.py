"""Log-probabilities without logits beside those of the logits: time and peak memory of a forward and backward pass.

    python benchmarks/bench_log_prob.py     # 2048 tokens, hidden size 1024, vocabularies 8192 and 131072
    python benchmarks/bench_log_prob.py --vocabulary 8192

fp32 on a CPU, bf16 on a GPU. A frozen head (adapters learn below it) wants the gradient of the hidden states alone, a
trained one also its own. The two ways are timed in turn in one run, after their results were compared. Extra memory is
the peak of the process beyond what it held before, less the gradients that both return; each is measured in a process
of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from common import Quantiles, append_rows, environment, parse_run, peak_memory, run_options, timed
from processes import run_fresh
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from hybrid_engine.ops.linear_log_prob import linear_log_prob


class Problem(NamedTuple):
    """The sizes of a head and of what it is given."""

    num_tokens: int
    hidden: int
    vocabulary: int
    is_trained: bool
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, weights and targets."""
        torch.manual_seed(0)
        like = {"device": self.device, "dtype": self.dtype}
        hidden = torch.randn(self.num_tokens, self.hidden, requires_grad=True, **like)
        weight = torch.randn(self.vocabulary, self.hidden, **like).mul_(self.hidden**-0.5)
        targets = torch.randint(self.vocabulary, (self.num_tokens,), device=self.device)
        return hidden, weight.requires_grad_(self.is_trained), targets


def from_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As a trainer does that has the model's logits."""
    logprobs = functional.log_softmax(functional.linear(hidden, weight).float(), dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1)


def from_hidden(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Without logits."""
    return linear_log_prob(hidden, weight, targets).logprobs


WAYS: dict[str, Callable[..., torch.Tensor]] = {"logits": from_logits, "no logits": from_hidden}


def one_pass(way: str, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Log-probabilities and gradients of a weighted sum of them."""
    logprobs = WAYS[way](*tensors)
    above = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    return [logprobs.detach(), *torch.autograd.grad((logprobs * above).sum(), [x for x in tensors if x.requires_grad])]


def check(problem: Problem) -> None:
    """AssertionError where the two differ by more than rounding."""
    tensors = problem.tensors()
    for found, expected in zip(*(one_pass(way, tensors) for way in WAYS), strict=True):
        near = 1e-4 if problem.dtype == torch.float32 else 0.05
        torch.testing.assert_close(found, expected, rtol=near, atol=near * expected.abs().max().item())


def extra_bytes(way: str, problem: Problem) -> int:
    """What a pass holds at its peak beside inputs and gradients; for a process of its own."""
    one_pass(way, problem._replace(vocabulary=64).tensors())  # libraries take their buffers
    tensors = problem.tensors()
    with peak_memory(problem.device) as peak:
        gradients = one_pass(way, tensors)[1:]
    return peak.num_bytes - sum(gradient.nbytes for gradient in gradients)


def seconds(problem: Problem, repeats: int) -> dict[str, list[float]]:
    """Of each way, in turn."""
    tensors = problem.tensors()
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, found in samples.items():
            found.append(timed(partial(one_pass, way, tensors), problem.device)[0])
    return samples


def main() -> None:
    """Prints a table with the ratios and adds the rows to the CSV."""
    parser = run_options(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, help="default 2048, with --small 64")
    parser.add_argument("--hidden", type=int, help="default 1024, with --small 32")
    parser.add_argument("--vocabulary", type=int, nargs="+", help="default 8192 131072, with --small 500")
    args = parse_run(parser, "log_prob")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    sizes = args.tokens or (64 if args.small else 2048), args.hidden or (32 if args.small else 1024)
    table = Table(
        "vocabulary", "head", "way", "median s", "of logits", "extra MiB", "of logits", title=f"N, E = {sizes}"
    )
    rows = []
    for vocabulary in args.vocabulary or ([500] if args.small else [8192, 131072]):
        for is_trained in (False, True):
            problem = Problem(*sizes, vocabulary, is_trained, args.device, dtype)
            check(problem)
            samples = seconds(problem, args.repeats)
            extra = {way: run_fresh(extra_bytes, 1, args.device, args.threads, way, problem)[0] for way in WAYS}
            median = {way: Quantiles.of(found) for way, found in samples.items()}
            for way in WAYS:
                times, memory = median[way].p50 / median["logits"].p50, extra[way] / max(extra["logits"], 1)
                head = "trained" if is_trained else "frozen"
                found = f"{median[way].p50:.3f}", f"{times:.2f}", f"{extra[way] / 2**20:.0f}", f"{memory:.3f}"
                table.add_row(str(vocabulary), head, way, *found)
                quantiles = {"p20": median[way].p20, "p50": median[way].p50, "p80": median[way].p80}
                rows.append({**problem._asdict(), "way": way, **quantiles, "extra_bytes": extra[way],
                             "threads": torch.get_num_threads(), **environment(args.device)})  # fmt: skip
    Console().print(table)
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
