"""Goldens of every format that the project writes and reads again, for `tests/integration/test_formats.py`.

They were written by commit c1c4c22, so that what users keep on their disks loads through every change of the code:
`tests/data/formats/c1c4c22.tar.xz`. `about.json` in it names the commit, the versions and the CPU. A golden is never
written again: a new format gets an archive of its own. To write one, copy this file into a checkout of that commit and

    OMP_NUM_THREADS=1 python -c "from tests.tools.write_formats import main; main('/tmp/formats')"
    tar -C /tmp/formats -cJf c1c4c22.tar.xz .

The test trains on with the functions and the modules of this file. Names of modules that have moved since stand in
`OLD` alone. The source of `Stack` and the name of this module are parts of the keys of plans: leave them as they are.
"""

import importlib
import json
import os
import platform
import random
import shutil
import socket
import string
import subprocess
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hybrid_engine
from hybrid_engine.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

OLD = {
    "command": "hybrid_engine.command.cli",
    "run log": "hybrid_engine.recipes.runs.run_log",
    "journal": "hybrid_engine.recipes.batch.journal",
    "calculator": "hybrid_engine.recipes.tasks.calculator",
}
"""Modules by the names of commit c1c4c22, which only writing needs."""
NUM_STEPS, NUM_NEXT_STEPS = 3, 2
"""Steps before a checkpoint, and after it."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters."""
    tokens = ["<pad>", "<eos>", *string.digits, *string.ascii_lowercase, *" +-=.,:?!()"]
    core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def save_model(folder: Path, tokenizer: Any) -> None:
    """A Llama of one layer and 3 thousand random weights, with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_start(folder: Path) -> None:
    """Writes models, data and a reward function, with which all runs begin."""
    save_model(folder / "model", build_tokenizer())
    save_model(folder / "calculator", importlib.import_module(OLD["calculator"]).build_tokenizer())
    sums = random.Random(0).sample([(a, b) for a in range(30) for b in range(30)], 60)
    files = {
        "answers": [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums],
        "pairs": [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"it is {a - b}?"} for a, b in sums],
        "problems": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums],
        "few": [{"prompt": f"{a}+{b}=", "place": n} for n, (a, b) in enumerate(sums[:6])],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "golden_rewards.py").write_text(
        '"""A reward that seldom is the same for two answers."""\n\n\n'
        "def low(prompts, responses):\n"
        '    """How early in the alphabet the characters stand."""\n'
        "    return [-sum(map(ord, response)) / (1 + len(response)) / 50 for response in responses]\n"
    )


ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.02, "total_num_steps": 9}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}, "scheduler": WARMUP, "gradient_clipping": 0.5}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {"zero_optimization": {"stage": 0}, **BF16}),
    "stage 2": (1, {"zero_optimization": {"stage": 2}, **BF16}),
    "stage 3": (1, {"zero_optimization": {"stage": 3}, **BF16}),
    "stage 0 of two": (2, {"zero_optimization": {"stage": 0}, **BF16}),
    "stage 2 of two": (2, {"zero_optimization": {"stage": 2}, **BF16}),
    "stage 3 of two": (2, {"zero_optimization": {"stage": 3}, **BF16}),
    "fp16 with its loss scale": (
        1, {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}, "scheduler": WARMUP},
    ),
    "fp32 with Lion": (1, {"optimizer": {"type": "Lion", "params": {"lr": 0.02}}}),
    "fp32 with momentum": (1, {"optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}}),
    "micro-batches": (1, {"gradient_accumulation_steps": 2, **BF16}),
    "format 1": (1, {"zero_optimization": {"stage": 2}, **BF16}),
}  # fmt: skip
"""By name: the number of processes, and the rest of the config."""
CLIENT_STATE = {"epoch": 3, "name": "é", "seen": [1, 2.5, None], "running": torch.tensor([0.5, -1.0])}


class Net(nn.Module):
    """Tied weights, dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next token; ids [B, T]."""
        self.calls += 1
        x = self.embed(ids)
        x = x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def build_engine(name: str, seed: int = 0) -> Any:
    """The engine of `ENGINES`, on each of its processes."""
    torch.manual_seed(seed)
    options = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **ENGINES[name][1]}
    return hybrid_engine.initialize(model=Net(), config=options)[0]


def ids_of(step: int, rank: int) -> torch.Tensor:
    """A micro-batch [B, T]."""
    return torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def take_steps(engine: Any, steps: range) -> dict[str, list[float]]:
    """Losses, norms of gradients and learning rates of micro-batches on this process."""
    figures: dict[str, list[float]] = {"loss": [], "norm": [], "lr": []}
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        loss = engine(ids_of(step, rank))
        engine.backward(loss)
        engine.step()
        figures["loss"].append(loss.item())
        is_step = engine.micro_steps % engine.gradient_accumulation_steps() == 0
        figures["norm"].append(float(engine.get_global_grad_norm()) if is_step else 0.0)
        figures["lr"].append(engine.get_lr()[0])
    return figures


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and optimizer states, whole, and buffers and counters."""
    values = {"global_steps": torch.tensor(engine.global_steps), "micro_steps": torch.tensor(engine.micro_steps)}
    if engine.fp16_enabled():
        values["scale"] = torch.tensor(float(engine.optimizer.cur_scale))
    for name, parameter in engine.module.named_parameters():
        values[name] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            try:
                state = safe_get_full_optimizer_state(parameter, key)
            except (KeyError, ValueError):
                continue
            if state is not None:
                values[f"{name} {key}"] = state
    values |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {name: value.detach().clone() for name, value in values.items()}


