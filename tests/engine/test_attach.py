"""`attach`: any model's `generate()` on containers, in training loops that know nothing of them.

What it gives is compared with the `generate()` of a copy of the model that was never attached.
"""

import copy
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import IA3Config, LNTuningConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.generation import GenerateDecoderOnlyOutput

import hybrid_engine
from hybrid_engine.config.notices import say_once
from hybrid_engine.engine.attached import Attached
from hybrid_engine.generation.rollout.generator import Generator
from tests.support.distributed import run_distributed
from tests.support.models import build_model, padded_prompts
from tests.support.training_reference import tiny_llama

pytestmark = pytest.mark.quick

GREEDY = {"max_new_tokens": 6, "do_sample": False}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def theirs(model, ids, mask, **options):
    """What a copy of the model generates by itself, in eval mode."""
    return copy.deepcopy(model).eval().generate(ids, attention_mask=mask, **{**GREEDY, **options})


def assert_follows(model, ids, mask):
    torch.testing.assert_close(model.generate(ids, attention_mask=mask, **GREEDY), theirs(model, ids, mask))


def train_a_step(model, ids, lr=0.5):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def runs_on_containers(attached: Attached):
    return attached.generator is not None and attached.generator.model is not None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_training_loop_generates_what_the_model_would(family):
    model, (ids, mask) = build_model(family), padded_prompts()
    attached = hybrid_engine.attach(model)
    assert runs_on_containers(attached)
    model.train()
    seen = set()
    for _ in range(3):
        assert_follows(model, ids, mask)
        seen.add(tuple(model.generate(ids, attention_mask=mask, **GREEDY).flatten().tolist()))
        train_a_step(model, ids)
    assert len(seen) > 1, "the weights must have changed what is generated"
    assert all(module.training for module in model.modules())


def test_dropout_is_off_while_it_generates_and_each_module_has_its_mode_again():
    model, (ids, mask) = tiny_llama(dropout=0.5), padded_prompts()
    ids = ids % 65
    hybrid_engine.attach(model)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert_follows(model, ids, mask)
    # An option that only the model's own generate() serves.
    torch.testing.assert_close(
        model.generate(ids, attention_mask=mask, num_beams=2, **GREEDY), theirs(model, ids, mask, num_beams=2)
    )
    assert [module.training for module in model.modules()] == modes


def test_gradient_checkpointing_goes_on_and_gives_the_same_gradients():
    model, (ids, mask) = build_model(), padded_prompts(num_prompts=2)
    plain = copy.deepcopy(model).train()
    model.train()
    model.gradient_checkpointing_enable()
    hybrid_engine.attach(model)
    assert_follows(model, ids, mask)
    assert model.is_gradient_checkpointing
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_weights_that_are_loaded_replaced_or_cast_are_followed():
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    model.load_state_dict(build_model(seed=3).state_dict())
    assert_follows(model, ids, mask)
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.flip(0).contiguous()
    assert_follows(model, ids, mask)
    model.to(torch.bfloat16)
    model.generate(ids, attention_mask=mask, **GREEDY)
    assert runs_on_containers(attached) and attached.generator.model.dtype == torch.bfloat16


def test_containers_that_could_not_be_built_are_built_at_the_next_call(monkeypatch):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    model.to(torch.bfloat16)
    build = Generator.build_containers

    def fail(generator):
        monkeypatch.setattr(Generator, "build_containers", build)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Generator, "build_containers", fail)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(ids, attention_mask=mask, **GREEDY)
    model.generate(ids, attention_mask=mask, **GREEDY)
    assert runs_on_containers(attached) and attached.generator.model.dtype == torch.bfloat16


def test_a_whole_top_k_may_be_a_float_as_trainers_write_it():
    model, (ids, mask) = build_model(), padded_prompts()
    options = {"attention_mask": mask, "do_sample": True, "max_new_tokens": 3}
    attached = hybrid_engine.attach(model)
    found = []
    for top_k in (0, 0.0):
        torch.manual_seed(3)
        found.append(model.generate(ids, top_k=top_k, **options))
    assert torch.equal(*found) and runs_on_containers(attached)
    with pytest.raises(ValueError, match=r"top_k=0\.5 must be an integer"):
        model.generate(ids, top_k=0.5, **options)


