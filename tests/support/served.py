"""`hybrid-engine serve` as a process of its own, with a small random model, for programs that ask it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.chat import build_chat_tokenizer

TEMPLATE = (
    "{% if tools %}{{ '<start>system\nTools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{ \' Call as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><eos>\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<start>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
"""Of chats with tools, whose calls are in the form of Hermes."""


class Served(NamedTuple):
    """A server that answers."""

    url: str
    """What the `openai` client takes as `base_url`."""
    process: subprocess.Popen
    log: Path


def build_llama(tokenizer: Any, **sizes: int) -> LlamaForCausalLM:
    """A small random Llama, always the same one for the same sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,  # confident enough that rounding tips no token
        **{"num_key_value_heads": 2, "max_position_embeddings": 512, **sizes},
    )
    return LlamaForCausalLM(config).eval()


def write_model(folder: Path) -> None:
    """A random Llama that reads bytes, and says nothing sensible."""
    tokenizer = build_chat_tokenizer(TEMPLATE)
    build_llama(tokenizer, num_key_value_heads=4, max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(model: Path, log: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """A server for the model in a folder, at a free port, whose output goes to `log`; ended by SIGTERM.

    `environment`: variables in addition to this process's.
    """
    command = [Path(sys.executable).parent / "hybrid-engine", "serve", "--model", model, "--port", "0", *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
    try:
        yield Served(wait_for_address(process, log), process, log)
    finally:
        process.terminate()
        process.wait(60)


def wait_for_address(process: subprocess.Popen, log: Path) -> str:
    """What the server's log says that it serves at."""
    while process.poll() is None:
        found = re.search(r"serving .* at (http\S+/v1)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"hybrid-engine serve ended:\n{log.read_text()}")
