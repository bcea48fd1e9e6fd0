"""`recipes/quick_start.py` under torchrun says what one process says."""

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.generation import (
    CommonInferenceParams,
    GPTInferenceWrapper,
    NativeBackend,
    SimpleTextGenerationStrategy,
    common_generate,
)
from hybrid_engine.inference import init_inference
from hybrid_engine.recipes import quick_start
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import free_port
from tests.support.fresh_python import executable, run_python
from tests.support.megatron_checkpoints import save_ranks
from tests.support.models import randomised


def test_four_processes_say_what_one_says(tmp_path):
    tokenizer = build_chat_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = randomised(lambda: LlamaForCausalLM(config))
    save_ranks(model, tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    script = Path(quick_start.__file__)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "4", f"--master-port={free_port()}"]
    environment = os.environ | {"PYTHON_EXEC": executable(), "OMP_NUM_THREADS": "1"}
    ended = run_python(*command, script, tmp_path / "gpt", tmp_path / "tokenizer", env=environment)
    assert ended.returncode == 0, ended.stderr
    strategy = SimpleTextGenerationStrategy(GPTInferenceWrapper(init_inference(model)), tokenizer)
    params = CommonInferenceParams(temperature=0.8, num_tokens_to_generate=30)
    with torch.random.fork_rng():
        result = common_generate(NativeBackend(strategy, 0), quick_start.PROMPTS, params)
    assert ended.stdout.splitlines() == "\n".join(result["prompts_plus_generations_detokenized"]).splitlines()
    assert len(script.read_text().split('"""', 2)[2].splitlines()) < 45
