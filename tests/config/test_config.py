"""The DeepSpeed-format config: what is read, what is accepted without effect and what is refused."""

import base64
import copy
import json
import logging
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments
from transformers.integrations import deepspeed as integration

from hybrid_engine.cli import config_page
from hybrid_engine.config import EngineConfig, HybridEngineConfig, load_config
from hybrid_engine.config.keys import CALLED_ELSEWHERE
from hybrid_engine.config.reading import without_comments
from hybrid_engine.optim.lr_schedules import build_scheduler
from tests.support.paths import DATA

pytestmark = pytest.mark.quick

BATCH = {"train_batch_size": 8}


def test_an_almost_empty_config_has_deepspeeds_defaults():
    config = load_config(BATCH, world_size=1)
    assert config == EngineConfig(
        train_batch_size=8, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1, gradient_clipping=1.0
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
        prefix_cache=True,
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
        {"amp": {"enabled": "auto", "opt_level": "auto"}},
        {"zero_optimization": {"zero_quantized_weights": "auto"}},
        {
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": False, "quantizer_kernel": True},
                    "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["attention"]}},
                }
            }
        },
        {"flops_profiler": {"profile_step": 1}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"data_types": {"grad_accum_dtype": None, "param_dtype": None}},
        {"gradient_predivide_factor": 1},
        {"communication_data_type": None},
        {"zero_optimization": {"offload_optimizer": None, "zero_quantized_gradients": False}},
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False}},
        {"zero_optimization": None},
        {"zero_optimization": {"load_from_fp32_weights": False}},
        {"comms_logger": {"enabled": False, "verbose": True}},
    ],
)
def test_a_feature_may_be_named_while_it_is_off(off, caplog):
    assert load_config(BATCH | off, world_size=1) == load_config(BATCH, world_size=1) and not caplog.records


@pytest.mark.parametrize(
    ("on", "path", "remedy"),
    [
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights", "false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio",
            "1.0",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device", 'to "cpu"'),
        ({"trackio": {"enabled": True}}, "trackio", "trackio.enabled to false"),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compression_training", "remove"),
        (
            {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training",
            "remove",
        ),
        ({"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype", "to null"),
        (
            {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}},
            "optimizer.params.fp32_optimizer_states",
            "true",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam'", "use Adam, AdamW, Lamb, Lion"),
        ({"optimizer": {"type": "onebitlamb"}}, "optimizer.type='onebitlamb'", "use Adam, AdamW, Lamb, Lion"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "params.amsgrad", "to false"),
    ],
)
def test_a_feature_that_is_not_supported_is_refused_while_it_is_on(on, path, remedy):
    with pytest.raises(ValueError) as error:
        load_config(BATCH | on, world_size=1)
    text = str(error.value)
    assert path in text and "is not supported" in text and remedy in text.split(";")[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_batch_sise": 8}, "train_batch_sise is not a known option; did you mean train_batch_size?"),
        ({"train_batch_sizes": 8}, "train_batch_sizes is not a known option; did you mean train_batch_size?"),
        ({"optimzer": {"type": "Adam"}}, "optimzer is not a known option; did you mean optimizer?"),
        ({"lr_scheduler": {"type": "WarmupLR"}}, "lr_scheduler is not a known option; did you mean scheduler?"),
        ({"bp16": {"enabled": True}}, "bp16 is not a known option; did you mean bf16?"),
        ({"FP16": {"enabled": True}}, "FP16 is not a known option; did you mean fp16?"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge .* mean zero_optimization.stage?"),
        ({"zero_optimization": {"overlap_com": 1}}, "zero_optimization.overlap_com .* zero_optimization.overlap_comm?"),
        ({"hybrid_engine": {"max_out_token": 9}}, "hybrid_engine.max_out_token .* hybrid_engine.max_out_tokens?"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_deca": 0}}}, "did you mean optimizer.params.weight_decay?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}}, "scheduler.params.total_num_steps is "),
        ({"optimizer": {"type": "AdmW"}}, "optimizer.type='AdmW' is not known; did you mean AdamW?"),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "did you mean WarmupCosineLR?"),
        ({"zero_optimization": {"qqqqqq": 1}}, "zero_optimization.qqqqqq is not a known option; the options read in"),
    ],
)
def test_a_misspelt_option_is_named_in_full_with_its_nearest_neighbour(wrong, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        load_config(BATCH | wrong, world_size=1)


def test_an_unknown_key_that_resembles_none_is_reported_at_the_top_level_where_deepspeed_reads_past_it(caplog):
    with caplog.at_level(logging.INFO, logger="hybrid_engine"):
        config = load_config(BATCH | {"qqqqqq": {"a": 1}}, world_size=1)
    assert config == load_config(BATCH, world_size=1)
    assert "without effect in this engine: qqqqqq (unknown to DeepSpeed too)" in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "communication_buffer_size",
        "deepspeed",
        "dtype",
        "eval_batch_size",
        "gradient_checkpointing",
        "monitor",
        "runtime",
    ],
)
def test_an_unknown_key_that_has_a_little_in_common_with_a_known_one_is_no_misspelling(name, caplog):
    assert load_config(BATCH | {name: 1}, world_size=1) == load_config(BATCH, world_size=1)
    assert f"without effect in this engine: {name} (unknown to DeepSpeed too)" in caplog.text


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("learning_rate", "optimizer.params.lr"),
        ("LR", "optimizer.params.lr"),
        ("weight-decay", "optimizer.params.weight_decay"),
        ("batch_size", "train_batch_size"),
        ("max_grad_norm", "gradient_clipping"),
        ("warmup_steps", "scheduler.params.warmup_num_steps"),
        ("mixed_precision", "fp16.enabled or bf16.enabled"),
        ("zero_stage", "zero_optimization.stage"),
    ],
)
def test_what_other_programs_call_an_option_is_an_error_that_names_its_place(name, place):
    with pytest.raises(ValueError, match=f"{name} is not a known option; set {place}.* instead, or remove it"):
        load_config(BATCH | {name: 1}, world_size=1)


