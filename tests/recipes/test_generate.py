"""`hybrid-engine generate`: prompts from files, whatever interrupts it."""

import io
import json
import os
import resource
import subprocess
import sys
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.cli.cli import main
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.recipes import generate, serve
from hybrid_engine.rlhf.experience.answering import load_answering
from tests.support.chat import build_chat_tokenizer
from tests.support.distributed import run_distributed

NUM_ROWS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = build_chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"row {number}", "answer": number} for number in range(NUM_ROWS - 2)]
    rows += [{"prompt": "row 3", "answer": 0}]  # the same prompt again draws another sample
    rows += [{"prompt": [{"role": "user", "content": "hi"}], "answer": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(model, prompts, out, **options):
    return generate.run(
        generate.Config(
            model=str(model), prompts=str(prompts), out=str(out), **({"max_new_tokens": 10, "seed": 5} | options)
        )
    )


def test_rows_stand_in_their_order_with_what_generate_draws(model, prompts, tmp_path):
    out = tmp_path / "answers.jsonl"
    run(model, prompts, out, max_running=3, num_samples=2)
    found = lines(out)
    assert [row["answer"] for row in found] == [row["answer"] for row in lines(prompts)]
    engine = hybrid_engine.init_inference(LlamaForCausalLM.from_pretrained(model).eval())
    tokenizer = build_chat_tokenizer()
    for number in (0, 3):
        ids = torch.tensor([tokenizer.encode(f"row {number}")])
        sampled = engine.generate(
            ids,
            do_sample=True,
            top_k=0,
            max_new_tokens=10,
            num_return_sequences=2,
            seed=5,
            return_dict_in_generate=True,
        )
        texts = [
            tokenizer.decode(row[ids.shape[1] :][:length], skip_special_tokens=True)
            for row, length in zip(sampled.sequences, sampled.lengths, strict=True)
        ]
        assert found[number]["responses"] == texts
    assert found[3]["responses"] != found[NUM_ROWS - 2]["responses"]
    assert not list(tmp_path.glob("*.part"))


def test_after_a_kill_finished_rows_are_not_answered_again(model, prompts, tmp_path, monkeypatch):
    whole = run(model, prompts, tmp_path / "whole.jsonl").read_bytes()
    out = tmp_path / "answers.jsonl"

    class Killed(BaseException):
        pass

    real, written = generate.Journal.add, []

    def add(journal, row, answer):
        if len(written) == 5:
            raise Killed
        written.append(row)
        real(journal, row, answer)

    monkeypatch.setattr(generate.Journal, "add", add)
    with pytest.raises(Killed):
        run(model, prompts, out)
    part = out.with_name("answers.jsonl.part")
    with part.open("a") as file:
        file.write('{"row": 99, "resp')  # what a kill leaves of a line
    again = []
    monkeypatch.setattr(generate.Journal, "add", lambda *args: (again.append(args[1]), real(*args)))
    run(model, prompts, out)
    assert sorted(written + again) == list(range(NUM_ROWS))
    assert out.read_bytes() == whole


def test_a_process_that_is_killed_loses_nothing_that_was_finished(model, prompts, tmp_path):
    whole = run(model, prompts, tmp_path / "whole.jsonl", max_new_tokens=200).read_bytes()
    out = tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "hybrid_engine.cli.cli", "generate", "--model", str(model)]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "200", "--seed", "5"]
    command += ["--max-running", "1"]
    narrow = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # files are UTF-8 all the same
    process = subprocess.Popen(command, env=narrow, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = out.with_name("answers.jsonl.part")
    while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") > 2):
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not out.exists()
    finished = part.read_bytes()
    run(model, prompts, out, max_new_tokens=200)
    assert out.read_bytes() == whole
    assert finished.count(b"\n") > 2


def test_a_journal_keeps_every_text(tmp_path):
    """JSON leaves ends of lines other than the newline as they are."""
    answer = {"responses": ["a\u2028b\x85c\u2029\x1cd", "\U0001f600 \u4f60"]}
    out = tmp_path / "out.jsonl"
    generate.Journal(out, {"seed": 1}, False).add(0, answer)
    journal = generate.Journal(out, {"seed": 1}, False)
    assert journal.finished == {0: {"row": 0} | answer}
    journal.publish()
    assert json.loads(out.read_bytes()) == answer


def test_a_disk_that_is_full_says_so_and_the_same_command_goes_on(model, prompts, tmp_path, capsys):
    command = ["generate", "--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "60", "--seed", "5"]
    assert main([*command, "--out", str(tmp_path / "whole.jsonl")]) == 0
    out, limits = tmp_path / "answers.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        assert main([*command, "--out", str(out), "--max-running", "2"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hybrid-engine: ") and "finished rows stay: make room" in line and f"{out}.part" in line
    assert not out.exists()
    assert main([*command, "--out", str(out)]) == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("command", "hint"), [("generate", "; finished rows are kept; the same command"), ("serve", "\n")]
)
def test_ctrl_c_says_what_stays(model, prompts, tmp_path, monkeypatch, capsys, command, hint):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_answering", interrupted)
    monkeypatch.setattr(serve, "load", interrupted)
    options = (
        ["--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")] if command == "generate" else ["--port", "0"]
    )
    assert main([command, "--model", str(model), *options]) == 130
    assert f"hybrid-engine: interrupted{hint}" in capsys.readouterr().err


