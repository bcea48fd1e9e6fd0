"""Serving where processes share the model: one is asked, and the others do as it does."""

import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch

import hybrid_engine
from hybrid_engine.generation import guides
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.decode import DecodeStep
from hybrid_engine.generation.live.batches import ContainerBatch
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.live.shared import _Codec
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.recipes import serve
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import free_port, run_distributed, run_to_the_end
from tests.support.one_rank import Broken
from tests.support.served import build_llama

TEXTS = ("hello", "say hi", "a", "the last of them")


def ask(client, text="hello", **fields):
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    given = {"model": "tiny", "prompt": text, "max_tokens": 12, "seed": 3, "logprobs": 0, "extra_body": extra} | fields
    (choice,) = client.completions.create(**given).choices
    return choice.token_ids, choice.logprobs.token_logprobs


def ask_everything(client):
    """Answers to prompts one after the other and at once, of which one is given up, and to a conversation."""
    found = [ask(client, text) for text in TEXTS]
    threads = [threading.Thread(target=lambda text=text: found.append(ask(client, text, seed=5))) for text in TEXTS]
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    for thread in threads:
        thread.start()
    stream.close()
    for thread in threads:
        thread.join()
    found[len(TEXTS) :] = sorted(found[len(TEXTS) :])
    found.append(ask(client, stop=["q"], max_tokens=30))
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, seed=2, extra_body={"session_id": "s"}
        ).choices[0].message  # fmt: skip
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
        found.append(([answer.content], []))
    return found


def serve_shared(tokenizer, rank, world_size):
    """What this process's caller is answered; the conversation; what generate() gives afterwards."""
    engine = hybrid_engine.init_inference(build_llama(tokenizer), tensor_parallel={"tp_size": world_size})
    with engine.serving(tokenizer if rank == 0 else None, model_name="tiny", longest=160, max_running=3) as server:
        if rank == 0:
            found = ask_everything(server.client())
            assert len(server.trajectories()) == 1
        else:  # its caller may ask as well, and the leader waits until it has left
            with pytest.raises(ValueError, match="rank 0"):
                server.trajectories()
            time.sleep(0.7)
            found = [ask(server.client(), text) for text in TEXTS]
    with pytest.raises(ValueError, match="port"), engine.serving(tokenizer, port=-1):
        pass
    with pytest.raises(ValueError, match="longest"), engine.serving(tokenizer, longest=10**9):
        pass
    with pytest.raises(ValueError, match="processes share the model"), live_batch(engine.generator):
        pass
    prompt = torch.tensor([tokenizer.encode("hello")])
    return found, server.trajectories()[0].tokens, engine.generate(prompt, max_new_tokens=4).tolist()


def serve_policy(tokenizer, rank, world_size):
    """A policy under training, whose sharded weights two processes share in rollouts."""
    config = {"train_batch_size": world_size, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config |= {"zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True, "inference_tp_size": 2}}
    policy, *_ = hybrid_engine.initialize(model=build_llama(tokenizer), config=config)
    answers = []
    for step in range(2):
        with policy.eval().serving(tokenizer, model_name="tiny") as server:
            answers.append(ask(server.client(), extra_body={"session_id": f"{rank}"})[0])
        assert {trajectory.session_id for trajectory in server.trajectories()} == {"0", "1"}
        assert {trajectory.versions[-1] for trajectory in server.trajectories()} == {step}
        policy.train()
        ids = torch.tensor([[5, 6, 7]])
        policy.backward(policy(input_ids=ids, labels=ids).loss)
        policy.step()
    return answers


def serve_by_command(folder, port, rank):
    """`hybrid-engine serve --tp 2` until it is told to end, after one answer."""
    ending, answers = threading.Event(), []
    serve.told_to_end = lambda seconds: ending
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=100)

    def ask_and_end():
        answers.append(ask(client))
        ending.set()

    asking = threading.Thread(target=ask_and_end)
    if rank == 0:
        asking.start()
    serve.run(serve.Config(model=folder, model_name="tiny", tp=2, port=port, longest=160))
    if rank == 0:
        asking.join()
    return answers


def serve_in_all_ways(rank, world_size, folder, port):
    tokenizer = build_chat_tokenizer()
    shared = serve_shared(tokenizer, rank, world_size)
    return *shared, serve_by_command(folder, port, rank), serve_policy(tokenizer, rank, world_size)


def alike(ours, theirs):
    for (tokens, logprobs), (expected, expected_logprobs) in zip(ours, theirs, strict=True):
        assert tokens == expected
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-4, rtol=0)


