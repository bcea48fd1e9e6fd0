"""Processes that hold some of a model's layers each generate what one process generates, and end together."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers import InferenceModel
from hybrid_engine.distributed.verdict import HeldInterrupts
from hybrid_engine.generation.decode import DecodeStep
from hybrid_engine.generation.memory import build_sequences, plan_rollout
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.rollout.stages import split_plan
from hybrid_engine.inference import init_inference
from hybrid_engine.inference.checkpoint import Stored
from tests.support.distributed import run_distributed
from tests.support.models import PAD, VOCAB, padded_prompts, randomised

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": PAD, "eos_token_id": [7, 11, 23]}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.3, "num_return_sequences": 3, "seed": 5}
RULED = {**SAMPLED, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "no_repeat_ngram_size": 2, "top_logprobs": 2}
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "ruled": RULED}
LAYOUTS = {"pp2": (1, 2), "tp2 pp2": (2, 2), "pp4": (1, 4)}


def build_llama():
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=VOCAB, pad_token_id=PAD,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=64, vocab_size=VOCAB))


def build_lfm2():
    """Stages of convolutions alone, of both kinds of layers and, with four, of attention alone."""
    config = Lfm2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=VOCAB, pad_token_id=PAD, layer_types=["conv", "conv", "full_attention", "conv"],
    )  # fmt: skip
    return Lfm2ForCausalLM(config)


BUILDERS = {"llama": build_llama, "unlike layers": build_lfm2, "tied": build_gpt2}


def rolled(engine, kind):
    input_ids, mask = padded_prompts()
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **KINDS[kind])
    return output.sequences, output.logprobs, output.lengths, output.finish_reason


def scored(engine):
    """Log-probabilities of the prompts' own tokens, and the likeliest in their places."""
    input_ids, mask = padded_prompts()
    options = {**GREEDY, "max_new_tokens": 2, "prompt_logprobs": 2, "return_dict_in_generate": True}
    output = engine.generate(input_ids, attention_mask=mask, **options)
    return output.prompt_logprobs, output.prompt_top_tokens


def stage_of(model, folder, tp_size, num_stages):
    """An engine on what `folder` holds, and the names of the tensors that this process read."""
    read, stored = set(), Stored.read
    with torch.device("meta"):
        empty = type(model)(model.config)

    def noting(self, dim, ranges):
        read.add(self.key)
        return stored(self, dim, ranges)

    Stored.read = noting
    try:
        engine = init_inference(
            empty.eval(), checkpoint=str(folder), tensor_parallel={"tp_size": tp_size},
            pipeline_parallel_size=num_stages,
        )  # fmt: skip
    finally:
        Stored.read = stored
    return engine, read


class Breaks:
    """Raises `error` at call `at` of the function that it stands in the place of, which it counts."""

    def __init__(self, function, error=None, at=None):
        self.function, self.error, self.at, self.num_calls = function, error, at, 0

    def __call__(self, *args):
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.error
        return self.function(*args)


def failures(world_size):
    """Who stops where, at what, at which call: before a layer, in it, after all sums of a pass, in a draw."""
    last = world_size - 1
    return [
        (0, "_run_layers", ValueError("no luck"), 4),
        (last, "layer", ArithmeticError("no sum"), 5),
        (last // 2, "send_hidden", MemoryError("no room"), 1),
        (last, "_head", LookupError("no head"), 4),
        (0, "held", KeyboardInterrupt(), 3),
        (last, "draw", OSError("no draw"), 5),
    ]


def failing(engine, is_here, name, error, at):
    """What a rollout of many turns raises where `error` is raised in this process, and the tokens of the next one."""
    model = engine.generator.model
    places = {"held": (HeldInterrupts, "pass_on"), "draw": (DecodeStep, "draw"), "layer": (model.layers[-1], "forward")}
    place, name = places.get(name) or (model.links if name == "send_hidden" else model, name)
    function = getattr(place, name)
    broken = Breaks(function, error, at if is_here else None)
    setattr(place, name, (lambda *args: broken(*args)) if isinstance(place, type) else broken)
    try:
        rolled(engine, "sampled")
        raised = None
    except BaseException as caught:
        raised = type(caught), str(caught)
    finally:
        setattr(place, name, function)
    return raised, rolled(engine, "greedy")[0]


def failing_pass(engine, is_here):
    """What a pass without a draw raises where one process stops in it, and the logits of the next one."""
    layer, input_ids = engine.generator.model.layers[-1], padded_prompts()[0][::4]
    layer.forward = Breaks(layer.forward, LookupError("no way"), 1 if is_here else None)
    try:
        engine(input_ids)
        raised = None
    except Exception as error:
        raised = type(error), str(error)
    del layer.forward
    return raised, engine(input_ids).logits


def num_passes(engine):
    """Passes of this stage in a rollout of which all rows end long before they may."""
    counting = engine.generator.model.run_stage = Breaks(engine.generator.model.run_stage)
    input_ids, mask = padded_prompts()
    ends = list(range(VOCAB - 5))
    engine.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=50, eos_token_id=ends)
    del engine.generator.model.run_stage
    return counting.num_calls


