"""Serving where the layers are dealt out to stages, adapters and tensor parallelism besides: as one process answers."""

import openai
import pytest
import torch

from hybrid_engine.generation.decode import DecodeStep
from hybrid_engine.generation.guides import GuidedTokens
from hybrid_engine.recipes import generate, serve
from hybrid_engine.rlhf.experience import answering
from tests.serving.test_adapters import write_models
from tests.serving.test_shared import alike, ask, ask_everything
from tests.support.distributed import run_distributed
from tests.support.one_rank import Broken

pytestmark = pytest.mark.long

LAYOUTS = {"pp2": (1, 2), "tp2": (2, 1), "tp2 pp2": (2, 2)}
MODELS = ("base", "one", "second")


def config_of(folder, tp=1, pp=1):
    adapters = (f"one={folder / 'first'}", str(folder / "second"))
    return serve.Config(model=str(folder / "base"), adapter=adapters, tp=tp, pp=pp)


def ask_guided(client):
    extra = {"guided_choice": ["yes", "no"]}
    return ask(client, n=1, extra_body=extra, max_tokens=9)


def ask_models(client):
    """All models, one after the other and at once, and what is scored of a prompt."""
    answers = [ask(client, model=model) for model in MODELS]
    streams = [client.completions.create(model=model, prompt="hello", max_tokens=30, seed=3, stream=True,
               extra_body={"return_token_ids": True, "ignore_eos": True}) for model in MODELS]  # fmt: skip
    for stream in streams:
        answers.append(([token for event in stream for token in event.choices[0].token_ids], []))
    for model in MODELS:
        scored = client.completions.create(model=model, prompt="hello", max_tokens=0, echo=True, logprobs=0)
        answers.append(([], scored.choices[0].logprobs.token_logprobs[1:]))
    return answers


def serve_adapters(folder, tp=1, pp=1):
    engine, tokenizer, names = serve.load(config_of(folder, tp, pp))
    with engine.serving(tokenizer, longest=160, max_running=4, model_name="base", adapters=names) as server:
        return ask_models(server.client()) if server.num_running == 0 and hasattr(server, "router") else None


def serve_one(folder, tp=1, pp=1):
    options = {"tensor_parallel": {"tp_size": tp}, "pipeline_parallel_size": pp} if tp * pp > 1 else {}
    base = serve.Config(model=str(folder / "base"))
    engine, tokenizer = answering.load_shared(base, tp, pp, {}) if options else (None, None)
    if engine is None:
        engine, tokenizer, _ = serve.load(base)
    found = []
    with engine.serving(tokenizer, longest=160, max_running=3, model_name="tiny") as server:
        if hasattr(server, "router"):
            client = server.client()
            found = [*ask_everything(client), ask_guided(client)]
            found.append(([], ask(client, echo=True, max_tokens=0)[1][1:]))
    ids = torch.tensor([tokenizer.encode("hello")])
    return found, engine, tokenizer, engine.generate(ids, max_new_tokens=4).tolist()


def fail(*unused):
    raise MemoryError("no room")


def stop_in_turn(engine, tokenizer, rank, who):
    """What is heard where one stage stops in a turn; where a rule of one answer fails, only that one does."""
    options = {"longest": 160, "max_running": 3, "model_name": "tiny"}
    with Broken(GuidedTokens, "__call__", None):
        GuidedTokens.__call__ = fail  # called where tokens are drawn, on the last stage
        with engine.serving(tokenizer, **options) as server:
            if hasattr(server, "router"):
                client = server.client().with_options(max_retries=0)
                with pytest.raises(openai.InternalServerError, match=r"a rule of this request failed.*no room"):
                    ask_guided(client)
                before = ask(client)
    is_alone = engine.group.parallel.size == 1  # processes of one stage must not stop alone in a layer
    place, name = (engine.generator.model.layers[0], "forward") if is_alone else (DecodeStep, "draw")
    calls, real = [], getattr(place, name)

    def stopping(*args):
        calls.append(0)
        return fail() if rank == who and len(calls) > 5 else real(*args)

    with Broken(place, name, None), pytest.raises(Exception) as raised:
        setattr(place, name, stopping)
        with engine.serving(tokenizer, **options) as server:
            if hasattr(server, "router"):
                client = server.client().with_options(max_retries=0)
                with pytest.raises(openai.APIStatusError, match="no room"):
                    for _ in range(9):
                        assert ask(client)[0] == before[0]
    return type(raised.value).__name__, str(raised.value)


def answer_file(folder, out, tp, pp):
    generate.run(
        generate.Config(model=str(folder / "base"), adapter=str(folder / "first"), prompts=str(folder / "p.jsonl"),
                        out=str(out), max_new_tokens=8, tp=tp, pp=pp)
    )  # fmt: skip
    return out.read_text()


def everything(rank, world_size, folder, layout):
    tp, pp = LAYOUTS[layout]
    found, engine, tokenizer, tokens = serve_one(folder, tp, pp)
    who = world_size - 1
    heard = stop_in_turn(engine, tokenizer, rank, who) if pp > 1 else None
    adapted = serve_adapters(folder, tp, pp)
    answers = answer_file(folder, folder / f"{layout}.jsonl", tp, pp)
    return {"found": found, "tokens": tokens, "heard": heard, "adapted": adapted, "answers": answers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    (folder / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "hi"}\n')
    found, *_, tokens = serve_one(folder)
    answers = answer_file(folder, folder / "alone.jsonl", 1, 1)
    return {"found": found, "tokens": tokens, "adapted": serve_adapters(folder), "answers": answers}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_answer_as_one_does(folder, expected, layout):
    tp, pp = LAYOUTS[layout]
    leader, *others = run_distributed(everything, tp * pp, folder, layout, seconds=10_000)
    alike(leader["found"], expected["found"])
    alike(leader["adapted"], expected["adapted"])
    assert len({tuple(tokens) for tokens, _ in leader["adapted"][:3]}) == 3
    for number, process in enumerate([leader, *others]):
        assert process["tokens"] == expected["tokens"] and process["answers"] == expected["answers"]
        if pp > 1:
            who = tp * pp - 1
            kind, text = process["heard"]
            assert kind == "MemoryError" and text.endswith("no room") and (number == who or f"rank {who}: " in text)
