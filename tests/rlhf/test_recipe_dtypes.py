"""What recipes compute in: one meaning of `--dtype` in all commands, fp32 masters, and plans that count it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hybrid_engine.distributed import processes
from hybrid_engine.recipes import dpo, evaluate, generate, grpo, ppo, serve, sft
from hybrid_engine.rlhf.experience.policy import build_policy
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.options.shared import DtypeOptions
from hybrid_engine.rlhf.planning.comparison import plan
from hybrid_engine.rlhf.rewards.learned import LearnedReward
from hybrid_engine.rlhf.runs import engine_config
from hybrid_engine.rlhf.runs.checkpoints import begin_run
from hybrid_engine.rlhf.runs.engine_config import Schedule, apply_tf32, choose_dtype, torch_dtype
from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer
from tests.support.small_actors import save_small_actor, save_sums

CONSTANT = Schedule(kind="constant", num_steps=4, num_warmup_steps=0)
COMMANDS = (grpo, ppo, dpo, sft, evaluate, generate, serve)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actor")
    model, dataset = save_small_actor(folder, build_tokenizer()), save_sums(folder)
    sizes = {"rollout_size": 4, "group_size": 4, "minibatch_size": 16, "eval_prompts": 2, "eval_samples": 2}
    lengths = {"max_prompt_tokens": 8, "max_new_tokens": 4, "save_every": 1, "eval_every": 0, "steps": 3}

    def build(out, **options):
        given = {"model": model, "dataset": dataset, "reward": ("regex:[0-4]$",), "out": str(out)}
        return grpo.Config(**sizes | lengths | given | {"learning_rate": 1e-3} | options)

    return build


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_have_one_dtype_option(command):
    assert issubclass(command.Config, DtypeOptions)
    assert {field.name: field.default for field in command.Config.__dataclass_fields__.values()}["dtype"] == "auto"


def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu(monkeypatch):
    for is_gpu, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        assert choose_dtype("auto") == expected
        assert choose_dtype("fp16") == "fp16"


def test_a_run_keeps_what_auto_became(rollouts, tmp_path, monkeypatch):
    config = rollouts(tmp_path)
    assert begin_run(config, "grpo").dtype == "fp32"
    options = tmp_path / "checkpoints" / "options.json"
    options.parent.mkdir()
    for saved, expected in (({"dtype": "bf16"}, "bf16"), ({}, "fp32")):  # the second of a version without the option
        options.write_text(json.dumps(saved))
        monkeypatch.setattr(torch.cuda, "is_available", lambda expected=expected: expected == "fp32")
        monkeypatch.setattr(processes, "check_gpu", lambda: None)  # there is no such card
        assert begin_run(replace(config, resume=True), "grpo").dtype == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "fp8"}, "--dtype=fp8 must be one of auto, fp32, bf16, fp16"),
        ({"dtype": "bf16", "tf32": True}, "--tf32 applies to fp32, but --dtype=bf16 computes in 16 bits"),
    ],
)
def test_other_dtypes_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        DtypeOptions(**options)


def test_tf32_is_on_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for tf32 in (True, False):
        apply_tf32(DtypeOptions(tf32=tf32))
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")


def test_tf32_without_a_gpu_is_refused_before_anything_is_loaded(rollouts, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--tf32 applies to matrix products on a GPU, and no GPU is available"):
        grpo.run(rollouts(tmp_path, tf32=True, model="no such model"))


def test_a_run_that_measures_no_kl_has_no_reference_under_an_adapter_either(rollouts, tmp_path):
    config = rollouts(tmp_path, lora_rank=2, measure_kl=False, steps=1, algorithm=Algorithm(kl_place="none"))
    grpo.run(config)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert not [name for name in line if name.startswith("kl_per")], line
    grpo.run(replace(config, measure_kl=True, out=str(tmp_path / "measured")))
    (line,) = map(json.loads, (tmp_path / "measured" / "metrics.jsonl").read_text().splitlines())
    assert line["kl_per_sequence"] == pytest.approx(0, abs=1e-5)  # the adapter adds nothing before its first step


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_actor_and_reference_compute_in_16_bits_and_masters_stay_fp32(rollouts, tmp_path, dtype):
    config = rollouts(tmp_path, dtype=dtype)
    policy = build_policy(config, config.model, 1e-3, CONSTANT)
    expected = {torch.bfloat16 if dtype == "bf16" else torch.float16}
    assert {p.dtype for p in policy.actor.module.parameters()} == expected
    assert {p.dtype for p in policy.reference.parameters()} == expected
    # In 16 bits the frequencies of rotary embeddings put distant tokens at wrong positions.
    classifier = AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=1)
    classifier.save_pretrained(tmp_path / "judge")
    policy.tokenizer.save_pretrained(tmp_path / "judge")
    reward = LearnedReward.load(str(tmp_path / "judge"), dtype=next(iter(expected)))
    assert {b.dtype for role in (policy.reference, reward.model) for b in role.buffers()} == {torch.float32}
    tokens = torch.arange(4).repeat(1, 200)
    with torch.no_grad():
        assert torch.equal(policy.actor.module(tokens).logits, policy.reference(tokens).logits)
    masters = [p for group in policy.actor.optimizer.inner.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}


@pytest.mark.parametrize(("dtype", "power"), [("bf16", 12), ("fp16", 12), ("fp16", 30)])
def test_a_run_in_16_bits_that_was_interrupted_goes_on_to_the_bit(rollouts, tmp_path, monkeypatch, dtype, power):
    """Also where steps overflow, which changes the loss scale: 30 is more than gradients take."""
    monkeypatch.setattr(engine_config, "FIRST_LOSS_SCALE_POWER", power)
    whole = grpo.run(rollouts(tmp_path / "whole", dtype=dtype))
    torn, save = rollouts(tmp_path / "torn", dtype=dtype), grpo.save_checkpoints

    def save_and_end(engines, folder, step, *more):
        save(engines, folder, step, *more)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(grpo, "save_checkpoints", save_and_end)
    with pytest.raises(KeyboardInterrupt):
        grpo.run(torn)
    monkeypatch.setattr(grpo, "save_checkpoints", save)
    resumed = grpo.run(replace(torn, resume=True, dtype="auto"))
    weights = [load_file(folder / "model.safetensors") for folder in (whole, resumed)]
    assert {tensor.dtype for tensor in weights[0].values()} == {torch_dtype(dtype)}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    scales = [
        [
            line.get("loss_scale")
            for line in map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        ]
        for run in ("whole", "torn")
    ]
    assert (
        scales[0]
        == scales[1]
        == [None if dtype == "bf16" else 2.0 ** (12 if power == 12 else 30 - n) for n in range(3)]
    )
    with pytest.raises(ValueError, match=f"--resume: --dtype='fp32' but the interrupted run had '{dtype}'"):
        grpo.run(replace(torn, resume=True, dtype="fp32"))


def test_the_plan_counts_16_bits_and_is_what_the_run_takes(rollouts, tmp_path):
    fitted = {dtype: plan("grpo", rollouts(tmp_path, dtype=dtype), "1GB", 1) for dtype in ("fp32", "bf16")}
    assert fitted["bf16"].title.endswith("a cpu each, bf16")
    kept = {dtype: {part.name: part.num_bytes for part in found.plan.roles[0].kept} for dtype, found in fitted.items()}
    assert 2 * kept["bf16"]["weights"] == kept["fp32"]["weights"] == kept["bf16"]["masters"]
    grpo.run(rollouts(tmp_path / "run", dtype="bf16"))
    memory = json.loads((tmp_path / "run" / "result.json").read_text())["memory"]
    assert memory["planned_for_lengths_bytes"] == pytest.approx(memory["measured_bytes"], rel=0.05)
