"""A model's log-probabilities from its hidden states are those of its logits, for every family and every wrapping."""

from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

import hybrid_engine
from hybrid_engine.ops.sample import token_logprobs
from hybrid_engine.ops.support_log_prob import Supports, pack_support, read_records
from hybrid_engine.rl.estimates import token_entropy
from hybrid_engine.rlhf.batches import head_log_probs
from hybrid_engine.rlhf.batches.head_log_probs import AskedColumns, token_log_probs
from hybrid_engine.rlhf.batches.sequences import build_sequences, recompute_activations, response_logprobs
from hybrid_engine.rlhf.options.shared import TrainingOptions
from tests.support.distributed import run_distributed
from tests.support.models import BUILDERS, build_model

pytestmark = pytest.mark.quick

T = 5


def build_inputs(num_rows=3):
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 60, (num_rows, 11), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}


def build_asked(num_rows=3, **options):
    mask = torch.arange(T) < torch.tensor([[5], [2], [4]])[:num_rows]
    return AskedColumns(mask, **options)


def from_logits(model, asked, inputs):
    logits = model(**inputs, use_cache=False).logits[:, -T - 1 : -1]
    logprobs = token_logprobs(logits, inputs["input_ids"][:, -T:], asked.temperature)
    return torch.where(asked.mask, logprobs, 0.0), torch.where(
        asked.mask, token_entropy(logits.float() / asked.temperature), 0.0
    )


def gradients(model, logprobs):
    model.zero_grad()
    (logprobs * torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def at_most_two_rows_of_logits(head):
    """Fails where a head makes logits of more than two tokens a row, those of the trial."""

    def check(module, arguments, output):
        assert output.shape[1] <= 2

    hook = head.register_forward_hook(check)
    yield
    hook.remove()


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_values_entropy_and_gradients_are_those_of_the_logits(family):
    model, inputs = build_model(family).eval(), build_inputs()
    for options in ({}, {"temperature": 0.7, "with_entropy": True, "with_sharper": True}):
        asked = build_asked(**options)
        expected, expected_entropy = from_logits(model, asked, inputs)
        expected_gradients = gradients(model, expected)
        with at_most_two_rows_of_logits(model.get_output_embeddings()):
            found = token_log_probs(model, asked, inputs)
        torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-5)
        if asked.with_entropy:
            torch.testing.assert_close(found.entropy, expected_entropy, rtol=1e-5, atol=1e-5)
            sharper = from_logits(model, asked._replace(temperature=0.35), inputs)[0].detach()
            torch.testing.assert_close(found.sharper, sharper, rtol=1e-5, atol=1e-5)  # without a gradient
        found_gradients = gradients(model, found.logprobs)
        assert found_gradients.keys() == expected_gradients.keys()
        for name, gradient in found_gradients.items():
            largest = float(expected_gradients[name].abs().max())  # up to 20, and fp32 rounds sums by their terms
            bound = 5e-6 * max(1.0, largest)
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=bound, msg=name)
    assert not head_log_probs._tried[model.get_output_embeddings()].differs


def draw_supports(asked, targets, vocab):
    """Some tokens for each requested one, itself among them: recorded, and as a mask `[N, V]`."""
    kept = torch.rand(int(asked.mask.sum()), vocab, generator=torch.Generator().manual_seed(3)) < 0.1
    kept[torch.arange(len(kept)), targets[asked.mask]] = True
    records = read_records(pack_support(torch.where(kept, 0.0, -torch.inf)).numpy())
    return Supports.of([records])[0], kept


def from_masked_logits(model, asked, inputs, kept):
    logits = model(**inputs, use_cache=False).logits[:, -T - 1 : -1][asked.mask] / asked.temperature
    logprobs = logits.masked_fill(~kept, -1e9).log_softmax(-1)
    chosen = logprobs.gather(1, inputs["input_ids"][:, -T:][asked.mask][:, None]).squeeze(1)
    zeros = torch.zeros(asked.mask.shape)
    return [zeros.masked_scatter(asked.mask, part) for part in (chosen, -(logprobs.exp() * logprobs).sum(1))]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_over_supports_values_entropy_and_gradients_are_those_of_masked_logits(family):
    model, inputs = build_model(family).eval(), build_inputs()
    asked, vocab = build_asked(temperature=0.7, with_entropy=True), model.get_output_embeddings().weight.shape[0]
    supports, kept = draw_supports(asked, inputs["input_ids"][:, -T:], vocab)
    asked = asked._replace(supports=supports)
    expected, expected_entropy = from_masked_logits(model, asked, inputs, kept)
    expected_gradients = gradients(model, expected + 0.3 * expected_entropy)
    with at_most_two_rows_of_logits(model.get_output_embeddings()):
        of_states = token_log_probs(model, asked, inputs)
    for found in (of_states, head_log_probs._from_logits(model, asked, inputs)):
        torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy, expected_entropy, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients(model, found.logprobs + 0.3 * found.entropy).items():
            bound = 5e-6 * max(1.0, float(expected_gradients[name].abs().max()))
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=bound, msg=name)


