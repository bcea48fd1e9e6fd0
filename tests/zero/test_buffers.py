"""Buffers of a module that is trained: their dtype, and whose of several processes a checkpoint and an export have."""

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import hybrid_engine
from hybrid_engine.extensions.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.distributed import run_distributed
from tests.support.training_reference import tiny_llama

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(stage=0, dtype="fp32", rows=4):
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        **precision,
    }


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_norm_trains_as_in_torchs_module_of_that_dtype(dtype):
    plain, batch = normed().to(DTYPES[dtype]), torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    engine = hybrid_engine.initialize(model=normed().bfloat16().float(), config=config(0, dtype))[0]
    engine.module.load_state_dict(plain.state_dict())
    for rows in batch.to(DTYPES[dtype]):
        loss = engine(rows).mean()
        torch.testing.assert_close(loss, plain(rows).mean())
        engine.backward(loss)
        engine.step()
    torch.testing.assert_close(dict(engine.module.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


def test_what_is_computed_again_and_what_transformers_keeps_in_fp32_stay_in_fp32():
    rotary = hybrid_engine.initialize(model=tiny_llama(), config=config(0, "bf16"))[0].module.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    dims = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_hidden_layers": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **dims, **experts, first_k_dense_replace=0))
    engine = hybrid_engine.initialize(model=model, config=config(0, "bf16"))[0]
    gate = engine.module.model.layers[0].mlp.gate
    assert (gate.weight.dtype, gate.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)


def of_each_process(rank, world_size, folder):
    """The buffers in checkpoints and exports, and after a load, where each process had its own."""
    found = []
    for stage, with_init in ((0, False), (1, False), (2, False), (3, False), (3, True)):
        settings = config(stage, "bf16", rows=2)
        with hybrid_engine.zero.Init(config_dict_or_path=settings, enabled=with_init):
            model = normed()
        engine = hybrid_engine.initialize(model=model, config=settings)[0]
        norm = engine.module[1]
        for buffer in norm.buffers():
            buffer.fill_(rank + 3)
        engine.save_checkpoint(folder)
        saved = get_fp32_state_dict_from_zero_checkpoint(folder)
        exported = engine.save_16bit_model(f"{folder}/exported")
        weights = torch.load(f"{exported}/pytorch_model.bin")
        engine.load_checkpoint(folder)
        names = [name for name in weights if name.split(".")[1] not in ("weight", "bias")]
        found.append([[float(b.mean(dtype=torch.float32)) for b in norm.buffers()]])
        found[-1] += [[float(state[name].float().mean()) for name in names] for state in (saved, weights)]
    return found


def test_checkpoints_exports_and_resumed_processes_have_rank_0s(tmp_path):
    for found in run_distributed(of_each_process, 2, str(tmp_path)):
        assert found == [[[3.0] * 3] * 3] * 5
