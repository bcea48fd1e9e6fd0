"""Packed sequences: losses and gradients of padded ones, and passes of a token budget."""

import copy
import gc
import random
import re
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import hybrid_engine
from hybrid_engine.ops.support_log_prob import Supports, pack_support, read_records
from hybrid_engine.rlhf.batches import micro_batches, packable
from hybrid_engine.rlhf.batches import packing as data_spans
from hybrid_engine.rlhf.batches.micro_batches import check_budget, deal, fill_evenly
from hybrid_engine.rlhf.batches.packable import expected_layout, pack_where_exact
from hybrid_engine.rlhf.batches.packing import (
    TOGETHER,
    Layout,
    SharedPrompt,
    Span,
    Spans,
    attend_along_spans,
    count_copied,
    fit_rows,
    lay_out_spans,
    layout_of,
    pack,
    set_layout,
)
from hybrid_engine.rlhf.batches.passes import Items, RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    ValueModel,
    build_sequences,
    packed_rows,
    response_logprobs,
    response_logprobs_and_entropy,
    response_values,
)
from hybrid_engine.rlhf.experience.evaluation import step_means
from hybrid_engine.rlhf.options.reinforcement import PPOConfig
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.rewards.learned import score_tokens
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.models import build_model
from tests.support.training_passes import train_in_parts
from tests.support.training_reference import tiny_llama

CPU = torch.device("cpu")
BUDGET = TrainingOptions(tokens_per_micro_batch=64)


def sampled(num_rows=7, seed=0, vocab=60, group=1):
    """Prompts, each in `group` rows that follow each other, and long-tailed responses, some tokens not learned."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, vocab) for _ in range(chance.randint(1, 6))] for _ in range(num_rows)]
    prompts = [prompt for prompt in prompts[: num_rows // group] for _ in range(group)]
    lengths = [min(40, 1 + int(chance.lognormvariate(1.5, 1))) for _ in range(num_rows)]
    responses = [[chance.randrange(3, vocab) for _ in range(length)] for length in lengths]
    learned = [None if chance.random() < 0.5 else [chance.random() < 0.7 for _ in row] for row in responses]
    return build_sequences(prompts, responses, 0, CPU, learned)


def gradients(model, loss):
    """Of every parameter of a copy's loss."""
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def assert_equal_to_padded(model, compute):
    """`compute(model)` is what gives `[B, T]`; its values and the gradient of a loss on them, packed and padded."""
    found = []
    for layout in (Layout.PADDED, layout_of(model)):
        set_layout(model, layout)
        values = compute(model)
        weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        found.append((values.detach(), gradients(model, (values * weights).sum())))
    (padded, expected), (packed, gradient) = found
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["gpt-neo-local", "gemma2", "mistral-window"])
def test_losses_and_gradients_in_rows_equal_the_padded_ones(family):
    model, batch = build_model(family), sampled()
    assert pack_where_exact(model, BUDGET) is Layout.ROWS
    packed = pack(batch.input_ids, batch.attention_mask, Layout.ROWS)
    assert packed.input_ids.numel() < 0.6 * batch.input_ids.numel()
    assert_equal_to_padded(model, lambda model: response_logprobs(model, batch, 0.7))


