"""Loads a Megatron-LM checkpoint as a model.

    model = load_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model)

If processes share the model, each loads only its part:

    model = build_empty_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model, checkpoint="checkpoints/gpt", tensor_parallel={"tp_size": 2})
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_engine.extensions.megatron.gpt import (
    MegatronGPT,
    MegatronGPTConfig,
    is_llama_like,
    llama_sources,
    read_llama_config,
)
from hybrid_engine.extensions.megatron.rank_files import (
    LAYERS,
    common_name,
    find_iteration,
    find_rank_files,
    has_rank_files,
    is_distributed,
    layer_of,
    load_mapped,
    read_arguments,
    read_distributed,
    with_layer,
)
from hybrid_engine.inference.checkpoint import Joined, Source, StoredRows, compute_buffers, open_checkpoint_of
from hybrid_engine.optim.build import cast_module

CUT_BY_ROWS = (
    *(f"{name}.{part}" for name in ("query_key_value", "dense_h_to_4h") for part in ("weight", "bias")),
    *("word_embeddings.weight", "output_layer.weight"),
)
CUT_BY_COLUMNS = ("self_attention.dense.weight", "dense_4h_to_h.weight")
ROUTER = "gate.wg.weight"
HEAD = "language_model.output_layer.weight"


def build_empty_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint on the meta device, in evaluation mode: a MegatronGPT, or a Llama, Qwen2 or Qwen3.

    Its vocabulary has the size in the checkpoint, which Megatron pads. If the checkpoint has the size without padding
    (`vocab_size`), the model's `generation_config` suppresses the padding ids, which are not tokens.

    Args:
        folder: the checkpoint's folder, or its parent with `latest_checkpointed_iteration.txt` or `latest` in it.
        dtype: of all parameters except routers, which stay fp32.

    Raises:
        ValueError: as `MegatronCheckpoint`.
    """
    checkpoint = MegatronCheckpoint(folder)
    with torch.device("meta"):
        model = _build(checkpoint.config)
        cast_module(model, dtype)
    padded, size = model.config.vocab_size, checkpoint.arguments.get("vocab_size")
    if isinstance(size, int) and 0 < size < padded:
        model.generation_config.suppress_tokens = list(range(size, padded))
    for name, module in model.named_modules():
        if f"{name}.weight".endswith(ROUTER):
            module.float()
    return model.eval()


def load_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a checkpoint on the CPU; arguments as for `build_empty_megatron_gpt`.

    Raises:
        ValueError: as there, and if tensors are missing, unknown or of another shape; it lists them.
    """
    model = build_empty_megatron_gpt(folder, dtype)
    open_checkpoint_of(model, folder).fill(torch.device("cpu"))
    compute_buffers(model, torch.device("cpu"))
    return model


def recognises(folder: Path) -> bool:
    """Whether `folder`, or its latest iteration, has files of Megatron's ranks or is a distributed checkpoint."""
    folder = find_iteration(folder)
    return has_rank_files(folder) or is_distributed(folder)


build_empty = build_empty_megatron_gpt


def find_sources(folder: Path) -> Mapping[str, Source]:
    """The tensors of a checkpoint by their names in the model. ValueError as for `MegatronCheckpoint`."""
    return MegatronCheckpoint(folder).sources


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    return MegatronGPT(config) if isinstance(config, MegatronGPTConfig) else AutoModelForCausalLM.from_config(config)