def test_every_place_that_such_an_error_names_is_in_the_list_of_options():
    sections = dict(re.findall(r"^## `?([^`\n]*)`?\n(.*?)(?=^## |\Z)", config_page.render(), re.DOTALL | re.MULTILINE))
    for place in CALLED_ELSEWHERE.values():
        path, _, name = re.match(r"[\w.]+", place)[0].rpartition(".")
        assert f"| `{name}` |" in sections[path or "Top level"], place


def test_frozen_weights_that_were_to_be_quantised_keep_their_dtype_and_the_log_says_so(caplog):
    zero = {"stage": 3, "overlap_comm": True, "zero_quantized_nontrainable_weights": True}
    config = load_config(BATCH | {"zero_optimization": zero}, world_size=1)
    assert config == load_config(BATCH | {"zero_optimization": {"stage": 3}}, world_size=1)
    line = "engine: zero_optimization.zero_quantized_nontrainable_weights (frozen weights keep their dtype), zero_opt"
    assert line in caplog.text


def test_a_config_that_is_read_again_is_not_warned_of_again_and_another_one_is(caplog):
    for _ in range(3):
        load_config(BATCH | {"my_note": 1}, world_size=1)
    load_config(BATCH | {"my_other_note": 1}, world_size=1)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "name",
    ["contiguous_gradients", "cpu_offload", "offload_optimizer", "stage3_param_persistence_threshold", "zenflow"],
)
def test_an_option_of_zero_at_the_top_level_is_named_with_where_it_belongs(name, caplog):
    assert load_config(BATCH | {name: {"device": "cpu"}}, world_size=1) == load_config(BATCH, world_size=1)
    assert f"{name} (belongs in zero_optimization; DeepSpeed, too, ignores it at the top level)" in caplog.text


def test_comments_are_read_past_everywhere_without_a_word(caplog):
    comments = {"_comment": "ours", "//": 1, "#stage": 2, "comment": "theirs"}
    with caplog.at_level(logging.INFO, logger="hybrid_engine"):
        config = load_config(BATCH | comments | {"zero_optimization": {"stage": 1, **comments}}, world_size=1)
    assert config == load_config(BATCH | {"zero_optimization": {"stage": 1}}, world_size=1) and not caplog.records


TRAINING_ARGUMENTS = SimpleNamespace(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_grad_norm=1.0,
    learning_rate=1e-4,
    adam_beta1=0.9,
    adam_beta2=0.99,
    adam_epsilon=1e-8,
    weight_decay=0.0,
    warmup_steps=5,
    max_steps=100,
    fp16=False,
    fp16_full_eval=False,
    bf16=True,
    bf16_full_eval=False,
)
REAL_FILES = json.loads((DATA / "real_ds_configs.json").read_text())