@pytest.mark.parametrize(("family", "layout"), [("mistral-window", Layout.ROWS), ("llama", Layout.SPANS)])
def test_packed_tokens_keep_their_own_supports(family, layout):
    model, batch = build_model(family), sampled(num_rows=8, vocab=40, group=4)
    assert pack_where_exact(model, BUDGET) is layout
    kept = torch.rand((*batch.responses.shape, 60), generator=torch.Generator().manual_seed(2)) < 0.2
    kept.scatter_(2, batch.responses[..., None], True)
    records = [read_records(pack_support(torch.where(row, 0.0, -torch.inf)).numpy()) for row in kept]
    batch = replace(batch, supports=Supports.of(records))
    assert_equal_to_padded(model, lambda model: response_logprobs(model, batch, 0.7))
    rows = torch.tensor([5, 2, 0])
    found, expected = (response_logprobs(model, part, 0.7) for part in (batch.rows(rows), batch))
    torch.testing.assert_close(found, expected[rows][:, : found.shape[1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox-parallel", "qwen3-moe", "opt"])
@pytest.mark.parametrize("group", [1, 4])
def test_losses_and_gradients_along_spans_equal_the_padded_ones(family, group):
    model, batch = build_model(family), sampled(num_rows=8, vocab=40, group=group)
    assert pack_where_exact(model, BUDGET) is Layout.SPANS
    num_spared = sum(
        prompt.cells_spared(group) for prompt in {prompt for item in batch.items.prompts for prompt in item}
    )
    assert (num_spared > 0) == (group > 1)
    assert packed_rows(batch, Layout.SPANS).input_ids.numel() == int(batch.attention_mask.sum()) - num_spared
    assert_equal_to_padded(model, lambda model: response_logprobs(model, batch, 0.7))
    # Everything else of the model is as before: its own forward pass, with a mask or without.
    plain = build_model(family)
    for given in ({"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}, {}):
        expected, found = (one(input_ids=batch.input_ids, **given).logits for one in (plain, model))
        assert torch.equal(expected, found)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3-moe"])
def test_short_answers_behind_a_long_prompt_are_read_together_and_equal_the_padded_ones(family):
    model, chance = build_model(family), random.Random(0)
    different = [[chance.randrange(3, 40) for _ in range(length)] for length in (50, 31, 12)]
    prompts = [prompt for prompt in different for _ in range(6)]
    responses = [[chance.randrange(3, 40) for _ in range(chance.randint(1, 5))] for _ in prompts]
    batch = build_sequences(prompts, responses, 0, CPU)
    assert pack_where_exact(model, BUDGET) is Layout.SPANS
    buckets = packed_rows(batch, Layout.SPANS).spans.buckets
    assert max(int(bucket.members.max()) for bucket in buckets) >= 2  # three spans of one line
    assert_equal_to_padded(model, lambda model: response_logprobs(model, batch, 0.7))


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_is_copied_for_a_share_of_its_answers_tokens_not_for_each_answer(seed):
    chance = random.Random(seed)
    prompts = [SharedPrompt(number, chance.randint(1, 300)) for number in range(5) for _ in range(40)]
    lengths = [prompt.length + chance.randint(1, 30) for prompt in prompts]
    spans = lay_out_spans(lengths, prompts)
    answers = sum(length - prompt.length + 1 for length, prompt in zip(lengths, prompts, strict=True))
    assert count_copied(spans)[0] <= (answers + 5 * 31) / TOGETHER + sum(prompt.length for prompt in set(prompts))
    found = Spans.of(spans)
    cells = torch.cat([bucket.queries[bucket.members >= 0] for bucket in found.buckets])
    assert sorted(cells.tolist()) == list(range(sum(span.length for span in spans)))
    for bucket in found.buckets:
        queries = (bucket.members >= 0).sum(dim=1)
        keys = queries if bucket.prefix_lengths is None else queries + bucket.prefix_lengths
        assert queries.min() >= 0.6 * queries.max() and keys.min() >= 0.6 * keys.max()


def test_the_mask_of_a_pass_is_made_once_for_all_layers_and_goes_with_it(monkeypatch):
    part, masks = torch.zeros(1, 2, 13, 4), []

    def attend(own, keys, values, mask, **options):
        masks.append(mask)
        return own

    monkeypatch.setattr(data_spans, "attend_grouped", attend)
    spans = Spans.of([Span(0, 9), Span(9, 2, 0, 9), Span(11, 2, 0, 9)])
    for _ in range(3):
        attend_along_spans(torch.nn.Module(), part, part, part, None, spans=spans)
    made = {id(mask): weakref.ref(mask) for mask in masks if mask is not None}
    (mask,) = made.values()
    del spans
    masks.clear()
    gc.collect()
    assert mask() is None


def test_entropy_values_and_scores_equal_the_padded_ones():
    model, batch = build_model(), sampled()
    assert_equal_to_padded(model, lambda model: response_logprobs_and_entropy(model, batch, 0.7)[1])
    torch.manual_seed(0)
    critic = ValueModel(tiny_llama().model, torch.nn.Linear(32, 1))
    assert pack_where_exact(critic, BUDGET) is Layout.SPANS
    assert_equal_to_padded(critic, lambda model: response_values(model, batch))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, pad_token_id=0, num_labels=1, **sizes)
    engine, *_ = hybrid_engine.initialize(
        model=LlamaForSequenceClassification(config),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    tokens = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [12, 13]]

    class Tokenizer:
        """Pads as transformers' do."""

        @staticmethod
        def pad(rows, **_):
            from transformers import BatchEncoding

            width = max(map(len, rows["input_ids"]))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows["input_ids"]])
            return BatchEncoding({"input_ids": ids, "attention_mask": (ids != 0).long()})

    assert pack_where_exact(engine, BUDGET) is Layout.SPANS
    assert_equal_to_padded(engine.module, lambda model: score_tokens(engine, tokens, Tokenizer()))


@pytest.mark.parametrize("family", ["bloom", "falcon-alibi-sequential"])
def test_a_model_whose_attention_does_not_allow_it_is_padded_and_one_line_says_why(family, capsys):
    model, batch = build_model(family), sampled(vocab=40)
    expected = response_logprobs(copy.deepcopy(model), batch)
    assert pack_where_exact(model, BUDGET) is layout_of(model) is Layout.PADDED
    assert "are padded, not packed: " in capsys.readouterr().out
    assert torch.equal(response_logprobs(model, batch), expected)


SIZES = {
    "vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "pad_token_id": 0,
}  # fmt: skip
WITH_STATE = {
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    "falcon-h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(
            **SIZES, head_dim=12, mamba_n_heads=8, mamba_d_head=12, mamba_d_ssm=96, mamba_n_groups=1, mamba_d_state=16
        )
    ),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            **SIZES, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=4,
            num_experts_per_tok=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["lfm2", "falcon-h1", "jamba", "mixtral", "llama"])
