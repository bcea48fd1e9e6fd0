"""The three ways to generate that bench_rollout.py compares, each called as its own documentation advises."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from countdown import EOS
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import hybrid_engine


@dataclass(frozen=True)
class Case:
    """What is asked of every engine. `lengths` of the answers where the prompts decide them, else None."""

    name: str
    prompts: torch.Tensor  # [B, P]
    options: GenerationConfig
    lengths: list[int] | None

    @property
    def group(self) -> int:
        """Samples per prompt."""
        return self.options.num_return_sequences or 1


class RolloutEngine(Protocol):
    """`generate` is what is timed; `answers` reads its result, rows in the order of the prompts and samples."""

    name: str

    def generate(self, case: Case, seed: int) -> Any: ...
    def answers(self, case: Case, result: Any) -> list[list[int]]: ...
    def finish(self) -> None: ...


def up_to_end(tokens: list[int]) -> list[int]:
    """The response without the padding after its end-of-sequence token, which is included."""
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


class HybridEngineRollout:
    """`engine.generate()`. `max_running=0` lets the engine choose the rows that run at once."""

    name = "engine.generate()"

    def __init__(self, model: PreTrainedModel, max_running: int):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "hybrid_engine": {
                "enabled": True,
                "max_out_tokens": model.config.max_position_embeddings,
                "max_running": max_running,
            },
        }
        if model.dtype != torch.float32:
            config["bf16" if model.dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
        self.engine, *_ = hybrid_engine.initialize(model=model, config=config)
        self.engine.eval()

    def generate(self, case: Case, seed: int) -> torch.Tensor:
        """`[B*G, P+T]`."""
        return self.engine.generate(case.prompts, torch.ones_like(case.prompts), case.options, seed=seed)

    def answers(self, case: Case, result: torch.Tensor) -> list[list[int]]:
        """Responses, ends included."""
        return [up_to_end(row) for row in result[:, case.prompts.shape[1] :].tolist()]

    def finish(self) -> None:
        """Gives the KV workspace back."""
        self.engine.release_inference_cache()


class ModuleRollout:
    """`model.generate()` of transformers; take the bound method before an engine puts its own in its place."""

    name = "model.generate()"

    def __init__(self, generate: Callable[..., torch.Tensor]):
        self.module_generate = generate

    def generate(self, case: Case, seed: int) -> torch.Tensor:
        """`[B*G, P+T]`."""
        torch.manual_seed(seed)
        mask = torch.ones_like(case.prompts)
        return self.module_generate(case.prompts, attention_mask=mask, generation_config=case.options)

    def answers(self, case: Case, result: torch.Tensor) -> list[list[int]]:
        """Responses, ends included."""
        return [up_to_end(row) for row in result[:, case.prompts.shape[1] :].tolist()]

    def finish(self) -> None:
        """Keeps nothing between runs."""


class ContinuousBatchingRollout:
    """`model.generate_batch()` of transformers, its manager and KV cache kept between the runs of a case.

    Left to itself on a CPU it takes 60% of the machine's memory for its cache, and up to all rows at once,
    which its attention (one mask over all rows' keys) makes slow; so it is told the demand and a batch size. Each call
    spends 0.3 s on stopping its thread (a garbage collection and a poll), whatever the size of the job.
    """

    name = "model.generate_batch()"

    def __init__(self, model: PreTrainedModel, page_size: int, max_requests: int, max_batch_tokens: int):
        self.model = model
        self.page_size, self.max_requests, self.max_batch_tokens = page_size, max_requests, max_batch_tokens
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def _config(self, case: Case) -> ContinuousBatchingConfig:
        if self.model.device.type != "cpu":
            return ContinuousBatchingConfig()
        tokens = case.prompts.shape[1] + (case.options.max_new_tokens or 0)
        return ContinuousBatchingConfig(
            self.page_size,  # positional: its name is block_size up to transformers 5.17, page_size later
            num_blocks=len(case.prompts) * case.group * math.ceil(tokens / self.page_size),
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=self.max_requests,
        )

    def generate(self, case: Case, seed: int) -> dict[str, Any]:
        """Outputs by request; the seed is the manager's own, drawn when it is built."""
        return self.model.generate_batch(
            case.prompts.tolist(),
            generation_config=case.options,
            continuous_batching_config=self._config(case),
            persistent_manager=True,
        )

    def answers(self, case: Case, result: dict[str, Any]) -> list[list[int]]:
        """Responses, ends included. Raises RuntimeError where `generate_batch` logged a failure and went on."""
        for output in result.values():
            if output.error is not None:
                raise RuntimeError(output.error)
        wanted = len(case.prompts) * case.group
        if len(result) != wanted:
            raise RuntimeError(f"generate_batch() returned {len(result)} of {wanted} answers")
        return [up_to_end(output.generated_tokens) for output in result.values()]

    def finish(self) -> None:
        """Stops its thread and gives its cache back; the next case has other options."""
        self.model.destroy_cached_continuous_batching_manager()