def test_a_rollout_func_wants_a_prompt():
    with pytest.raises(ValueError, match=r"rollout_func: prompts=\[\] must have at least one"):
        hybrid_engine.attach(build_model()).rollout_func([], None)


def test_changed_rotary_frequencies_are_followed():
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    assert_follows(model, ids, mask)
    built = attached.generator
    assert_follows(model, ids, mask)
    assert attached.generator is built
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert_follows(model, ids, mask)
    assert attached.generator is not built and runs_on_containers(attached)


def change_an_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def change_the_scaling_of_attention(model):
    model.model.layers[0].self_attn.scaling *= 3


def change_the_scaling_of_an_adapter(model):
    model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] *= 8


def change_the_scalings_of_adapters_as_peft_does(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(6.0)


@pytest.mark.parametrize(
    "change",
    [
        change_an_epsilon,
        change_the_scaling_of_attention,
        change_the_scaling_of_an_adapter,
        change_the_scalings_of_adapters_as_peft_does,
    ],
)
def test_changed_numbers_of_modules_are_followed(change):
    torch.manual_seed(0)
    model, (ids, mask) = build_model(), padded_prompts()
    if "adapter" in change.__name__:
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
        model = get_peft_model(model, adapter)
    attached = hybrid_engine.attach(model)
    before = model.generate(input_ids=ids, attention_mask=mask, **GREEDY)
    built = attached.generator
    assert_follows(model, ids, mask)
    assert attached.generator is built
    change(model)
    assert_follows(model, ids, mask)
    assert runs_on_containers(attached)
    assert not torch.equal(model.generate(input_ids=ids, attention_mask=mask, **GREEDY), before)
    built = attached.generator
    for module in model.modules():
        module.last_loss = 0.1  # somebody's statistics, of no effect on what is generated
    assert_follows(model, ids, mask)
    assert attached.generator is built


def hook_a_layer(model):
    return model.model.layers[0].register_forward_hook(lambda layer, given, output: output * 1.5).remove


def hook_what_an_mlp_is_given(model):
    return model.model.layers[1].mlp.register_forward_pre_hook(lambda mlp, given: (given[0] * 0.2,)).remove


def patch_a_forward(model):
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * 0.1
    return lambda: delattr(mlp, "forward")


@pytest.mark.parametrize("change", [hook_a_layer, hook_what_an_mlp_is_given, patch_a_forward])
def test_a_layer_that_is_made_to_compute_something_else_is_followed(change):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    undo = change(model)
    expected = type(model).generate(model, ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(expected, plain)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert not runs_on_containers(attached)
    undo()
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), plain) and runs_on_containers(attached)


def test_a_compiled_model_is_the_model_in_it():
    model, (ids, mask) = build_model(), padded_prompts()
    compiled = torch.compile(model, backend="eager")
    attached = hybrid_engine.attach(compiled)
    assert torch.equal(compiled.generate(ids, attention_mask=mask, **GREEDY), theirs(model, ids, mask))
    assert runs_on_containers(attached) and attached.module is model
    model.model.layers[0].compile(backend="eager")
    assert torch.equal(compiled.generate(ids, attention_mask=mask, **GREEDY), theirs(model, ids, mask))


@pytest.mark.parametrize("is_attached_first", [True, False])
def test_adapters_are_followed(is_attached_first):
    base, (ids, mask) = build_model(), padded_prompts()
    plain = theirs(base, ids, mask)
    if is_attached_first:
        attached = hybrid_engine.attach(base)
        model = get_peft_model(base, LoraConfig(**LORA))
    else:
        model = get_peft_model(base, LoraConfig(**LORA))
        attached = hybrid_engine.attach(model)
    model.train()
    assert not torch.equal(model.generate(input_ids=ids, attention_mask=mask, **GREEDY), plain)
    train_a_step(model, ids)
    expected = copy.deepcopy(model).eval().generate(input_ids=ids, attention_mask=mask, **GREEDY)
    torch.testing.assert_close(model.generate(input_ids=ids, attention_mask=mask, **GREEDY), expected)
    with model.disable_adapter():
        torch.testing.assert_close(model.generate(input_ids=ids, attention_mask=mask, **GREEDY), plain)
    assert runs_on_containers(attached)