def test_layers_that_go_on_across_a_boundary_are_found_in_every_precision(
    family, dtype, is_sharded, capsys, monkeypatch
):
    """With their first weights their effect is smaller than the rounding of bf16. A sharded model has no gradients."""
    torch.manual_seed(0)
    has_state = family in WITH_STATE
    model = (WITH_STATE[family]() if has_state else build_model(family)).to(dtype)
    if is_sharded:
        monkeypatch.setattr(packable, "FSDPModule", torch.nn.Module)
        if (family, dtype) == ("jamba", torch.bfloat16):
            return  # rounding of its experts and this effect are alike
    layout = pack_where_exact(model, BUDGET)
    assert expected_layout(BUDGET, model.config) is layout
    assert (layout is Layout.PADDED) == has_state
    assert ("do not begin again where a sequence does" in capsys.readouterr().out) == has_state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["lfm2", "falcon-h1"])
def test_padded_rows_of_a_model_with_state_are_those_of_single_sequences(family):
    torch.manual_seed(0)
    model, batch = WITH_STATE[family]().eval(), sampled()
    for parameter in model.parameters():
        parameter.data *= 2 if parameter.dim() > 1 else 1
    together = response_logprobs(model, batch)
    weights = torch.randn(together.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(model, (together * weights).sum())
    found, total = torch.zeros_like(together), 0.0
    for row in range(len(together)):
        alone = response_logprobs(model, batch.rows(torch.tensor([row])))
        found[row, : alone.shape[1]] = alone[0].detach()
        total = total + (alone[0] * weights[row, : alone.shape[1]]).sum()
    torch.testing.assert_close(found, together.detach(), atol=1e-5, rtol=1e-5)
    assert (gradients(model, total) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_without_a_budget_and_in_exact_mode_nothing_is_packed(capsys):
    model = build_model()
    assert pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=0)) is Layout.PADDED
    assert capsys.readouterr().out == ""
    assert pack_where_exact(model, PPOConfig(tokens_per_micro_batch=999, exact=True)) is Layout.PADDED
    assert "exact mode" in capsys.readouterr().out


class Engine:
    """What a recipe asks an engine for while it trains; plain PyTorch."""

    def __init__(self, module, size=2):
        self.module, self.size = module, size
        self.boundaries, self.steps = [], []

    def train_micro_batch_size_per_gpu(self):
        return self.size

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.is_boundary = is_boundary

    def step(self):
        self.steps.append(self.is_boundary)

    def gradient_accumulation_steps(self):
        return 1

    def backward(self, loss):
        loss.backward()

    def begin_step_again(self):
        self.module.zero_grad()
        self.steps.clear()


def alone(lengths):
    """Items whose sequences share nothing."""
    return behind(lengths, [SharedPrompt(None, 0)] * len(lengths))


def behind(lengths, prompts):
    """Items of such lengths, all of whose sequences begin with the item's prompt."""
    return Items(lengths, [(prompt,) * len(item) for item, prompt in zip(lengths, prompts, strict=True)])


