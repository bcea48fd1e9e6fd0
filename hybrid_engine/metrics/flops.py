"""The floating-point operations of one micro-batch, counted by PyTorch's FlopCounterMode and written as a table."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid_engine.config.observing import FlopsProfilerConfig


class FlopsProfiler:
    """Counts from `start()` before a forward pass to `stop()` after its backward pass, once.

    Operations are those of matrix products, convolutions and attention, as FlopCounterMode knows them.
    """

    def __init__(self, config: FlopsProfilerConfig, device: torch.device, is_writer: bool) -> None:
        """`is_writer` says whether this process writes; counting is local. The clock waits for `device`."""
        self.config = config
        self.device = device
        self.is_writer = is_writer
        self._counter: FlopCounterMode | None = None
        self._is_done = not config.enabled
        self._start = 0.0

    def start(self, step: int) -> None:
        """Begins to count if `step` is the one to profile."""
        if self._is_done or self._counter is not None or step != self.config.profile_step:
            return
        self._counter = FlopCounterMode(display=False)
        self._counter.__enter__()
        self._start = self._now()

    def stop(self) -> None:
        """Ends counting and writes what was counted, if it had begun."""
        if self._counter is None:
            return
        seconds = self._now() - self._start
        self._counter.__exit__(None, None, None)
        self._is_done = True
        if self.is_writer:
            self._write(self._describe(self._counter, seconds))
        self._counter = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _describe(self, counter: FlopCounterMode, seconds: float) -> str:
        total = counter.get_total_flops()
        head = (
            f"flops_profiler: step {self.config.profile_step}, one micro-batch forward and backward: {total} "
            f"operations in {seconds:.3f} s, {total / seconds:.3g} per second"
        )
        counts: dict[str, dict[Any, int]] = counter.get_flop_counts()
        by_module = {name: sum(ops.values()) for name, ops in counts.items() if name != "Global"}
        if self.config.detailed:
            shown = [entry for entry in by_module.items() if self._is_shown(entry[0])]
        else:
            shown = sorted(by_module.items(), key=lambda item: -item[1])[: self.config.top_modules]
        return "\n".join([head, *(f"  {count:>20,}  {name}" for name, count in shown)])

    def _is_shown(self, name: str) -> bool:
        return self.config.module_depth < 0 or name.count(".") <= self.config.module_depth

    def _write(self, text: str) -> None:
        if self.config.output_file is None:
            print(text, flush=True)
        else:
            Path(self.config.output_file).write_text(text + "\n")
