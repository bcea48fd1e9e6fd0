"""What a run says of its memory at its end: the plan beside what was measured, by the same definition."""

import json
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hybrid_engine
from hybrid_engine.recipes import dpo, grpo, kto, sft
from hybrid_engine.rlhf.batches.passes import PassShape, RunPasses
from hybrid_engine.rlhf.planning import comparison
from hybrid_engine.rlhf.planning.comparison import FollowedRun, RunMemory
from hybrid_engine.rlhf.planning.memory_plan import MemoryPart, MemoryPlan, RolePlan
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama
from tests.support.distributed import run_distributed
from tests.support.small_actors import save_sums


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    tokenizer = arithmetic.build_tokenizer()
    build_small_llama(tokenizer, hidden_size=64, num_layers=2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save_sums(folder)
    with (folder / "texts.jsonl").open("w") as file:
        for n in range(80):
            file.write(json.dumps({"prompt": f"{n:02}+{n:02}=", "completion": f"{2 * n:03}" * 16}) + "\n")
    return folder


def sft_config(folder, out, **options):
    texts = str(folder / "texts.jsonl")
    options = {"dataset": texts, **options}
    return sft.Config(out=str(out), model=str(folder / "model"), epochs=1, save_every=0, **options)


def memory_of(out, log="sft-log"):
    return json.loads((Path(out) / log / "result.json").read_text())["memory"]


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 4}, {"tokens_per_micro_batch": 256}])
def test_a_run_takes_the_memory_that_was_planned(sources, tmp_path, options, capsys):
    sft.run(sft_config(sources, tmp_path, **options))
    memory = memory_of(tmp_path)
    assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)
    assert memory["planned_for_lengths_bytes"] is None
    assert memory["process_peak_bytes"] > memory["measured_bytes"]
    assert "memory: planned" in capsys.readouterr().out


def test_the_longest_answers_are_planned_where_they_meet_and_not_all_at_once(sources, tmp_path):
    with (tmp_path / "labelled.jsonl").open("w") as file:
        for n in range(80):
            answer = {"completion": f"{2 * n:03}" * (30 if n % 10 == 0 else 3), "label": n % 2 == 0}
            file.write(json.dumps({"prompt": f"{n:02}+{n:02}=", **answer}) + "\n")
    kto.run(
        kto.Config(
            out=str(tmp_path / "out"), model=str(sources / "model"), dataset=str(tmp_path / "labelled.jsonl"),
            batch_size=8, tokens_per_micro_batch=768, max_new_tokens=4, eval_prompts=2, eval_every=0, save_every=0,
        )
    )  # fmt: skip
    memory = memory_of(tmp_path / "out", "")
    assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)


@pytest.mark.parametrize("budget", [0, 256])
@pytest.mark.parametrize("recipe", [sft, dpo, kto], ids=["sft", "dpo", "kto"])
def test_passes_are_measured_by_the_tokens_that_the_model_reads(recipe, budget, sources, tmp_path, monkeypatch):
    with (tmp_path / "rows.jsonl").open("w") as file:  # long prompts before short answers and the other way round
        for n in range(80):
            prompt, answer = (f"{n:02}+" * 12, "01") if n % 2 else (f"{n:02}+", "012" * 12)
            row = {"prompt": prompt}
            row |= {"chosen": answer, "rejected": answer[1:]} if recipe is dpo else {"completion": answer}
            file.write(json.dumps(row | ({"label": n % 4 < 2} if recipe is kto else {})) + "\n")
    passes = []

    @contextmanager
    def count(self, shape, *, has_gradients):
        read = []
        (embedding,) = {engine.module.get_input_embeddings() for engine in engines}
        with embedding.register_forward_hook(lambda module, args, output: read.append(args[0].numel())):
            yield
        passes.append((shape.num_cells, sum(read)))

    monkeypatch.setattr(RunPasses, "training_pass", count)
    engines, build = [], hybrid_engine.initialize
    monkeypatch.setattr(hybrid_engine, "initialize", lambda **options: keep(build(**options)))

    def keep(built):
        engines.append(built[0])
        return built

    config = recipe.Config(
        out=str(tmp_path / "out"), model=str(sources / "model"), dataset=str(tmp_path / "rows.jsonl"), batch_size=8,
        micro_batch_size=4, tokens_per_micro_batch=budget, eval_every=0, save_every=0, epochs=1,
        **({} if recipe is sft else {"max_new_tokens": 4, "eval_prompts": 2}),
    )  # fmt: skip
    recipe.run(config)
    assert len(passes) > 8
    assert [cells for cells, _ in passes] == [read for _, read in passes]


