"""transformers' Trainer and accelerate on the engine: they train, save and resume as without it.

Everything runs on one process and on two, after `enable_compat()`, beside the same code without deepspeed on one
process. On a CPU accelerate needs to be told of several processes: `use_cpu=True`, or the backend.
"""

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.training_reference import relative_error, tiny_llama

pytestmark = pytest.mark.long

BATCH = 4
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = dict.fromkeys((*BATCH_SIZES, "gradient_clipping"), "auto")
ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}
ARGUMENTS = {
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
    "use_cpu": True,
}
LONGER = {"max_steps": 4, "learning_rate": 3e-2}
WATCHED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {**LONGER, **WATCHED, "load_best_model_at_end": True}
GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}

RUNS = {
    "stage 0": ({"stage": 0}, {}, {}),
    "stage 1, its optimizer": ({"stage": 1}, {"optimizer": ADAM}, {}),
    "stage 2, its optimizer and schedule": (
        {"stage": 2},
        {"optimizer": ADAM, "scheduler": WARMUP},
        {"warmup_steps": 2},
    ),
    "stage 3": ({"stage": 3}, {}, {}),
    "stage 3, recomputing": ({"stage": 3}, {}, {"gradient_checkpointing": True}),
    "stage 3, bf16": ({"stage": 3}, {"bf16": {"enabled": "auto"}}, {"bf16": True}),
    "stage 3, offloaded": ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, {}, {}),
}
"""The `zero_optimization` block, the rest of the config and the arguments of a run."""
REFERENCES = {"stage 1, its optimizer": "all decays", "stage 2, its optimizer and schedule": "slow start"}
"""What a run is compared with, where that is not the Trainer's own optimizer."""
FOLLOWED = {1: [3], 2: [2, 3]}
"""The stages whose saved files are looked at, by the number of processes: one alone shards nothing at any."""


def rows(num_rows, seed):
    return torch.randint(65, (num_rows, 8), generator=torch.Generator().manual_seed(seed))


def build_trainer(
    folder, output, num_processes=1, zero=None, config=None, adapters=False, optimizers=(None, None), **more
):
    """A Trainer on the model in `folder`; without `zero` without deepspeed."""
    deepspeed = None if zero is None else {**AUTO, "zero_optimization": zero, **(config or {})}
    arguments = TrainingArguments(
        output_dir=str(folder / output),
        per_device_train_batch_size=BATCH // num_processes,
        deepspeed=deepspeed,
        **{**ARGUMENTS, **more},
    )
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    if adapters:
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    if callable(optimizers):
        optimizers = optimizers(model)
    data, heldout = ([{"input_ids": row, "labels": row} for row in rows(*of)] for of in ((32, 1), (8, 2)))
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=heldout, optimizers=optimizers)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def seen(trainer):
    """What a training came to: losses, norms, held-out losses, how many processes took part."""
    return {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "held out": logged(trainer, "eval_loss"),
        "processes": trainer.args.world_size,
    }


def follow(folder, prefix, num_processes=1, zero=None, adapters=False):
    """Trains with evaluations, goes back to the best weights, saves, and goes on from the second step."""
    name = f"{prefix} {'adapters' if adapters else 'whole'}"
    options = {"num_processes": num_processes, "zero": zero, "adapters": adapters}
    trainer = build_trainer(folder, name, **options, **BEST)
    trainer.train()
    trainer.save_model(str(folder / name / "best"))
    results = {**seen(trainer), "best": Path(trainer.state.best_model_checkpoint).name}
    trainer = build_trainer(folder, f"{name} resumed", **options, **LONGER)
    trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-2"))
    trainer.save_model(str(folder / name / "last"))
    return {**results, "resumed": seen(trainer)["losses"]}


def train(rank, world_size, folder):
    hybrid_engine.enable_compat()
    results = {}
    for name, (zero, config, arguments) in RUNS.items():
        trainer = build_trainer(folder, name, world_size, zero, config, **arguments)
        trainer.train()
        assert isinstance(trainer.model_wrapped, hybrid_engine.ZeroEngine)
        results[name] = seen(trainer)
    for stage in FOLLOWED[world_size]:
        for adapters in (False, True):
            prefix, zero = f"{world_size} {stage}", {"stage": stage, **(GATHERS if stage == 3 else {})}
            results["followed", stage, adapters] = follow(folder, prefix, world_size, zero, adapters)
    trainer = build_trainer(folder, "apart", world_size, {"stage": 3, **dict.fromkeys(GATHERS, False)})
    trainer.train()
    trainer.save_model(str(folder / f"{world_size} apart"))
    results["only evaluated"] = build_trainer(folder, "evaluated", world_size, {"stage": 3}).evaluate()["eval_loss"]
    results["accelerate"] = {stage: accelerate(rank, folder / f"{world_size} {stage}", stage) for stage in (1, 2, 3)}
    return results


def build_accelerator(stage=None):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # an accelerator with a plugin has set it
    split = DataLoaderConfiguration(split_batches=True)  # the same schedule on any number of processes
    if stage is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=split)
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=True
    )
    backend = InitProcessGroupKwargs(backend="gloo")
    return Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, dataloader_config=split, kwargs_handlers=[backend]
    )


def prepare(accelerator):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return accelerator.prepare(model, optimizer, scheduler, DataLoader(rows(16, 1), batch_size=BATCH))


