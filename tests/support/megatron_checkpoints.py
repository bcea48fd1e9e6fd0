"""Writes a transformers model as Megatron Core would save it: files of tp x pp ranks, or a distributed checkpoint."""

import argparse
import enum
import io
import pickle
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

PADDED = 112
"""Rows of the tests' own vocabulary, once they are as many as Megatron wants."""


def padded(weight):
    return F.pad(weight, (0, 0, 0, -len(weight) % 16))


def whole_llama(model):
    """The weights under Megatron Core's names, norms fused as Transformer Engine does, and the options."""
    config, state = model.config, model.state_dict()
    num_groups, dim = config.num_key_value_heads, config.head_dim
    weights = {
        "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": padded(state["lm_head.weight"]),
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        heads = [state[f"{ours}self_attn.{part}_proj.weight"].unflatten(0, (num_groups, -1, dim)) for part in "qkv"]
        weights |= {
            f"{theirs}self_attention.linear_qkv.weight": torch.cat(heads, 1).flatten(0, 2),
            f"{theirs}self_attention.linear_qkv.layer_norm_weight": state[f"{ours}input_layernorm.weight"],
            f"{theirs}self_attention.linear_proj.weight": state[f"{ours}self_attn.o_proj.weight"],
            f"{theirs}mlp.linear_fc1.layer_norm_weight": state[f"{ours}post_attention_layernorm.weight"],
            f"{theirs}mlp.linear_fc1.weight": torch.cat(
                [state[f"{ours}mlp.{part}_proj.weight"] for part in ("gate", "up")]
            ),
            f"{theirs}mlp.linear_fc2.weight": state[f"{ours}mlp.down_proj.weight"],
        }
    options = {
        "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0,
        "group_query_attention": True, "num_query_groups": num_groups, "kv_channels": dim,
        "norm_epsilon": config.rms_norm_eps, "rotary_base": 10000, "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    return weights, options


def whole_gpt2(model):
    config, state = model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {
        "embedding.word_embeddings.weight": padded(state["transformer.wte.weight"]),
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    names = {"ln_1": "input_layernorm", "ln_2": "pre_mlp_layernorm", "attn.c_proj": "self_attention.linear_proj"}
    names |= {"mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2", "attn.c_attn": "self_attention.linear_qkv"}
    for layer in range(config.n_layer):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                tensor = state[f"transformer.h.{layer}.{ours}.{kind}"].t()  # Conv1D lies the other way
                if ours == "attn.c_attn":
                    tensor = tensor.unflatten(0, (3, config.n_head, -1)).transpose(0, 1).flatten(0, 2)
                weights[f"decoder.layers.{layer}.{theirs}.{kind}"] = tensor.contiguous()
    weights |= {f"decoder.final_layernorm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    options = {
        "swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
        "bias_gelu_fusion": True, "layernorm_epsilon": 1e-5, "untie_embeddings_and_output_weights": False,
    }  # fmt: skip
    return weights, options


def whole(model):
    weights, options = (whole_llama if model.config.model_type == "llama" else whole_gpt2)(model)
    options |= {
        "num_layers": model.config.num_hidden_layers, "num_attention_heads": model.config.num_attention_heads,
        "vocab_size": model.config.vocab_size, "hidden_size": model.config.hidden_size,
        "max_position_embeddings": model.config.max_position_embeddings,
    }  # fmt: skip
    return weights, argparse.Namespace(**options, params_dtype=torch.float32, attention_backend=Backend.AUTO)


class Backend(enum.Enum):
    """A class of Megatron's, of which the options of a run hold a value."""

    AUTO = 5


@contextmanager
def megatrons():
    """Inside, classes are pickled under Megatron's names, which nobody finds afterwards."""
    index = "megatron.core.dist_checkpointing.strategies.torch"
    parts = index.split(".")
    names = [".".join(parts[: number + 1]) for number in range(len(parts))]
    for name in [*names, "megatron.core.enums"]:
        sys.modules[name] = types.ModuleType(name)
    Backend.__module__, MCoreMetadata.__module__ = "megatron.core.enums", index
    sys.modules["megatron.core.enums"].Backend = Backend
    sys.modules[index].MCoreMetadata = MCoreMetadata
    yield
    for name in [*names, "megatron.core.enums"]:
        del sys.modules[name]


def cut(name, tensor, rank, size, is_gated):
    if "linear_fc1." in name and "layer_norm" not in name and is_gated:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    if "layer_norm" not in name and any(part in name for part in ("linear_qkv", "linear_fc1", "word_", "output_layer")):
        return tensor.chunk(size)[rank]
    return tensor.chunk(size, 1)[rank] if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else tensor


def save_ranks(model, folder, tp_size=2, num_stages=2):
    weights, args = whole(model)
    per_stage = args.num_layers // num_stages
    for stage in range(num_stages):
        own = {}
        for name, tensor in weights.items():
            if name.startswith("decoder.layers."):
                layer = int(name.split(".")[2])
                if layer // per_stage == stage:
                    own[name.replace(f".{layer}.", f".{layer - stage * per_stage}.", 1)] = tensor
            elif name.startswith("embedding") == (stage == 0):
                own[name] = tensor
        if stage == num_stages - 1 and not args.untie_embeddings_and_output_weights:
            own["output_layer.weight"] = weights["embedding.word_embeddings.weight"]  # the last stage's copy
        own["decoder.layers.0.self_attention.core_attention._extra_state"] = io.BytesIO(b"state")
        for rank in range(tp_size):
            parts = {
                name: cut(name, tensor, rank, tp_size, args.swiglu).clone() if torch.is_tensor(tensor) else tensor
                for name, tensor in own.items()
            }
            path = folder / "iter_0000012" / f"mp_rank_{rank:02d}_{stage:03d}"
            path.mkdir(parents=True)
            content = {"args": args, "checkpoint_version": 3.0, "iteration": 12, "model": parts}
            with megatrons():
                torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("12")


@dataclass
class MCoreMetadata(Metadata):
    """Megatron's index, whose class this machine does not have either."""

    mcore_data: dict | None = None


def halves(tensor, num_dims):
    """Offsets and pieces of a tensor that is cut in two along its first `num_dims` dimensions."""
    pieces = [((0,) * tensor.dim(), tensor)]
    for dim in range(num_dims):
        pieces = [
            ((*at[:dim], start, *at[dim + 1 :]), part.narrow(dim, start, length))
            for at, part in pieces
            for start, length in (
                (0, tensor.shape[dim] // 2),
                (tensor.shape[dim] // 2, tensor.shape[dim] - tensor.shape[dim] // 2),
            )
        ]
    return pieces


def layers_of(stacked):
    """Offsets and pieces of `stacked [L, ...]`: two of each layer."""
    for layer, tensor in enumerate(stacked):
        for offsets, part in halves(tensor, 1):
            yield (layer, *offsets), part[None]


def save_distributed(model, folder):
    """As `torch_dist` of four ranks: layers stacked, each tensor in pieces, an optimizer and other states beside."""
    weights, args = whole(model)
    folder.mkdir(parents=True)
    stacked = {name: tensor for name, tensor in weights.items() if ".layers." not in name}
    for name in sorted({name.split(".", 3)[3] for name in weights if ".layers." in name}):
        layers = [weights[f"decoder.layers.{layer}.{name}"] for layer in range(args.num_layers)]
        stacked[f"decoder.layers.{name}"] = torch.stack(layers)
    stacked |= {f"optimizer.state.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in stacked.items()}
    entries, places = {"rng_state/shard_0": BytesStorageMetadata()}, {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for name, tensor in stacked.items():
            chunks = []
            is_stacked = name.startswith("decoder.layers")
            for offsets, part in layers_of(tensor) if is_stacked else halves(tensor, min(tensor.dim(), 2)):
                start = file.tell()
                torch.save((part[0] if is_stacked else part).clone(), file)
                places[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(
                    "__0_0.distcp", start, file.tell() - start
                )
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    places[MetadataIndex("rng_state/shard_0")] = _StorageInfo("__0_0.distcp", 0, 1)
    with megatrons(), (folder / ".metadata").open("wb") as file:
        pickle.dump(MCoreMetadata(entries, storage_data=places, mcore_data={"a": {"b": 1}}), file)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 12}, folder / "common.pt")