@pytest.mark.parametrize("name", REAL_FILES)
def test_the_files_that_people_have_load(name):
    entry = REAL_FILES[name]
    config = load_config(entry["config"], world_size=8, arguments=TRAINING_ARGUMENTS)
    assert (config.train_batch_size, config.zero_optimization.stage, str(config.dtype)) == tuple(entry["expected"])


def test_the_config_answers_like_the_dict_that_deepspeeds_engines_keep():
    given = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "overlap_comm": True}}
    config = load_config(given, world_size=1)
    assert config["zero_optimization"]["overlap_comm"] is True and config.get("zero_optimization", {}).get("stage") == 3
    assert "train_batch_size" in config and "fp16" not in config and config.get("fp16", {}) == {}
    with pytest.raises(KeyError):
        config["fp16"]


def test_infinitely_many_steps_per_print_print_nothing():
    assert load_config(BATCH | {"steps_per_print": float("inf")}, world_size=1).steps_per_print == 0


def test_numbers_of_steps_may_be_written_as_1e5_as_many_files_do(tmp_path):
    path = tmp_path / "ds.json"
    schedule = '{"type": "WarmupDecayLR", "params": {"total_num_steps": 1e5, "warmup_num_steps": 2e2}}'
    path.write_text(f'{{"train_batch_size": 8, "steps_per_print": 1e5, "scheduler": {schedule}}}')
    config = load_config(path, world_size=1)
    assert config.steps_per_print == 100_000 and isinstance(config.steps_per_print, int)
    assert config.scheduler.params == {"total_num_steps": 100_000, "warmup_num_steps": 200}
    assert isinstance(config.scheduler.params["warmup_num_steps"], int)


def test_every_integer_may_be_written_as_a_whole_float_and_is_kept_as_an_integer():
    fp16 = {"loss_scale_window": 1e3, "initial_scale_power": 16.0, "hysteresis": 2.0}
    zero = {"stage": 3.0, "zero_hpz_partition_size": 8.0}
    others = {"seed": 3.0, "hybrid_engine": {"max_out_tokens": 1e3}, "flops_profiler": {"profile_step": 2.0}}
    given = {"train_batch_size": 16.0, "fp16": fp16, "zero_optimization": zero, **others}
    config = load_config(given, world_size=8)
    blocks = (config, config.fp16, config.zero_optimization, config.hybrid_engine, config.flops_profiler)
    values = [getattr(block, entry.name) for block in blocks for entry in fields(block) if entry.type is int]
    assert (config.train_batch_size, config.seed, config.zero_optimization.shard_size) == (16, 3, 8)
    assert (config.fp16.loss_scale_window, config.hybrid_engine.max_out_tokens) == (1000, 1000)
    assert {type(value) for value in [*values, config.seed]} == {int}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"allgather_size": 500_000_000}, "allgather_size"),
        ({"disable_python_gc": True}, "disable_python_gc"),
        ({"comms_logger": {"enabled": True, "verbose": False}}, "comms_logger"),
        ({"zero_optimization": {"grad_hooks": True}}, "zero_optimization.grad_hooks"),
        ({"zero_optimization": {"load_from_fp32_weights": True}}, "zero_optimization.load_from_fp32_weights"),
        ({"bf16": {"auto_cast": True}}, "bf16.auto_cast"),
        ({"bf16": {"loss_scale": 128}}, "bf16.loss_scale"),
        ({"bf16": {"loss_scale_window": 250}}, "bf16.loss_scale_window"),
        ({"bf16": {"initial_scale_power": 16}}, "bf16.initial_scale_power"),
        ({"bf16": {"hysteresis": 2}}, "bf16.hysteresis"),
        ({"bf16": {"min_loss_scale": 1}}, "bf16.min_loss_scale"),
    ],
)
def test_what_has_no_meaning_here_is_accepted_and_named(given, name, caplog):
    assert load_config(BATCH | given, world_size=1) == load_config(BATCH, world_size=1)
    assert f"without effect in this engine: {name}" in caplog.text


def test_adam_w_mode_beside_params_changes_nothing_as_in_deepspeed_which_reads_it_inside(caplog):
    optimizer = {"type": "Adam", "adam_w_mode": True, "params": {"lr": 0.1}}
    config = load_config(BATCH | {"optimizer": optimizer}, world_size=1)
    assert "without effect in this engine: optimizer.adam_w_mode" in caplog.text
    optimizer["params"] = {"lr": 0.1, "adam_w_mode": False}
    assert (config.optimizer.type, load_config(BATCH | {"optimizer": optimizer}, world_size=1).optimizer.type) == (
        "AdamW",
        "Adam",
    )


