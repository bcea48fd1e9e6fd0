"""What must always hold: rollouts leave no trace in weights, training, modes, memory or other engines."""

import copy
import gc
import pickle

import pytest
import torch

import hybrid_engine
from tests.support.live_tensors import live_storages
from tests.support.models import BUILDERS, PAD, build_model, padded_prompts

ROLLOUT = {"do_sample": True, "top_k": 0, "max_new_tokens": 6, "pad_token_id": PAD}


def build_engine(model=None, lr=1e-2, **hybrid_config):
    config = {
        "train_batch_size": 6,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "hybrid_engine": {"enabled": True, **hybrid_config},
    }
    engine, *_ = hybrid_engine.initialize(model=model or build_model(), config=config)
    return engine


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_identical(before, after):
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def train_step(engine, input_ids, mask):
    loss = engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss
    engine.backward(loss)
    engine.step()


def live_bytes():
    return sum(storage.nbytes() for storage in live_storages().values())


@pytest.mark.parametrize("family", BUILDERS)
def test_every_parameter_moves_exactly_as_without_the_engine(family):
    input_ids, mask = padded_prompts()
    plain = build_model(family).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    engine = build_engine(build_model(family))
    for _ in range(3):
        engine.eval()
        engine.generate(input_ids, attention_mask=mask, **ROLLOUT)
        engine.train()
        torch.manual_seed(0)  # dropout, where a family has it
        train_step(engine, input_ids, mask)
        torch.manual_seed(0)
        plain(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = snapshot(build_model(family))
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
        is_buffer = name.endswith(("masked_bias", "layer_scalar", "e_score_correction_bias"))
        assert not torch.equal(tensor, moved[name]) or is_buffer, f"{name} is frozen"


def test_the_next_rollout_sees_the_new_weights_without_rebinding():
    input_ids, mask = padded_prompts()
    engine = build_engine(lr=0.3)
    engine.eval()
    before = engine.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    views = [linear.view[0].data_ptr() for linear in engine.convert_to_linear_transposed()]
    engine.train()
    train_step(engine, input_ids, mask)
    engine.eval()
    after = engine.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    trained = build_model()
    trained.load_state_dict(engine.module.state_dict())
    assert torch.equal(after, trained.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=8))
    assert not torch.equal(before, after)
    assert views == [linear.view[0].data_ptr() for linear in engine.convert_to_linear_transposed()]


def test_weights_are_bit_identical_around_a_rollout():
    input_ids, mask = padded_prompts()
    engine = build_engine()
    before = snapshot(engine.module)
    engine.eval()
    engine.generate(input_ids, attention_mask=mask, **ROLLOUT)
    engine.train()
    assert_identical(before, engine.module.state_dict())


@pytest.mark.parametrize("failing_pass", [0, 3])
def test_an_exception_in_generate_leaves_weights_mode_and_memory_as_they_were(monkeypatch, failing_pass):
    input_ids, mask = padded_prompts()
    engine = build_engine(release_inference_cache=True)
    engine.eval()
    expected = engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT)
    before, held = snapshot(engine.module), live_bytes()
    model, passes = engine.generator.model, []
    forward = model.forward

    def fail(*args):
        passes.append(1)
        if len(passes) > failing_pass:
            raise RuntimeError("power cut")
        return forward(*args)

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT)
    monkeypatch.undo()
    assert_identical(before, engine.module.state_dict())
    assert not engine.module.training and engine.generator.workspace.allocated_bytes == 0
    assert live_bytes() <= held
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT), expected)


def test_weights_that_are_not_finite_are_an_error_and_do_not_poison_the_next_rollout():
    input_ids, mask = padded_prompts()
    engine = build_engine()
    engine.eval()
    expected = engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT)
    weight = engine.module.model.layers[0].self_attn.k_proj.weight
    good = weight.detach().clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT)
    weight.data.copy_(good)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, seed=1, **ROLLOUT), expected)


def test_memory_after_a_rollout_is_what_it_was_when_the_cache_is_released():
    input_ids, mask = padded_prompts()
    engine = build_engine(release_inference_cache=True)
    engine.eval()
    engine.generate(input_ids, attention_mask=mask, **ROLLOUT)  # makes the rotary table
    before = live_bytes()
    engine.generate(input_ids, attention_mask=mask, **ROLLOUT)
    assert live_bytes() == before
    assert engine.generator.workspace.allocated_bytes == 0


def test_the_workspace_is_kept_released_and_retaken_by_name():
    input_ids, mask = padded_prompts()
    engine = build_engine()
    engine.eval()
    engine.generate(input_ids, attention_mask=mask, **ROLLOUT)
    cache, held = engine.generator.workspace.cache, engine.generator.workspace.allocated_bytes
    assert held > 0
    engine.release_inference_cache()
    assert engine.generator.workspace.allocated_bytes == 0 and engine.generator.workspace.cache is cache
    engine.retake_inference_cache()
    assert engine.generator.workspace.allocated_bytes == held
    engine.release_workspace()
    assert engine.generator.workspace.allocated_bytes == 0