def write_engine(rank: int, folder: Path, name: str) -> None:
    """A checkpoint of an engine after some steps, and what the engine does then."""
    num_micro = ENGINES[name][1].get("gradient_accumulation_steps", 1)
    engine, last = build_engine(name), NUM_STEPS * num_micro
    take_steps(engine, range(last))
    engine.save_checkpoint(folder / name, "last", CLIENT_STATE)
    expected = {"saved": values_of(engine), "next": take_steps(engine, range(last, last + NUM_NEXT_STEPS * num_micro))}
    torch.save(expected | {"after": values_of(engine)}, folder / name / f"expected-{rank}.pt")


def make_format_1(folder: Path) -> None:
    """Makes the manifest one of format 1, as the project wrote them before it had checksums."""
    path = folder / "checkpoint.json"
    manifest = json.loads(path.read_text())
    kept = {key: value for key, value in manifest.items() if key not in ("checksum", "checksums")}
    path.write_text(json.dumps({**kept, "format": 1}))


def build_adapted(start: Path, seed: int = 0) -> Any:
    """An engine over a LoRA adapter on the model of `write_start`."""
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(start / "model"),
        LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
    return hybrid_engine.initialize(model=model, config=config)[0]


def adapted_losses(engine: Any, steps: range) -> list[float]:
    """Losses of steps on the adapter."""
    losses = []
    for step in steps:
        ids = ids_of(step, 0)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def logits_of(model: nn.Module) -> torch.Tensor:
    """[B, T, V] of a fixed input, in fp32."""
    with torch.no_grad():
        return model.eval().float()(ids_of(99, 0)).logits


def write_adapted(start: Path, folder: Path) -> None:
    """The checkpoint of an adapter without its base, the adapter by itself, and exports of adapter and model."""
    engine = build_adapted(start)
    adapted_losses(engine, range(NUM_STEPS))
    engine.save_checkpoint(folder / "adapter checkpoint", "last", exclude_frozen_parameters=True)
    engine.module.save_pretrained(folder / "adapter")
    engine.save_16bit_model(folder / "merged export")
    expected = {"logits": logits_of(PeftModel.from_pretrained(model_of(start), folder / "adapter"))}
    expected["merged"] = logits_of(AutoModelForCausalLM.from_pretrained(folder / "merged export"))
    expected["next"] = adapted_losses(engine, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "bf16": {"enabled": True}}
    whole = hybrid_engine.initialize(model=model_of(start), config=config)[0]
    adapted_losses(whole, range(NUM_STEPS))
    whole.save_16bit_model(folder / "export")
    whole.save_16bit_model(folder / "export as a state dict", "pytorch_model.bin")
    expected["weights"] = {name: value.clone() for name, value in whole.module.state_dict().items()}
    torch.save(expected, folder / "expected.pt")


def model_of(start: Path) -> nn.Module:
    """The model of `write_start`."""
    return AutoModelForCausalLM.from_pretrained(start / "model")