@pytest.mark.parametrize(("old", "stage"), [(False, 0), (True, 1)])
def test_zero_optimization_may_be_true_or_false_as_it_was_before_there_were_stages(old, stage):
    config = load_config(BATCH | {"zero_optimization": old}, world_size=1)
    assert config == load_config(BATCH | {"zero_optimization": {"stage": stage}}, world_size=1)


@pytest.mark.parametrize("name", ["seq_parallel_comm_data_type", "seq_parallel_communication_data_type"])
def test_the_dtype_of_sequence_parallelism_means_nothing_without_it(name, caplog):
    assert load_config(BATCH | {name: "bf16"}, world_size=1) == load_config(BATCH, world_size=1)
    assert f"without effect in this engine: {name}" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train_batch_size": "8"}, "train_batch_size='8' must be an integer .*without quotes"),
        ({"train_batch_size": True}, "train_batch_size=True must be an integer"),
        ({"train_batch_size": 0}, "train_batch_size=0 must be an integer of at least 1"),
        ({"train_batch_size": 8.5}, "train_batch_size=8.5 must be an integer"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: True is not one of 0, 1, 2, 3"),
        ({"seed": False}, "seed=False must be an integer"),
        ({"bf16": {"enabled": "auto"}}, 'bf16.enabled="auto"'),
        ({"bf16": {"enabled": 1}}, "bf16.enabled=1 must be true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "exclude each other"),
        ({"bf16": {}, "bfloat16": {}}, "two names of one option"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 must be a finite number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping=nan must be a finite number"),
        ({"gradient_clipping": True}, "gradient_clipping=True must be a finite number"),
        ({"gradient_clipping": 10**400}, "gradient_clipping=10* must be a finite number"),
        ({"optimizer": [1]}, r"optimizer=\[1\] must be a block of options"),
        ({"optimizer": {"type": "Adam", "params": 3}}, "optimizer.params=3 must be a block of options"),
        ({"steps_per_print": -1}, "steps_per_print=-1 must"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is not one of 0, 1, 2, 3"),
        ({"zero_optimization": 2}, "zero_optimization=2 must be a block of options"),
        ({"zero_optimization": [True]}, r"zero_optimization=\[True\] must be a block of options"),
        ({"fp16": {"initial_scale_power": 127}}, "fp16.initial_scale_power=127 must be an integer from 0 to 126"),
        ({"fp16": {"min_loss_scale": -1}}, "fp16.min_loss_scale=-1 must be a finite number of at least 0"),
        ({"hybrid_engine": {"max_out_tokens": 0}}, "hybrid_engine.max_out_tokens=0 must be an integer of at least 1"),
        ({"optimizer": {"params": {}}}, "optimizer.type=None must be one of Adam, AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr='1e-3' must be a finite"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "optimizer.params.betas=0.9 must be two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}}, r"betas\[1\]=1 must be below 1"),
        ({"flops_profiler": {"profile_step": -2}}, "flops_profiler.profile_step=-2 must be an integer of at least -1"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}},
            "warmup_num_steps=-1 must be an integer of at least 0",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps is missing; WarmupDecayLR needs it"),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, r"momentun is .*optimizer.params.momentum\?"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "optimizer.params.lr=-1 must be a finite number"),
        ({"optimizer": {"type": "SGD", "params": {"lr": "x"}}}, "optimizer.params={'lr': 'x'} are not arguments of"),
        ({"scheduler": {"type": "StepLR"}}, "scheduler.params={} are not arguments of torch's StepLR: .*step_size"),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1}}},
            r"scheduler.params.cycle_min_lr=\[0.1, 0.2\] must be a finite number",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": []}}}, r"warmup_min_lr=\[\] must be a finite"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
            "warmup_type: 'cubic' is not one of log, linear",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_the_value_and_the_rule(wrong, message):
    with pytest.raises(ValueError, match=message):
        load_config(BATCH | wrong, world_size=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train_batch_size": 8,,}', "ds.json' is not valid JSON: .*line 1 column 2[45]"),
        ('{"a": 1, // one\n"b": /* two\n\n*/ x}', "ds.json' is not valid JSON: .*line 4 column 4"),
        ('{"a": 1 /* never ends }', "ds.json' is not valid JSON: .*line 1 column 9"),
        ('{"a": [,]}', "ds.json' is not valid JSON: .*line 1 column 8"),
        ('{"a": "b // c', "ds.json' is not valid JSON: .*line 1 column 7"),
        ("[1]", "ds.json' must hold a JSON object, not list"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "ds.json': fp16.enabled is given twice, True and False"),
        ('{"a": [1, {"b": {"c": 1}, "b": 2}]}', r"ds.json': a\[1\].b is given twice, {'c': 1} and 2; keep one"),
        (None, "ds.json' cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path, world_size=1)


COMMENTED = r"""// A config of ours, "commented" as Hjson.
{
    "train_batch_size": 8, # samples, /* not */ tokens
    "csv_monitor": {
        "enabled": true, /* a block,
        "enabled": false, over lines */
        "output_path": "file:// # /* \" // */ ,]", // no comment
        "job_name": "a, }",
    },
    "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95, /* two */ ], }, },
}
# the end"""


def test_comments_and_trailing_commas_of_hjson_are_read_past_and_strings_stay_whole(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(COMMENTED)
    monitor = {"enabled": True, "output_path": 'file:// # /* " // */ ,]', "job_name": "a, }"}
    optimizer = {"type": "Adam", "params": {"betas": [0.9, 0.95]}}
    plain = {"train_batch_size": 8, "csv_monitor": monitor, "optimizer": optimizer}
    encoded = base64.urlsafe_b64encode(COMMENTED.partition("\n")[2].encode()).decode()
    for config in (path, encoded):
        assert load_config(config, world_size=1) == load_config(plain, world_size=1)


@pytest.mark.parametrize("value", [REAL_FILES, [], {}, "#", ["// [,", {"a, }": [{}, [""], -1.5, True, None]}]])
def test_a_text_without_comments_is_left_as_it_is(value):
    for text in (json.dumps(value), json.dumps(value, indent=2)):
        assert without_comments(text) == text


def test_a_file_that_is_nested_too_deeply_is_refused_and_a_byte_order_mark_read_past(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"ds.json' is not valid JSON: .*recursion"):
        load_config(path, world_size=1)
    path.write_text('\ufeff{"train_batch_size": 8}', encoding="utf-8")
    assert load_config(path, world_size=1) == load_config(BATCH, world_size=1)


def test_checkpoints_on_disks_of_their_own_are_refused_only_where_there_may_be_several_machines(monkeypatch):
    given = BATCH | {"checkpoint": {"use_node_local_storage": True}}
    assert load_config(given, world_size=1).checkpoint.use_node_local_storage
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    load_config(given, world_size=4)
    for local in ("4", None):
        monkeypatch.delenv("LOCAL_WORLD_SIZE") if local is None else monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with pytest.raises(ValueError, match=r"checkpoint.use_node_local_storage=true is .* one machine only"):
            load_config(given, world_size=8)


def test_a_config_that_is_neither_dict_nor_path_is_refused():
    with pytest.raises(ValueError, match=r"config=8 must be a dict or the path of a JSON file"):
        load_config(8, world_size=1)


def test_an_error_in_a_file_begins_with_the_file_and_names_the_full_path_of_the_key(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 4}}))
    with pytest.raises(ValueError) as error:
        load_config(path, world_size=1)
    assert str(error.value).startswith(f"{path}: zero_optimization.stage: 4 is not one of 0, 1, 2, 3")


def test_a_config_in_base64_is_read_like_the_dict():
    content = BATCH | {"zero_optimization": {"stage": 2}}
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    assert load_config(encoded, world_size=1) == load_config(content, world_size=1)
    wrong = base64.urlsafe_b64encode(b'{"train_batch_size": 0}').decode()
    with pytest.raises(ValueError, match=r"^config in base64: train_batch_size=0 must be"):
        load_config(wrong, world_size=1)


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, ("mics_shard_size=2", "zero_optimization.stage=2")),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}},
            ("zero_optimization.zero_hpz_partition_size=2", "zero_optimization.mics_shard_size=2"),
        ),
        (
            {"gradient_accumulation_dtype": "bf16", "fp16": {"enabled": True}},
            ("gradient_accumulation_dtype=bf16", "parameters in fp16"),
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_dtype": "fp32"},
            ("gradient_accumulation_dtype", "data_types.grad_accum_dtype"),
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            ("zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"),
        ),
    ],
)
def test_a_contradiction_names_both_sides(given, both):
    with pytest.raises(ValueError) as error:
        load_config(BATCH | given, world_size=2)
    assert all(side in str(error.value) for side in both)


