"""The DeepSpeed-format config: what is read, what is accepted without effect and what is refused."""

import copy
import json
import logging

import pytest
import torch

from hybrid_engine.config import EngineConfig, HybridEngineConfig, load_config

BATCH = {"train_batch_size": 8}


def test_an_almost_empty_config_has_deepspeeds_defaults():
    config = load_config(BATCH, world_size=1)
    assert config == EngineConfig(
        train_batch_size=8, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1, gradient_clipping=0.0
    )
    assert config.zero_optimization.stage == 0
    assert config.optimizer is None and config.scheduler is None
    assert (config.fp16.loss_scale, config.fp16.initial_scale_power, config.fp16.loss_scale_window) == (0, 16, 1000)
    assert (config.fp16.hysteresis, config.fp16.consecutive_hysteresis, config.fp16.min_loss_scale) == (2, False, 1)
    assert config.hybrid_engine == HybridEngineConfig(
        enabled=False,
        max_out_tokens=512,
        inference_tp_size=1,
        release_inference_cache=False,
        pin_parameters=True,
        tp_gather_partition_size=8,
        max_running=0,
        kv_block_size=0,
        max_kv_blocks=0,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, (24, 3, 4)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, (24, 3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 4}, (24, 3, 4)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, (24, 3, 4)),
        ({"train_batch_size": 24}, (24, 12, 1)),
        ({"train_micro_batch_size_per_gpu": 12}, (24, 12, 1)),
    ],
)
def test_missing_batch_sizes_follow_from_those_given(given, expected):
    config = load_config(given, world_size=2)
    sizes = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert sizes == expected


@pytest.mark.parametrize(
    ("given", "arithmetic", "advice"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
            "world_size = 3 * 2 * 2 = 12",
            "set train_batch_size to 12",
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "= 3 * 2 = 6, but 8 / 6 leaves 2", "to 6 or 12"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 5}, "= 5 * 2 = 10, but 8 / 10 leaves 8", "to 10"),
        ({"train_batch_size": 7}, "= 1 * 2 = 2, but 7 / 2 leaves 1", "to 6 or 8"),
        ({"gradient_accumulation_steps": 2}, "both missing", "give one of them"),
    ],
)
def test_batch_sizes_that_do_not_fit_show_the_arithmetic(given, arithmetic, advice):
    with pytest.raises(ValueError) as error:
        load_config(given, world_size=2)
    numbers, remedy = str(error.value).split(";")
    assert arithmetic in numbers and advice in remedy


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, torch.bfloat16),
        ({"fp16": {"enabled": True, "loss_scale_window": 100}}, torch.float16),
    ],
)
def test_the_precision_blocks_choose_the_dtype(blocks, dtype):
    assert load_config(BATCH | blocks, world_size=1).dtype == dtype


def test_a_file_gives_the_same_config_as_the_dict_and_the_dict_is_not_changed(tmp_path):
    content = BATCH | {
        "bfloat16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
    }
    before = copy.deepcopy(content)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    config = load_config(path, world_size=1)
    assert config == load_config(str(path), world_size=1) == load_config(content, world_size=1)
    assert content == before
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, "AdamW"),
        ("Adam", {}, "AdamW"),
        ("adam", {"adam_w_mode": True}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
    ],
)
def test_adam_decouples_weight_decay_unless_adam_w_mode_is_off_as_in_deepspeed(kind, params, expected):
    config = load_config(BATCH | {"optimizer": {"type": kind, "params": params}}, world_size=1)
    assert config.optimizer.type == expected
    getattr(torch.optim, config.optimizer.type)([torch.nn.Parameter(torch.zeros(1))], **config.optimizer.params)


def test_the_config_that_deepspeed_chat_writes_is_accepted_with_one_line_for_what_has_no_effect(caplog):
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_hpz_partition_size": 1,
    }
    chat = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": zero,
        "fp16": {"enabled": True, "loss_scale_window": 100},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512, "pin_parameters": True},
        "tensorboard": {"enabled": False, "output_path": "out/ds_tensorboard_logs/", "job_name": "step3"},
    }
    with caplog.at_level(logging.INFO, logger="hybrid_engine"):
        config = load_config(chat, world_size=4)
    assert config.gradient_accumulation_steps == 2
    assert len(caplog.records) == 1
    for name in ("zero_optimization.overlap_comm", "zero_optimization.stage3_max_live_parameters"):
        assert name in caplog.text
    for name in ("offload_param", "tensorboard", "wall_clock_breakdown", "max_out_tokens"):
        assert name not in caplog.text


