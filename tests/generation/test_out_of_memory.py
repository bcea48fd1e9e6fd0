"""Where one rank alone runs out of memory, all go on with less, and the results are those of a run with enough."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForSequenceClassification

import hybrid_engine
from hybrid_engine.distributed.verdict import describe_error, is_out_of_memory
from hybrid_engine.recipes import kto, reward, sft
from hybrid_engine.rlhf.batches.passes import RunPasses, until_it_fits
from hybrid_engine.rlhf.batches.sequences import ValueModel, build_sequences, in_parts, response_logprobs
from hybrid_engine.rlhf.data.encoding import Encoded
from hybrid_engine.rlhf.experience.answers import LabelledAnswer, Reading, all_logprobs
from hybrid_engine.rlhf.experience.evaluation import step_means
from hybrid_engine.rlhf.rewards.learned import LearnedReward, save_normalised
from hybrid_engine.rlhf.rewards.scores import Answers
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import Pair
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.models import PAD, build_model, padded_prompts
from tests.support.one_rank import outcome
from tests.support.training_passes import train_in_parts

STAGES = 0, 2, 3
PLACES = "forward", "behind the model", "backward", "the second model's backward"
PROMPTS = [[5, 6, 7], [8], [9, 10], [4, 5, 6, 7]], [[6], [7, 9], [3, 4, 5], [8, 8]]
RESPONSES = [[11, 12], [13, 14, 15, 16], [17], [18, 19]], [[20, 21, 22], [23], [24, 25, 26], [27]]


def build_engine(stage, pinned=True):
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "hybrid_engine": {"enabled": True, "pin_parameters": pinned, "max_running": 4},
    }
    return hybrid_engine.initialize(model=build_model(), config=config)[0]


class Memory:
    """For `most_rows` at once at the place of that name, from pass number `first` of a step on; None: for all."""

    def __init__(self, place="", most_rows=None, first=0, error=None):
        self.place, self.most_rows, self.first = place, most_rows, first
        self.error = error or torch.OutOfMemoryError("no memory")
        self.number = -1

    def take(self, place, num_rows):
        is_there = self.most_rows is not None and place == self.place and self.number >= self.first
        if is_there and num_rows > self.most_rows:
            raise self.error


def train(engines, batch, memory, sizes=None):
    """An optimizer step of both engines; its figures."""

    def loss_of(number):
        engine = engines[number]
        backward = ("backward", "the second model's backward")[number]

        def compute(rows):
            memory.number += number == 0
            part = batch.rows(torch.tensor(rows))
            layer = engine.module.model.layers[1].mlp
            hook = layer.register_forward_pre_hook(lambda _, given: memory.take("forward", len(given[0])))
            try:
                logprobs = response_logprobs(engine, part)
            finally:
                hook.remove()
            memory.take("behind the model", len(rows))
            logprobs.register_hook(lambda grad: memory.take(backward, len(rows)))
            return -logprobs.sum() / 8, {f"loss{number}": (-logprobs.sum().item(), len(rows)), "rows": (len(rows), 1)}

        return engine, compute

    return step_means(train_in_parts(engines, batch.items, sizes or RunPasses(), [loss_of(0), loss_of(1)]))


def weights(engines):
    return torch.cat([full_tensor(value).flatten() for e in engines for value in e.module.parameters()])


def check_equal(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def passes_with_less_memory(rank, world_size, stage):
    """What a step gives, and the next one: with enough memory, and where it ends in each place on one rank."""
    batch = build_sequences(PROMPTS[rank], RESPONSES[rank], PAD, torch.device("cpu"))
    engines = [build_engine(stage), build_engine(stage)]
    expected = []
    for _ in range(2):
        figures = train(engines, batch, Memory())
        expected.append((figures["loss0"], figures["loss1"], weights(engines)))
    sizes = {}
    for number, place in enumerate(PLACES):
        engines = [build_engine(stage), build_engine(stage)]
        who = number % 2
        first = (number // 2 + STAGES.index(stage)) % 2  # the pass in which memory ends: one that reduces, or not
        memory, of_run = Memory(place, 1, first) if rank == who else Memory(), RunPasses()
        for *losses, after in expected:
            figures = train(engines, batch, memory, of_run)
            memory = Memory()
            assert (figures["loss0"], figures["loss1"]) == pytest.approx(losses, rel=1e-5)
            check_equal(weights(engines), after)
            sizes.setdefault(place, []).append(figures["rows"])
    return sizes


def errors_of_passes(rank, world_size, stage):
    """What all raise where no memory is enough, or one has another error; then a step as if there had been none."""
    batch = build_sequences(PROMPTS[rank], RESPONSES[rank], PAD, torch.device("cpu"))
    engines = [build_engine(stage), build_engine(stage)]
    train(engines, batch, Memory())
    expected, engines, found = weights(engines), [build_engine(stage), build_engine(stage)], {}
    refusal = ValueError("no")

    def broken(memory):
        try:
            return outcome(lambda: train(engines, batch, memory))
        finally:
            for engine in engines:
                engine.begin_step_again()

    for place in PLACES:
        found[place] = (
            broken(Memory(place, 0 if rank == 1 else None)),
            broken(Memory(place, 0 if rank == 1 else None, error=refusal)),
            broken(Memory(place, 0, error=refusal if rank == 1 else None)),
        )
    train(engines, batch, Memory())
    check_equal(weights(engines), expected)
    return found


@contextmanager
def limited(engine, most_rows):
    """Inside, the second layer of the engine's rollouts has memory for so many rows at once."""
    native, layer = engine.generator.native, engine.generator.model.layers[1]
    run, forward, tried = native.run, layer.forward, []

    def noting(plan, *arguments):
        tried.append(plan.max_running)
        return run(plan, *arguments)

    def less(*arguments, **options):
        if tried[-1] > most_rows:
            raise torch.OutOfMemoryError("no memory")
        return forward(*arguments, **options)

    native.run, layer.forward = noting, less
    try:
        yield tried
    finally:
        del native.run, layer.forward