def test_a_copy_of_the_model_takes_a_number_of_processes_that_divides_all():
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    assert load_config(BATCH | {"zero_optimization": zero}, world_size=4).zero_optimization.shard_size == 2
    with pytest.raises(ValueError, match="2 processes per copy of the model do not divide the 1 processes"):
        load_config(BATCH | {"zero_optimization": zero}, world_size=1)


def test_old_names_stand_for_the_new_ones():
    old = {"cpu_offload": True, "cpu_offload_param": False, "stage3_gather_fp16_weights_on_model_save": False}
    new = {"offload_optimizer": {"device": "cpu"}, "stage3_gather_16bit_weights_on_model_save": False}
    assert load_config(BATCH | {"zero_optimization": old}, world_size=1) == load_config(
        BATCH | {"zero_optimization": new}, world_size=1
    )
    types = {"data_types": {"grad_accum_dtype": "bf16"}, "bfloat16": {"enabled": True}}
    assert load_config(BATCH | types, world_size=1).accumulation_dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16"])
def test_dtypes_have_the_names_that_deepspeed_reads(name):
    types = {"data_types": {"grad_accum_dtype": name}, "communication_data_type": name, "bf16": {"enabled": True}}
    config = load_config(BATCH | types, world_size=1)
    assert config.accumulation_dtype == config.communication_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="gradient_accumulation_dtype: 'int8' is not one of fp32, fp16, bf16"):
        load_config(BATCH | {"gradient_accumulation_dtype": "int8"}, world_size=1)