OTHER_ADAPTERS = {
    "IA3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "ia3.layer.Linear"),
    "norms": (LNTuningConfig(target_modules=["input_layernorm"]), "LNTuningLayer in the place of a norm"),
    "prefix": (PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "disagree"),
    "prompt": (PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "16 positions for 12 tokens"),
    "DoRA": (LoraConfig(**LORA, use_dora=True), "DoraLinearVariant"),
}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_adapters_that_are_not_plain_lora_generate_by_the_models_own_and_it_is_said_why(name, caplog):
    say_once.cache_clear()
    (config, reason), (ids, mask) = OTHER_ADAPTERS[name], padded_prompts()
    model = get_peft_model(build_model(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    expected = copy.deepcopy(model).eval().generate(input_ids=ids, attention_mask=mask, **GREEDY)
    attached = hybrid_engine.attach(model)
    assert torch.equal(model.train().generate(input_ids=ids, attention_mask=mask, **GREEDY), expected)
    assert not runs_on_containers(attached)
    first = next(line for line in caplog.messages if reason in line)
    assert "generates with its own generate()" in first


def test_an_adapter_for_each_row_is_pefts_own_business(caplog):
    ids, mask = padded_prompts()
    model = get_peft_model(build_model(), LoraConfig(**LORA)).eval()
    model.add_adapter("other", LoraConfig(**LORA))
    names = (["default", "other", "__base__"] * len(ids))[: len(ids)]
    plain = copy.deepcopy(model).generate(input_ids=ids, attention_mask=mask, adapter_names=names, **GREEDY)
    hybrid_engine.attach(model)
    answers = model.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **GREEDY)
    assert torch.equal(answers, plain) and "option adapter_names is not served natively" in caplog.text


def test_what_is_returned_is_transformers_class_with_the_samplers_log_probabilities():
    model, (ids, mask) = build_model(), padded_prompts()
    hybrid_engine.attach(model)
    config = GenerationConfig(max_new_tokens=5, do_sample=True, top_k=0, temperature=0.7, num_return_sequences=2)
    config.pad_token_id, config.return_dict_in_generate = 0, True
    torch.manual_seed(5)
    output = model.generate(ids, config, attention_mask=mask)
    torch.manual_seed(5)
    again = model.generate(inputs=ids, generation_config=config, attention_mask=mask)
    assert isinstance(output, GenerateDecoderOnlyOutput) and output.past_key_values is None
    assert torch.equal(output.sequences, again.sequences)
    rows, full = output.sequences, torch.cat([mask.repeat_interleave(2, 0), torch.ones(len(ids) * 2, 5).long()], 1)
    assert torch.equal(rows[:, : ids.shape[1]], ids.repeat_interleave(2, 0))
    positions = (full.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(rows, attention_mask=full, position_ids=positions).logits[:, ids.shape[1] - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, rows[:, ids.shape[1] :, None]).squeeze(-1)
    torch.testing.assert_close(output.logprobs, expected, atol=1e-5, rtol=0)


def test_equal_rows_that_follow_each_other_are_prefilled_once(monkeypatch):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    prefilled = []
    forward = attached.generator.model.forward

    def counting(batch, kv, layers):
        prefilled.append(len(batch.tokens))
        return forward(batch, kv, layers)

    def tokens(rows, row_mask):
        prefilled.clear()
        output = model.generate(rows, attention_mask=row_mask, max_new_tokens=1, do_sample=True, top_k=0)
        return output, sum(prefilled)

    monkeypatch.setattr(attached.generator.model, "forward", counting)
    torch.manual_seed(2)
    repeated, num_repeated = tokens(ids.repeat_interleave(4, 0), mask.repeat_interleave(4, 0))
    assert num_repeated == int(mask.sum()) == tokens(ids, mask)[1]
    torch.manual_seed(2)
    samples = model.generate(
        ids, attention_mask=mask, max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=4
    )
    assert torch.equal(repeated, samples) and len(repeated.unique(dim=0)) > len(ids)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")],
)
def test_out_of_memory_halves_the_rows_and_gives_the_same_samples(error, monkeypatch, caplog):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    rows, row_mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)

    def sampled():
        torch.manual_seed(7)
        return model.generate(rows, attention_mask=row_mask, max_new_tokens=5, do_sample=True, top_k=0)

    expected, native = sampled(), attached.generator.native
    run, tried = native.run, []

    def limited(plan, *arguments):
        tried.append(plan.max_running)
        if plan.max_running > 3:
            plan.sequences[0].tokens.append(1)  # half-way
            raise error
        return run(plan, *arguments)

    monkeypatch.setattr(native, "run", limited)
    assert torch.equal(sampled(), expected) and tried == [12, 6, 3]
    assert "out of memory with 12 rows at once; goes on with 6: hybrid_engine.max_running=6, or as" in caplog.text
    monkeypatch.setattr(native, "run", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("always")))
    with pytest.raises(torch.OutOfMemoryError, match="always"):
        sampled()
    monkeypatch.undo()
    assert torch.equal(sampled(), expected)