def rollouts_with_less_memory(rank, world_size):
    """By kind of engine and rank with less memory: the numbers of rows tried. The last rank has a single row."""
    ids, mask = padded_prompts()
    rows = slice(0, 5) if rank == 0 else slice(5, 6)
    found = {}
    for kind, (stage, pinned) in {"whole": (0, True), "gathered": (3, True), "streamed": (3, False)}.items():
        engine = build_engine(stage, pinned)
        engine.eval()

        def sample(engine=engine):
            options = {"do_sample": True, "max_new_tokens": 4, "pad_token_id": PAD, "seed": 3}
            return engine.generate(ids[rows], attention_mask=mask[rows], **options)

        expected = sample()
        for who in range(world_size):
            with limited(engine, 1 if rank == who else 100) as tried:
                assert torch.equal(sample(), expected)
            found[kind, who] = tried
        with limited(engine, 0 if rank == 1 else 100):
            found[kind, "none"] = outcome(sample)
        assert torch.equal(sample(), expected)
    return found


def measured_with_less_memory(rank, world_size):
    """How many rows at a time log-probabilities without a gradient are computed where one rank has less memory."""
    model, batch = build_model(), build_sequences(PROMPTS[rank], RESPONSES[rank], PAD, torch.device("cpu"))
    with torch.no_grad():
        expected = in_parts(response_logprobs, model, batch, RunPasses())
        tried, sizes = [], RunPasses()

        def compute(model, rows):
            tried.append(len(rows.input_ids))
            if len(rows.input_ids) > (2 if rank == 1 else 100):
                raise torch.OutOfMemoryError("no memory")
            return response_logprobs(model, rows)

        for _ in range(2):
            torch.testing.assert_close(in_parts(compute, model, batch, sizes), expected, atol=1e-6, rtol=1e-6)
    return tried


def evaluations(engine, rank):
    """By its name what a recipe computes without a gradient; of eight rows, or of this rank's four."""
    rows = [
        Encoded(prompt_ids=prompt, response_ids=response)
        for prompt, response in zip([*PROMPTS[0], *PROMPTS[1]], [*RESPONSES[0], *RESPONSES[1]], strict=True)
    ]
    mine, reading, sizes = rows[4 * rank : 4 * rank + 4], Reading(PAD), RunPasses()
    labelled = [LabelledAnswer(row, True, 0.0, other, 0.1) for row, other in zip(mine, rows[::-1], strict=False)]
    batch = build_sequences(PROMPTS[rank], RESPONSES[rank], PAD, torch.device("cpu"))
    return {
        "held-out loss": partial(sft.held_out_loss, engine, SimpleNamespace(held_out=rows, pad_token=PAD), sizes),
        "whole answers": partial(all_logprobs, engine, rows, reading),
        "reference point": lambda: kto.reference_point(engine, labelled, reading).item(),
        "responses": lambda: in_parts(response_logprobs, engine, batch, sizes).sum().item(),
    }