def test_parameters_are_offloaded_at_stage_3_only_as_in_deepspeed(caplog):
    zero = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    with caplog.at_level(logging.INFO, logger="hybrid_engine"):
        config = load_config(BATCH | {"zero_optimization": zero}, world_size=1).zero_optimization
    assert "zero_optimization.offload_param (read at stage 3)" in caplog.text
    assert config.offloads_optimizer and not config.offloads_parameters
    assert load_config(
        BATCH | {"zero_optimization": {**zero, "stage": 3}}, world_size=1
    ).zero_optimization.offloads_parameters


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}


def test_auto_becomes_what_the_integration_of_transformers_makes_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(
        integration.HfDeepSpeedConfig, "__init__", lambda self, config: vars(self).update(config=config)
    )
    monkeypatch.setattr(integration.HfTrainerDeepSpeedConfig, "find_config_node", _find_node, raising=False)
    monkeypatch.setattr(integration.HfTrainerDeepSpeedConfig, "get_value", _get_value, raising=False)
    monkeypatch.setattr(
        integration.HfTrainerDeepSpeedConfig, "is_true", lambda self, key: bool(_get_value(self, key)), raising=False
    )
    monkeypatch.setattr(integration.HfTrainerDeepSpeedConfig, "is_zero3", lambda self: True, raising=False)
    arguments = TrainingArguments(
        output_dir=tmp_path,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        adam_beta1=0.8,
        adam_epsilon=1e-7,
        weight_decay=0.02,
        max_grad_norm=0.7,
        warmup_steps=6,
        max_steps=50,
        bf16=True,
        use_cpu=True,
    )
    theirs = integration.HfTrainerDeepSpeedConfig(copy.deepcopy(AUTO))
    theirs.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=8))
    theirs.trainer_config_finalize(arguments, model, arguments.max_steps)
    assert "auto" not in json.dumps(theirs.config)
    config = load_config(AUTO, world_size=1, arguments=arguments)
    assert config == load_config(theirs.config, world_size=1)
    assert config.dtype == torch.bfloat16 and config.optimizer.params["lr"] == 2e-4


def _find_node(self, path):
    *blocks, key = path.split(".")
    config = self.config
    for name in blocks:
        config = config.get(name)
        if config is None:
            return None, key
    return config, key


def _get_value(self, path):
    config, key = _find_node(self, path)
    return None if config is None else config.get(key)