def test_equal_rows_run_in_as_few_blocks_as_samples_of_a_prompt_do():
    model, (ids, mask) = build_model(), padded_prompts()
    rows, row_mask = ids.repeat_interleave(4, 0), mask.repeat_interleave(4, 0)
    attached = hybrid_engine.attach(model, kv_block_size=4, max_kv_blocks=5)
    found = model.generate(rows, attention_mask=row_mask, **GREEDY)
    attached.detach()
    assert torch.equal(found, theirs(model, rows, row_mask))


def test_threads_wait_for_each_other():
    model, (ids, mask) = build_model("llama"), padded_prompts()
    hybrid_engine.attach(model)
    expected = theirs(model, ids, mask)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(model.generate, ids, attention_mask=mask, **GREEDY) for _ in range(6)]
        for call in calls:
            torch.testing.assert_close(call.result(), expected)


def test_detach_waits_for_the_rollout_of_another_thread_and_those_that_come_later_are_the_models_own(monkeypatch):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    expected, generate, run = theirs(model, ids, mask), model.generate, attached.generator.native.run
    begun, is_told = threading.Event(), threading.Event()

    def late(*arguments):
        begun.set()
        assert is_told.wait(60)
        time.sleep(0.2)  # for a detach() that would not wait
        return run(*arguments)

    def detach():
        assert begun.wait(60)
        is_told.set()
        attached.detach()

    monkeypatch.setattr(attached.generator.native, "run", late)
    with ThreadPoolExecutor(2) as threads:
        call, detached = threads.submit(generate, ids, attention_mask=mask, **GREEDY), threads.submit(detach)
        assert torch.equal(call.result(), expected)
        detached.result()
    assert "generate" not in vars(model) and "it was detached" in attached.report()
    model.to(torch.float64)  # containers are not built anew
    assert torch.equal(generate(ids, attention_mask=mask, **GREEDY), theirs(model, ids, mask))
    assert attached.generator is None


def test_detach_inside_generate_is_refused():
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)

    def detach(tokens, scores):
        with pytest.raises(ValueError, match=r"detach\(\) was called inside generate"):
            attached.detach()
        return scores

    found = model.generate(ids, attention_mask=mask, logits_processor=[detach], **GREEDY)
    assert torch.equal(found, theirs(model, ids, mask)) and runs_on_containers(attached)