def _run_one_step(rank, world_size, folder, out, long_answer):
    """SFT on eight texts, all in one step; that of so many is the longest by far."""
    with (Path(out) / f"texts-{rank}.jsonl").open("w") as file:
        for n in range(8):
            completion = "012" * (30 if n == long_answer else 3)
            file.write(json.dumps({"prompt": f"{n:02}+{n:02}=", "completion": completion}) + "\n")
    options = {"held_out_share": 0.0, "batch_size": 8, "micro_batch_size": 1, "zero_stage": 3 if world_size > 1 else 0}
    texts = str(Path(out) / f"texts-{rank}.jsonl")
    sft.run(sft_config(Path(folder), out, **{"dataset": texts, **options}))
    return memory_of(out)


def test_the_first_step_is_planned_and_measured_before_the_optimizer_has_a_state(sources, tmp_path, capsys):
    memory = _run_one_step(0, 1, sources, tmp_path, 3)
    assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.05)


def test_the_process_with_most_is_measured(sources, tmp_path):
    for memory in run_distributed(_run_one_step, 2, str(sources), str(tmp_path), 3):
        assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)


def _run_sharded(rank, world_size, folder, out, stage):
    sft.run(sft_config(Path(folder), out, zero_stage=stage))
    return memory_of(out)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_processes_take_the_memory_that_was_planned(sources, tmp_path, stage):
    for memory in run_distributed(_run_sharded, 2, str(sources), str(tmp_path), stage):
        assert memory["measured_bytes"] == pytest.approx(memory["planned_bytes"], rel=0.15)


def _run_without_a_plan_on_one(rank, world_size, folder, out):
    def fail(read, setting):
        raise NotImplementedError("no shapes here")

    if rank == 1:
        comparison.plan_memory = fail
    sft.run(sft_config(Path(folder), out))
    return Path(out, "sft-log", "result.json").read_text()


def test_a_plan_that_fails_on_one_process_does_not_keep_the_other_waiting(sources, tmp_path):
    for result in run_distributed(_run_without_a_plan_on_one, 2, str(sources), str(tmp_path)):
        assert "seconds" in json.loads(result) and "memory" not in json.loads(result)


def test_answers_that_end_early_are_planned_again_as_long_as_they_were(sources, tmp_path, capsys):
    grpo.run(
        grpo.Config(
            out=str(tmp_path), model=str(sources / "model"), dataset=str(sources / "prompts.jsonl"),
            reward=("length:target=12",),
            steps=2, rollout_size=4, group_size=4, minibatch_size=16, micro_batch_size=8, eval_prompts=2,
            eval_samples=1, eval_every=0, save_every=0, max_new_tokens=24, max_running=8,
        )
    )  # fmt: skip
    memory = memory_of(tmp_path, "")
    assert memory["planned_bytes"] >= memory["planned_for_lengths_bytes"]
    assert memory["measured_bytes"] == pytest.approx(memory["planned_for_lengths_bytes"], rel=0.15)
    assert memory["measured_generation_bytes"] <= memory["planned_generation_bytes"]
    said = " ".join(capsys.readouterr().out.split())
    assert ", 8 sequences at once" in said
    assert "peak of training:" in said and "KV workspace" in said and "memory: planned" in said
    assert "with the KV workspace in addition to training" in said and "answers as long as they were" in said


