"""Several adapters of one model served side by side."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import hybrid_engine
from hybrid_engine.generation import step
from hybrid_engine.generation.live import opening as live_adapters
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.recipes import serve
from hybrid_engine.rlhf.experience.answering import BaseModelOptions, load_with_adapters, read_adapters
from tests.serving.test_server import build
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import run_distributed

TARGETS = {"first": ["q_proj", "down_proj"], "second": ["v_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_models(folder)
    return folder


def write_models(folder):
    """base/, and first/ and second/ with an adapter each."""
    tokenizer = build_chat_tokenizer()
    build(tokenizer).module.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for seed, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(seed)
        adapted = get_peft_model(
            type(build(tokenizer).module).from_pretrained(folder / "base"), LoraConfig(r=2, target_modules=targets)
        )
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.7)
        adapted.save_pretrained(folder / name)


def serving(folder, **options):
    given = (f"one={folder / 'first'}", str(folder / "second"))
    adapters = read_adapters(given, str(folder / "base"), "base")
    engine, tokenizer, names = load_with_adapters(BaseModelOptions(model=str(folder / "base")), adapters)
    return engine, engine.serving(tokenizer, longest=160, max_running=4, model_name="base", adapters=names, **options)


def ask(client, model, **fields):
    given = {
        "prompt": "hello",
        "max_tokens": 20,
        "seed": 3,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    return client.completions.create(model=model, **given | fields).choices[0]


def alone(folder, model, **options):
    """By an engine that has this adapter alone."""
    tokenizer = build_chat_tokenizer()
    module = build(tokenizer).module
    if model != "base":
        module = PeftModel.from_pretrained(module, folder / {"one": "first"}.get(model, model))
    engine, ids = hybrid_engine.init_inference(module.eval()), torch.tensor([tokenizer.encode("hello")])
    given = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "seed": 3, "eos_token_id": None}
    return engine.generate(ids, **given | options)[0, ids.shape[1] :].tolist()


def test_each_name_answers_by_its_adapter_whoever_else_is_asked(folder, monkeypatch):
    monkeypatch.setattr(live_adapters, "TURNS_AT_ONCE", 3)
    expected = {model: alone(folder, model) for model in ("base", "one", "second")}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    engine, opening = serving(folder)
    before = engine.module.active_adapter
    trained = {name: number % 3 == 0 for number, (name, _) in enumerate(engine.module.named_parameters())}
    for name, parameter in engine.module.named_parameters():
        parameter.requires_grad_(trained[name])
    with opening as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        listed = client.models.list().data
        assert [model.id for model in listed] == ["base", "one", "second"]
        assert [model.parent for model in listed[1:]] == ["base", "base"]
        assert client.models.retrieve("one").id == "one"
        for _ in range(2):  # alone, one after the other, and back
            assert {model: ask(client, model).token_ids for model in expected} == expected
        with ThreadPoolExecutor(12) as pool:
            models = [*expected] * 4
            answers = list(pool.map(lambda model: ask(client, model).token_ids, models))
        assert answers == [expected[model] for model in models]
        scored = {m: ask(client, m, echo=True, logprobs=0, max_tokens=0).logprobs.token_logprobs[1:] for m in expected}
        assert scored["base"] != scored["one"] != scored["second"]
        with pytest.raises(openai.NotFoundError, match="there is 'base', 'one', 'second'"):
            ask(client, "first")
    assert engine.module.active_adapter == before
    assert {name: parameter.requires_grad for name, parameter in engine.module.named_parameters()} == trained
    ids = torch.tensor([build_chat_tokenizer().encode("hello")])
    active = engine.generate(ids, max_new_tokens=20, do_sample=True, top_k=0, seed=3, eos_token_id=None)
    assert active[0, ids.shape[1] :].tolist() == expected["one"]  # as before: the adapter that was loaded first


def test_no_adapter_waits_for_the_end_of_anothers_answers(folder, monkeypatch):
    monkeypatch.setattr(live_adapters, "TURNS_AT_ONCE", 2)
    _, opening = serving(folder)
    with opening as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model="one", prompt="x", max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        ask(client, "second", max_tokens=4)
        assert server.worker.num_running == 1
        stream.close()


@pytest.mark.parametrize(
    ("adapters", "word"),
    [
        (("nowhere",), "no adapter_config.json"),
        (("{}/first", "x={}/second", "first={}/second"), "'first', as another one"),
        (("base={}/first",), "or the model itself"),
        (("{}/of-another",), "was trained on 'some/other-model'"),
        (("{}/no-lora",), "peft_type IA3"),
        (("{}/no-json",), "cannot be read"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused_before_anything_loads(folder, monkeypatch, adapters, word):
    written = json.loads((folder / "first" / "adapter_config.json").read_text())
    changed = {"of-another": {"base_model_name_or_path": "some/other-model"}, "no-lora": {"peft_type": "IA3"}}
    for name, changes in changed.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "adapter_config.json").write_text(json.dumps(written | changes))
    (folder / "no-json").mkdir(exist_ok=True)
    (folder / "no-json" / "adapter_config.json").write_text("{")
    monkeypatch.setattr(serve, "load_with_adapters", None)
    given = tuple(adapter.format(folder) for adapter in adapters)
    with pytest.raises(ValueError, match=word):
        serve.run(serve.Config(model=str(folder / "base"), adapter=given))


def test_an_engine_serves_adapters_that_its_model_has(folder):
    tokenizer = build_chat_tokenizer()
    for adapters, word in (({"a": "none"}, "no adapter 'none'"), ({"tiny": "default"}, "name of the base model")):
        engine = hybrid_engine.init_inference(
            PeftModel.from_pretrained(build(tokenizer).module, folder / "first").eval()
        )
        with pytest.raises(ValueError, match=word), engine.serving(tokenizer, model_name="tiny", adapters=adapters):
            pass


def ask_a_shared_policy(rank, world_size, folder, tp_size):
    """Answers of the models of a policy under training, of which groups of processes have a server each."""
    tokenizer = build_chat_tokenizer()
    model = PeftModel.from_pretrained(build(tokenizer).module, folder / "first", "first", is_trainable=True)
    model.load_adapter(str(folder / "second"), "second")
    config = {"train_batch_size": world_size, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config |= {"zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True, "inference_tp_size": tp_size}}
    policy, *_ = hybrid_engine.initialize(model=model, config=config)
    names, trained = {"one": "first", "second": "second"}, [p.requires_grad for p in policy.module.parameters()]
    answers = []
    for _ in range(2):  # they switch at moments of their own, and wait for nobody
        with policy.eval().serving(tokenizer, model_name="base", longest=160, max_running=4, adapters=names) as server:
            if rank % tp_size == 0:
                models = ("base", "one", "second", "one")[:: 1 if rank == 0 else -1]
                answers += [(model, ask(server.client(), model).token_ids) for model in models]
        assert trained == [p.requires_grad for p in policy.module.parameters()]
    policy.train()
    ids = torch.tensor([[5, 6, 7]])
    policy.backward(policy(input_ids=ids, labels=ids).loss)
    policy.step()
    with policy.eval().serving(tokenizer, model_name="base", longest=160, max_running=4, adapters=names) as server:
        found = ask(server.client(), "one").token_ids
    return answers, found


def test_adapters_of_a_policy_that_processes_share_answer_as_those_of_one(folder):
    expected = {model: alone(folder, model) for model in ("base", "one", "second")}
    first, second = run_distributed(ask_a_shared_policy, 2, folder, 2)
    assert len(first[0]) == 8 and all(tokens == expected[model] for model, tokens in first[0])
    assert second[0] == [] and first[1] == second[1] != expected["one"]  # the step moved the adapter that is active


def test_adapters_are_fused_into_gathered_weights_and_not_into_copies_of_them(folder, monkeypatch):
    """Where steps are recorded, sharded weights are copied and parted again, and no other adapter can be read."""
    model = PeftModel.from_pretrained(build(build_chat_tokenizer()).module, folder / "first")
    model.load_adapter(str(folder / "second"), "second")
    generator = hybrid_engine.init_inference(model.eval()).generator
    generator.native.steps.recorder, generator.gatherer.can_stream = object(), True
    monkeypatch.setattr(step, "bound_to_copies", None)
    with live_batch(generator, 16, 2, adapters=("default", "second")) as batch:
        assert not batch.has_work