@contextmanager
def memory_for(model, most_rows, place):
    """Inside, passes of `model` have memory for so many rows; it ends in its second layer, or behind the model."""

    def take(module, given, *output):
        if len(given[0] if given else output[0]["logprobs"]) > most_rows:
            raise torch.OutOfMemoryError("no memory")

    layer = model.model.layers[1].mlp
    hook = layer.register_forward_pre_hook(take) if place == "layer" else model.register_forward_hook(take)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def evaluations_with_less_memory(rank, world_size, stage):
    """By name, rank with less memory and place: the figures, and what is raised where there is none at all."""
    engine = build_engine(stage)
    engine.eval()
    found = {}
    for number, (name, compute) in enumerate(evaluations(engine, rank).items()):
        expected = compute()
        place = ("layer", "behind")[(number + STAGES.index(stage)) % 2]
        for who in range(world_size):
            with memory_for(engine.module, 1 if rank == who else 100, place):
                assert compute() == pytest.approx(expected, rel=1e-5), (name, who, place)
        with memory_for(engine.module, 0 if rank == 1 else 100, place):
            found[name] = outcome(compute)
        assert compute() == pytest.approx(expected, rel=1e-5), name
    return found


def everything(rank, world_size):
    return {
        "passes": {stage: passes_with_less_memory(rank, world_size, stage) for stage in STAGES},
        "errors": {stage: errors_of_passes(rank, world_size, stage) for stage in STAGES},
        "rollouts": rollouts_with_less_memory(rank, world_size),
        "measured": measured_with_less_memory(rank, world_size),
        "evaluations": {stage: evaluations_with_less_memory(rank, world_size, stage) for stage in (0, 3)},
    }


