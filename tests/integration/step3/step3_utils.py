"""What a code base for DeepSpeed keeps beside its training script: configs, LoRA, averages, files.

The calling style is DeepSpeed-Chat's, the code is not; only the imports say hybrid_engine.
"""

import math
import os

import torch
from tiny_models import PROMPT_WIDTH
from torch import nn
from torch.nn import functional as F

import hybrid_engine as deepspeed
import hybrid_engine.comm as dist
from hybrid_engine.compression.helper import recursive_getattr, recursive_setattr
from hybrid_engine.runtime.zero.partition_parameters import ZeroParamStatus

LORA_SCALING = 1.0


def print_rank_0(message):
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def params_to_fetch(params):
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def train_ds_config(args, stage, generates=False):
    device = "cpu" if args.offload else "none"
    return {
        **batch_sizes(args),
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        **precision(args, trains=True),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": generates,
            "max_out_tokens": PROMPT_WIDTH + args.max_answer_seq_len,
            "inference_tp_size": 1,
            "release_inference_cache": args.release_inference_cache,
            "pin_parameters": not args.unpin_actor_parameters,
            "tp_gather_partition_size": 8,
        },
        "tensorboard": {"enabled": False, "output_path": "step3/ds_tensorboard_logs/", "job_name": "step3_tensorboard"},
    }


def eval_ds_config(args, stage, offload=False):
    return {
        **batch_sizes(args),
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 1e4,
            "offload_param": {"device": "cpu" if offload else "none"},
            "memory_efficient_linear": False,
        },
        **precision(args, trains=False),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def batch_sizes(args):
    micro_batch = args.per_device_training_batch_size
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_batch_size": micro_batch * dist.get_world_size() * args.gradient_accumulation_steps,
    }


def precision(args, trains):
    if args.dtype == "bf16":
        return {"bfloat16": {"enabled": True}}
    if args.dtype == "fp16" and trains:
        window, power = args.loss_scale_window, args.initial_scale_power
        return {"fp16": {"enabled": True, "loss_scale_window": window, "initial_scale_power": power}}
    return {"fp16": {"enabled": True}} if args.dtype == "fp16" else {}


def parameter_groups(model, weight_decay, lora_learning_rate):
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    lora = [param for name, param in trained if "lora_" in name]
    norms = [param for name, param in trained if "norm" in name]
    others = [param for name, param in trained if "lora_" not in name and "norm" not in name]
    groups = [
        {"params": others, "weight_decay": weight_decay},
        {"params": lora, "weight_decay": weight_decay, "lr": lora_learning_rate},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class LinearWithLora(nn.Module):
    """A linear's frozen weight beside a product of two small trained ones."""

    def __init__(self, linear, dim):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        rows, columns = getattr(self.weight, "ds_shape", self.weight.shape)
        self.lora_right_weight = nn.Parameter(torch.empty(columns, dim))
        self.lora_left_weight = nn.Parameter(torch.zeros(dim, rows))
        self.lora_scaling = LORA_SCALING / dim
        self.lora_dropout = nn.Identity()
        self.fuse_lora = False
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.weight.requires_grad = False

    # Neither returns the module nor sets `training`, as the scripts have it.
    def eval(self):
        self.lora_dropout.eval()

    def train(self, mode=True):
        self.lora_dropout.train(mode)

    def fuse_lora_weight(self):
        if not self.fuse_lora:
            self.weight.data += self.lora_scaling * (self.lora_left_weight.t() @ self.lora_right_weight.t())
        self.fuse_lora = True

    def forward(self, hidden):
        output = F.linear(hidden, self.weight, self.bias)
        if self.fuse_lora:
            return output
        return output + self.lora_dropout(hidden) @ self.lora_right_weight @ self.lora_left_weight * self.lora_scaling


def add_lora(model, part_of_name, dim):
    names = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and part_of_name in n]
    for name in names:
        linear = recursive_getattr(model, name)
        layer = LinearWithLora(linear, dim).to(linear.weight.device).to(linear.weight.dtype)
        recursive_setattr(model, name, layer)
    return model


def train_only_lora(model):
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name
    model.enable_input_require_grads()
    return model


def merge_lora(engine):
    """Adds every adapter to its weight, in place; the names begin with `module.`."""
    names = [name for name, module in engine.named_modules() if isinstance(module, LinearWithLora)]
    for name in names:
        layer = recursive_getattr(engine, name)
        is_sharded = hasattr(layer.weight, "ds_id")
        params = [layer.weight, layer.bias, layer.lora_left_weight, layer.lora_right_weight]
        with deepspeed.zero.GatheredParameters(params_to_fetch(params), modifier_rank=0, enabled=is_sharded):
            layer.fuse_lora_weight()
    return engine


def moving_average(engine, engine_ema, beta, zero_stage):
    """Moves the average towards the model; only sharded parameters have to be gathered first."""
    with torch.no_grad():
        for param, param_ema in zip(engine.parameters(), engine_ema.parameters(), strict=True):
            params = params_to_fetch([param, param_ema]) if zero_stage == 3 else []
            # Without a modifier what is written inside would be discarded.
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=len(params) > 0):
                param_ema.data.copy_(torch.lerp(param.data, param_ema.data, beta))


def num_params(engine):
    """Counted once and kept on the module, as the scripts' throughput figures do."""
    if not hasattr(engine.module, "_num_params"):
        params = list(engine.module.parameters())
        engine.module._num_params = sum(p.ds_numel if hasattr(p, "ds_tensor") else p.nelement() for p in params)
    return engine.module._num_params


def model_norm(engine):
    """The sum of all parameters' norms: a number that changes whenever a weight does."""
    total = 0.0
    with torch.no_grad():
        for param in engine.parameters():
            is_apart = hasattr(param, "ds_id") and param.ds_status == ZeroParamStatus.NOT_AVAILABLE
            with deepspeed.zero.GatheredParameters(param, enabled=is_apart):
                total += float(param.float().norm())
    return total


def save_hf_format(engine, folder):
    """A folder for from_pretrained, from what this process has in its state dict."""
    model = engine.module if hasattr(engine, "module") else engine
    os.makedirs(folder, exist_ok=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora" not in name}
    torch.save(state, os.path.join(folder, "pytorch_model.bin"))
    model.config.to_json_file(os.path.join(folder, "config.json"))


def save_zero_three_model(engine, folder):
    """The weights' file again, from parameters that are gathered one at a time."""
    model = engine.module if hasattr(engine, "module") else engine
    rank = torch.distributed.get_rank()
    state = {}
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters(params_to_fetch([param])):
                whole = param.data.cpu()
        else:
            whole = param.cpu()
        if rank == 0 and "lora" not in name:
            state[name] = whole
    if rank == 0:
        torch.save(state, os.path.join(folder, "pytorch_model.bin"))