def test_auto_without_arguments_is_the_default_or_follows_from_the_rest():
    given = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    config = load_config(given, world_size=1)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (4, 1.0)
    assert config.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert config.scheduler.params == {"warmup_max_lr": 3e-4}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, "params.total_num_steps"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, "train_batch_size"),
        ({"bfloat16": {"enabled": "auto"}}, "bfloat16.enabled"),
        ({"hybrid_engine": {"enabled": "auto"}}, "hybrid_engine.enabled"),
    ],
)
def test_auto_that_only_the_user_can_fill_in_is_an_error_with_its_path_and_where_it_could_come_from(given, path):
    with pytest.raises(ValueError, match=f'{path}="auto".*TrainingArguments as initialize'):
        load_config(BATCH | given, world_size=1)


def test_the_old_name_of_bf16_takes_auto_from_the_same_argument():
    config = load_config(BATCH | {"bfloat16": {"enabled": "auto"}}, world_size=1, arguments=TRAINING_ARGUMENTS)
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["fp16", "bf16", "optimizer", "zero_optimization", "zero_optimization.offload_param"])
def test_a_block_cannot_be_auto(path):
    given = "auto"
    for key in reversed(path.split(".")):
        given = {key: given}
    with pytest.raises(ValueError, match=f'{path}="auto" must be a block of options'):
        load_config(BATCH | given, world_size=1)


def test_a_share_of_the_steps_to_warm_up_in_needs_their_number(tmp_path):
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}

    def read(**more):
        arguments = TrainingArguments(output_dir=tmp_path, use_cpu=True, **more)
        config = load_config(BATCH | {"scheduler": scheduler}, world_size=1, arguments=arguments)
        return config.scheduler.params["warmup_num_steps"]

    assert (read(), read(warmup_steps=7), read(warmup_steps=0.1, max_steps=50)) == (1, 7, 5)
    with pytest.raises(ValueError, match=r'warmup_num_steps="auto" is warmup_steps=0.1 of the steps.*max_steps=-1'):
        read(warmup_steps=0.1)


def test_auto_hides_no_misspelt_option():
    with pytest.raises(ValueError, match=r"gradient_cliping is not a known option; did you mean gradient_clipping\?"):
        load_config(BATCH | {"gradient_cliping": "auto"}, world_size=1)
    with pytest.raises(ValueError, match=r"zero_optimization.stages is not a known option"):
        load_config(BATCH | {"zero_optimization": {"stages": "auto"}}, world_size=1)


def test_an_automatic_peak_is_the_rate_of_the_optimizer_that_is_passed():
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}}
    config = load_config(BATCH | {"scheduler": scheduler}, world_size=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    assert build_scheduler(config.scheduler, optimizer).max_lrs == [0.25]


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("Lamb", {"max_coeff": 5.0}, {"max_coeff": 5.0, "min_coeff": 0.01, "eps_inside_sqrt": False}),
        ("lion", {"lr": 1e-4}, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        ("Adam", {"bias_correction": False}, {"bias_correction": False, "eps": 1e-8}),
    ],
)
def test_other_optimizers_have_their_own_parameters_and_deepspeeds_defaults(kind, params, expected):
    config = load_config(BATCH | {"optimizer": {"type": kind, "params": params}}, world_size=1)
    assert expected.items() <= config.optimizer.params.items()


def test_every_key_of_deepspeeds_documentation_and_sources_is_in_the_table():
    for path, keys in json.loads((DATA / "deepspeed_config_keys.json").read_text()).items():
        documented = set(re.findall(r"^\| `(\w+)`", section(path), re.MULTILINE))
        assert set(keys) <= documented, (path, set(keys) - documented)


def section(path: str) -> str:
    """The part of docs/config.md about the block at `path`."""
    title = f"`{path}`" if path else "Top level"
    return config_page.render().split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_page_about_the_config_is_up_to_date():
    assert (DATA.parent.parent / "docs" / "config.md").read_text() == config_page.render(), (
        "run python -m hybrid_engine.cli.config_page > docs/config.md"
    )


def test_keys_that_trl_and_accelerate_write_by_themselves_are_not_reported(caplog):
    keys = ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
    with caplog.at_level(logging.INFO, logger="hybrid_engine"):
        load_config(BATCH | {f"zero_optimization.{key}": 64 for key in keys}, world_size=1)
        assert "unknown to DeepSpeed" not in caplog.text
        load_config(BATCH | {"zero_optimization.overlap_comm": True}, world_size=1)
    assert "zero_optimization.overlap_comm (unknown to DeepSpeed too)" in caplog.text