LEARNING = "--batch-size 8 --micro-batch-size 4 --learning-rate 1e-3 --save-every 2"
PREFERENCE = f"{LEARNING} --eval-every 1 --eval-rows 4 --eval-prompts 2 --max-new-tokens 4 --dataset pairs.jsonl"
LOOP = "--steps 4 --micro-batch-size 4 --save-every 2 --eval-every 1 --eval-prompts 2 --max-new-tokens 6"
SAMPLING = f"{LOOP} --rollout-size 4 --dataset problems.jsonl --reward golden_rewards:low"
PPO = f"ppo --model model {SAMPLING} --minibatch-size 4 --actor-lr 1e-3 --critic-lr 1e-3"
RUNS = {
    "sft": f"sft --model model --dataset answers.jsonl --max-examples 32 --eval-every 1 {LEARNING}",
    "reward": f"reward --model model --dataset pairs.jsonl --max-pairs 32 --eval-every 1 {LEARNING}",
    "reward-adapter": f"reward --model model --dataset pairs.jsonl --max-pairs 32 --lora-rank 2 {LEARNING}",
    "dpo": f"dpo --model model --max-pairs 32 --sft-weight 0.1 {PREFERENCE}",
    "kto": f"kto --model model --max-answers 32 {PREFERENCE}",
    "online-dpo": f"online-dpo --model model {SAMPLING} --group-size 2 --minibatch-size 4 --learning-rate 1e-3",
    "grpo": f"grpo --model model {SAMPLING} --group-size 4 --minibatch-size 8 --learning-rate 1e-3 --eval-samples 2 "
    "--preset deepseekmath --metric-names trl",
    "agent": f"agent --model calculator {LOOP} --rollout-size 2 --group-size 2 --num-clients 4 --learning-rate 1e-3 "
    "--max-prompt-tokens 64",
    "ppo": PPO,
    "ppo-shared-base": f"{PPO} --lora-rank 2 --shared-base --reward reward-adapter/reward",
}  # fmt: skip
"""Name of the run, which is its folder too: its command. In the order in which they are written."""
FINISHED = ("reward-adapter", "grpo", "dpo")
"""Runs of which the golden holds the finished folder too, below `whole/`."""
GENERATE = (
    "generate --model model --prompts few.jsonl --out few-answers.jsonl --num-samples 2 --max-new-tokens 6 --seed 3"
)


def command_of(name: str, out: str) -> list[str]:
    """The words of the run's command."""
    return [*RUNS[name].split(), "--out", out]


def _run_command(words: list[str], status: int = 0) -> None:
    found = importlib.import_module(OLD["command"]).main(words)
    assert found == status, f"{words} ended with status {found} instead of {status}"


