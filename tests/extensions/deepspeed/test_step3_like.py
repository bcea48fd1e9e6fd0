"""A script in DeepSpeed's calling style (compat/step3_like.py) against the same algorithm in plain PyTorch."""

import itertools
import json
import os

import plain_ppo
import pytest
import step3_like
import torch
from tiny_models import ValueModel, prompt_batch
from transformers import LlamaForCausalLM

from tests.support.distributed import run_distributed
from tests.support.fresh_python import executable, run_python

pytestmark = pytest.mark.long


def stages(actor, critic):
    return ["--actor_zero_stage", str(actor), "--critic_zero_stage", str(critic)]


SHORT = ["--steps", "2"]
ONCE = [*SHORT, "--ppo_epochs", "1"]
PLAIN_LORA = ["--actor_lora_dim", "4"]
LORA = [*PLAIN_LORA, "--enable_ema"]
FP16 = ["--dtype", "fp16", "--initial_scale_power", "8", "--loss_scale_window", "4", "--record_norms", *SHORT]
ALONE = {
    "stage 0, micro-batches": [*LORA, "--gradient_accumulation_steps", "2"],
    "stage 3": [*LORA, *stages(3, 3), "--offload"],
}
ON_TWO = {
    "stage 0, micro-batches": [*LORA, *ONCE, "--gradient_accumulation_steps", "2"],
    "stage 1, recomputed": [
        *LORA,
        *ONCE,
        *stages(1, 1),
        "--actor_gradient_checkpointing",
        "--critic_gradient_checkpointing",
    ],
    "stage 2, offloaded": [*LORA, *ONCE, *stages(2, 2), "--offload"],
    "stage 3, offloaded": [*LORA, *ONCE, *stages(3, 3), "--offload", "--offload_reference_model"],
    "stage 3, only LoRA, streamed": [
        *PLAIN_LORA,
        *ONCE,
        *stages(3, 2),
        "--only_optimize_lora",
        "--unpin_actor_parameters",
        "--actor_gradient_checkpointing",
    ],
    "stage 3, sampled": [*ONCE, *stages(3, 3), "--do_sample", "--release_inference_cache"],
}
OVERFLOWS = [1, 2]
FP16_ON_TWO = {
    "aligned": [*PLAIN_LORA, *stages(3, 2), *FP16, "--align_overflow", "--inject_overflow_at", *map(str, OVERFLOWS)],
    "not aligned": [*stages(1, 0), *FP16, "--inject_overflow_at", *map(str, OVERFLOWS)],
}

IN_16_BITS = {
    name: [*PLAIN_LORA, *stages(3, 3), "--dtype", name, "--initial_scale_power", "8"] for name in ("bf16", "fp16")
}
OFFLOADS = {
    f"{name}, {where}": [*argv, *SHORT, *(["--offload"] if where == "offloaded" else [])]
    for name, argv in IN_16_BITS.items()
    for where in ("on the device", "offloaded")
}
# On a CPU "offloaded" computes the same; that processes come together in it one dtype shows.
OFFLOADS_ON_TWO = {name: argv for name, argv in OFFLOADS.items() if name.startswith("bf16")}

KILLED = "stage 3, offloaded"


def checkpointed(folder):
    return [*ON_TWO[KILLED], "--checkpoint_dir", str(folder / "checkpoints")]


def run_cases(rank, world_size, cases, folder):
    return {name: step3_like.main([*argv, "--output_dir", str(folder / name)]) for name, argv in cases.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("step3")


@pytest.fixture(scope="module")
def killed(folder):
    """What torchrun said of a run, started as a user does, that died before its second batch of prompts was saved."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = [step3_like.__file__, *checkpointed(folder), "--output_dir", str(folder / "killed"), "--crash_at", "1"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHON_EXEC": executable()}
    return run_python(*command, *script, env=environment)


@pytest.fixture(scope="module")
def two_ranks(killed, folder):
    """The records of all cases on each of two processes, which began by resuming the killed run."""
    resumed = {"resumed": [*checkpointed(folder), "--resume"]}
    return run_distributed(run_cases, 2, {**resumed, **ON_TWO, **FP16_ON_TWO, **OFFLOADS_ON_TWO}, folder)


def load(file):
    return torch.load(file, map_location="cpu")


def assert_is_plain_run(argv, records, folder):
    """Every process's losses and sequences, and the saved weights, are those of plain PyTorch."""
    args = step3_like.parse_args(argv)
    rollouts = zip(*(record["sequences"] for record in records), strict=True)
    sequences = [[torch.tensor(rows) for rows in rollout] for rollout in rollouts]
    plain = plain_ppo.run(args, len(records), sequences if args.do_sample else None)
    for shard, record in enumerate(records):
        losses = [(row["actor_loss"], row["critic_loss"]) for row in record["training"]]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain.losses[shard]), rtol=1e-5, atol=1e-6)
        assert record["num_params"] == plain.num_params
        assert record["sequences"] == [rollout[shard].tolist() for rollout in plain.sequences]
    assert set(plain.weights) == {path.name for path in folder.iterdir() if path.is_dir()}
    for name, weights in plain.weights.items():
        saved = load(folder / name / "pytorch_model.bin")
        torch.testing.assert_close(saved, weights, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ALONE)
