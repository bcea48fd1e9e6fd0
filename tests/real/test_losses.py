"""The first step of a recipe on the real model: its loss and gradient are those of transformers, or of TRL."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_engine.recipes import dpo, kto, sft
from hybrid_engine.rlhf.data.parts import load_parts
from hybrid_engine.rlhf.data.reading import read_labelled_rows, read_preference_rows
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.runs.run_folder import read_metrics

TURNS = [
    ("What is the capital of France?", "Paris.", "It is London, I think."),
    ("Add 2 and 3.", "5", "The sum of both is 6."),
    ("Write a word that rhymes with cat.", "Hat rhymes with cat.", "Dog."),
    ("Say yes.", "Yes!", "No, never."),
    ("Name a color.", "Blue is a color.", "A chair."),
    ("What day follows Monday?", "Tuesday.", "Sunday, or so."),
    ("How many legs has a dog?", "Four.", "Two legs."),
    ("Is fire cold?", "No, it is hot.", "Yes."),
]
SMALL = {"warmup_steps": 0, "dtype": "fp32", "save_every": 0}

COMPARED = {"beta": 0.1, "held_out_share": 0.65, "eval_every": 0, "eval_prompts": 1, "max_new_tokens": 2}


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def norm(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def agree(step, loss, gradient):
    """Both are of fp32: the loss to 1e-5, the norm of the gradient to 1e-5 of it."""
    assert step["loss"] == pytest.approx(loss, abs=1e-5)
    assert step["grad_norm"] == pytest.approx(gradient, rel=1e-5)


def first_step_of_sft(real_model, rows, tmp_path):
    data = write(tmp_path / "rows.jsonl", rows)
    options = {"batch_size": len(rows), "micro_batch_size": 2, "epochs": 1, "held_out_share": 0.0, **SMALL}
    sft.run(sft.Config(model=real_model, dataset=data, out=str(tmp_path / "run"), **options))
    return read_metrics(tmp_path / "run" / "sft-log" / "metrics.jsonl")[0]


def test_sft_has_the_loss_and_the_gradient_of_trl(real_model, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = [{"prompt": user(question), "completion": assistant(answer)} for question, answer, _ in TURNS]
    step = first_step_of_sft(real_model, rows, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(real_model),
        args=trl.SFTConfig(output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None),
        train_dataset=Dataset.from_list([rendered(row, tokenizer) for row in rows]),
        processing_class=tokenizer,
    )
    examples = [trainer.train_dataset[index] for index in range(len(rows))]
    loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(examples))
    loss.backward()
    agree(step, loss.item(), norm(trainer.model))


def test_sft_has_the_loss_and_the_gradient_of_transformers(real_model, tmp_path):
    rows = [{"messages": user(question) + assistant(answer)} for question, answer, _ in TURNS]
    step = first_step_of_sft(real_model, rows, tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(real_model), AutoModelForCausalLM.from_pretrained(real_model)
    losses, num_learned = [], 0
    for row in rows:
        prompt, whole = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=begins, return_dict=False)
            for turns, begins in ((row["messages"][:1], True), (row["messages"], False))
        )
        end = max(index for index, token in enumerate(whole) if token == tokenizer.eos_token_id) + 1
        tokens = torch.tensor([whole[:end]])
        # In double precision: in fp32 the loss that transformers takes of its logits is 1e-5 off by itself.
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double()
        losses.append(nn.functional.cross_entropy(logits, tokens[0, len(prompt) :], reduction="sum"))
        num_learned += end - len(prompt)
    loss = sum(losses) / num_learned
    loss.backward()
    agree(step, loss.item(), norm(model))


def trained_on(data, rows, read):
    """The rows that a run does not hold out; some are, and all of the others are in one step."""
    train, held_out = load_parts(DataSource(datasets=(data,), held_out_share=COMPARED["held_out_share"]), read)
    assert train and held_out
    return [rows[int(row.place.rpartition(" ")[2]) - 1] for row in train]


def rendered(row, tokenizer):
    """A row as text: of a conversation TRL learns the line feed after the turn's end too, which no model need write."""
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    answers = {name: row[name][0]["content"] for name in row.keys() - {"prompt", "label"}}
    return {**row, "prompt": prompt, **answers}


def first_step_of_trl(name, real_model, rows, tmp_path):
    """Loss and gradient of TRL's trainer on all rows at once."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    make_config, make_trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    arguments = make_config(
        output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None, beta=0.1,
        per_device_train_batch_size=len(rows), disable_dropout=True,
    )  # fmt: skip
    trainer = make_trainer(
        model=AutoModelForCausalLM.from_pretrained(real_model),
        ref_model=AutoModelForCausalLM.from_pretrained(real_model),
        args=arguments,
        train_dataset=Dataset.from_list([rendered(row, tokenizer) for row in rows]),
        processing_class=tokenizer,
    )
    model = trainer.model.train()
    examples = [trainer.train_dataset[index] for index in range(len(trainer.train_dataset))]
    loss = trainer.compute_loss(model, trainer.data_collator(examples))
    loss.backward()
    return loss.item(), norm(model)


def test_dpo_has_the_loss_and_the_gradient_of_trl(real_model, tmp_path):
    rows = [
        {"prompt": user(question), "chosen": assistant(better), "rejected": assistant(worse)}
        for question, better, worse in TURNS
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    rows = trained_on(data, rows, read_preference_rows)
    options = {"batch_size": len(rows), "micro_batch_size": 2, **COMPARED, **SMALL}
    dpo.run(dpo.Config(model=real_model, dataset=data, out=str(tmp_path / "run"), **options))
    step = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    agree(step, *first_step_of_trl("DPO", real_model, rows, tmp_path))


def test_kto_has_the_loss_and_the_gradient_of_trl(real_model, tmp_path):
    rows = [
        {"prompt": user(question), "completion": assistant(better if index % 2 else worse), "label": bool(index % 2)}
        for index, (question, better, worse) in enumerate(TURNS)
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    rows = trained_on(data, rows, read_labelled_rows)
    options = {"batch_size": len(rows), "micro_batch_size": 2, **COMPARED, **SMALL}
    kto.run(kto.Config(model=real_model, dataset=data, out=str(tmp_path / "run"), **options))
    step = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    agree(step, *first_step_of_trl("KTO", real_model, rows, tmp_path))