def shared_runs(rank, world_size, model, prompts, folder):
    """Each layout, the first one ended by an error of rank 0 in the middle and gone on with by the second."""
    real = generate.Journal.add

    def add(journal, row, answer):
        if len(journal.finished) == 4:
            raise OSError("disk full")
        real(journal, row, answer)

    generate.Journal.add = add
    try:
        with pytest.raises(OSError, match="disk full"):
            run(model, prompts, folder / "resumed.jsonl", pp=2, num_samples=2, max_running=6)
    finally:
        generate.Journal.add = real
    run(model, prompts, folder / "resumed.jsonl", tp=2, num_samples=2)
    run(model, prompts, folder / "greedy.jsonl", pp=2, num_samples=2, temperature=0, max_running=3)
    with pytest.raises(ValueError, match="makes 1 processes, and 2 were started"):
        run(model, prompts, folder / "alone.jsonl")
    with pytest.raises(ValueError, match="has no adapter_config"):
        run(model, prompts, folder / "adapted.jsonl", pp=2, adapter="nowhere")


def test_processes_that_share_the_model_answer_as_one_does(model, prompts, tmp_path):
    run_distributed(shared_runs, 2, model, prompts, tmp_path)
    alone = run(model, prompts, tmp_path / "one.jsonl", num_samples=2)
    assert (tmp_path / "resumed.jsonl").read_bytes() == alone.read_bytes()
    greedy = run(model, prompts, tmp_path / "one_greedy.jsonl", num_samples=2, temperature=0)
    assert (tmp_path / "greedy.jsonl").read_bytes() == greedy.read_bytes()
    with pytest.raises(ValueError, match="several processes only read and write files"):
        run(model, "-", tmp_path / "x.jsonl", pp=2)


def test_an_adapter_answers_as_peft_does(model, prompts, tmp_path):
    torch.manual_seed(1)
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    out = run(model, prompts, tmp_path / "out.jsonl", adapter=str(tmp_path / "adapter"), temperature=0)
    tokenizer = build_chat_tokenizer()
    ids = torch.tensor([tokenizer.encode("row 0")])
    expected = adapted.eval().generate(input_ids=ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert lines(out)[0]["responses"] == [tokenizer.decode(expected, skip_special_tokens=True)]


def test_the_terminal_gets_answers_as_they_come(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("row 0\n\nrow 1\n"))
    assert main(["generate", "--model", str(model), "--prompts", "-", "--out", "-", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_lines_of_the_terminal_are_asked_as_the_rows_of_a_file_are(model, tmp_path, monkeypatch, capsys):
    options = {"temperature": 0.0, "system_prompt": "Be brief.", "prompt_template": "{prompt} Why?"}
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "row 0"}\n{"prompt": "row 1"}\n')
    run(model, file, tmp_path / "out.jsonl", **options)
    monkeypatch.setattr(sys, "stdin", io.StringIO("row 0\nrow 1\n"))
    run(model, "-", tmp_path / "typed.txt", **options)
    answers = [row["responses"][0] for row in lines(tmp_path / "out.jsonl")]
    assert (tmp_path / "typed.txt").read_text() == "".join(f"{answer}\n" for answer in answers)
    monkeypatch.setattr(sys, "stdin", io.StringIO("row 0\nrow 1\n"))
    run(model, "-", tmp_path / "bare.txt", temperature=0.0)
    assert (tmp_path / "bare.txt").read_text() != (tmp_path / "typed.txt").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": ("ask=prompt",)}, "--columns='ask=prompt' needs a dataset, but --prompts='-'"),
        ({"split": "test"}, "--split='test' needs a dataset"),
        ({"dataset_config": "main"}, "--dataset-config='main' needs a dataset"),
        ({"prompt_template": "{prompt} {more}"}, "must name {prompt} and no other column"),
        ({"prompt_template": "{question}"}, "must name {prompt} and no other column"),
    ],
)
def test_what_a_line_of_the_terminal_does_not_have_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        generate.Config(model="any", prompts="-", out="-", **options)