@pytest.mark.parametrize(
    "off",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"flops_profiler": {"profile_step": 1}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"data_types": {"grad_accum_dtype": None}},
        {"gradient_predivide_factor": 1},
        {"communication_data_type": None},
        {"zero_optimization": {"offload_optimizer": None, "zero_quantized_gradients": False}},
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False}},
        {"zero_optimization": None},
    ],
)
def test_a_feature_that_is_not_built_may_be_named_while_it_is_off(off):
    assert load_config(BATCH | off, world_size=1) == load_config(BATCH, world_size=1)


@pytest.mark.parametrize(
    ("on", "path", "remedy"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer",
            'offload_optimizer.device to "none"',
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights", "false"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8", "set it to 1"),
        ({"tensorboard": {"enabled": True}}, "tensorboard", "tensorboard.enabled to false"),
        ({"wandb": {"enabled": True}}, "wandb", "wandb.enabled to false"),
        ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing", "remove"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training", "remove"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types", "grad_accum_dtype to null"),
        ({"prescale_gradients": True}, "prescale_gradients=true", "set it to false"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast", "set it to false"),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "hybrid_engine.inference_tp_size=2", "set it to 1"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam'", "use Adam or AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "params.bias_correction", "to true"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type='OneCycle'", "WarmupCosineLR"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal", "set it to false"),
    ],
)
def test_a_feature_that_is_not_built_is_refused_while_it_is_on(on, path, remedy):
    with pytest.raises(ValueError) as error:
        load_config(BATCH | on, world_size=1)
    text = str(error.value)
    assert path in text and "known to DeepSpeed, not built yet" in text and remedy in text.split(";")[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_batch_sise": 8}, "train_batch_sise is not a known option; did you mean train_batch_size?"),
        ({"FP16": {"enabled": True}}, "FP16 is not a known option; did you mean fp16?"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge .* mean zero_optimization.stage?"),
        ({"zero_optimization": {"overlap_com": 1}}, "zero_optimization.overlap_com .* zero_optimization.overlap_comm?"),
        ({"hybrid_engine": {"max_out_token": 9}}, "hybrid_engine.max_out_token .* hybrid_engine.max_out_tokens?"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_deca": 0}}}, "did you mean optimizer.params.weight_decay?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}, "scheduler.params.total_num_steps is "),
        ({"optimizer": {"type": "AdmW"}}, "optimizer.type='AdmW' is not known; did you mean AdamW?"),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "did you mean WarmupCosineLR?"),
        ({"qqqqqq": 1}, "qqqqqq is not a known option; the options read in the config are"),
    ],
)
def test_a_misspelt_option_is_named_in_full_with_its_nearest_neighbour(wrong, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_config(BATCH | wrong, world_size=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_batch_size": "8"}, "train_batch_size='8' must be an integer .*without quotes"),
        ({"train_batch_size": True}, "train_batch_size=True must be an integer"),
        ({"train_batch_size": 0}, "train_batch_size=0 must be an integer of at least 1"),
        ({"train_batch_size": 8.0}, "train_batch_size=8.0 must be an integer"),
        ({"train_batch_size": "auto"}, 'train_batch_size="auto" is filled in by the Trainer'),
        ({"bf16": {"enabled": "auto"}}, 'bf16.enabled="auto"'),
        ({"bf16": {"enabled": 1}}, "bf16.enabled=1 must be true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "exclude each other"),
        ({"bf16": {}, "bfloat16": {}}, "two names of one block"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 must be a finite number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping=nan must be a finite number"),
        ({"gradient_clipping": True}, "gradient_clipping=True must be a finite number"),
        ({"steps_per_print": -1}, "steps_per_print=-1 must"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 must be an integer from 0 to 3"),
        ({"zero_optimization": True}, "zero_optimization=True must be a block of options"),
        ({"fp16": {"initial_scale_power": 127}}, "fp16.initial_scale_power=127 must be an integer from 0 to 126"),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale=0 must be above 0"),
        ({"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens=0 must be an integer of at least 1"),
        ({"optimizer": {"params": {}}}, "optimizer.type=None must be one of Adam, AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr='1e-3' must be a finite"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.params.betas=0.9 must be two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}, r"betas\[1\]=1 must be below 1"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing; WarmupDecayLR needs"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "warmup_type='cubic' must be"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_the_value_and_the_rule(wrong, message):
    with pytest.raises(ValueError, match=message):
        load_config(BATCH | wrong, world_size=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8,}', "ds.json' is not valid JSON: .*line 1 column 24"),
        ("[1]", "ds.json' must hold a JSON object, not list"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "enabled is given twice .* True and False"),
        (None, "ds.json' cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path, world_size=1)


def test_a_config_that_is_neither_dict_nor_path_is_refused():
    with pytest.raises(ValueError, match=r"config=8 must be a dict or the path of a JSON file"):
        load_config(8, world_size=1)
