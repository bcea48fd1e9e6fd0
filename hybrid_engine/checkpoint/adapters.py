"""Writes the adapters of a trained model by themselves, for peft's `PeftModel.from_pretrained`."""

import copy
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from hybrid_engine.checkpoint.export import gather_weights, unshared
from hybrid_engine.distributed.processes import on_rank_zero

WEIGHTS = "adapter_model.safetensors"


def save_adapter(module: nn.Module, folder: Path) -> bool:
    """Saves the active adapter of a `PeftModel`, in the precision it computes in; collective.

    The files are those of peft's own `save_pretrained`; `module` may be sharded, with nothing gathered.

    Returns:
        Whether there was an adapter to save; without one nothing is written.
    """
    if not isinstance(module, PeftModel):
        return False
    adapter = module.active_adapter
    left_out = {name for name, _ in module.named_parameters(remove_duplicate=False) if adapter not in name.split(".")}
    weights = gather_weights(module, left_out)
    on_rank_zero(lambda: _write(module, adapter, weights, folder))
    return True


def _write(module: PeftModel, adapter: str, weights: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(module, weights, adapter, save_embedding_layers=False)
    state = unshared({name: tensor.contiguous() for name, tensor in state.items()})
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    config = copy.deepcopy(module.peft_config[adapter])
    config.inference_mode = True
    config.save_pretrained(str(folder))