def test_on_one_process_losses_and_weights_are_those_of_plain_pytorch(name, folder):
    argv, output = ALONE[name], folder / "alone" / name
    record = step3_like.main([*argv, "--output_dir", str(output)])
    assert json.loads((output / "record_0.json").read_text()) == record
    assert_is_plain_run(argv, [record], output)


@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_processes_losses_and_weights_are_those_of_plain_pytorch(name, two_ranks, folder):
    assert_is_plain_run(ON_TWO[name], [results[name] for results in two_ranks], folder / name)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_in_16_bits_losses_are_those_of_fp32_up_to_rounding(name, dtype):
    argv = [*LORA, *stages(2, 2), "--dtype", name, "--initial_scale_power", "8"]
    record = step3_like.main(argv)
    sequences = [[torch.tensor(rows)] for rows in record["sequences"]]
    plain = plain_ppo.run(step3_like.parse_args(argv), num_shards=1, sequences=sequences)
    losses = torch.tensor([(row["actor_loss"], row["critic_loss"]) for row in record["training"]])
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(losses, torch.tensor(plain.losses[0]), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def alone(folder):
    """The records of one process, in 16 bits with and without offload."""
    return run_cases(0, 1, OFFLOADS, folder / "alone")


@pytest.mark.parametrize("dtype", IN_16_BITS)
def test_offload_changes_no_number_in_16_bits_with_rollouts_between_the_steps(dtype, alone, two_ranks, folder):
    on_two = [(two_ranks, folder)] if f"{dtype}, offloaded" in OFFLOADS_ON_TWO else []
    for runs, place in [([alone], folder / "alone"), *on_two]:
        for results in runs:
            kept, offloaded = (results[f"{dtype}, {where}"] for where in ("on the device", "offloaded"))
            assert kept["training"] == offloaded["training"] and len(kept["training"]) == 8
            assert kept["sequences"] == offloaded["sequences"]
        for role in ("actor", "critic"):
            weights, expected = (
                load(place / f"{dtype}, {where}" / role / "pytorch_model.bin")
                for where in ("on the device", "offloaded")
            )
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_saved_models_load_with_from_pretrained_and_give_the_logits_of_plain_pytorch(two_ranks, folder):
    """Below stage 3 from the state dict of rank 0, at stage 3 from parameters gathered one at a time."""
    prompts, _ = prompt_batch(step=9, rank=0, num_prompts=3)
    for name in ("stage 2, offloaded", "stage 3, offloaded"):
        args = step3_like.parse_args(ON_TWO[name])
        plain = plain_ppo.run(args, num_shards=2)
        for role in ("actor", "actor_ema"):
            model, loading = LlamaForCausalLM.from_pretrained(folder / name / role, output_loading_info=True)
            assert not any(loading.values())
            expected = torch.func.functional_call(model, plain.weights[role], prompts).logits
            torch.testing.assert_close(model(prompts).logits, expected, rtol=1e-5, atol=2e-5)
        ValueModel(seed=0).load_state_dict(load(folder / name / "critic" / "pytorch_model.bin"))


def calls(records, name):
    """A column of each process's training calls."""
    return [[row[name] for row in record["training"]] for record in records]


@pytest.mark.parametrize("name", FP16_ON_TWO)
def test_an_overflow_on_one_rank_skips_the_step_on_every_rank_and_halves_the_scale_that_then_grows(name, two_ranks):
    records = [results[name] for results in two_ranks]
    skipped = [call in OVERFLOWS for call in range(8)]
    assert calls(records, "actor_overflow") == [skipped, skipped]
    # The first overflow is forgiven; the step after four clean ones doubles the scale, as DeepSpeed's does.
    scales = [2.0**8] * 2 + [2.0**7] * 5 + [2.0**8]
    assert calls(records, "actor_scale") == [scales, scales]
    assert_moved_unless(skipped, calls(records, "actor_norm"))
    is_aligned = name == "aligned"
    critic_skipped = skipped if is_aligned else [False] * 8
    assert calls(records, "critic_overflow") == [critic_skipped, critic_skipped]
    assert_moved_unless(critic_skipped, calls(records, "critic_norm"))
    assert all(scale >= 2.0**8 for scale in calls(records, "critic_scale")[0])  # the critic has not overflowed


def assert_moved_unless(skipped, norms):
    """The weights, of which both ranks see the same norm, changed at every call but the skipped ones."""
    assert norms[0] == norms[1]
    stayed = [before == after for before, after in itertools.pairwise(norms[0])]
    assert stayed == skipped[1:]


def test_a_run_that_was_killed_goes_on_with_the_losses_it_would_have_had(killed, two_ranks, folder):
    assert "SIGKILL" in killed.stderr, killed.stderr
    assert not (folder / "killed").exists()
    for record in two_ranks:
        resumed, uninterrupted = record["resumed"], record[KILLED]
        assert resumed["first_step"] == 1
        assert resumed["sequences"] == uninterrupted["sequences"][1:]
        assert resumed["training"] == uninterrupted["training"][2:]
    for role in ("actor", "critic", "actor_ema"):
        weights, expected = (load(folder / run / role / "pytorch_model.bin") for run in ("resumed", KILLED))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
