"""TRL's DPO and KTO with the reference's log-probabilities computed first, as `precompute_ref_log_probs` has it.

TRL then builds an engine for the reference, and accelerate another on the same model to train it.
"""

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer, LlamaForCausalLM

import hybrid_engine
from tests.engine.test_attach_trl import COMMON, folder, tokenizer  # noqa: F401  fixtures
from tests.support.distributed import run_distributed

BATCH = 4
CONFIG = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
}
PAIRS = {
    "prompt": [f"w{n} w{n + 1}" for n in range(12)],
    "chosen": [f" w{n + 3} w{n % 5}" for n in range(12)],
    "rejected": [f" w{(5 * n) % 30}" for n in range(12)],
}
LABELLED = {
    "prompt": PAIRS["prompt"],
    "completion": [(PAIRS["chosen"] if n % 2 else PAIRS["rejected"])[n] for n in range(12)],
    "label": [bool(n % 2) for n in range(12)],
}
TRAINERS = {
    "DPO": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
    # KTO's own loss has a KL of the rows of one process, which other numbers of processes change.
    "KTO": (trl.KTOTrainer, trl.KTOConfig, LABELLED, {"loss_type": "apo_zero_unpaired"}),
}


def rows_of(name, output):
    """The rows on disk, where TRL's processes find what the first of them computed."""
    path = output / f"rows of {name}"
    if not path.exists():
        Dataset.from_dict(TRAINERS[name][2]).save_to_disk(path)
    return path


def losses(name, folder, output, num_processes=1, stage=None):  # noqa: F811
    """The losses of three steps."""
    trainer_class, config_class, _, options = TRAINERS[name]
    deepspeed = {} if stage is None else {"deepspeed": {**CONFIG, "zero_optimization": {"stage": stage}}}
    common = {**COMMON, "per_device_train_batch_size": BATCH // num_processes}
    trainer = trainer_class(
        model=LlamaForCausalLM.from_pretrained(folder),
        args=config_class(output_dir=str(output), precompute_ref_log_probs=True, **common, **options, **deepspeed),
        train_dataset=load_from_disk(rows_of(name, output)),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(rank, world_size, folder, output):  # noqa: F811
    """The losses of each trainer at stage 3."""
    hybrid_engine.enable_compat()
    found = {}
    for name in TRAINERS:
        found[name] = losses(name, folder, output, world_size, 3)
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):  # noqa: F811
    output = tmp_path_factory.mktemp("runs")
    for name in TRAINERS:
        rows_of(name, output)
    return run_distributed(train, 2, folder, output)


@pytest.mark.parametrize("name", TRAINERS)
def test_the_losses_on_two_processes_are_those_without_deepspeed(name, runs, folder, tmp_path):  # noqa: F811
    torch.manual_seed(1)
    expected = losses(name, folder, tmp_path)
    assert len(set(expected)) == len(expected) == COMMON["max_steps"]
    assert runs[0][name] == pytest.approx(expected, abs=1e-5)