def test_embeddings_and_no_prompt_at_all_go_to_the_models_own(caplog):
    say_once.cache_clear()  # another test may have read the line
    model, (ids, _) = build_model(), padded_prompts(num_prompts=2)
    embeddings = model.get_input_embeddings()(ids).detach()
    expected = [model.generate(inputs_embeds=embeddings, **GREEDY), model.generate(bos_token_id=3, **GREEDY)]
    hybrid_engine.attach(model)
    torch.testing.assert_close(model.generate(inputs_embeds=embeddings, **GREEDY), expected[0])
    assert "there are no input_ids to begin from" in caplog.text
    torch.testing.assert_close(model.generate(bos_token_id=3, **GREEDY), expected[1])


@pytest.mark.parametrize(
    ("given", "is_native"),
    [
        ({"trust_remote_code": False}, True),
        ({"assistant_tokenizer": None, "tokenizer": None}, True),
        ({"custom_generate": lambda model, input_ids, shift, **others: input_ids + shift, "shift": 2}, False),
    ],
)
def test_names_that_only_transformers_generate_reads_are_taken(given, is_native, monkeypatch):
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    own, calls = attached._own, []
    monkeypatch.setattr(attached, "_own", lambda *args, **kwargs: calls.append(0) or own(*args, **kwargs))
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **GREEDY, **given),
        copy.deepcopy(model).generate(ids, attention_mask=mask, **GREEDY, **given),
    )
    assert bool(calls) != is_native


def test_detach_puts_back_what_was_there_and_copies_are_their_own():
    model, (ids, mask) = build_model(), padded_prompts()
    attached = hybrid_engine.attach(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.generate.__self__ is other
        assert torch.equal(other.generate(ids, attention_mask=mask, **GREEDY), theirs(model, ids, mask))
    attached.detach()
    attached.detach()
    assert "generate" not in vars(model) and model.generate.__func__ is type(model).generate
    hybrid_engine.attach(model).detach()

    def own_generate(*args, **kwargs):
        return "somebody else's"

    model.generate = own_generate
    attached = hybrid_engine.attach(model)
    assert isinstance(model.generate(ids, attention_mask=mask, **GREEDY), torch.Tensor)
    attached.detach()
    assert model.generate is own_generate


def test_a_model_without_policy_generates_by_itself_and_one_line_says_so(caplog):
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    ids = padded_prompts()[0]
    expected = model.generate(ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    attached = hybrid_engine.attach(model)
    assert "MambaForCausalLM generates with its own generate(): no policy" in caplog.text
    model.train()
    found = model.generate(ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert type(found) is type(expected) and torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)
    assert "no policy" in attached.report() and model.training


def test_what_cannot_be_attached_is_refused():
    model = build_model()
    attached = hybrid_engine.attach(model)
    for again in (model, get_peft_model(model, LoraConfig(**LORA))):
        with pytest.raises(ValueError, match=r"attached already; call detach\(\)"):
            hybrid_engine.attach(again)
    attached.detach()
    with pytest.raises(ValueError, match="max_runing=4 is not an option; did you mean max_running"):
        hybrid_engine.attach(model, max_runing=4)
    with pytest.raises(ValueError, match="max_running=-1"):
        hybrid_engine.attach(model, max_running=-1)
    with pytest.raises(ValueError, match="Linear is not a decoder-only language model"):
        hybrid_engine.attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model is a str"):
        hybrid_engine.attach("gpt2")
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not a decoder-only"):
        hybrid_engine.attach(t5)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "hybrid_engine": {"enabled": True}}
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    with pytest.raises(ValueError, match="is an engine"):
        hybrid_engine.attach(engine)
    with pytest.raises(ValueError, match="belongs to an engine"):
        hybrid_engine.attach(engine.module)


def test_wrong_input_is_refused_before_anything_is_done():
    model, (ids, mask) = build_model(), padded_prompts()
    hybrid_engine.attach(model)
    model.train()
    with pytest.raises(ValueError, match="max_new_tokns=3 is not an option"):
        model.generate(ids, attention_mask=mask, max_new_tokns=3)
    with pytest.raises(ValueError, match="both name the prompts"):
        model.generate(ids, input_ids=ids)
    with pytest.raises(ValueError, match="padding after a token"):
        model.generate(ids, attention_mask=mask.flip(1), **GREEDY)
    assert model.training
    assert_follows(model, ids, mask)


class Generating(TrainerCallback):
    """Generates at the end of every step, as a user who watches samples does."""

    def __init__(self, ids):
        self.ids, self.seen = ids, []

    def on_step_end(self, args, state, control, model, **kwargs):
        assert model.training
        self.seen.append(model.generate(self.ids, **GREEDY))


def test_transformers_trainer_trains_as_it_did_and_its_samples_are_the_same(tmp_path):
    ids = torch.randint(65, (8, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    runs = []
    for is_attached in (False, True):
        model, callback = tiny_llama(), Generating(ids[:3])
        if is_attached:
            attached = hybrid_engine.attach(model)
        arguments = TrainingArguments(
            tmp_path, max_steps=4, learning_rate=0.05, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, torch.stack(callback.seen)))
    assert runs_on_containers(attached)
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1]) and len(runs[0][1].unique(dim=0)) > 1