class MegatronCheckpoint:
    """The model's `config`, and the `sources` of its parameters by their names in the model, which can be read in part.

    Raises:
        ValueError: a folder without checkpoint files, or files that lack required entries.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = find_iteration(Path(folder))
        sources = self._distributed() if is_distributed(self.folder) else self._of_ranks()
        if self.arguments.get("untie_embeddings_and_output_weights") is False:
            sources.pop(HEAD, None)  # the last stage's copy of the embedding
        layers = {layer for layer in map(layer_of, sources) if layer is not None}
        self.num_layers = len(layers)
        wanted = self.arguments.get("num_layers")
        if layers != set(range(wanted or self.num_layers)):
            raise ValueError(
                f"checkpoint={self.folder} holds layers {sorted(layers)} of {wanted or self.num_layers}; copy the "
                "folders of all stages"
            )
        if is_llama_like(self.arguments):
            embedding = "language_model.embedding.word_embeddings.weight"
            if embedding not in sources or not layers:
                raise ValueError(f"checkpoint={self.folder} has no {embedding if layers else 'layers'}")
            self.config: PreTrainedConfig = read_llama_config(self.arguments, sources, self.num_layers, self.folder)
            self.sources = llama_sources(sources, self.config)
        else:
            self.sources = sources
            self.config = self._read_config()

    def _distributed(self) -> dict[str, Source]:
        common, sources = read_distributed(self.folder)
        self.arguments = read_arguments(common, self.folder)
        return sources

    def _of_ranks(self) -> dict[str, Source]:
        contents = [[load_mapped(path) for path in of_stage] for of_stage in find_rank_files(self.folder)]
        first = contents[0][0]
        self.version = float(first.get("checkpoint_version") or 0)
        self.arguments = read_arguments(first, self.folder)
        stages = [[_models(content, self.folder) for content in of_stage] for of_stage in contents]
        shards = _join_stages(stages)
        for rank, shard in enumerate(shards):
            for path in sorted(self.folder.glob(f"layer_*_expert_*_mp_rank_{rank:02d}_model_states.pt")):
                shard.update(_named_tensors(load_mapped(path)))
            if unshared := sorted(shard.keys() ^ shards[0].keys()):
                raise ValueError(f"checkpoint={self.folder}: only one of ranks 0 and {rank} has {unshared[0]}")
        return {name: self._source(name, [shard[name] for shard in shards]) for name in shards[0]}

    def _source(self, name: str, parts: list[torch.Tensor]) -> Source:
        """The whole tensor from the parts of all ranks."""
        dim = _cut_dim(name)
        num_heads = None
        if "query_key_value" in name and self.version < 2:
            num_heads = self.arguments["num_attention_heads"] // len(parts)
        mapped: list[Source] = [Mapped(part, self.version, num_heads) for part in parts]
        if ".dense_h_to_4h." in name and self.arguments.get("swiglu"):  # each rank has its own gate and up
            halves = [part.shape[0] // 2 for part in parts]
            gates = [StoredRows(source, ((0, half),)) for source, half in zip(mapped, halves, strict=True)]
            ups = [StoredRows(source, ((half, 2 * half),)) for source, half in zip(mapped, halves, strict=True)]
            return Joined([*gates, *ups], 0)
        return mapped[0] if dim is None else Joined(mapped, dim)

    def _read_config(self) -> MegatronGPTConfig:
        """The config: sizes from the shapes, the rest from the arguments of the training run."""
        shapes = {name: source.shape for name, source in self.sources.items()}
        embedding, layers = "language_model.embedding.", LAYERS
        for needed in (f"{embedding}word_embeddings.weight", f"{embedding}position_embeddings.weight"):
            if needed not in shapes:
                raise ValueError(f"checkpoint={self.folder} has no {needed}; only GPT with learned positions is read")
        vocab_size, hidden_size = shapes[f"{embedding}word_embeddings.weight"]
        up = next((shape[0] for name, shape in shapes.items() if name.endswith("dense_h_to_4h.weight")), None)
        routers = {name: shape[0] for name, shape in shapes.items() if name.endswith(ROUTER)}
        num_layers = self.num_layers
        return MegatronGPTConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.arguments["num_attention_heads"],
            intermediate_size=up,
            max_position_embeddings=shapes[f"{embedding}position_embeddings.weight"][0],
            hidden_act=_activation(self.arguments),
            layer_norm_eps=self.arguments.get("layernorm_epsilon", 1e-5),
            num_experts=[routers.get(f"{layers}{i}.mlp.deepspeed_moe.{ROUTER}", 0) for i in range(num_layers)],
            num_experts_per_tok=self.arguments.get("topk", 1) if routers else 1,
            is_moe_residual=any(name.endswith("mlp.coefficient.weight") for name in shapes),
            tie_word_embeddings=HEAD not in shapes,
        )


class Mapped:
    """A rank's tensor in a memory-mapped file; with `num_heads`, the rows of its heads are reordered when read."""

    def __init__(self, tensor: torch.Tensor, version: float, num_heads: int | None):
        self.tensor, self.version, self.num_heads = tensor, version, num_heads
        self.shape = tuple(tensor.shape)

    def read(self, dim: int, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """See `Source`; returns a copy."""
        tensor = self.tensor
        if self.num_heads is not None:
            tensor = interleave_heads(tensor, self.version, self.num_heads)
        return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def interleave_heads(tensor: torch.Tensor, version: float, num_heads: int) -> torch.Tensor:
    """Rows of a query-key-value projection in the order [H, 3, D]; older checkpoints use another order.

    Version 0 has [3, H, D], version 1 [H, D, 3].
    """
    if version >= 2:
        return tensor
    if version >= 1:
        return tensor.unflatten(0, (num_heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return tensor.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def _activation(arguments: dict[str, Any]) -> str:
    """The activation's name; fused GELU and OpenAI's GELU are the tanh approximation."""
    is_approximate = arguments.get("bias_gelu_fusion") or arguments.get("openai_gelu")
    return "gelu_new" if is_approximate else "gelu"


def _models(content: Mapping[str, Any], folder: Path) -> list[Any]:
    """The weights in a rank's file: one tree, or one for each virtual stage of the rank."""
    virtual = [content[f"model{number}"] for number in range(len(content)) if f"model{number}" in content]
    models = virtual or [content.get("model", content.get("module"))]
    if not all(isinstance(model, Mapping) for model in models):
        raise ValueError(
            f"checkpoint={folder} has keys {', '.join(sorted(content))}; it needs the weights under model or module, "
            f"and args with num_attention_heads"
        )
    return models


def _join_stages(stages: list[list[list[Any]]]) -> list[dict[str, torch.Tensor]]:
    """The weights of all stages for each tensor-parallel rank; `stages` holds trees by stage, rank and virtual stage.

    Layers are numbered within a stage. The first virtual stages of all pipeline stages come before the second ones.
    """
    shards: list[dict[str, torch.Tensor]] = [{} for _ in stages[0]]
    first_layer = 0
    for virtual in range(len(stages[0][0])):
        for stage in stages:
            num_layers = 0
            for shard, models in zip(shards, stage, strict=True):
                for name, tensor in _named_tensors(models[virtual]):
                    layer = layer_of(name)
                    if layer is not None:
                        num_layers = max(num_layers, layer + 1)
                        name = with_layer(name, first_layer + layer)
                    shard[name] = tensor
            first_layer += num_layers
    return shards


def _named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries, under the names of the third release."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _named_tensors(value, f"{name}.")
        elif isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            name = common_name(name)
            if not name.startswith("word_embeddings_for_head."):  # the last stage's copy of the embedding
                yield name, value


def _cut_dim(name: str) -> int | None:
    """The dimension that ranks split; None if each rank has the whole tensor. Experts are split like an MLP."""
    if name.endswith(CUT_BY_ROWS):
        return 0
    return 1 if name.endswith(CUT_BY_COLUMNS) else None
