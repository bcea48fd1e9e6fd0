"""A Megatron-LM checkpoint as a model.

    model = load_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model)

Where processes share the model, none needs to load the whole:

    model = build_empty_megatron_gpt("checkpoints/gpt", torch.bfloat16)
    engine = init_inference(model, checkpoint="checkpoints/gpt", tensor_parallel={"tp_size": 2})
"""

import os

import torch

from hybrid_engine.inference.checkpoint import open_checkpoint_of
from hybrid_engine.inference.megatron.checkpoint import ROUTER, MegatronCheckpoint
from hybrid_engine.inference.megatron.gpt import MegatronGPT


def build_empty_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> MegatronGPT:
    """The model of a checkpoint on the meta device, in evaluation mode.

    Args:
        folder: the checkpoint's, or the one above with `latest_checkpointed_iteration.txt` or `latest` in it.
        dtype: of the parameters but routers, which stay fp32.

    Raises:
        ValueError: as `MegatronCheckpoint`.
    """
    with torch.device("meta"):
        model = MegatronGPT(MegatronCheckpoint(folder).config).to(dtype)
    for name, module in model.named_modules():
        if f"{name}.weight".endswith(ROUTER):
            module.float()
    return model.eval()


def load_megatron_gpt(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> MegatronGPT:
    """The model of a checkpoint on the CPU; arguments as `build_empty_megatron_gpt`.

    Raises:
        ValueError: also where tensors are missing, unknown or of another shape; it lists them.
    """
    model = build_empty_megatron_gpt(folder, dtype)
    open_checkpoint_of(model, folder).fill(torch.device("cpu"))
    return model