def test_memory_is_flat_over_a_thousand_cycles(capsys):
    torch.manual_seed(0)
    input_ids, mask = torch.randint(3, 99, (2, 4)), torch.ones(2, 4, dtype=torch.int64)
    engine = build_engine()

    def cycles(count):
        for _ in range(count):
            engine.eval()
            engine.generate(input_ids, attention_mask=mask, max_new_tokens=2, do_sample=True, pad_token_id=PAD)
            engine.train()

    cycles(10)
    tensors, objects = live_bytes(), len(gc.get_objects())
    cycles(1000)
    assert live_bytes() == tensors
    assert len(gc.get_objects()) - objects < 100


def test_two_engines_in_one_process_do_not_touch_each_other():
    input_ids, mask = padded_prompts()
    options = {**ROLLOUT, "seed": 3}
    alone = [
        build_engine(build_model(seed=s)).eval().generate(input_ids, attention_mask=mask, **options) for s in (0, 1)
    ]
    first, second = build_engine(build_model(seed=0)), build_engine(build_model(seed=1), release_inference_cache=True)
    before = snapshot(second.module)
    first.eval()
    second.eval()
    together = [engine.generate(input_ids, attention_mask=mask, **options) for engine in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    first.train()
    train_step(first, input_ids, mask)
    assert_identical(before, second.module.state_dict())
    assert not second.module.training
    assert torch.equal(second.generate(input_ids, attention_mask=mask, **options), alone[1])
    assert second.latency_stats()["num_samples"] == 2 * first.latency_stats()["num_samples"]


def test_building_an_engine_draws_no_random_numbers_and_keeps_every_mode():
    model = build_model("gpt2").train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    build_engine(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [m.training for m in model.modules()]


def test_a_copy_of_the_module_generates_by_itself_and_breaks_no_engine():
    input_ids, mask = padded_prompts()
    engine = build_engine(lr=0.3)
    greedy = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD}
    expected = engine.eval().generate(input_ids, attention_mask=mask, **greedy)
    pickled = pickle.dumps(engine.module)
    copies = [copy.deepcopy(engine.module), pickle.loads(pickled)]
    assert len(pickled) < 1.5 * sum(p.nbytes for p in engine.module.parameters()), "no engine came along"
    engine.train()
    train_step(engine, input_ids, mask)
    engine.eval()
    assert not torch.equal(engine.generate(input_ids, attention_mask=mask, **greedy), expected)
    for reference in copies:
        assert torch.equal(reference.generate(input_ids, attention_mask=mask, **greedy), expected)


def test_a_second_engine_on_the_same_model_knows_nothing_of_the_first():
    model = build_model()
    first = build_engine(model, max_out_tokens=12).eval()
    second = build_engine(model).eval()
    input_ids, mask = padded_prompts()
    foreign = {"do_sample": False, "max_new_tokens": 9, "encoder_no_repeat_ngram_size": 2}
    output = second.generate(input_ids, attention_mask=mask, **foreign)
    assert torch.equal(output, build_model().generate(input_ids, attention_mask=mask, **foreign))
    assert first.latency_stats()["num_samples"] == 0


def test_greedy_and_foreign_rollouts_do_not_move_torchs_generator():
    input_ids, mask = padded_prompts()
    engine = build_engine().eval()
    state = torch.get_rng_state()
    engine.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=3)
    engine.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=3, encoder_no_repeat_ngram_size=2)
    engine.generate(
        input_ids, attention_mask=mask, do_sample=True, max_new_tokens=3, encoder_no_repeat_ngram_size=2, seed=3
    )
    engine.generate(input_ids, attention_mask=mask, do_sample=True, max_new_tokens=3, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_rollout_inside_another_context_is_the_same_and_leaves_nothing_behind(context):
    input_ids, mask = padded_prompts()
    engine = build_engine().eval()
    expected = engine.generate(input_ids, attention_mask=mask, seed=2, **ROLLOUT)
    engine.release_workspace()
    with context():
        assert torch.equal(engine.generate(input_ids, attention_mask=mask, seed=2, **ROLLOUT), expected)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, seed=2, **ROLLOUT), expected)


def test_reading_weights_that_are_no_longer_there_is_an_error():
    input_ids, mask = padded_prompts()
    engine = build_engine().eval()
    engine.generate(input_ids, attention_mask=mask, **ROLLOUT)
    norm = engine.generator.model.layers[0].attention_norm
    norm.gamma = norm.gamma.clone()
    norm.gamma.untyped_storage().resize_(0)  # as FSDP leaves a parameter when it reshards
    cache = engine.generator.workspace.cache.layers[0]
    with pytest.raises(RuntimeError, match="layer 0 reads weights that are not gathered"):
        engine.generator.model.layers[0].forward(torch.zeros(1, 48), None, cache, None)