def test_adapters_learn_what_they_learn_from_logits():
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, inputs, asked = get_peft_model(build_model("llama"), config).eval(), build_inputs(), build_asked()
    expected = gradients(model, from_logits(model, asked, inputs)[0])
    with at_most_two_rows_of_logits(model.get_output_embeddings()):
        found = gradients(model, token_log_probs(model, asked, inputs).logprobs)
    assert found.keys() == expected.keys() and all("lora" in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_an_adapter_of_the_head_makes_logits_and_one_line_says_so(caplog):
    model = get_peft_model(build_model("llama"), LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    inputs, asked = build_inputs(), build_asked(with_sharper=True)
    found, (expected, _) = token_log_probs(model.eval(), asked, inputs), from_logits(model, asked, inputs)
    assert torch.equal(found.logprobs, expected)
    assert torch.equal(found.sharper, from_logits(model, asked._replace(temperature=0.5), inputs)[0])
    assert caplog.text.count("log-probabilities are made from logits, which takes their memory") == 1


def test_a_head_that_is_trained_whole_beside_an_adapter_makes_no_logits(caplog):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = get_peft_model(build_model("llama"), config).eval()
    model.add_adapter("other", config)
    inputs, asked = build_inputs(), build_asked()
    wrapper = model.get_base_model().lm_head
    logits = []
    for hooked in (wrapper.original_module, *wrapper.modules_to_save.values()):
        hooked.register_forward_hook(lambda head, given, output: logits.append(output.shape[1]))
    with torch.no_grad():
        wrapper.modules_to_save["default"].weight.mul_(1.5)
        wrapper.modules_to_save["other"].weight.mul_(0.5)

    def compute(function):
        model.zero_grad()
        logprobs = function(model, asked, inputs)[0]
        (logprobs * torch.linspace(0, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        return logprobs.detach(), found

    with model.disable_adapter():
        before = token_log_probs(model, asked, inputs).logprobs
        torch.testing.assert_close(before, from_logits(model, asked, inputs)[0], atol=1e-5, rtol=1e-5)
    for name in ("default", "other"):
        model.set_adapter(name)
        compute(token_log_probs)  # tries the head, once for a copy
        logits.clear()
        found = compute(token_log_probs)
        assert logits == [0]
        torch.testing.assert_close(found, compute(from_logits), atol=1e-5, rtol=1e-4)
        assert f"base_model.model.lm_head.modules_to_save.{name}.weight" in found[1]
    assert caplog.text == ""


def test_a_model_that_does_more_behind_its_head_than_its_config_says_makes_logits(caplog):
    model, inputs, asked = build_model("llama").eval(), build_inputs(), build_asked()
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits * 1.01
            return output

    model.__class__ = Odd
    for _ in range(2):
        found, (expected, _) = token_log_probs(model, asked, inputs), from_logits(model, asked, inputs)
        assert torch.equal(found.logprobs, expected)
    assert caplog.text.count("log-probabilities are made from logits") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softcap_that_no_config_names_is_found_where_logits_are_small_too(dtype, caplog):
    model, inputs, asked = build_model("llama").eval().to(dtype), build_inputs(), build_asked()
    forward = type(model).forward

    class Capped(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = torch.tanh(output.logits / 30) * 30
            return output

    model.__class__ = Capped
    found, (expected, _) = token_log_probs(model, asked, inputs), from_logits(model, asked, inputs)
    assert torch.equal(found.logprobs, expected)
    assert "log-probabilities are made from logits" in caplog.text


def test_a_model_that_drops_some_of_its_logits_makes_them():
    model, inputs, asked = build_model("llama").eval(), build_inputs(), build_asked()
    forward = type(model).forward

    class Shorter(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output.logits = output.logits[..., : inputs["input_ids"].max() + 1]
            return output

    model.__class__ = Shorter
    assert output_size(model, inputs) < len(model.get_output_embeddings().weight)
    found, (expected, _) = token_log_probs(model, asked, inputs), from_logits(model, asked, inputs)
    assert torch.equal(found.logprobs, expected)


def output_size(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits.shape[-1]


def test_a_head_that_is_given_a_hook_later_is_tried_again():
    model, inputs, asked = build_model("llama").eval(), build_inputs(), build_asked()
    before = token_log_probs(model, asked, inputs).logprobs
    hook = model.get_output_embeddings().register_forward_hook(lambda head, given, output: output * 2)
    found, (expected, _) = token_log_probs(model, asked, inputs), from_logits(model, asked, inputs)
    assert torch.equal(found.logprobs, expected) and not torch.allclose(found.logprobs, before)
    hook.remove()
    with at_most_two_rows_of_logits(model.get_output_embeddings()):
        assert torch.equal(token_log_probs(model, asked, inputs).logprobs, before)


def test_a_pass_that_is_not_a_number_is_no_trial():
    model, inputs, asked = build_model("llama").eval(), build_inputs(), build_asked()
    model.config.logit_scale = 7.0  # which Llama does not read
    weight = model.model.norm.weight
    with torch.no_grad():
        whole = weight.clone()
        weight[0] = torch.nan
        assert token_log_probs(model, asked, inputs).logprobs.isnan().any()
        weight.copy_(whole)
    found, (expected, _) = token_log_probs(model, asked, inputs), from_logits(model, asked, inputs)
    assert torch.equal(found.logprobs, expected)


def test_a_pass_that_fails_leaves_no_hook():
    model, inputs, asked = build_model("llama").eval(), build_inputs(), build_asked()
    with pytest.raises(TypeError):
        token_log_probs(model, asked, {**inputs, "input_ids": None})
    assert not model._forward_hooks and not model.get_output_embeddings()._forward_pre_hooks


def trial_that_differs_on_one(rank):
    """At stage 3, where the head of one rank alone does more: whether both then make logits, and later too."""
    engine, *_ = hybrid_engine.initialize(
        model=build_model("llama"), config={"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    )
    head = engine.module.get_output_embeddings()
    if rank == 1:
        head.register_forward_hook(lambda module, given, output: output * 1.01)
    asked, inputs = build_asked(), build_inputs()
    with torch.no_grad():
        found = [token_log_probs(engine, asked, inputs).logprobs for _ in range(2)]
        expected, _ = from_logits(engine, asked, inputs)
    return all(torch.equal(logprobs, expected) for logprobs in found)


def train(rank, world_size, stage):
    """The first loss, and every weight after three steps on this rank's rows."""
    assert stage < 3 or trial_that_differs_on_one(rank)
    rows = {name: x.chunk(world_size)[rank] for name, x in build_inputs(4).items()}
    asked = AskedColumns((torch.arange(T) < torch.tensor([[5], [2], [4], [3]])).chunk(world_size)[rank])
    options = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    config = {
        "train_batch_size": 4,
        "optimizer": options,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine, *_ = hybrid_engine.initialize(model=build_model("llama"), config=config)
    losses = []
    for _ in range(3):
        loss = -token_log_probs(engine, asked, rows).logprobs.sum() / 8
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with hybrid_engine.zero.GatheredParameters(list(engine.module.parameters())):
        return losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_two_processes_learn_what_one_learns_from_logits():
    model, inputs = build_model("llama"), build_inputs(4)
    asked = AskedColumns(torch.arange(T) < torch.tensor([[5], [2], [4], [3]]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        loss = -from_logits(model, asked, inputs)[0].sum() / 16
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for stage in (2, 3):
        for _, weights in run_distributed(train, 2, stage):
            for name, weight in model.named_parameters():
                torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-4, atol=1e-5, msg=name)


def _granite_hybrid():
    """Granite 4: recurrent and attention layers, experts, a shared MLP, and scaled logits."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    state = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **sizes, **state, **experts, vocab_size=99, intermediate_size=40, logits_scaling=3.0, pad_token_id=0,
            layer_types=["mamba", "attention"],
        )
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3", "lfm2", "granite-4"])
def test_models_with_states_and_latents_have_plain_heads_and_can_be_recomputed(family):
    torch.manual_seed(0)
    model = _granite_hybrid() if family == "granite-4" else build_model(family)
    model.train()
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    batch = build_sequences(*([row.tolist() for row in part] for part in ids.split([4, 5], dim=1)), 0, ids.device)

    def with_gradients():
        found = response_logprobs(model, batch, 0.7)
        return found.detach(), torch.autograd.grad(found.sum(), list(model.parameters()), allow_unused=True)

    logprobs, kept = with_gradients()
    assert not head_log_probs._tried[model.get_output_embeddings()].differs
    logits = model(input_ids=ids).logits[:, 3:-1].float() / 0.7
    expected = logits.log_softmax(-1).gather(2, ids[:, 4:, None]).squeeze(2)
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=1e-5)
    recompute_activations(model, TrainingOptions(activation_checkpointing=True))
    again, others = with_gradients()
    assert torch.equal(logprobs, again)
    for one, other in zip(kept, others, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, atol=1e-6, rtol=1e-5)