TWO = alone([(1,), (2,)])


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("seed", range(5))
def test_items_are_dealt_out_once_each_within_the_budget_and_evenly(layout, seed):
    chance = random.Random(seed)
    engine = Engine(torch.nn.Linear(1, 1))
    set_layout(engine, layout)
    items = [tuple(chance.randint(1, 50) for _ in range(1 + seed % 2)) for _ in range(chance.randint(1, 60))]
    parts = deal(alone(items), engine, RunPasses(200))
    assert sorted(index for part in parts for index in part) == list(range(len(items)))
    cells = [layout.num_cells(sorted((n for i in part for n in items[i]), reverse=True)) for part in parts]
    assert max(cells) <= 200 and all(parts)
    assert len(parts) <= 1 + 2 * sum(map(sum, items)) // 100


@pytest.mark.parametrize("seed", range(8))
def test_answers_to_one_prompt_go_into_the_same_pass_where_there_is_room(seed):
    chance = random.Random(seed)
    engine = Engine(torch.nn.Linear(1, 1))
    set_layout(engine, Layout.SPANS)
    drawn = [SharedPrompt(key, chance.randint(1, 60)) for key in range(6)]
    prompts = [prompt for prompt in drawn for _ in range(chance.randint(1, 6))]
    chance.shuffle(prompts)
    items = [tuple(prompt.length + chance.randint(1, 20) for _ in range(1 + seed % 2)) for prompt in prompts]

    given = behind(items, prompts)

    def cells(part):
        spared = sum(
            prompt.cells_spared(sum(len(items[i]) for i in part if prompts[i] == prompt)) for prompt in set(prompts)
        )
        return sum(sum(items[i]) for i in part) - spared

    parts = deal(given, engine, RunPasses(200))
    assert sorted(index for part in parts for index in part) == list(range(len(items)))
    assert max(map(cells, parts)) <= 200 and all(parts)
    assert sum(map(cells, parts)) <= cells(range(len(items))) + 60 * (len(parts) - 1)  # a prompt again a pass at most
    assert len(parts) <= len(deal(alone(items), engine, RunPasses(200)))


@pytest.mark.parametrize("seed", range(8))
def test_padded_passes_hold_the_longest_prompt_beside_the_longest_response(seed):
    chance = random.Random(seed)
    engine = Engine(torch.nn.Linear(1, 1))
    prompts = [SharedPrompt(key, chance.choice([4, 100])) for key in range(20)]
    items = [tuple(prompt.length + chance.choice([4, 100]) for _ in range(1 + seed % 2)) for prompt in prompts]

    def cells(part):
        responses = (length - prompts[index].length for index in part for length in items[index])
        widest = max(prompts[index].length for index in part) + max(responses)
        return sum(len(items[index]) for index in part) * widest

    parts = deal(behind(items, prompts), engine, RunPasses(450))
    assert sorted(index for part in parts for index in part) == list(range(len(items)))
    assert max(map(cells, parts)) <= 450 and all(parts)


def test_a_pass_has_as_many_cells_as_its_deal_counted():
    batch = sampled(num_rows=12, group=4)
    cells = packed_rows(batch, Layout.SPANS).input_ids.numel()
    engine = Engine(torch.nn.Linear(1, 1))
    set_layout(engine, Layout.SPANS)
    assert len(deal(batch.items, engine, RunPasses(cells))) == 1
    assert len(deal(batch.items, engine, RunPasses(cells - 1))) == 2


def test_a_model_whose_attention_is_more_than_a_product_is_not_read_along_spans():
    module, part = torch.nn.Module(), torch.zeros(1, 2, 3, 4)
    spans = Spans.of([Span(0, 3)])
    with pytest.raises(NotImplementedError, match="no softcap"):
        attend_along_spans(module, part, part, part, None, spans=spans, softcap=30.0)


def test_processes_make_as_many_passes(monkeypatch):
    monkeypatch.setattr(micro_batches, "gather_objects", lambda own: [own, 6])
    engine = Engine(torch.nn.Linear(1, 1))
    set_layout(engine, Layout.ROWS)
    for items in ([(40,)] * 12, [(3,)] * 12, [(3,)] * 6):
        parts = deal(alone(items), engine, RunPasses(100))
        assert len(parts) == 6 and all(parts)
        assert sorted(index for part in parts for index in part) == list(range(len(items)))


def test_a_budget_below_the_longest_sequence_is_refused():
    check_budget(0, [(1000,)])
    check_budget(64, [(64,), (32, 32)])
    with pytest.raises(ValueError, match=r"--tokens-per-micro-batch=64 must hold the largest .* 65 tokens"):
        check_budget(64, [(3,), (65,)])
    with pytest.raises(ValueError, match=r"66 tokens \(its longest sequence has 33\)"):
        check_budget(64, [(33, 20)])