def test_accelerates_mixed_precision_around_forward_is_looked_through():
    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model, (ids, mask) = build_model(), padded_prompts()
        expected = theirs(model, ids, mask)
        prepared = accelerator.prepare(model)
        attached = hybrid_engine.attach(prepared)
        assert runs_on_containers(attached)
        wrapped = prepared.forward
        assert torch.equal(accelerator.unwrap_model(prepared).generate(ids, attention_mask=mask, **GREEDY), expected)
        assert prepared.forward == wrapped
    finally:
        AcceleratorState._reset_state(True)


def sharded_run(rank, world_size):
    """Two steps of FSDP2 training with generation in between; tokens, and whether settings are what they were."""
    model, (ids, mask) = build_model(), padded_prompts()
    ids, mask = ids[2 * rank : 2 * rank + 3], mask[2 * rank : 2 * rank + 3]
    attached = hybrid_engine.attach(model)  # whole; that it is sharded afterwards is seen
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    for module in (*model.model.layers, model):
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (*model.model.layers, model)]
    found = []
    for _ in range(2):
        model.train()
        found.append(model.generate(ids, attention_mask=mask, **GREEDY))
        found.append(model.generate(ids, attention_mask=mask, num_beams=2, **GREEDY))
        settings = [group.post_forward_mesh_info is None for group in groups]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.generate(ids, attention_mask=mask, **GREEDY)
        assert settings[:2] == [True, True]
        assert [group.post_forward_mesh_info is None for group in groups] == settings
    return found, runs_on_containers(attached), attached.generator.sharding.is_sharded


def test_a_model_sharded_by_fsdp2_generates_what_the_whole_one_does():
    results = run_distributed(sharded_run, 2)
    model, (ids, mask) = build_model(), padded_prompts()
    parts = [(ids[2 * rank : 2 * rank + 3], mask[2 * rank : 2 * rank + 3]) for rank in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        for (found, is_native, is_sharded), part in zip(results, parts, strict=True):
            assert is_native and is_sharded
            assert torch.equal(found[2 * step], theirs(model, *part))
            assert torch.equal(found[2 * step + 1], theirs(model, *part, num_beams=2))
        for part_ids, _ in parts:
            (model(input_ids=part_ids, labels=part_ids).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel_run(rank, world_size):
    model, (ids, mask) = build_model(), padded_prompts()
    wrapped = DistributedDataParallel(model)
    attached = hybrid_engine.attach(wrapped)
    train_a_step(wrapped, ids[rank : rank + 2])
    assert_follows(model, ids[rank:], mask[rank:])
    if rank == 1:  # and the other one not: they do not meet
        assert_follows(model, ids, mask)
    with torch.random.fork_rng():
        torch.manual_seed(5 + rank)
        drawn = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=6, num_return_sequences=2)
    return runs_on_containers(attached), drawn


def test_with_ddp_each_process_generates_alone():
    (first, drawn), (second, drawn_elsewhere) = run_distributed(parallel_run, 2)
    assert first and second and not torch.equal(drawn, drawn_elsewhere)
