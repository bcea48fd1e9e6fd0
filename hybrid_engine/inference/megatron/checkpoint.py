"""Reads a checkpoint of Megatron-LM's GPT, or DeepSpeed's of one with experts, under the names of `MegatronGPT`.

The folder holds one file per tensor-parallel rank, `mp_rank_XX/model_optim_rng.pt` (Megatron-LM) or
`mp_rank_XX_model_states.pt` (DeepSpeed, beside files `layer_L_expert_X_mp_rank_XX_model_states.pt`). Files are
mapped, not read: a tensor is put together from its parts when it is asked for. Names and dimensions are those
of Megatron-LM's third release, to which older ones are translated.

H heads, D head dimension, E hidden size.
Source: https://github.com/NVIDIA/Megatron-LM, megatron/checkpointing.py (`fix_query_key_value_ordering`).
"""

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.inference.megatron.gpt import MegatronGPTConfig
from hybrid_engine.inference.stored import Joined, Source

RANK_FOLDER = re.compile(r"mp_rank_(\d+)$")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
CUT_BY_ROWS = (
    *(f"{name}.{part}" for name in ("query_key_value", "dense_h_to_4h") for part in ("weight", "bias")),
    *("word_embeddings.weight", "output_layer.weight"),
)
CUT_BY_COLUMNS = ("self_attention.dense.weight", "dense_4h_to_h.weight")
ROUTER = "gate.wg.weight"