@pytest.fixture(scope="module")
def found():
    return run_distributed(everything, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_whose_memory_ends_on_one_rank_is_redone_in_halves_on_all_with_the_same_result(found, stage):
    for part in found:
        for place, sizes in part["passes"][stage].items():
            assert sizes == [1.0, 1.0], (place, sizes)  # the rows of a pass in the step, and in the next one
        assert len(part["passes"][stage]) == len(PLACES)


@pytest.mark.parametrize("stage", STAGES)
def test_memory_that_is_too_small_for_one_row_and_other_errors_are_raised_on_all(found, stage):
    for rank, part in enumerate(found):
        for place, (no_memory, refused, both) in part["errors"][stage].items():
            assert no_memory[0] == "OutOfMemoryError" and "no memory" in no_memory[1], place
            assert refused[0] == both[0] == "ValueError", (place, refused, both)
            assert refused[1] == both[1] == ("no" if rank else "rank 1: no"), place


def test_a_rollout_whose_memory_ends_on_one_rank_goes_on_with_half_the_rows_on_all(found):
    for kind in ("whole", "gathered", "streamed"):
        assert [part["rollouts"][kind, 0] for part in found] == [[4, 2, 1], [1, 1, 1]]
        assert [part["rollouts"][kind, 1] for part in found] == [[4], [1]]
        errors = [part["rollouts"][kind, "none"] for part in found]
        assert all(kind == "OutOfMemoryError" and "no memory" in words for kind, words in errors), errors


def test_log_probabilities_without_a_gradient_are_computed_of_fewer_rows(found):
    tried = [4, 4, 2, 2, 2, 2]  # as their second time, which begins with what fitted
    assert [part["measured"] for part in found] == [tried, tried]


@pytest.mark.parametrize("stage", (0, 3))
def test_figures_without_a_gradient_are_the_same_where_the_memory_of_one_rank_is_less(found, stage):
    for part in found:
        assert len(part["evaluations"][stage]) == 4
        for name, (kind, words) in part["evaluations"][stage].items():
            assert kind == "OutOfMemoryError" and "no memory" in words, name


@contextmanager
def noting_rows(layer, most_rows):
    """Inside, `layer` has memory for so many rows; gives how many there were in each pass."""
    tried = []

    def take(module, given):
        tried.append(len(given[0]))
        if tried[-1] > most_rows:
            raise torch.OutOfMemoryError("no memory")

    hook = layer.register_forward_pre_hook(take)
    try:
        yield tried
    finally:
        hook.remove()


def test_a_reward_model_scores_the_same_with_less_memory_and_a_setting_avoids_it(capsys):
    numbers = ["1", "22", "333", "1+1", "7"]
    rows = [[index + 1] for index in range(5)]
    answers = Answers(
        prompts=["1+1="] * 5, responses=numbers, prompt_ids=rows, response_ids=rows, is_cut_off=[False] * 5
    )
    model = ValueModel(build_model().model, torch.nn.Linear(build_model().config.hidden_size, 1)).eval()
    judge = LearnedReward("judge", model, arithmetic.build_tokenizer(), None, RunPasses())
    expected = judge(answers)
    capsys.readouterr()
    layer = model.backbone.layers[1].mlp
    with noting_rows(layer, 2) as tried:
        assert judge(answers) == pytest.approx(expected, rel=1e-5)
    lines = " ".join(capsys.readouterr().out.split())
    assert tried[0] == 5 and tried[-3:] == [2, 2, 1] and "--rows-per-pass 2 avoids it" in lines
    judge = LearnedReward("judge", model, arithmetic.build_tokenizer(), None, RunPasses(most_rows=2))
    with noting_rows(layer, 2) as tried:
        assert judge(answers) == pytest.approx(expected, rel=1e-5)
    assert tried == [2, 2, 1] and capsys.readouterr().out == ""
    with noting_rows(layer, 0), pytest.raises(torch.OutOfMemoryError):
        judge(answers)


@torch.no_grad()
def test_accuracy_and_scores_of_references_are_the_same_with_less_memory(tmp_path):
    config = build_model().config
    config.num_labels, config.pad_token_id = 1, PAD
    tokenizer = arithmetic.build_tokenizer()
    both = zip([*PROMPTS[0], *PROMPTS[1]], RESPONSES[0] * 2, RESPONSES[1] * 2, strict=True)
    pairs = [Pair(prompt + chosen, prompt + rejected, 0.0, None) for prompt, chosen, rejected in both]

    def accuracy(engine, sizes):
        measured = reward.measure(engine, pairs, tokenizer, sizes)
        return [measured["held_out_loss"], measured["held_out_accuracy"]["all"]]

    def normalised(engine, sizes):
        save_normalised(engine, [pair.chosen for pair in pairs], tokenizer, tmp_path / "saved", sizes)
        return [engine.module.config.score_mean, engine.module.config.score_std]

    for compute, rows_at_first in ((accuracy, 16), (normalised, 8)):
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config)
        engine = hybrid_engine.initialize(model=model, config={"train_batch_size": 1})[0]
        expected, sizes = compute(engine, RunPasses()), RunPasses()
        with noting_rows(model.model.layers[1].mlp, 3) as tried:
            for _ in range(2):
                assert compute(engine, sizes) == pytest.approx(expected, rel=1e-5)
        passes = [rows for rows in tried if rows > 1]  # one row alone asks for the logits that a save is compared by
        assert passes[0] == rows_at_first and set(passes[-8:]) == {2}


def test_an_inference_engine_rolls_out_with_half_the_rows():
    engine = hybrid_engine.init_inference(build_model())
    ids, mask = padded_prompts()
    options = {"do_sample": True, "max_new_tokens": 4, "pad_token_id": PAD, "seed": 3}
    expected = engine.generate(ids, attention_mask=mask, **options)
    with limited(engine, 2) as tried:
        assert torch.equal(engine.generate(ids, attention_mask=mask, **options), expected)
    assert tried == [6, 3, 1]


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
TEXTS = {
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "NCCL": NCCL,
    "a graph": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "a kernel": "Triton Error [CUDA]: out of memory",
    "the CPU": "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
}


def failed_capture(cause):
    """The error that ends a capture in which `cause` was raised."""
    try:
        try:
            raise cause
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("name", [*TEXTS, "a capture"])
def test_memory_of_libraries_and_graphs_that_ends_counts_as_out_of_memory(name):
    error = failed_capture(torch.OutOfMemoryError("no")) if name == "a capture" else RuntimeError(TEXTS[name])
    assert is_out_of_memory(error) and describe_error(error).kind is torch.OutOfMemoryError
    sizes, lines = [], []

    def run(size):
        sizes.append(size)
        if size > 2:
            raise error
        return size

    assert until_it_fits(run, 8, lambda size: size // 2, lines.append) == 2 and sizes == [8, 4, 2]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        failed_capture(ValueError("no")),
        ValueError("out of memory"),
    ],
)
def test_other_errors_of_a_device_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        until_it_fits(lambda _: (_ for _ in ()).throw(error), 8, lambda size: size // 2, print)