def test_rows_that_have_no_answer_are_left_out_before_the_model_is_loaded(model, tmp_path, monkeypatch, capsys):
    rows = ["fine", "x" * 3000, [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}], "good"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    run(model, file, tmp_path / "out.jsonl", skip_bad_rows=True)
    assert [row["prompt"] for row in lines(tmp_path / "out.jsonl")] == ["fine", "good"]
    told = capsys.readouterr().out
    assert "2 of 4 rows are left out" in told and "a prompt of 3000 tokens" in told and "refuses" in told
    assert main(["generate", "--model", str(model), "--prompts", str(file), "--out", "-", "--skip-bad-rows"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"fine\n{rows[1]}\ngood\n"))
    run(model, "-", tmp_path / "typed.txt", skip_bad_rows=True)
    assert (tmp_path / "typed.txt").read_text().count("\n") >= 2
    assert "line 2: a prompt of 3000 tokens" in capsys.readouterr().out
    monkeypatch.setattr(generate, "load_answering", None)  # what cannot be used is told without it
    with pytest.raises(
        ValueError, match=r"2 of 4 rows cannot be used: line 2: a prompt of 3000 .* \| line 3: the chat"
    ):
        run(model, file, tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model": None}, "--model"),
        ({"prompts": None}, "--prompts"),
        ({"out": None}, "--out"),
        ({"prompts": "nothing.jsonl"}, "nothing.jsonl"),
        ({"num_samples": 0}, "--num-samples"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"max_new_tokens": 10**7}, r"--max-new-tokens=10000000 exceed the 2048 that the model takes"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -1}, "--top-k"),
        ({"adapter": "nothing"}, "--adapter"),
        ({"dtype": "int8"}, "--dtype"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(model, prompts, tmp_path, options, word):
    given = {"model": str(model), "prompts": str(prompts), "out": str(tmp_path / "x" / "out.jsonl")} | options
    with pytest.raises(ValueError, match=word):
        generate.run(generate.Config(**given))
    assert not (tmp_path / "x" / "out.jsonl").exists()


def test_prompt_and_answer_may_be_as_long_as_the_model_takes_and_memory_holds(model, monkeypatch):
    engine, _ = load_answering(generate.Config(model=str(model), prompts="-", out="-"))
    with live_batch(engine.generator, max_running=1) as batch:
        assert batch.longest == 2048
    of_a_token = engine.generator.model.bytes_per_block(1)
    monkeypatch.setattr(engine.generator.memory, "spare_bytes", lambda model: 33 * 16 * of_a_token)
    with live_batch(engine.generator, max_running=4) as batch:
        assert batch.longest == 16 * 32
    with (
        pytest.raises(ValueError, match=r"longest=513: .* hold 512 tokens; lower it"),
        live_batch(engine.generator, 513),
    ):
        pass


def test_an_earlier_result_stays_and_a_journal_of_other_options_is_refused(model, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ValueError, match="--restart"):
        run(model, prompts, out)
    assert out.read_text() == "mine\n"
    run(model, prompts, out, restart=True)
    assert (tmp_path / "previous-1" / "out.jsonl").read_text() == "mine\n"
    other = tmp_path / "other.jsonl"
    other.with_name("other.jsonl.part").write_text(json.dumps({"model": "another"}) + "\n")
    with pytest.raises(ValueError, match="differs"):
        run(model, prompts, other)
