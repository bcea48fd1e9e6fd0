"""NCCL on several GPUs: sharded training and shared rollouts give what one process gives.

`REHEARSE_WITHOUT_GPU=1` runs the same on two gloo processes without GPUs (`make gpu DEVICE=cpu` sets it).
"""

import os

import pytest
import torch

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.gpu_processes import run_on_gpus
from tests.support.models import build_model
from tests.support.training_reference import batches, engine_config, relative_error, train_plainly, whole_weights

pytestmark = pytest.mark.multigpu
WORLD_SIZE, STEPS = 2, 3
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12]]
"""One for each process."""
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
# Adam's kernels, NCCL's sums and cuBLAS's products each have an order of their own; parameters are O(1) of their size.
TOLERANCE = 1e-4


def run_processes(worker, *args):
    """A GPU for each process; or, in a rehearsal, none."""
    if os.environ.get("REHEARSE_WITHOUT_GPU") == "1":
        return run_distributed(worker, WORLD_SIZE, *args)
    count = torch.cuda.device_count()
    if count < WORLD_SIZE:
        pytest.skip(f"needs {WORLD_SIZE} CUDA devices, this machine has {count}; REHEARSE_WITHOUT_GPU=1 runs on CPUs")
    return run_on_gpus(worker, WORLD_SIZE, *args)


def _train_and_generate(rank, world_size, cases):
    """For each case: this rank's devices, tokens before and after training, and the weights after it."""
    found = {}
    for name, (stage, tp_size) in cases.items():
        options = {"enabled": True, "max_out_tokens": 16, "print_latency": False, "inference_tp_size": tp_size}
        config = engine_config(stage, world_size, hybrid_engine=options)
        engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
        assert engine.generator.fallback_reason is None
        prompts = torch.tensor([PROMPTS[rank]], device=engine.device)
        before = engine.eval().generate(prompts, **OPTIONS).tolist()
        engine.train()
        for micro_batches in batches(STEPS):
            for tokens in micro_batches[rank::world_size]:
                tokens = tokens.to(engine.device)
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
        weights = {key: weight.cpu() for key, weight in whole_weights(engine).items()}
        after = engine.eval().generate(prompts, **OPTIONS).tolist()
        found[name] = (str(engine.device), before, after, weights)
    return found


CASES = {**{f"stage {stage}": (stage, 1) for stage in (1, 2, 3)}, "tensor parallel": (3, 2)}


def test_sharded_training_and_shared_rollouts_on_several_devices_equal_one_process():
    ranks = run_processes(_train_and_generate, CASES)
    trained = train_plainly(build_model(), STEPS)
    own = build_model().eval()
    first = [own.generate(torch.tensor([prompt]), **OPTIONS).tolist() for prompt in PROMPTS]
    own.load_state_dict(trained.weights, strict=False)
    last = [own.generate(torch.tensor([prompt]), **OPTIONS).tolist() for prompt in PROMPTS]
    on_gpus = os.environ.get("REHEARSE_WITHOUT_GPU") != "1"
    for name in CASES:
        for rank, results in enumerate(ranks):
            device, before, after, weights = results[name]
            assert device == (f"cuda:{rank}" if on_gpus else "cpu"), name
            assert before == first[rank], name
            assert relative_error(weights, trained.weights) < TOLERANCE, name
            assert after == last[rank], name