def _stop_at(owner: Any, method: str, is_there: Callable[..., bool]) -> Callable[[], None]:
    """Raises Ctrl-C after the call of the method for which `is_there` holds; returns a function that undoes this."""
    real = getattr(owner, method)

    def stopping(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        if is_there(*args):
            raise KeyboardInterrupt

    setattr(owner, method, stopping)
    return lambda: setattr(owner, method, real)


def write_runs(folder: Path) -> None:
    """In `whole` and `stopped` each run to its end, and stopped a step after its only checkpoint."""
    for name in RUNS:
        _run_command(command_of(name, name))
    (folder / "whole").mkdir()
    log = importlib.import_module(OLD["run log"]).RunLog
    for name in RUNS:
        if name != "reward-adapter":  # which the last run reads
            shutil.move(folder / name, folder / "whole" / name)
        else:
            shutil.copytree(folder / name, folder / "whole" / name)
        (folder / "stopped").mkdir(exist_ok=True)
        undo = _stop_at(log, "write", lambda step, *others: step == 2)
        _run_command(command_of(name, f"stopped/{name}"), status=130)
        undo()
    keep_what_is_read(folder)


def keep_what_is_read(folder: Path) -> None:
    """Removes plots, and of whole runs that are not in `FINISHED` all but figures and last weights."""
    for path in (folder / "whole").iterdir():
        if path.name not in FINISHED:
            kept = {"metrics.jsonl", "result.json", "model.safetensors", "adapter_model.safetensors"}
            for file in path.rglob("*"):
                if file.is_file() and (file.name not in kept or {"best", "checkpoints"} & set(file.parts)):
                    file.unlink()
        else:
            for checkpoints in path.rglob("*checkpoints"):
                shutil.rmtree(checkpoints)
    for path in folder.rglob("plot.png"):
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def write_journal(folder: Path) -> None:
    """The journal of answers that were stopped after three rows, and the answers of a whole run."""
    _run_command(GENERATE.split())
    shutil.move(folder / "few-answers.jsonl", folder / "few-answers-expected.jsonl")
    journal = importlib.import_module(OLD["journal"]).Journal
    undo = _stop_at(journal, "add", lambda *others: num_added.append(1) or len(num_added) == 3)
    num_added: list[int] = []
    _run_command(GENERATE.split(), status=130)
    undo()


class Block(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to x [B, T, E]."""
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(8)

    def forward(self, sample: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of the next token."""
        x = self.embed(sample["ids"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), sample["ids"].roll(1).flatten(), reduction="sum")


num_plans: list[int] = []
"""Grows with each plan that the policy below makes."""


def columns_then_rows(graph: Any, config: Any) -> Any:
    """Megatron's layout of linears called `up` and `down`."""
    num_plans.append(1)
    plan = hybrid_engine.Plan(graph=graph, mesh=(config.plan_ngpus,))
    plan.place("*.up", out="n")
    plan.place("*.down", out="k")
    plan.follow("*")
    return plan


PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    "graph": (columns_then_rows, {"plan_ngpus": 2}),
    "eager": (columns_then_rows, {"plan_ngpus": 2, "lowering": "eager"}),
    "stages": ("pp", {"plan_ngpus": 2, "pas_config": {"pipeline_nmicros": 4}}),
    "ZeRO": ("dp", {"plan_ngpus": 1, "use_zero": True}),
}
"""By name: the policy, and the options of its config; each on two processes."""


def parallelized(folder: Path, name: str, reuse: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module under the plan in `folder`, and its optimizer."""
    policy, options = PLANS[name]
    torch.manual_seed(0)
    config = hybrid_engine.ComputeConfig(runtime_ngpus=2, use_end2end=True, **options)
    sample = {"sample": {"ids": torch.zeros((4, 6), dtype=torch.long)}}
    module = hybrid_engine.parallelize(Stack(), sample, policy, config, gen_savedir=folder, reuse=reuse)
    return module, hybrid_engine.build_optimizer(module, torch.optim.Adam, lr=0.01, eps=1e-3)


def parallel_norms(module: Any, optimizer: Any, steps: range) -> list[float]:
    """The norms of the gradients of steps over the same four samples, which the units share out."""
    num_units = 2 // module.compute_config.plan_ngpus
    unit, count = dist.get_rank() // module.compute_config.plan_ngpus, 4 // num_units
    norms = []
    for step in steps:
        samples = [{"ids": ids_of(100 * step + number, 0).repeat(2, 1)} for number in range(4)]
        module.train_step(samples[unit * count : (unit + 1) * count])
        norms.append(float(optimizer.clip_gnorm(0.7)))
        optimizer.step()
    return norms


def write_plan(rank: int, folder: Path, name: str) -> None:
    """The folder of plan and graph, and state dicts of two processes: whole, each one's, and each one's own share."""
    module, optimizer = parallelized(folder / name / "plans", name, "override")
    parallel_norms(module, optimizer, range(NUM_STEPS))
    states = {
        "plain": (module.state_dict(), optimizer.state_dict()),
        "deduped": hybrid_engine.deduped_state_dict(module, optimizer),
    }
    for kind, state in states.items():
        torch.save(state, folder / name / f"{kind}-{rank}.pt")
    dist.barrier()
    if rank == 0:
        files = [torch.load(folder / name / f"plain-{other}.pt") for other in range(2)]
        torch.save(hybrid_engine.merge_state_dicts(*zip(*files, strict=True)), folder / name / "merged.pt")
    norms = parallel_norms(module, optimizer, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS))
    torch.save(norms, folder / name / f"expected-{rank}.pt")


def build_planned_engine(folder: Path, seed: int = 0) -> Any:
    """A training engine over a module that two processes hold together, by the plan in the folder."""
    torch.manual_seed(seed)
    config = hybrid_engine.ComputeConfig(2, 2, lowering="eager")
    sample = {"sample": {"ids": torch.zeros((2, 6), dtype=torch.long)}}
    module = hybrid_engine.parallelize(Stack(), sample, columns_then_rows, config, gen_savedir=folder, reuse="match")
    options = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "scheduler": WARMUP}
    return hybrid_engine.initialize(model=module, config=options)[0]


def planned_steps(engine: Any, steps: range) -> list[float]:
    """Losses of steps on the same samples for both processes."""
    losses = []
    for step in steps:
        loss = engine({"ids": ids_of(step, 0)})
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def write_planned_engine(rank: int, folder: Path) -> None:
    """A checkpoint of an engine over a split module, and what it does next."""
    engine = build_planned_engine(folder / "plans")
    planned_steps(engine, range(NUM_STEPS))
    engine.save_checkpoint(folder / "checkpoint", "last", CLIENT_STATE)
    torch.save(planned_steps(engine, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS)), folder / f"expected-{rank}.pt")


def write_graph(folder: Path) -> None:
    """The folder of a plan on one process, whose graph is to be used again."""
    config = hybrid_engine.ComputeConfig(1, 1, use_end2end=True)
    sample = {"sample": {"ids": torch.zeros((4, 6), dtype=torch.long)}}
    torch.manual_seed(0)
    hybrid_engine.parallelize(Stack(), sample, "dp", config, gen_savedir=folder, reuse="graph")


CONSTRAINTS = "- modules: blocks.*.up\n  splits: [n]\n"


def plan_alone(folder: Path, **options: Any) -> dict[str, Any]:
    """The plan that `autodist` leaves in the folder, for two processes."""
    sample = {"sample": {"ids": torch.zeros((4, 6), dtype=torch.long)}}
    config = hybrid_engine.ComputeConfig(2, 2, use_end2end=True, pas_config=options)
    call = {"gen_savedir": folder, "reuse": "override", "load_module": False}
    hybrid_engine.parallelize(Stack(), sample, "autodist", config, **call)
    (file,) = folder.rglob("plan.json")
    return json.loads(file.read_text())


def write_planned(folder: Path) -> None:
    """Writes files that options of the planner name: constraints, and a plan that is kept elsewhere."""
    (folder / "constraints.yaml").write_text(CONSTRAINTS)
    files = {"partition_constraints_path": "constraints.yaml", "costs": "links.json", "save_plan_path": "plan.json"}
    plan_alone(folder / "autodist", **{option: str(folder / name) for option, name in files.items()})


def write_links(rank: int, folder: Path) -> None:
    """Writes the figures of `measure-links` between two processes."""
    _run_command(["measure-links", "--out", str(folder / "links.json"), "--megabytes", "1", "--repeats", "2"])


def write_alone(folder: Path) -> None:
    """Everything that one process writes."""
    for name, (world_size, _) in ENGINES.items():
        if world_size == 1:
            write_engine(0, folder / "engines", name)
    make_format_1(folder / "engines" / "format 1" / "last")
    write_graph(folder / "plans" / "graph to use again")
    write_planned(folder / "plans")
    start = folder / "runs"
    write_start(start)
    write_adapted(start, folder / "adapted")
    with chdir(start):
        write_runs(start)
        write_journal(start)


def write_on_two(rank: int, port: int, folder: Path) -> None:
    """Everything that two processes write together."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, (world_size, _) in ENGINES.items():
        if world_size == 2:
            write_engine(rank, folder / "engines", name)
    for name in PLANS:
        write_plan(rank, folder / "plans", name)
    write_planned_engine(rank, folder / "plans" / "engine")
    write_links(rank, folder / "plans")
    dist.destroy_process_group()


def cpu_of() -> str:
    """The name of this machine's CPU."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def versions_of() -> dict[str, str]:
    """Versions and CPU, on which the arithmetic depends in addition to the code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_of(),
    }


def main(target: str) -> None:
    """Writes all formats into the new folder `target`; from the root of the checkout that writes them."""
    folder = Path(target).absolute()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for name in ("runs", "engines", "adapted", "plans/engine", *(f"plans/{plan}" for plan in PLANS)):
        (folder / name).mkdir(parents=True)
    (folder / "about.json").write_text(json.dumps({"commit": commit, **versions_of()}, indent=1) + "\n")
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(write_on_two, (port, folder), 2, start_method="spawn")
    write_alone(folder)
