"""What only a GPU decides, end to end: rollouts in bf16 against the model itself, recordings and memory over cycles.

Without a GPU the same runs on the references, so that the tests themselves are known to work.
"""

import copy
import gc

import pytest
import torch

import hybrid_engine
from tests.support.live_tensors import live_storages
from tests.support.models import PAD, WIDE_FAMILIES, WIDE_VOCAB, module_logprobs, padded_prompts, randomised
from tests.support.tape import TapeRecorder

pytestmark = pytest.mark.gpu
CUDA = torch.cuda.is_available()


def build(model, **config):
    """An engine that trains `model` in bf16; its steps are recorded, on a CPU on a tape."""
    config = {"enabled": True, "max_out_tokens": 64, "print_latency": False} | config
    engine, *_ = hybrid_engine.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "hybrid_engine": config,
        },
    )
    assert engine.generator.fallback_reason is None
    if not CUDA and not engine.generator.model.has_experts:
        engine.generator.native.steps.recorder = TapeRecorder()
        engine.generator.native.lag = 1
    return engine.eval()


def roll_out(engine, **options):
    """Samples, two of each of six padded prompts."""
    input_ids, mask = padded_prompts(width=21)
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, "num_return_sequences": 2, "seed": 3} | options
    return engine.generate(
        input_ids.to(engine.device), mask.to(engine.device), pad_token_id=PAD, return_dict_in_generate=True, **options
    )


def responses_of(output):
    """True where a row's answer is, whose end it may have drawn."""
    lengths = torch.as_tensor(output.lengths, device=output.logprobs.device)
    return torch.arange(output.logprobs.shape[1], device=lengths.device) < lengths[:, None]


def train_step(engine):
    """On the same few tokens."""
    engine.train()
    tokens = padded_prompts()[0][:1].to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.eval()


@pytest.mark.parametrize("family", WIDE_FAMILIES)
def test_log_probabilities_of_a_rollout_in_bf16_are_as_near_to_fp32_as_the_models_own(family):
    torch.manual_seed(0)
    engine = build(WIDE_FAMILIES[family]())
    output = roll_out(engine)
    mask = padded_prompts(width=21)[1].repeat_interleave(2, dim=0).to(engine.device)
    is_response = responses_of(output)
    exact = module_logprobs(copy.deepcopy(engine.module).float(), output.sequences, mask)
    own = (module_logprobs(engine.module, output.sequences, mask) - exact)[is_response].abs()
    ours = (output.logprobs - exact)[is_response].abs()
    assert len(ours) > 200
    # Both round at every operator, at other places; a router's choice may then fall the other way in either.
    assert ours.mean() <= 2 * own.mean() + 1e-4
    assert ours.max() <= 4 * own.max()


def test_steps_are_recorded_in_the_first_rollout_and_serve_all_that_follow_in_bf16():
    engine = build(randomised(WIDE_FAMILIES["llama"]))
    captures, mask = [], padded_prompts(width=21)[1].repeat_interleave(2, dim=0).to(engine.device)
    for _ in range(4):
        output = roll_out(engine, eos_token_id=WIDE_VOCAB - 1)
        captures.append(engine.latency_stats()["graph_captures"])
        # The replay read the weights of this step, not those it was recorded with.
        difference = (module_logprobs(engine.module, output.sequences, mask) - output.logprobs).abs()
        assert difference[responses_of(output)].mean() < 0.1
        train_step(engine)
    assert captures[0] > 0 and captures[2:] == [0, 0]


def held_bytes():
    """Of the device's allocator; without a GPU, of all tensors that live."""
    if not CUDA:
        return sum(storage.nbytes() for storage in live_storages().values()), 0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("release", [False, True], ids=["workspace kept", "workspace released"])
def test_memory_is_flat_over_200_cycles_of_rollout_and_training(release):
    engine = build(WIDE_FAMILIES["llama"](), release_inference_cache=release)
    if not CUDA:
        engine.generator.native.steps.recorder = None  # the tape keeps all that was ever recorded

    def cycles(count):
        for _ in range(count):
            roll_out(engine, max_new_tokens=3)
            train_step(engine)

    cycles(5)
    allocated, reserved = held_bytes()
    cycles(200 if CUDA else 10)
    allocated_after, reserved_after = held_bytes()
    assert allocated_after <= allocated
    assert reserved_after <= reserved