def most_under_way(engine):
    """Turns of a rollout that the first stage has taken and not heard of yet."""
    links, most = engine.generator.model.links, [0]
    real = links.await_drawn

    def noting():
        real()
        most.append(links.num_awaited)

    links.await_drawn = noting
    rolled(engine, "sampled")
    del links.await_drawn
    return max(most)


def check_heads():
    """Told before a weight is read, on all processes."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=3, hidden_size=24, num_hidden_layers=2))
    with pytest.raises(ValueError, match="tp_size=2 must divide num_attention_heads=3"):
        init_inference(model, checkpoint="nowhere", tensor_parallel={"tp_size": 2}, pipeline_parallel_size=2)


def everything(rank, world_size, folder, layout):
    results = {}
    for family in BUILDERS:
        model = randomised(BUILDERS[family])
        engine, read = stage_of(model, folder / family, *LAYOUTS[layout])
        results[family] = {"read": read, **{kind: rolled(engine, kind) for kind in KINDS}, "scored": scored(engine)}
        input_ids, _ = padded_prompts()
        results[family]["report"] = engine.report()
        results[family]["logits"] = engine(input_ids[::4]).logits  # two rows without padding
    results["passes"] = num_passes(engine)
    results["under way"] = most_under_way(engine)
    if layout == "tp2 pp2":
        check_heads()
    results["failed"] = [failing(engine, rank == who, name, error, at) for who, name, error, at in failures(world_size)]
    results["passes failed"] = [failing_pass(engine, rank == who) for who in (0, world_size - 1)]
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family, build in BUILDERS.items():
        randomised(build).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, folder):
    tp_size, num_stages = LAYOUTS[request.param]
    return run_distributed(everything, tp_size * num_stages, folder, request.param)


@pytest.mark.parametrize("family", BUILDERS)
def test_stages_give_what_one_process_gives(ranks, family):
    engine = init_inference(randomised(BUILDERS[family]))
    input_ids, _ = padded_prompts()
    expected = {kind: rolled(engine, kind) for kind in KINDS}
    logprobs_of_prompts, likeliest = scored(engine)
    logits = engine(input_ids[::4]).logits
    for rank in ranks:
        for kind, (sequences, logprobs, lengths, reasons) in expected.items():
            own = rank[family][kind]
            assert torch.equal(own[0], sequences) and torch.equal(own[2], lengths) and own[3] == reasons
            torch.testing.assert_close(own[1], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(rank[family]["logits"], logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(rank[family]["scored"][0], logprobs_of_prompts, atol=1e-5, rtol=0)
        assert torch.equal(rank[family]["scored"][1], likeliest) and (logprobs_of_prompts != 0).any()


def test_a_stage_reads_nothing_of_the_other_stages(ranks):
    read = [rank["llama"]["read"] for rank in ranks]
    tp_size = 2 if len(ranks) == 4 and read[0] == read[1] else 1
    stages = read[::tp_size]
    for stage, names in enumerate(stages):
        assert ("model.embed_tokens.weight" in names) == (stage == 0)
        assert ("lm_head.weight" in names) == ("model.norm.weight" in names) == (stage == len(stages) - 1)
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in stages]
    assert sorted(number for of_stage in layers for number in of_stage) == ["0", "1", "2", "3", "4"]
    assert max(map(len, layers)) - min(map(len, layers)) <= 1
    tied = [rank["tied"]["read"] for rank in ranks][::tp_size]
    assert ["transformer.wte.weight" in names for names in tied] == [True] + [False] * (len(tied) - 2) + [True]


def test_the_report_names_what_a_stage_holds(ranks):
    first, last = ranks[0]["llama"]["report"], ranks[-1]["llama"]["report"]
    assert "of 5 LlamaDecoderLayer layers, embedding, as views" in first and "pipeline: stage 0 of" in first
    assert "of 5 LlamaDecoderLayer layers, final norm, LM head, as views" in last


def test_the_first_stage_goes_on_while_the_others_are_busy(ranks):
    """It waits for the tokens of a micro-batch only once it has passed on all of them: no stage is idle."""
    assert ranks[0]["under way"] == (
        4 if len(ranks) == 4 and ranks[0]["tied"]["read"] != ranks[1]["tied"]["read"] else 2
    )


def test_every_stage_knows_when_all_rows_have_ended(ranks):
    """Stages that do not hear of it would go on to the last token, and wait for each other."""
    passes = [rank["passes"] for rank in ranks]
    assert len(set(passes)) == 1 and passes[0] < 30


def test_an_error_of_one_process_is_raised_on_all_and_the_next_rollout_is_right(ranks):
    for number, rank in enumerate(ranks):
        for (raised, tokens), (who, _, error, _) in zip(rank["failed"], failures(len(ranks)), strict=True):
            assert torch.equal(tokens, rank["tied"]["greedy"][0])
            assert raised is not None and raised[0] is type(error) and str(error) in raised[1], raised
            assert number == who or f"rank {who}" in raised[1]
        for (raised, logits), who in zip(rank["passes failed"], (0, len(ranks) - 1), strict=True):
            assert raised == (LookupError, "no way" if number == who else f"rank {who}: no way")
            torch.testing.assert_close(logits, rank["tied"]["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size=6 must not exceed the model's 5 layers"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0"),
        ({"pipeline_parallel_size": 2, "tensor_parallel": {"tp_size": 2}}, "makes 4 processes .* of processes 1"),
        ({"pipeline_parallel_size": 2, "tensor_parallel": {"tp_group": object()}}, "leave tensor_parallel.tp_group"),
        ({"pipeline_parallel": 2}, "did you mean pipeline_parallel_size"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        init_inference(build_llama(), **options)


def test_a_model_without_containers_has_no_stages():
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: stages run on containers, and Linear has no"):
        init_inference(torch.nn.Linear(2, 2), pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "options", "rows"),
    [
        (5, 1, {}, [3, 2]),
        (1, 3, {}, [2, 1]),
        (1, 1, {}, [1]),
        (4, 2, {"max_running": 1}, [8]),
        (4, 1, {"max_kv_blocks": 3}, [4]),  # not enough for two sequences at a time
    ],
)
def test_rows_are_dealt_out_to_as_many_micro_batches_as_work(num_prompts, num_samples, options, rows):
    model = InferenceModel(build_llama())
    settings = [GenerationOptions(max_new_tokens=20, do_sample=True, num_return_sequences=num_samples)] * num_prompts
    sequences = build_sequences([[1, 2, 3]] * num_prompts, settings, num_samples)
    config = HybridEngineConfig(enabled=True, kv_block_size=16, **options)
    plan = plan_rollout(model, sequences, settings[0], config, 2**24)
    parts = split_plan(plan, 2)
    assert [len(part.sequences) for part in parts] == rows
    assert sum(part.num_blocks for part in parts) <= plan.num_blocks
    assert sum(part.max_running for part in parts) == plan.max_running
    prompts = [{sequence.prompt for sequence in part.sequences} for part in parts]
    assert not set.intersection(*prompts) or len(parts) == 1
