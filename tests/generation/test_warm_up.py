"""The wide probe meets what large rollouts meet, once per model and device; a warm-up records what they replay."""

import re

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.generation.model import container_probe, probe
from hybrid_engine.generation.model.probe import probe_containers, probe_widely, widened
from hybrid_engine.ops import PrefillBatch
from hybrid_engine.ops.cpu_library import VARIABLE
from tests.support.models import PAD, build_model, padded_prompts
from tests.support.tape import TapeRecorder


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "probes"


def build_engine(family="llama", **options):
    options = {"enabled": True, "max_out_tokens": 64, "kv_block_size": 4} | options
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "hybrid_engine": options}
    engine, *_ = hybrid_engine.initialize(model=build_model(family), config=config)
    return engine.eval()


def containers_of(model):
    containers = InferenceModel(model)
    containers.bind()
    return containers


def wrong_where(containers, is_wrong):
    """Containers whose logits are one token off in the batches that `is_wrong` picks."""
    forward = containers.forward

    def changed(batch, kv, layers):
        logits = forward(batch, kv, layers)
        return logits.roll(1, dims=-1) if is_wrong(batch) else logits

    containers.forward = changed


class Forgetful(TapeRecorder):
    """Steps that are replayed with the numbers of when they were recorded."""

    def capture(self, run):
        super().capture(run)
        return lambda: None


WRONG = {
    "prefill": lambda batch: isinstance(batch, PrefillBatch) and len(batch.tokens) > 256,
    "decode of 1 rows": lambda batch: not isinstance(batch, PrefillBatch) and batch.context > 256,
    "decode of 8 rows": lambda batch: not isinstance(batch, PrefillBatch) and len(batch.tokens) == 8,
    "decode of 64 rows": lambda batch: len(batch.tokens) == 64,
    "decode of 128 rows": lambda batch: len(batch.tokens) == 128,
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_wide_probe_finds_what_only_large_batches_do_wrong(family, what):
    model = build_model(family)
    containers = containers_of(model)
    probe_widely(model, containers, lambda: containers.layers, 64)
    wrong_where(containers, WRONG[what])
    probe_containers(model, containers, lambda: containers.layers)  # meets none of it
    with pytest.raises(UnsupportedModelError, match=re.escape(f"({what})")):
        probe_widely(model, containers, lambda: containers.layers, 64)


def test_the_wide_probe_replays_a_recorded_step_for_other_rows():
    model = build_model()
    containers = containers_of(model)
    probe_widely(model, containers, lambda: containers.layers, 64, TapeRecorder())
    with pytest.raises(UnsupportedModelError, match=r"\(a recorded step\)"):
        probe_widely(model, containers, lambda: containers.layers, 64, Forgetful())


def test_a_widened_forward_is_the_fp32_models_and_leaves_every_parameter_where_it_was():
    model, wide = build_model().bfloat16(), build_model().bfloat16().float()
    input_ids, _ = padded_prompts()
    before = {name: (id(p), p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with torch.no_grad(), widened(model, model.model.layers):
        assert torch.equal(model(input_ids).logits, wide(input_ids).logits)
        with pytest.raises(IndexError):
            model(input_ids + 10**6)  # after an error too
    for name, parameter in model.named_parameters():
        identity, address, value = before[name]
        assert (id(parameter), parameter.data_ptr()) == (identity, address) and torch.equal(parameter, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_bound_is_the_models_own_error_and_not_a_number_for_all(dtype):
    """0.2 nats are far beyond what rounding does to this model, and were accepted when the bound was 0.25."""
    model = build_model().to(dtype)
    containers = containers_of(model)
    difference = probe_containers(model, containers, lambda: containers.layers)
    assert 0 < difference.max < 0.05
    forward = containers.forward
    tilt = torch.linspace(-0.1, 0.1, containers.vocab_size)
    containers.forward = lambda *args: forward(*args) + tilt
    with pytest.raises(UnsupportedModelError, match="more than rounding"):
        probe_containers(model, containers, lambda: containers.layers)


def test_a_token_that_rounding_sends_to_other_experts_is_no_wrong_function():
    """In bf16 with experts one place in twenty may be far off, and one in five may not; without experts none."""

    def probed(family, step):
        model = build_model(family).bfloat16()
        containers = containers_of(model)
        forward = containers.forward

        def flipped(batch, kv, layers):
            logits = forward(batch, kv, layers)
            if isinstance(batch, PrefillBatch):
                logits[::step] = logits[::step].roll(1, dims=-1)
            return logits

        containers.forward = flipped
        return probe_widely(model, containers, lambda: containers.layers, 64)

    assert probed("mixtral", 20).max > 0.3
    for family, step in (("mixtral", 5), ("llama", 20)):
        with pytest.raises(UnsupportedModelError):
            probed(family, step)


def test_a_verdict_is_kept_by_model_device_and_versions(monkeypatch, empty_cache):
    runs = []

    def counted(*args):
        runs.append(1)
        return probe.probe_widely(*args)

    monkeypatch.setattr(container_probe, "probe_widely", counted)

    def num_runs(engine):
        runs.clear()
        engine.warm_up()
        return len(runs)

    assert num_runs(build_engine()) == 1
    assert num_runs(build_engine()) == 0
    assert num_runs(build_engine("gpt2")) == 1
    assert num_runs(build_engine(kv_block_size=8)) == 1
    (first, *_) = sorted(empty_cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first.write_text("{")  # damaged
    assert num_runs(build_engine()) == 1
    assert num_runs(build_engine()) == 0
    monkeypatch.setattr(container_probe.metadata, "version", lambda package: "0")
    assert num_runs(build_engine()) == 1


def test_a_model_that_fails_the_wide_probe_generates_by_itself(empty_cache):
    engine = build_engine()
    wrong_where(engine.generator.model, WRONG["decode of 64 rows"])
    engine.warm_up()
    assert "decode of 64 rows" in engine.generator.fallback_reason and not empty_cache.exists()
    input_ids, mask = padded_prompts()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = build_model().generate(input_ids, attention_mask=mask, **options)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **options), expected)


@pytest.mark.gpu
def test_after_a_warm_up_no_rollout_records_anything(empty_cache, capsys):
    engine = build_engine()
    native = engine.generator.native
    native.steps.recorder = native.steps.recorder or TapeRecorder()
    state = torch.random.get_rng_state()
    options = {"do_sample": True, "top_k": 0, "pad_token_id": PAD}
    result = engine.warm_up(num_prompts=6, prompt_length=4, **options)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert result.graphs == 4  # 1, 2, 4 and 8 rows
    assert (result.probe_seconds > 0) != torch.cuda.is_available()  # on a GPU the engine was probed when it was built
    assert result.seconds >= result.probe_seconds + result.graph_seconds > 0
    probe = "nothing to probe" if torch.cuda.is_available() else r".* for the probe"
    assert re.search(rf"warm-up: .* s, of these {probe} and .* for 4 graphs", capsys.readouterr().out)
    input_ids, mask = (tensor.to(engine.device) for tensor in padded_prompts())
    engine.generate(input_ids, attention_mask=mask, max_new_tokens=55, seed=1, **options)
    assert engine.latency_stats()["graph_captures"] == 0


def test_init_inference_warms_up_too():
    engine = hybrid_engine.init_inference(build_model(), max_out_tokens=64)
    assert engine.warm_up().probe_seconds > 0
    assert engine.warm_up(num_prompts=2, prompt_length=3).probe_seconds == 0
    with pytest.raises(ValueError, match="num_prompts=0"):
        engine.warm_up(num_prompts=0)
