"""Two machines, played by two launchers on this one that meet as those of two machines do."""

import json
import os
import runpy
import sys
import textwrap

from tests.support.distributed import free_port
from tests.support.fresh_python import executable, start_python

SCRIPT = """
import json, os, pathlib, sys
import torch
import hybrid_engine
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
zero, generates = {"stage": 3}, {"enabled": True, "print_latency": False}
if "WORLD_SIZE" in os.environ:
    zero["mics_shard_size"] = generates["inference_tp_size"] = int(os.environ["LOCAL_WORLD_SIZE"])
options = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
engine, *_ = hybrid_engine.initialize(
    model=model, config={**options, "zero_optimization": zero, "hybrid_engine": generates}
)
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
rows = torch.arange(20).view(4, 5).chunk(world_size)[rank]
losses = []
for _ in range(2):
    loss = engine(input_ids=rows, labels=rows).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
engine.eval()
tokens = engine.generate(rows, max_new_tokens=6, min_new_tokens=6, do_sample=False).tolist()
shards = engine.sharding.mesh["fsdp"].mesh.tolist() if world_size > 1 else None
result = {"losses": losses, "tokens": tokens, "shards": shards}
pathlib.Path(sys.argv[-1], f"{rank}.json").write_text(json.dumps(result))
"""


def test_shards_and_shared_models_stay_inside_a_node_and_give_what_one_process_gives(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment["OMP_NUM_THREADS"] = "1"
    flags = ["--num_nodes", "2", "--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment["PYTHON_EXEC"] = executable()
    launch = ["-m", "hybrid_engine.cli.launcher", *flags, "--no_local_rank"]
    nodes = [start_python(*launch, "--node_rank", node, script, tmp_path, env=environment) for node in range(2)]
    for node in nodes:
        ended = node.wait()
        assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [result["shards"] for result in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]

    (tmp_path / "alone").mkdir()
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "alone")])
    runpy.run_path(str(script))
    alone = json.loads((tmp_path / "alone" / "0.json").read_text())
    assert [row for result in found for row in result["tokens"]] == alone["tokens"]
    means = [sum(result["losses"][step] for result in found) / 4 for step in range(2)]
    assert all(abs(mean - loss) < 1e-5 for mean, loss in zip(means, alone["losses"], strict=True))