@pytest.mark.parametrize("budget", [500, 2000])
def test_passes_in_which_groups_share_long_prompts_are_planned_with_all_that_they_copy(budget, sources, tmp_path):
    with (tmp_path / "prompts.jsonl").open("w") as file:
        for n in range(40):
            file.write(json.dumps({"prompt": f"{n:02}+" * 60 + "=", "answer": "7"}) + "\n")
    grpo.run(
        grpo.Config(
            out=str(tmp_path), model=str(sources / "model"), dataset=str(tmp_path / "prompts.jsonl"),
            reward=("length:target=12",),
            steps=2, rollout_size=4, group_size=8, minibatch_size=32, tokens_per_micro_batch=budget, eval_prompts=2,
            eval_samples=1, eval_every=0, save_every=0, max_new_tokens=24, max_prompt_tokens=256, max_running=8,
        )
    )  # fmt: skip
    memory = memory_of(tmp_path, "")
    assert memory["planned_bytes"] >= memory["planned_for_lengths_bytes"]
    assert memory["measured_bytes"] == pytest.approx(memory["planned_for_lengths_bytes"], rel=0.03)


GPU = torch.device("cuda")
NOTHING = MemoryPlan(
    roles=[RolePlan(name="model", kept=[], gradients=MemoryPart("gradients", 0, ""))], accumulates=True, generation=[]
)


class Models:
    """Stands in for the models of a run, which hold so many bytes; the last rollout took `of_rollout`."""

    num_steps = 1

    def __init__(self, held=0):
        self.held, self.of_rollout = held, (0, 0)

    def held_bytes(self):
        return self.held

    def gathered_storages(self):
        return ()

    def cache_bytes(self):
        return 0

    def rollout_bytes(self):
        return self.of_rollout


def largest_beside(given_out, passes, monkeypatch):
    """Of passes of so many tokens, None for one that runs out of memory, the one that is planned again.

    `given_out`: the most bytes that a GPU's allocator had given out before and after each.
    """
    planned, peaks = [], iter(given_out)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks, given_out[-1]))
    memory = RunMemory(GPU, Models())
    for num_tokens in passes:
        with (
            suppress(torch.OutOfMemoryError),
            memory.training_pass(PassShape(1, 0, num_tokens or 100), has_gradients=False),
        ):
            if num_tokens is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
    run = FollowedRun(NOTHING, memory, lambda ran: planned.append(ran) or NOTHING)
    assert run.compare(memory.measured())["planned_for_lengths_bytes"] == 0
    return [num_tokens or 100 for num_tokens in passes].index(planned[0].shape.response)


def test_on_a_gpu_the_pass_in_which_the_allocator_gave_out_more_is_planned_again(monkeypatch):
    assert largest_beside([5, 5, 5, 9, 9, 9], [10, 20, 30], monkeypatch) == 1
    assert largest_beside([9, 9, 9, 9, 9, 9], [10, 30, 20], monkeypatch) == 1  # a rollout took more than all of them
    assert largest_beside([5, 6, 6, 9, 9, 9], [10, None, 20], monkeypatch) == 1


def test_a_rollout_is_planned_as_it_is_measured():
    generation = [
        MemoryPart("KV workspace", 70, ""),
        MemoryPart("fused adapters", 5, ""),
        MemoryPart("prefill", 900, ""),
    ]
    plan, models = replace(NOTHING, generation=generation), Models(held=40)
    memory = RunMemory(torch.device("cpu"), models)
    run = FollowedRun(plan, memory, None)
    with memory.training_pass(PassShape(1, 0, 1), has_gradients=False):
        pass
    assert run.compare(memory.measured())["planned_for_lengths_bytes"] is None  # nothing was drawn
    models.of_rollout = (50, 5)
    found = run.compare(memory.measured())
    assert found["measured_generation_bytes"] == 95
    assert found["planned_for_lengths_bytes"] == 55  # the plan's models are empty