def steps_on_two_processes(rank, world_size, batch):
    """Two steps by padded rows and by packed ones: the losses, the weights, and the tokens of each pass."""
    mine = batch.rows(torch.arange(rank, len(batch.items), world_size))
    num_rows, found = len(batch.items), []
    for stage in (0, 3):
        for budget in (0, 64):
            engine, *_ = hybrid_engine.initialize(
                model=build_model(),
                config={
                    "train_batch_size": num_rows,
                    "train_micro_batch_size_per_gpu": 2,
                    "zero_optimization": {"stage": stage},
                    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                },
            )
            layout = pack_where_exact(engine, TrainingOptions(tokens_per_micro_batch=budget))
            passes = []

            def loss_of(rows, engine=engine, passes=passes):
                part = mine.rows(torch.tensor(rows))
                passes.append(int(part.attention_mask.sum()))
                loss = -response_logprobs(engine, part).sum() / num_rows
                return loss, {"loss": (loss.item(), len(rows) / num_rows)}

            sizes = RunPasses(budget)
            losses = [
                step_means(train_in_parts([engine], mine.items, sizes, [(engine, loss_of)]))["loss"] for _ in range(2)
            ]
            weights = torch.cat([full_tensor(value).flatten() for value in engine.module.parameters()])
            found.append((layout, losses, weights, passes))
    return found


def test_two_processes_train_on_packed_rows_as_on_padded_ones_and_do_equal_work():
    batch = sampled(num_rows=12, vocab=40)
    first, second = run_distributed(steps_on_two_processes, 2, batch)
    (_, losses, weights, _), *_ = first
    for (layout, *found, passes), (_, *others, its_passes) in zip(first, second, strict=True):
        for its_losses, its_weights in (found, others):
            assert its_losses == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(its_weights, weights, atol=1e-5, rtol=1e-5)
        assert len(passes) == len(its_passes)
        if layout is Layout.SPANS:
            assert max(*passes, *its_passes) <= 64 and len(passes) < 6
    assert [part[0] for part in first] == [Layout.PADDED, Layout.SPANS] * 2


def test_out_of_memory_in_a_pass_is_redone_in_halves_with_the_same_loss_and_gradients(capsys):
    batch = sampled()

    def train(most_rows):
        model = build_model()
        engine, tries = Engine(model, size=4), []

        def limited(gradient):  # with gradients on some parameters already
            if tries[-1] > most_rows:
                raise torch.OutOfMemoryError("CUDA out of memory")

        def loss_of(rows):
            tries.append(len(rows))
            logprobs = response_logprobs(model, batch.rows(torch.tensor(rows)))
            logprobs.register_hook(limited)
            return -logprobs.sum(), {"loss": (-logprobs.sum().item(), 1.0)}

        found = train_in_parts([engine], batch.items, RunPasses(), [(engine, loss_of)])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        return sum(part["loss"][0] for part in found), gradient, tries, engine.steps

    loss, gradient, tries, steps = train(most_rows=4)
    assert tries == [4, 3] and steps == [False, True]
    split_loss, split_gradient, tries, steps = train(most_rows=1)
    assert tries == [4, 2, 1, 1, 1, 1, 1, 1, 1] and steps == [False] * 6 + [True]
    assert split_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(split_gradient, gradient, atol=1e-4, rtol=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2
        and "--micro-batch-size 2 avoids it" in lines[0]
        and "--micro-batch-size 1 avoids it" in lines[1]
    )
    with pytest.raises(torch.OutOfMemoryError):
        train(most_rows=0)


@pytest.mark.parametrize("layout", [Layout.SPANS, Layout.ROWS, Layout.PADDED])
def test_later_steps_keep_to_the_budget_that_fitted_which_is_also_what_avoids_it(layout, capsys):
    batch = sampled(num_rows=12, group=4)

    def train(engine, sizes, most_tokens):
        """The tokens of the passes that were tried."""
        tried = []

        def loss_of(rows):
            part = batch.rows(torch.tensor(rows))
            packed = packed_rows(part, layout) if layout is not Layout.PADDED else None
            tried.append(part.input_ids.numel() if packed is None else packed.input_ids.numel())
            if tried[-1] > most_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.zeros((), requires_grad=True).sum(), {}

        train_in_parts([engine], batch.items, sizes, [(engine, loss_of)])
        return tried

    def build():
        engine = Engine(build_model())
        set_layout(engine, layout)
        return engine

    whole = 2 * batch.input_ids.numel()
    most = int(0.6 * max(train(build(), RunPasses(whole), whole)))
    engine, sizes = build(), RunPasses(whole)
    assert max(train(engine, sizes, most)) > most
    line = " ".join(capsys.readouterr().out.split("out of memory")[-1].split())
    budget = int(re.search(r"a smaller --tokens-per-micro-batch avoids it, (\d+) if", line)[1])
    assert max(train(engine, sizes, most)) <= budget <= most
    assert max(train(build(), RunPasses(budget), most)) <= budget
    assert "out of memory" not in capsys.readouterr().out


