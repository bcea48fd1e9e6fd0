"""Supervised fine-tuning on a dataset of one's own: what is learned, how it is measured, how it stops and goes on."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid_engine.recipes import sft
from hybrid_engine.rlhf.batches.sequences import epochs_of_similar_length
from hybrid_engine.rlhf.data.parts import load_parts
from hybrid_engine.rlhf.data.reading import read_learned_rows
from hybrid_engine.rlhf.options.supervised import TASKS
from hybrid_engine.rlhf.runs.run_folder import read_config, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog
from hybrid_engine.rlhf.tasks import corpus
from tests.support.chat import MARKED_TEMPLATE, build_chat_tokenizer
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny chat model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_chat_tokenizer(MARKED_TEMPLATE)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A file of conversations of different lengths."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w") as file:
        for n in range(20):
            turns = [("user", f"{n}?"), ("assistant", "a" * (n % 3 + 1))] * (n % 2 + 1)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return str(path)


@pytest.fixture
def config(model, chats, tmp_path):
    return sft.Config(
        out=str(tmp_path / "run"), model=model, dataset=chats, batch_size=4, epochs=2, learning_rate=1e-2, save_every=0
    )


def metrics_of(config):
    return read_metrics(sft.Path(config.out) / "sft-log" / "metrics.jsonl")


def weights_of(config, name="sft"):
    return AutoModelForCausalLM.from_pretrained(sft.Path(config.out) / name).state_dict()


def test_a_chat_model_learns_the_conversations_of_a_file_and_keeps_the_best(config, tmp_path):
    config = replace(config, epochs=4, eval_every=4)
    folder = sft.run(config)
    lines = metrics_of(config)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[0]["learning_rate"] > lines[-1]["learning_rate"] > 0  # of the step itself, not of the next
    measured = {line["step"] + 1: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    result = json.loads((tmp_path / "run" / "sft-log" / "result.json").read_text())
    assert result["best"]["held_out_loss"] == min(measured.values()) == measured[result["best"]["step"]]
    assert set(measured) == {*range(4, len(lines) + 1, 4), len(lines)}
    assert AutoTokenizer.from_pretrained(folder).chat_template == MARKED_TEMPLATE
    assert (
        read_config(tmp_path / "run" / "sft-log")["eval_every"] == 4
        and (tmp_path / "run" / "sft-log" / "plot.png").exists()
    )
    if result["best"]["step"] == len(lines):
        assert all(map(torch.equal, weights_of(config).values(), weights_of(config, "sft-best").values()))


def test_the_loss_is_that_of_the_marked_tokens_alone(config, model, chats):
    sft.run(replace(config, epochs=1, batch_size=2))
    first = metrics_of(config)[0]["loss"]
    tokenizer, corpus = sft.load_corpus(config)
    rows, _ = load_parts(config.source, read_learned_rows)
    batch = epochs_of_similar_length([len(example) for example in corpus.train], 2, 1, config.seed)[0]
    net, total, count = AutoModelForCausalLM.from_pretrained(model), 0.0, 0
    for index in batch:
        marked = tokenizer.apply_chat_template(
            rows[index].messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        ids, mask = marked["input_ids"], marked["assistant_masks"][0, 1:].bool()
        losses = -net(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total, count = total + losses[mask].sum().item(), count + int(mask.sum())
    assert first == pytest.approx(total / count, rel=1e-5)


def test_the_split_into_micro_batches_changes_nothing(config):
    whole, split = replace(config, epochs=1), replace(config, epochs=1, micro_batch_size=1, out=config.out + "-split")
    for each in (whole, split):
        sft.run(each)
    for ours, theirs in zip(metrics_of(split), metrics_of(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def run_sft(rank, world_size, config):
    sft.run(config)


def test_two_processes_under_zero_3_learn_with_an_adapter_what_one_does(config):
    alone = replace(config, epochs=1, lora_rank=2)
    shared = replace(alone, zero_stage=3, out=config.out + "-two", eval_every=2)
    sft.run(alone)
    run_distributed(run_sft, 2, shared)
    for ours, theirs in zip(metrics_of(shared), metrics_of(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert weights_of(shared).keys() == weights_of(alone).keys()


@pytest.mark.parametrize("stop", [3, 5])
def test_an_interrupted_run_goes_on_with_the_same_bits(config, stop):
    config = replace(config, save_every=3, eval_every=2)
    whole, torn = replace(config, out=config.out + "-whole"), config
    sft.run(whole)
    with stopped_after(stop):
        sft.run(torn)
    with pytest.raises(ValueError, match=r"--resume: --learning-rate=0.5 but the interrupted run had 0.01"):
        sft.run(replace(torn, resume=True, learning_rate=0.5))
    with pytest.raises(ValueError, match="--resume continues a run and --restart starts it over"):
        sft.run(replace(torn, resume=True, restart=True))
    sft.run(replace(torn, resume=True))
    assert metrics_of(torn) == metrics_of(whole)
    assert all(map(torch.equal, weights_of(torn).values(), weights_of(whole).values()))
    results = [json.loads((sft.Path(each.out) / "sft-log" / "result.json").read_text()) for each in (torn, whole)]
    assert results[0]["best"] == results[1]["best"]


def test_without_resume_an_interrupted_run_begins_again_and_loses_nothing(config, tmp_path, monkeypatch):
    config = replace(config, save_every=1, epochs=1)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(sft, "save_stage", None)
        sft.run(config)
    sft.run(config)
    assert (tmp_path / "run" / "previous-1" / "sft-checkpoints" / "latest").exists()


def test_a_model_from_nothing_learns_a_data_set_of_text(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {"vocab_size": 300, "hidden_size": 64, "num_layers": 1, "epochs": 1, "batch_size": 4}
    folder = sft.run(sft.Config(out=str(tmp_path), dataset=str(tmp_path / "sums.jsonl"), held_out_share=0, **small))
    assert len(AutoTokenizer.from_pretrained(folder)) <= 300
    assert json.loads((tmp_path / "sft-log" / "result.json").read_text()).keys() == {"seconds", "memory"}


def test_a_template_file_serves_a_tokenizer_without_one(config, model, tmp_path):
    plain = tmp_path / "plain"
    LlamaForCausalLM.from_pretrained(model).save_pretrained(plain)
    build_chat_tokenizer(None).save_pretrained(plain)
    config = replace(config, model=str(plain), epochs=1)
    with pytest.raises(
        ValueError, match=r"line 1 is a conversation, but the tokenizer of '.*plain' has no chat template"
    ):
        sft.run(config)
    assert not (tmp_path / "run").exists()
    (tmp_path / "chat.jinja").write_text(MARKED_TEMPLATE)
    tokenizer, _ = sft.load_corpus(replace(config, chat_template=str(tmp_path / "chat.jinja")))
    assert tokenizer.chat_template == MARKED_TEMPLATE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 20},
            "18 of 20 rows cannot be used: line 1 has 23 tokens, more than --max-tokens=20; raise it",
        ),
        ({"held_out_share": 0.001}, "--held-out-share=0.001 of --dataset='"),
        ({"batch_size": 64}, "--batch-size=64 must not exceed the 1"),
        ({"chat_template": "nowhere"}, "--chat-template='nowhere' must be a file with a Jinja chat template"),
        ({"lora_rank": 17}, "--lora-rank=17 exceeds the width of --model="),
        ({"resume": True}, "sft-checkpoints' contains no complete checkpoint; leave it out"),
        (
            {"eval_every": 2, "held_out_share": 0.0},
            "--eval-every=2 has no held-out rows; raise --held-out-share=0",
        ),
        ({"lora_rank": 2, "model": None}, "--lora-rank=2 needs a pretrained model; give --model"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(config, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sft.run(replace(config, **options))
    assert not (tmp_path / "run").exists()


def test_a_row_longer_than_the_models_positions_is_named(config, tmp_path):
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (9, 5, 128)))
    config = replace(config, dataset=str(tmp_path / "long.jsonl"), held_out_share=0)
    with pytest.raises(
        ValueError, match=r"long.jsonl': line 3 has 129 tokens, more than the 128 positions of --model='"
    ):
        sft.run(config)


def test_the_best_may_be_the_last_where_no_interval_ends(config, tmp_path):
    folder = sft.run(replace(config, epochs=1, eval_every=100))
    result = json.loads((tmp_path / "run" / "sft-log" / "result.json").read_text())
    assert result["best"] == {"step": len(metrics_of(config)), "held_out_loss": result["held_out_nats_per_token"]}
    assert folder.exists() and all(
        map(torch.equal, weights_of(config).values(), weights_of(config, "sft-best").values())
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "WarmupDecayLR"])
def test_a_finished_run_is_made_longer(config, kind, capsys):
    config = replace(config, epochs=1, save_every=100, eval_every=100, lr_scheduler_type=kind)
    short, whole = config, replace(config, epochs=2, out=config.out + "-whole")
    sft.run(whole)
    num_short = len(metrics_of(whole)) // 2
    sft.run(short)
    assert len(metrics_of(short)) == num_short
    capsys.readouterr()
    sft.run(replace(short, resume=True, epochs=2))
    said = " ".join(capsys.readouterr().out.split())
    ours, theirs = metrics_of(short), metrics_of(whole)
    rates = [[line["learning_rate"] for line in lines[num_short:]] for lines in (ours, theirs)]
    assert rates[0] == rates[1] and min(rates[0]) > 0 and len(ours) == len(theirs)
    if kind == "constant":
        assert [line["loss"] for line in ours] == [line["loss"] for line in theirs] and "makes the run" not in said
        assert all(map(torch.equal, weights_of(short).values(), weights_of(whole).values()))
    else:
        assert f"--epochs=2 makes the run longer: the {kind} schedule of the model is now over all of it" in said
        assert f"its learning rate goes on at {rates[0][0]:.3g}, after" in said


@pytest.mark.parametrize("stop", ["in a step", "before its model is saved", "after an earlier version"])
def test_a_longer_run_that_was_interrupted_goes_on(config, monkeypatch, capsys, stop):
    config = replace(config, epochs=1, save_every=2, lr_scheduler_type="constant")
    longer, whole = replace(config, resume=True, epochs=2), replace(config, epochs=2, out=config.out + "-whole")
    sft.run(whole)
    sft.run(config)
    if stop == "after an earlier version":
        (sft.Path(config.out) / "sft-log" / "finished.json").unlink()
    write, last = RunLog.write, len(metrics_of(whole)) - 1

    def stop_there(log, step, *arguments):
        write(log, step, *arguments)
        if step == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, TypeError)):
        if stop == "before its model is saved":
            patch.setattr(sft, "save_stage", None)
        else:
            patch.setattr(RunLog, "write", stop_there)
        sft.run(longer)
    assert json.loads((sft.Path(config.out) / "sft-checkpoints" / "options.json").read_text())["epochs"] == 2
    sft.run(longer)
    assert metrics_of(config) == metrics_of(whole)
    assert all(map(torch.equal, weights_of(config).values(), weights_of(whole).values()))
    capsys.readouterr()
    sft.run(longer)
    assert "exists, so this stage is skipped" in capsys.readouterr().out


def test_a_run_without_checkpoints_is_not_made_longer_and_says_so(config, capsys):
    sft.run(replace(config, epochs=1))
    capsys.readouterr()
    sft.run(replace(config, epochs=1, resume=True))
    assert "this stage is skipped (`hybrid-engine sft --restart` repeats it)" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(
        ValueError, match=r"contains no complete checkpoint; --restart starts .*--save-every 0 saves no checkpoint$"
    ):
        sft.run(replace(config, resume=True))


def test_only_the_length_of_a_finished_run_may_grow(config, capsys):
    config = replace(config, epochs=None, save_every=100)  # one pass over the rows of one's own model
    folder = sft.run(config)
    for options in ({}, {"epochs": 1}):
        sft.run(replace(config, resume=True, **options))
        assert "exists, so this stage is skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--seed=1 but the interrupted run had 0; .* use the original --seed$"):
        sft.run(replace(config, resume=True, epochs=2, seed=1))
    with pytest.raises(
        ValueError, match=r"--max-tokens=64 but the interrupted run had None; .* leave --max-tokens out$"
    ):
        sft.run(replace(config, resume=True, epochs=2, max_tokens=64))
    longer = replace(config, resume=True, epochs=3)
    sft.run(longer)
    folder.rename(folder.with_name("moved-too"))
    with pytest.raises(
        ValueError, match=r"--epochs=2 but the interrupted run had 3; .* original --epochs, or more for a longer run$"
    ):
        sft.run(replace(longer, epochs=2))


def test_the_tasks_that_the_option_allows_are_those_that_have_rows():
    assert tuple(corpus.TASKS) == TASKS