def test_processes_that_share_the_model_answer_as_one_does(tmp_path):
    tokenizer = build_chat_tokenizer()
    build_llama(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    first, second = run_distributed(serve_in_all_ways, 2, str(tmp_path), free_port())
    with hybrid_engine.init_inference(build_llama(tokenizer)).serving(
        tokenizer, model_name="tiny", longest=160, max_running=3
    ) as server:
        expected = ask_everything(server.client())
    alike(first[0], expected)
    alike(second[0], expected[: len(TEXTS)])
    assert first[1] == second[1] == server.trajectories()[0].tokens
    assert first[2] == second[2]
    alike(first[3], expected[:1])
    # The policy draws what the model does, and something else after a step.
    assert first[4] == second[4] and first[4][0] == expected[0][0] != first[4][1]


def die_while_serving(rank, world_size):
    tokenizer = build_chat_tokenizer()
    engine = hybrid_engine.init_inference(build_llama(tokenizer), tensor_parallel={"tp_size": world_size})
    try:
        with engine.serving(tokenizer, model_name="tiny") as server:
            if rank == 1:
                os._exit(1)
            ended = threading.Event()
            server.wait(ended)  # returns: the model has failed
            assert server.worker.error is not None
            with pytest.raises(openai.APIStatusError, match="rank 1 is gone"):
                ask(server.client())
    except RuntimeError as error:
        return str(error)


def test_a_process_that_dies_ends_the_others_with_its_name():
    ((message, died),) = run_to_the_end([(die_while_serving,)], seconds=300)
    assert died is None and "serving(): rank 1 is gone" in message


@contextmanager
def without_room(owner, name, calls):
    """`name` of `owner`, an object or a class, raises an error after so many calls."""
    with Broken(owner, name, MemoryError("no room"), calls):
        broken = getattr(owner, name)
        if isinstance(owner, type):
            setattr(owner, name, lambda *args: broken(*args))
        yield


def stop_while_serving(rank, world_size):
    """What each process hears where one stops at an error: in a layer, in a draw, at a joining request."""
    tokenizer = build_chat_tokenizer()
    engine = hybrid_engine.init_inference(build_llama(tokenizer), tensor_parallel={"tp_size": world_size})
    prompt, heard = torch.tensor([tokenizer.encode("hello")]), []
    expected = engine.generate(prompt, max_new_tokens=4)
    layer, steps = engine.generator.model.layers[1], engine.generator.native.steps
    for who in range(world_size):
        for place, name, calls in ((layer, "forward", 3), (DecodeStep, "draw", 0), (ContainerBatch, "add", 0)):
            with (
                without_room(place, name, calls if rank == who else 10**9),
                pytest.raises(Exception) as raised,
                engine.serving(tokenizer, model_name="tiny") as server,
            ):
                if rank == 0:
                    with pytest.raises(openai.APIStatusError, match="no room"):
                        ask(server.client().with_options(max_retries=0))
            steps.drop()
            heard.append((type(raised.value).__name__, str(raised.value)))
            assert torch.equal(engine.generate(prompt, max_new_tokens=4), expected)
    return heard


def test_an_error_of_one_process_ends_all_at_once_and_they_may_go_on():
    """Nobody waits for the time limit, which is longer than the test may take."""
    ours = run_distributed(stop_while_serving, 2, seconds=10_000)
    for rank, heard in enumerate(ours):
        for number, (kind, text) in enumerate(heard):
            who = number // 3
            assert kind == "MemoryError" and text == ("no room" if rank == who else f"rank {who}: no room")


GUIDED = {"extra_body": {"guided_choice": ["yes", "no"]}, "max_tokens": 4}


def serve_while_a_guide_is_compiled(rank, world_size, folder):
    """The names of the threads that compile here, and on rank 0 the answers without and with a guide."""
    tokenizer, folder = build_chat_tokenizer(), Path(folder)
    engine = hybrid_engine.init_inference(build_llama(tokenizer), tensor_parallel={"tp_size": world_size})
    real, names, answers = guides._grammar, [], []  # called where a guide is not in the cache

    def compile_slowly(*args):
        names.append(threading.current_thread().name)
        if rank == 1 and not (folder / "answered").exists():
            (folder / "compiling").touch()
            wait_until((folder / "answered").exists)
        return real(*args)

    guides._grammar = compile_slowly  # of processes that end with this function
    with engine.serving(tokenizer if rank == 0 else None, model_name="tiny") as server:
        if rank == 0:
            client = server.client().with_options(max_retries=0, timeout=30)
            asking = threading.Thread(target=lambda: answers.append(ask(client, **GUIDED)))
            asking.start()
            wait_until((folder / "compiling").exists)
            answers.append(ask(client))
            assert len(answers) == 1
            (folder / "answered").touch()
            asking.join()
            answers.append(ask(client, **GUIDED))
            stream = client.completions.create(model="tiny", prompt="a", stream=True, extra_body=GUIDED["extra_body"])
            stream.close()  # given up, perhaps before it has joined
            answers.append(ask(client))
    return names, answers


def wait_until(is_so):
    """Asserts that it comes to be within 60 s."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_turn_of_any_process_waits_for_the_compilation_of_a_guide(tmp_path):
    tokenizer = build_chat_tokenizer()
    (_, answers), (names, _) = run_distributed(serve_while_a_guide_is_compiled, 2, str(tmp_path))
    assert names and all(name.startswith("hybrid-engine-guide") for name in names), names
    engine = hybrid_engine.init_inference(build_llama(tokenizer))
    with engine.serving(tokenizer, model_name="tiny") as server:
        plain, guided = ask(server.client()), ask(server.client(), **GUIDED)
    alike(answers, [plain, guided, guided, plain])


def test_sequences_travel_once_and_go_on_from_those_that_are_there():
    options, leader, follower = GenerationOptions(max_new_tokens=4), _Codec(), _Codec()
    prompt = Prompt([1, 2])
    first, second = Sequence(prompt, 0, options), Sequence(prompt, 1, options)
    got = follower.decode(leader.encode([first, second]))
    assert got[0].prompt is got[1].prompt and got[0].prompt.tokens == [1, 2]
    third, forgotten = Sequence(Prompt([3]), 0, options, begins_from=first), got.pop(1)
    del forgotten
    (other,) = follower.decode(leader.encode([third]))
    assert other.begins_from is got[0]
    fourth = Sequence(Prompt([3]), 0, options, begins_from=second)
    (other,) = follower.decode(leader.encode([fourth]))
    assert other.begins_from is None
    assert follower.decode(leader.encode([first, second])) == [got[0]]
