"""Ctrl-C at any line of an RLHF cycle: gradients stay enabled, weights whole, and the engine goes on as if nothing was.

    python -m tests.tools.attack.interrupts [--every 1]

Two engines train side by side from the same weights. One is never interrupted. To the other SIGINT is delivered at a
chosen line of Python, in the engine's own files or in those of PyTorch and contextlib that run below them; what was
interrupted is then done again, and at every step both must hold the same weights, to the bit.

A point is a place in the code and a visit to it: of every place its first and its last visit of a cycle.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import hybrid_engine
from tests.support.models import PAD, padded_prompts
from tests.support.training_reference import VOCABULARY, tiny_llama

ROOT = Path(__file__).parents[3]
OWN = tuple(f"{ROOT / name}{os.sep}" for name in ("hybrid_engine", "containers", "ops"))
TORCH = Path(torch.__file__).parent
BELOW = (
    contextlib.__file__,
    *(str(TORCH / name) for name in ("autograd", "nn", "optim", "random.py", "_tensor.py", "amp")),
    *(str(TORCH / name) for name in ("utils/_contextlib.py", "distributed/fsdp", "distributed/checkpoint")),
)
"""Files of others in which Ctrl-C may come while the engine is at work."""


@dataclass(frozen=True)
class Point:
    """The `visit`-th time, from 1, that a line is reached in a cycle."""

    file: str
    line: int
    visit: int

    def __str__(self) -> str:
        name = self.file.removeprefix(f"{ROOT}{os.sep}")
        return f"{name.split('site-packages/')[-1]}:{self.line} (visit {self.visit})"


class Lines:
    """Sees every line that is executed in the files above, inside `watching()`."""

    def __init__(self, on_line: Callable[[str, int], None]):
        self.on_line = on_line
        self._is_watched: dict[CodeType, bool] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in self._is_watched:
            self._is_watched[code] = code.co_filename.startswith((*OWN, *BELOW))
        return self._line if self._is_watched[code] else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.on_line(frame.f_code.co_filename, frame.f_lineno)
        return self._line


def record_points(action: Callable[[], Any]) -> list[Point]:
    """The first and the last visit of every place that `action` comes to, in the order of the first."""
    visits: dict[tuple[str, int], int] = {}

    def count(file: str, line: int) -> None:
        visits[file, line] = visits.get((file, line), 0) + 1

    with Lines(count).watching():
        action()
    return [Point(*place, visit) for place, last in visits.items() for visit in sorted({1, last})]


@contextlib.contextmanager
def interrupting(point: Point) -> Iterator[list[Point]]:
    """Delivers one SIGINT at `point` of what runs inside; yields a list that has the point once it was delivered."""
    seen, delivered = 0, []

    def look(file: str, line: int) -> None:
        nonlocal seen
        if not delivered and line == point.line and file == point.file:
            seen += 1
            if seen == point.visit:
                delivered.append(point)
                signal.raise_signal(signal.SIGINT)

    with Lines(look).watching():
        yield delivered


@dataclass
class Outcome:
    """What an attack came to."""

    num_points: int = 0
    num_delivered: int = 0
    failures: list[str] = field(default_factory=list)


def process_state() -> dict[str, Any]:
    """What belongs to the process and not to an engine."""
    return {
        "gradients enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "threads": threading.active_count(),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, LoRA, workspace released": {
        "lora": True,
        "bf16": {"enabled": True},
        "hybrid_engine": {"enabled": True, "release_inference_cache": True},
    },
    "fp16, accumulating": {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_accumulation_steps": 2},
}


class Cycle:
    """One engine and what is done with it: rollouts, then a step."""

    def __init__(self, variant: dict[str, Any]):
        self.options = {**variant}
        model = tiny_llama()
        model.generation_config.pad_token_id = PAD
        if self.options.pop("lora", False):
            torch.manual_seed(1)
            model = get_peft_model(
                model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            )
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_type": "linear"}},
            "hybrid_engine": {"enabled": True},
        }
        self.engine, *_ = hybrid_engine.initialize(model=model, config=config | self.options)
        self.prompts, self.mask = padded_prompts(num_prompts=3)
        self.prompts %= VOCABULARY
        self.rollouts: list[torch.Tensor] = []
        self.has_gradients = False  # of a micro-batch that step() has not ended

    def run(self) -> None:
        """Up to the next optimizer step; safe to begin again wherever it was left."""
        self.rollouts = []
        self.sample()
        self.step()

    def sample(self) -> None:
        engine = self.engine
        engine.eval()
        options = {"attention_mask": self.mask, "max_new_tokens": 4, "eos_token_id": None}
        self.rollouts.append(engine.generate(self.prompts, do_sample=False, **options))
        self.rollouts.append(
            engine.generate(self.prompts, do_sample=True, seed=engine.global_steps, num_return_sequences=2, **options)
        )
        engine.fuse_lora_weight()
        engine.unfuse_lora_weight()
        engine.train()

    def step(self) -> None:
        engine = self.engine
        num_parts = engine.gradient_accumulation_steps()
        for part in range(engine.micro_steps % num_parts, num_parts):
            micro_steps = engine.micro_steps
            generator = torch.Generator().manual_seed(2 * engine.global_steps + part)
            tokens = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
            if not self.has_gradients:
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                self.has_gradients = True
            try:
                engine.step()
            finally:
                self.has_gradients = engine.micro_steps == micro_steps

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of weights, masters and optimizer state by name."""
        optimizer = self.engine.optimizer
        values = {name: p.detach().clone() for name, p in self.engine.module.named_parameters()}
        for trained in optimizer.parameters:
            values[f"master {trained.name}"] = trained.master.detach().clone()
            for key, value in optimizer.state.get(trained.master, {}).items():
                values[f"{key} {trained.name}"] = torch.as_tensor(value).clone()
        return values

    def counters(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
            "skipped_steps": engine.skipped_steps,
            "pending": engine.num_pending_micro_batches,
            "rate": engine.get_lr(),
            "schedule": engine.lr_scheduler.last_epoch,
            "scale": engine.optimizer.cur_scale,
        }


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names whose values differ."""

    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    names = [*expected, *(name for name in actual if name not in expected)]
    return [
        name for name in names if name not in actual or name not in expected or not equal(actual[name], expected[name])
    ]


class Pair:
    """An engine to attack beside one that is left alone."""

    def __init__(self, variant: dict[str, Any]):
        self.variant = variant
        self.renew()
        self.points = record_points(self.untouched.run)
        self.attacked.run()

    def renew(self) -> None:
        self.untouched, self.attacked = Cycle(self.variant), Cycle(self.variant)
        for _ in range(2):  # the second step is the first of a warm engine: state is there, caches are filled
            self.untouched.run()
            self.attacked.run()

    def attack(self, point: Point) -> tuple[bool, list[str]]:
        """Interrupts one cycle at `point`; whether it came to it, and what was then not as it should be."""
        before, process = self.untouched.state(), process_state()
        self.untouched.run()
        steps_before, after = self.attacked.engine.global_steps, self.untouched.state()
        was_interrupted, delivered = False, []
        try:
            with interrupting(point) as delivered:
                self.attacked.run()
        except KeyboardInterrupt:
            was_interrupted = True
        wrong = [f"{name} changed" for name in differences(process_state(), process)]
        torch.set_grad_enabled(True)  # so that one failure does not make the next
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if delivered and not was_interrupted:
            wrong.append("KeyboardInterrupt was lost")
        has_stepped = self.attacked.engine.global_steps > steps_before
        torn = differences(self.attacked.state(), after if has_stepped else before)
        wrong += [f"{len(torn)} tensors are not those {'after' if has_stepped else 'before'} the step"] if torn else []
        try:
            wrong += self._go_on(has_stepped)
        except Exception as error:
            wrong.append(f"going on raised {type(error).__name__}: {error}")
        if wrong:
            self.renew()
        return bool(delivered), wrong

    def _go_on(self, has_stepped: bool) -> list[str]:
        if not has_stepped:
            self.attacked.run()
            if differences(dict(enumerate(self.attacked.rollouts)), dict(enumerate(self.untouched.rollouts))):
                return ["later rollouts differ"]
        wrong = [
            f"{name} differs after the next step" for name in differences(self.attacked.state(), self.untouched.state())
        ]
        counters = differences(self.attacked.counters(), self.untouched.counters())
        return [*wrong[:1], *(f"{name} differs after the next step" for name in counters)]


def attack(
    variant: dict[str, Any], every: int = 1, offset: int = 0, report: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Tries every `every`-th point of a cycle, from `offset` on."""
    pair = Pair(variant)
    points = pair.points[offset::every]
    outcome = Outcome(num_points=len(points))
    for point in points:
        was_delivered, wrong = pair.attack(point)
        outcome.num_delivered += was_delivered
        if wrong:
            outcome.failures.append(f"{point}: {'; '.join(wrong)}")
            report(outcome.failures[-1])
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try every n-th point only")
    every = parser.parse_args().every
    torch.set_num_threads(1)
    num_failures = 0
    for name, variant in VARIANTS.items():
        outcome = attack(variant, every, report=print)
        num_failures += len(outcome.failures)
        print(f"{name}: {outcome.num_delivered} of {outcome.num_points} delivered, {len(outcome.failures)} failures")
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