def loop(accelerator, model, optimizer, scheduler, loader):
    """One epoch as accelerate's documentation has it: the loss of each micro-batch and the norm of each step."""
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
        if accelerator.sync_gradients:
            norms.append(float(norm))
    return losses, norms, scheduler.get_last_lr()


def accelerate(rank, folder, stage):
    accelerator = build_accelerator(stage)
    parts = prepare(accelerator)
    results = {"first": loop(accelerator, *parts)}
    unwrapped = accelerator.unwrap_model(parts[0])
    results["unwrapped"] = isinstance(unwrapped, LlamaForCausalLM)
    state = accelerator.get_state_dict(parts[0])
    # Every process comes here, as in accelerate's examples.
    unwrapped.save_pretrained(folder / "saved", is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.save_model(parts[0], folder / "saved by accelerate")
    accelerator.save_state(str(folder / "state"))
    results["second"] = loop(accelerator, *parts)
    accelerator.load_state(str(folder / "state"))
    results["second again"] = loop(accelerator, *parts)
    accelerator.wait_for_everyone()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    tiny_llama().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def runs(request, folder):
    return run_distributed(train, request.param, folder)


def all_decays(model):
    """AdamW as a config says it: with weight decay for norms too, which the Trainer spares."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1), None


def slow_start(model):
    """The same with DeepSpeed's linear WarmupLR over two steps, which stands at its beginning for two."""
    optimizer, _ = all_decays(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, max(0, step - 1) / 2))


def load_weights(folder, saved, adapters=False):
    """What transformers, and peft, load from `saved`, by name."""
    model = LlamaForCausalLM.from_pretrained(folder / "model" if adapters else saved)
    model = PeftModel.from_pretrained(model, saved) if adapters else model
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def plain(folder):
    """The runs without deepspeed, by what tells them apart."""
    results = {}
    for name, optimizers in {"default": (None, None), "all decays": all_decays, "slow start": slow_start}.items():
        trainer = build_trainer(folder, name, optimizers=optimizers)
        trainer.train()
        results[name] = seen(trainer)
    for adapters in (False, True):
        results["followed", adapters] = follow(folder, "plain", adapters=adapters)
    return results


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_trains_as_without_deepspeed(runs, plain, name):
    expected = plain[REFERENCES.get(name, "default")]
    # bf16 has 8 bits; without deepspeed bf16=True would be autocast, with other roundings.
    tolerance = {"losses": 2e-3, "norms": 2e-2} if "bf16" in name else {"losses": 1e-4, "norms": 1e-3}
    for results in runs:
        assert results[name]["processes"] == len(runs)
        for what, bound in tolerance.items():
            assert results[name][what] == pytest.approx(expected[what], rel=bound)


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_the_trainer_evaluates_finds_the_best_weights_saves_and_resumes(runs, plain, folder, adapters):
    expected = plain["followed", adapters]
    assert expected["best"] != "checkpoint-4", "the last is not the best"
    kind = "adapters" if adapters else "whole"
    for stage in FOLLOWED[len(runs)]:
        for results in runs:
            actual = results["followed", stage, adapters]
            for what in ("losses", "held out", "resumed"):
                assert actual[what] == pytest.approx(expected[what], rel=1e-4)
            assert actual["best"] == expected["best"]
        for saved in ("best", "last"):
            ours, theirs = folder / f"{len(runs)} {stage} {kind}" / saved, folder / f"plain {kind}" / saved
            assert relative_error(load_weights(folder, ours, adapters), load_weights(folder, theirs, adapters)) < 1e-3


def test_a_model_that_may_not_be_gathered_is_saved_as_a_checkpoint(runs, folder):
    saved = folder / f"{len(runs)} apart"
    assert not (saved / "model.safetensors").exists()
    assert (saved / "latest").read_text() == "global_step3"


def test_the_trainer_evaluates_without_training(runs):
    model, batch = tiny_llama(), rows(8, 2)
    with torch.no_grad():
        expected = model(input_ids=batch, labels=batch).loss.item()
    assert all(results["only evaluated"] == pytest.approx(expected, rel=1e-5) for results in runs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loop_with_accelerate_is_as_without_deepspeed(runs, folder, stage):
    accelerator = build_accelerator()
    parts = prepare(accelerator)
    expected = [loop(accelerator, *parts)]
    weights = {name: value.clone() for name, value in parts[0].state_dict().items() if name != "lm_head.weight"}
    expected.append(loop(accelerator, *parts))
    for results in runs:
        actual = results["accelerate"][stage]
        assert actual["unwrapped"]
        for name, run in (("first", expected[0]), ("second", expected[1]), ("second again", expected[1])):
            for values, expected_values in zip(actual[name], run, strict=True):
                assert values == pytest.approx(expected_values, rel=1e-3)
    saved = folder / f"{len(runs)} {stage}"
    assert relative_error(load_weights(folder, saved / "saved"), weights) < 1e-3
    files = [load_file(saved / name / "model.safetensors") for name in ("saved", "saved by accelerate")]
    assert all(torch.equal(files[0][name], value) for name, value in files[1].items() if name in files[0])
    if stage == 3:
        assert files[0].keys() == load_file(folder / "model" / "model.safetensors").keys(), "tied weights once"
