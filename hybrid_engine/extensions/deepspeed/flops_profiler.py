"""`deepspeed.profiling.flops_profiler`: operations, parameters and time of a model's forward pass.

    flops, macs, params = get_model_profile(model, args=[input_ids], as_string=False)

Counted by PyTorch's FlopCounterMode: matrix products, convolutions and attention, two operations for each
multiply-accumulate. DeepSpeed adds elementwise operations, a small part of a transformer's.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator

PREFIXES = ("", "K", "M", "G", "T", "P", "E")


class FlopsProfiler:
    """Counts what runs between `start_profile()` and `stop_profile()`.

    `ds_engine` and `recompute_fwd_factor` have no meaning here: recomputed operations are counted as they run.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.started = False
        self._ignored: tuple[type, ...] = ()
        self._counter = FlopCounterMode(display=False)
        self._start = self._seconds = 0.0

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Begins to count, without what runs inside modules of the classes in `ignore_list`."""
        self._ignored = tuple(ignore_list or ())
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self.started = True
        self._start = _now()

    def stop_profile(self) -> None:
        """Ends counting, if it had begun; what was counted is kept until `reset_profile()`."""
        if self.started:
            self._seconds = _now() - self._start
            self._counter.__exit__(None, None, None)
            self.started = False

    def reset_profile(self) -> None:
        """Forgets the operations and times that were counted."""
        self.stop_profile()
        self._counter, self._seconds = FlopCounterMode(display=False), 0.0

    end_profile = reset_profile

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations of what was profiled."""
        counts = self._counts()
        count = sum(counts.get("Global", {}).values()) - sum(
            sum(counts.get(name, {}).values()) for name in self._names_of_ignored()
        )
        return flops_to_string(count) if as_string else count

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates so far, half of the operations; a number, or as text."""
        count = self.get_total_flops() // 2
        return macs_to_string(count) if as_string else count

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the whole model."""
        count = sum(getattr(param, "ds_numel", param.numel()) for param in self.model.parameters())
        return params_to_string(count) if as_string else count

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds that what was profiled took."""
        return duration_to_string(self._seconds) if as_string else self._seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the totals, and the operations of the modules down to `module_depth`, or of the `top_modules` largest.

        Args:
            profile_step: the step to name.
            module_depth: -1 prints all.
            top_modules: how many, when `detailed` is false.
            output_file: prints to this file instead.
        """
        lines = [
            f"flops_profiler: step {profile_step}: {self.get_total_flops(True)}, {self.get_total_macs(True)}, "
            f"{self.get_total_params(True)} parameters, {self.get_total_duration(True)}",
            *(f"  {count:>20,}  {name}" for name, count in self._modules(module_depth, top_modules, detailed)),
        ]
        text = "\n".join(lines) + "\n"
        if output_file is None:
            sys.stdout.write(text)
        else:
            Path(output_file).write_text(text, encoding="utf-8")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the totals and the `top_modules` largest modules down to `module_depth`."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)

    def _modules(self, depth: int, top_modules: int, detailed: bool) -> list[tuple[str, int]]:
        counts = [(name, sum(by_op.values())) for name, by_op in self._counts().items() if name != "Global"]
        shown = [entry for entry in counts if depth < 0 or entry[0].count(".") <= depth]
        return shown if detailed else sorted(shown, key=lambda entry: -entry[1])[:top_modules]

    def _counts(self) -> Mapping[str, Mapping[Any, int]]:
        counts: Mapping[str, Mapping[Any, int]] = self._counter.get_flop_counts()
        return counts

    def _names_of_ignored(self) -> list[str]:
        """The counter's names of the outermost ignored modules."""
        root = type(self.model).__name__
        names = [f"{root}.{name}" for name, module in self.model.named_modules() if isinstance(module, self._ignored)]
        return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one call of `model`, which is put into evaluation mode.

    Args:
        model: what is called.
        input_shape: of one tensor of ones to call it with, in the parameters' dtype; or
        args: the positional arguments, and
        kwargs: those by name.
        print_profile: whether `FlopsProfiler.print_model_profile` prints, with the next three and `output_file`.
        warm_up: calls before the one that is timed.
        as_string: whether the results are strings with units.
        ignore_modules: classes of modules whose operations do not count.
        mode: "forward", or "generate".

    Raises:
        ValueError: no input is given, or another mode.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f'{mode=} is not one of forward, generate; choose "generate" for model.generate()')
    if input_shape is not None:
        args = [_ones(model, input_shape)]
    if not args and not kwargs:
        raise ValueError("get_model_profile(): there is no input; give input_shape, args or kwargs")
    call = model if mode == "forward" else model.generate
    model.eval()
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **kwargs or {})
    profiler.start_profile(ignore_modules)
    call(*args, **kwargs or {})
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


def number_to_string(number: float, units: str | None = None, precision: int = 2) -> str:
    """`number` with the largest prefix that keeps it above one, or with the one in `units`: "1.5 M"."""
    power = PREFIXES.index(units) if units is not None else 0
    while units is None and abs(number) >= 1000 ** (power + 1) and power < len(PREFIXES) - 1:
        power += 1
    return f"{round(number / 1000**power, precision):g} {PREFIXES[power]}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Floating-point operations in words, as "1.5 GFLOPS"."""
    return f"{number_to_string(flops, units and units.removesuffix('FLOPS'), precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations in words, as "1.5 GMACs"."""
    return f"{number_to_string(macs, units and units.removesuffix('MACs'), precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters in words, as "1.5 M"."""
    return number_to_string(params_num, units, precision).rstrip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds as text: "1.5 s", "1.5 ms" or "1.5 us"."""
    factors = {"s": 1, "ms": 1e3, "us": 1e6}
    unit = units or next((name for name, factor in factors.items() if duration * factor >= 1), "us")
    return f"{round(duration * factors[unit], precision):g} {unit}"


def _ones(model: nn.Module, shape: Sequence[int]) -> torch.Tensor:
    parameter = next(model.parameters(), torch.zeros(()))
    return torch.ones(tuple(shape), dtype=parameter.dtype, device=parameter.device)


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