class MegatronCheckpoint:
    """`config` of the model, and `sources` of its parameters by their names in `MegatronGPT`, whole or in part.

    Raises:
        ValueError: a folder without such files or with pipeline-parallel ones, or files that lack what is needed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = find_iteration(Path(folder))
        contents = [_load(path) for path in _rank_files(self.folder)]
        self.version = float(contents[0].get("checkpoint_version") or 0)
        self.arguments = _arguments(contents[0], self.folder)
        self.num_heads: int = self.arguments["num_attention_heads"]
        self.shards = [dict(_named_tensors(content.get("model", content.get("module")))) for content in contents]
        for rank, shard in enumerate(self.shards):
            for path in sorted(self.folder.glob(f"layer_*_expert_*_mp_rank_{rank:02d}_model_states.pt")):
                shard.update(_named_tensors(_load(path)))
            if unshared := sorted(shard.keys() ^ self.shards[0].keys()):
                raise ValueError(f"checkpoint={self.folder}: only one of ranks 0 and {rank} has {unshared[0]}")
        self.sources = {name: self._source(name) for name in self.shards[0]}
        self.config = self._read_config()

    def _source(self, name: str) -> Source:
        parts, dim = [shard[name] for shard in self.shards], _cut_dim(name)
        num_heads = self.num_heads // len(parts) if "query_key_value" in name and self.version < 2 else None
        mapped = [Mapped(part, self.version, num_heads) for part in parts]
        return mapped[0] if dim is None else Joined(mapped, dim)

    def _read_config(self) -> MegatronGPTConfig:
        """Sizes from the shapes, the rest from the arguments that the training was started with."""
        shapes = {name: source.shape for name, source in self.sources.items()}
        embedding, layers = "language_model.embedding.", "language_model.encoder.layers."
        for needed in (f"{embedding}word_embeddings.weight", f"{embedding}position_embeddings.weight"):
            if needed not in shapes:
                raise ValueError(f"checkpoint={self.folder} has no {needed}; only GPT with learned positions is read")
        vocab_size, hidden_size = shapes[f"{embedding}word_embeddings.weight"]
        indices = [int(name.removeprefix(layers).split(".")[0]) for name in shapes if name.startswith(layers)]
        up = next((shape[0] for name, shape in shapes.items() if name.endswith("dense_h_to_4h.weight")), None)
        routers = {name: shape[0] for name, shape in shapes.items() if name.endswith(ROUTER)}
        num_layers = max(indices, default=-1) + 1
        return MegatronGPTConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=up,
            max_position_embeddings=shapes[f"{embedding}position_embeddings.weight"][0],
            hidden_act=_activation(self.arguments),
            layer_norm_eps=self.arguments.get("layernorm_epsilon", 1e-5),
            num_experts=[routers.get(f"{layers}{i}.mlp.deepspeed_moe.{ROUTER}", 0) for i in range(num_layers)],
            num_experts_per_tok=self.arguments.get("topk", 1) if routers else 1,
            is_moe_residual=any(name.endswith("mlp.coefficient.weight") for name in shapes),
            tie_word_embeddings="language_model.output_layer.weight" not in shapes,
        )


class Mapped:
    """A rank's tensor in a mapped file; `num_heads` where the rows of its heads must be put in order."""

    def __init__(self, tensor: torch.Tensor, version: float, num_heads: int | None):
        self.tensor, self.version, self.num_heads = tensor, version, num_heads
        self.shape = tuple(tensor.shape)

    def read(self, dim: int, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """See `Source`; a tensor of its own."""
        tensor = self.tensor
        if self.num_heads is not None:
            tensor = interleave_heads(tensor, self.version, self.num_heads)
        return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether `folder`, or its latest iteration, has files of Megatron-LM's ranks."""
    folder = find_iteration(folder)
    return folder.is_dir() and any(
        RANK_FOLDER.match(path.name) or RANK_FILE.match(path.name) for path in folder.iterdir()
    )


def interleave_heads(tensor: torch.Tensor, version: float, num_heads: int) -> torch.Tensor:
    """Rows of a query-key-value projection in the order [H, 3, D]; older checkpoints have another.

    Version 0 has [3, H, D], version 1 [H, D, 3].
    """
    if version >= 2:
        return tensor
    if version >= 1:
        return tensor.unflatten(0, (num_heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return tensor.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def find_iteration(folder: Path) -> Path:
    """The folder of the latest iteration where `folder` holds several, else `folder`."""
    for marker, form in (("latest_checkpointed_iteration.txt", "iter_{:0>7}"), ("latest", "{}")):
        if (folder / marker).is_file():
            latest = (folder / marker).read_text().strip()
            return folder / (latest if latest == "release" else form.format(latest))
    return folder


def _rank_files(folder: Path) -> list[Path]:
    """One file for each tensor-parallel rank, in their order."""
    files: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.match(r"mp_rank_\d+_\d+", path.name):
            raise ValueError(f"checkpoint={folder} is pipeline-parallel ({path.name}); merge its stages first")
        if match := RANK_FILE.match(path.name):
            files[int(match[1])] = path
        elif match := RANK_FOLDER.match(path.name):
            files |= {int(match[1]): path / name for name in MODEL_FILES if (path / name).is_file()}
    if sorted(files) != list(range(len(files))) or not files:
        found = f"files of ranks {sorted(files)}" if files else "no mp_rank_XX files"
        raise ValueError(f"checkpoint={folder} holds {found}; expected those of ranks 0 to the last")
    return [files[rank] for rank in sorted(files)]


def _load(path: Path) -> dict[str, Any]:
    # Megatron keeps its command line in the file. Nothing else than tensors and numbers is let in.
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    # Garbled bytes make torch raise nearly anything: UnpicklingError, KeyError, UnicodeDecodeError, ...
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint: {path} is not a file of tensors from torch.save: {reason}") from error


def _arguments(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    arguments = content.get("args")
    values = dict(arguments) if isinstance(arguments, Mapping) else vars(arguments or argparse.Namespace())
    if "num_attention_heads" not in values or not isinstance(content.get("model", content.get("module")), Mapping):
        raise ValueError(
            f"checkpoint={folder} has keys {', '.join(sorted(content))}; it needs the weights under model or module, "
            f"and args with num_attention_heads"
        )
    return values


def _activation(arguments: dict[str, Any]) -> str:
    """Fused GELU and OpenAI's are the tanh approximation."""
    is_approximate = arguments.get("bias_gelu_fusion") or arguments.get("openai_gelu")
    return "gelu_new" if is_approximate else "gelu"


def _named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of dictionaries in dictionaries, under the names of `MegatronGPT`."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _named_tensors(value, f"{name}.")
        elif isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            name = name.removeprefix("module.").replace("language_model.transformer.", "language_model.encoder.")
            if not name.startswith("word_embeddings_for_head."):  # the last stage's copy of the embedding
                yield name.replace(".attention.", ".self_attention."), value


def _cut_dim(name: str) -> int | None:
    """Which dimension ranks share; None where each has all. Experts are cut like an MLP."""
    if name.endswith(CUT_BY_ROWS):
        return 0
    return 1 if name.endswith(CUT_BY_COLUMNS) else None