def steps_with_less_memory(layout, budget, steps, cost, most):
    """The costs of the passes that each of `steps`, items and their prompts, tries; a pass may cost `most`."""
    engine = Engine(build_model(), size=4)
    set_layout(engine, layout)
    tried, sizes = [], RunPasses(budget)
    for items, prompts in steps:
        tried.append([])

        def loss_of(part, items=items, prompts=prompts):
            tried[-1].append(cost([items[index] for index in part], [prompts[index] for index in part]))
            if tried[-1][-1] > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.zeros((), requires_grad=True).sum(), {}

        train_in_parts([engine], behind(items, prompts), sizes, [(engine, loss_of)])
    return tried


def shared_tokens(items, prompts):
    number_of = Counter()
    for item, prompt in zip(items, prompts, strict=True):
        number_of[prompt] += len(item)
    return sum(map(sum, items)) - sum(prompt.cells_spared(number) for prompt, number in number_of.items())


def test_later_steps_keep_to_what_fitted_where_pairs_share_long_prompts(capsys):
    items = [(410, 410)] + [(205, 205)] * 7
    prompts = [SharedPrompt(number, max(item) - 5) for number, item in enumerate(items)]
    first, *later = steps_with_less_memory(Layout.SPANS, 2000, [(items, prompts)] * 3, shared_tokens, 600)
    assert max(first) > 600 and all(max(tried) <= 600 for tried in later)
    assert capsys.readouterr().out.count("out of memory") == sum(cost > 600 for cost in first)


def test_what_fitted_once_does_not_grow_by_a_longer_item():
    short, long = [(10,)] * 40, [(10,)] * 39 + [(250,)]
    steps = [([*items], [SharedPrompt(None, 1)] * 40) for items in (short, long, short, long)]

    def cost(items, prompts):
        return sum(map(sum, items)) + 15 * len(items)

    first, second, third, fourth = steps_with_less_memory(Layout.ONE_ROW, 400, steps, cost, 270)
    assert max(first) > 270 and max(map(max, (second, third, fourth))) <= 270
    assert len(second) == len(fourth) and max(third) < 265  # the longer item is a pass by itself


def test_rows_are_filled_as_well_as_one_sequence_after_the_other_would_be():
    chance = random.Random(0)
    for _ in range(50):
        lengths = [min(100, 1 + int(chance.lognormvariate(3, 1))) for _ in range(chance.randint(1, 60))]
        rows = fit_rows(lengths)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in row) <= max(lengths) for row in rows)
        budget = chance.randint(max(lengths), sum(lengths))
        parts = fill_evenly(alone([(length,) for length in lengths]), Layout.ROWS, budget)
        assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
        for part in parts:
            assert Layout.ROWS.num_cells(sorted((lengths[index] for index in part), reverse=True)) <= budget


def test_what_a_pass_that_ran_out_of_memory_held_is_free_before_it_is_redone():
    engine, held, alive = Engine(build_model()), [], []

    def loss_of(rows):
        alive.append(sum(tensor() is not None for tensor in held))
        activations = torch.ones(1, requires_grad=True)
        held.append(weakref.ref(activations))
        if len(rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return activations.sum(), {}

    gc.disable()
    try:
        train_in_parts([engine], TWO, RunPasses(), [(engine, loss_of)])
    finally:
        gc.enable()
    assert alive[:2] == [0, 0]


def test_other_errors_and_those_of_the_optimizer_are_raised():
    engine = Engine(build_model())

    def fail(rows):
        raise RuntimeError("nothing to do with memory")

    with pytest.raises(RuntimeError, match="nothing to do"):
        train_in_parts([engine], TWO, RunPasses(), [(engine, fail)])

    def no_memory():
        raise torch.OutOfMemoryError("for Adam's moments")

    engine.step = no_memory
    with pytest.raises(torch.OutOfMemoryError):
        train_in_parts([engine], TWO, RunPasses(), [(engine, lambda rows: (torch.ones((), requires_grad=True), {}))])
