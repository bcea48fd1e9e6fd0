"""DPO and KTO end to end with tiny sizes: what they write, how they stop and go on, what they refuse."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hybrid_engine.cli import cli
from hybrid_engine.recipes import dpo, kto, sft
from hybrid_engine.rlhf.data.parts import is_held_out
from hybrid_engine.rlhf.runs.run_folder import read_answers, read_metrics
from tests.support.answers import check_followed
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after

SIZES = {
    "batch_size": 8,
    "micro_batch_size": 4,
    "eval_every": 2,
    "save_every": 0,
    "max_new_tokens": 8,
    "learning_rate": 1e-4,
}
RECIPES = {"dpo": dpo, "kto": kto}
FIGURES = {"loss", "chosen_reward", "rejected_reward", "reward_margin", "accuracy"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny SFT model."""
    out = tmp_path_factory.mktemp("sft")
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_layers": 1, "epochs": 1, "max_examples": 8, "batch_size": 8}
    return str(sft.run(sft.Config(out=str(out), **sizes)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of 40 pairs, of which two prompts are held out."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [
        {"prompt": f"f{n}(x)\n", "chosen": f"Return f{n}.", "rejected": f"returns the f{n} of x"} for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tiny(recipe, out, model, pairs, **options):
    return RECIPES[recipe].Config(**{**SIZES, "out": str(out), "model": model, "dataset": pairs, **options})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_learns_and_writes_metrics_plot_result_and_an_actor_that_changed(recipe, model, pairs, tmp_path):
    config = tiny(recipe, tmp_path, model, pairs, epochs=3, learning_rate=3e-3)
    RECIPES[recipe].run(config)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(line.keys() >= FIGURES | {"grad_norm", "learning_rate"} for line in lines)
    assert lines[0]["learning_rate"] > lines[-1]["learning_rate"] > 0  # of the step itself, not of the next
    assert ["held_out_accuracy" in line for line in lines[:4]] == [False, True, False, True]
    assert lines[0]["chosen_reward"] == pytest.approx(0, abs=1e-5)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["before"].keys() == result["after"].keys() >= FIGURES | {"length", "distinct_share"}
    assert "score" not in result["after"] and len(json.loads((tmp_path / "samples.json").read_text())) > 0
    assert result["before"]["accuracy"] == 0.5 and result["before"]["reward_margin"] == 0
    assert result["after"]["accuracy"] == 1 and result["after"]["reward_margin"] > 0.1
    assert result["after"]["loss"] < result["before"]["loss"]
    answers = read_answers(tmp_path / "answers.jsonl")
    check_followed(answers, {0, *range(2, len(lines) + 1, 2), len(lines)})
    assert all(line["rewards"] == [None] for line in answers)  # nobody judges the user's data
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(not torch.equal(actor[name], before[name]) for name in before)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "actor")) == 300
    losses = {line["step"] + 1: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    best = min(losses, key=losses.get)
    assert result["best"] == {"loss": losses[best], "step": best}
    AutoModelForCausalLM.from_pretrained(tmp_path / "best")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_best_may_be_the_last_where_no_interval_ends(recipe, model, pairs, tmp_path):
    RECIPES[recipe].run(tiny(recipe, tmp_path, model, pairs, epochs=1, eval_every=100))
    result = json.loads((tmp_path / "result.json").read_text())
    num_steps = len(read_metrics(tmp_path / "metrics.jsonl"))
    assert result["best"] == {"loss": result["after"]["loss"], "step": num_steps}
    assert (tmp_path / "best" / "config.json").exists()
    check_followed(read_answers(tmp_path / "answers.jsonl"), {0, num_steps})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_finished_run_is_made_longer_as_if_it_had_been_so_from_the_start(recipe, model, pairs, tmp_path):
    run, given = RECIPES[recipe].run, {"save_every": 100, "eval_every": 0, "lr_scheduler_type": "constant"}
    short, whole = (tiny(recipe, tmp_path / name, model, pairs, epochs=1, **given) for name in ("short", "whole"))
    for config in (short, replace(whole, epochs=2), replace(short, epochs=2, resume=True)):
        run(config)
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("short", "whole"))
    assert ours == theirs
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor") for name in ("short", "whole")]
    assert all(map(torch.equal, *(each.state_dict().values() for each in models)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(recipe, model, pairs, tmp_path):
    options = {
        "epochs": 1 if recipe == "kto" else 2,
        "save_every": 2,
        "max_pairs" if recipe == "dpo" else "max_answers": 32,
    }
    whole, torn = (tiny(recipe, tmp_path / name, model, pairs, **options) for name in ("whole", "torn"))
    RECIPES[recipe].run(whole)
    with stopped_after(3):
        RECIPES[recipe].run(torn)
    with pytest.raises(ValueError, match=r"--resume: --beta=0.5 but the interrupted run had 0.1"):
        RECIPES[recipe].run(replace(torn, resume=True, beta=0.5))
    RECIPES[recipe].run(replace(torn, resume=True))
    assert (tmp_path / "torn" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    actors = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor") for name in ("torn", "whole")]
    assert all(map(torch.equal, *(actor.state_dict().values() for actor in actors)))


def run_both(rank, world_size, configs):
    for recipe, config in configs:
        RECIPES[recipe].run(config)


def test_two_processes_under_zero_3_train_as_one_does(model, pairs, tmp_path):
    alone = [(recipe, tiny(recipe, tmp_path / f"{recipe}-1", model, pairs, learning_rate=3e-3)) for recipe in RECIPES]
    run_both(0, 1, alone)
    run_distributed(
        run_both,
        2,
        [(recipe, replace(config, out=str(tmp_path / f"{recipe}-2"), zero_stage=3)) for recipe, config in alone],
    )
    for recipe in RECIPES:
        one, two = (read_metrics(tmp_path / f"{recipe}-{number}" / "metrics.jsonl") for number in (1, 2))
        assert one[-1] == pytest.approx(two[-1], rel=1e-3, abs=1e-5)
        for line in (*one, *two):  # at the first steps the rewards are rounding, and so are their signs
            line.pop("accuracy")
            line.pop("held_out_accuracy", None)
        for ours, theirs in zip(one, two, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{recipe}-2" / "actor")


def test_an_adapter_is_trained_from_its_base_as_reference_which_is_loaded_once(
    model, pairs, tmp_path, capsys, monkeypatch
):
    options = "--lora-rank 2 --batch-size 8 --max-new-tokens 8 --loss hinge --sft-weight 0.1"
    loaded, load = [], LlamaForCausalLM.from_pretrained

    def load_counted(source, *arguments, **options):
        loaded.append(source)
        return load(source, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", load_counted)
    assert cli.main(f"dpo --model {model} --dataset {pairs} --out {tmp_path} {options}".split()) == 0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [lines[0]["chosen_reward"], lines[0]["rejected_reward"]] == pytest.approx([0, 0], abs=1e-5)
    assert "DPO 1/4  loss" in capsys.readouterr().out
    assert loaded.count(model) == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "actor")


def test_without_a_data_set_docstrings_are_learned_and_the_rules_judge(model, tmp_path):
    config = tiny("dpo", tmp_path, model, None, max_pairs=8, eval_every=0, eval_rows=4, eval_prompts=3)
    dpo.run(config)
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 <= result["before"]["score"] <= 1 and 0 <= result["after"]["score"] <= 1


def test_two_equal_answers_are_refused_with_their_line_before_anything_is_loaded(tmp_path, capsys, model):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b", "rejected": "b"}\n'
    )
    assert cli.main(["dpo", "--dataset", str(path), "--out", str(tmp_path / "run"), "--model", model]) == 2
    assert "line 2 has equal chosen and rejected answers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sigmoidal"}, "--loss=sigmoidal must be one of sigmoid, hinge, ipo"),
        ({"loss": "robust"}, "--label-smoothing=0.0 does not fit --loss=robust"),
        ({"label_smoothing": 0.1}, "--label-smoothing=0.1 does not fit --loss=sigmoid"),
        ({"loss": "robust", "label_smoothing": 0.5}, "--label-smoothing=0.5 must be at least 0 and below 0.5"),
        ({"beta": 0.0}, "--beta=0.0 must be above 0"),
        ({"loss": "exo"}, "--label-smoothing=0.0 does not fit --loss=exo"),
        ({"target_margin": 0.5}, "--target-margin=0.5 does not fit --loss=sigmoid, which ignores it"),
        ({"loss": "simpo", "target_margin": -1.0}, "--target-margin=-1.0 must be at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        dpo.Config(**options)
    with pytest.raises(ValueError, match="--batch-size=1 must be at least 2"):
        kto.Config(batch_size=1)


def test_the_defaults_of_a_loss_are_its_papers():
    found = {name: dpo.Config(loss=name) for name in ("sigmoid", "simpo", "orpo", "cpo", "sigmoid-length-normalised")}
    assert [config.beta for config in found.values()] == [0.1, 2.0, 0.1, 0.1, 5.0]
    assert [config.sft_weight for config in found.values()] == [0, 0, 1, 1, 0]
    assert dpo.Config(loss="orpo", sft_weight=0.0).build_loss().sft_weight == 0


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo"])
def test_a_loss_without_a_reference_learns_and_reads_no_reference(loss, model, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(dpo, "refer_pairs", None)
    config = tiny("dpo", tmp_path, model, pairs, loss=loss, wpo=loss == "simpo", eval_every=0)
    dpo.run(config)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["after"]["loss"] < result["before"]["loss"]
    assert result["after"]["reward_margin"] > result["before"]["reward_margin"]
    assert ("on_policy_weight" in result["after"]) == config.wpo


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_do_not_fit_the_model_are_left_out_if_asked(recipe, tmp_path, model, pairs, capsys):
    path = tmp_path / "long.jsonl"
    long = {"prompt": "x" * 600, "chosen": "a", "rejected": "b"}
    path.write_text(json.dumps(long) + "\n" + Path(pairs).read_text())
    config = tiny(recipe, tmp_path / "run", model, str(path), skip_too_long=True, eval_every=0)
    RECIPES[recipe].run(config)
    num_rows, num_trained = {"dpo": (1, 34), "kto": (2, 68)}[recipe]
    shown = capsys.readouterr().out
    assert f"{num_rows} of {num_trained + num_rows} rows have more tokens than the 512 positions of --model=" in shown
    assert f"{recipe.upper()}: {num_trained} " in shown
    with pytest.raises(ValueError, match=r"--batch-size=\d+ must not exceed the \d+ (pairs|answers) to train on"):
        RECIPES[recipe].run(replace(config, out=str(tmp_path / "few"), batch_size=num_trained + num_rows))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("dpo", {"held_out_share": 0.0}, "^--held-out-share=0.0 holds out 0 pairs and leaves 40 to train on"),
        ("kto", {"held_out_share": 0.0}, "^--held-out-share=0.0 holds out 0 answers and leaves 80 to train on"),
        (
            "dpo",
            {"held_out_share": 0.5, "batch_size": 32},
            r"^--batch-size=32 must not exceed the (\d+) pairs to train on \((\d+) more are held out for evaluation\)",
        ),
    ],
)
def test_a_share_that_leaves_too_few_is_named_with_its_numbers(recipe, options, message, tmp_path, model, pairs):
    with pytest.raises(ValueError, match=message) as refused:
        RECIPES[recipe].run(tiny(recipe, tmp_path / "run", model, pairs, **options))
    numbers = re.match(message, str(refused.value)).groups()
    assert not numbers or sum(map(int, numbers)) == 40
    assert not (tmp_path / "run").exists()


def test_labelled_answers_to_one_held_out_prompt_are_refused_before_anything_is_loaded(tmp_path, model, monkeypatch):
    monkeypatch.setattr(kto, "find_first_actor", None)
    kept = [prompt for prompt in (f"g{n}(x)\n" for n in range(40)) if not is_held_out(prompt)]
    rows = [{"prompt": prompt, "completion": "a", "label": True} for prompt in kept]
    held_out = next(prompt for prompt in map(str, range(99)) if is_held_out(prompt))
    rows += [{"prompt": held_out, "completion": answer, "label": False} for answer in "bc"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="--dataset has a single prompt to evaluate on, but KTO compares answers"):
        kto.run(tiny("kto", tmp_path / "run", model, str(tmp_path / "data.jsonl")))


def test_what_restart_would_move_aside_is_no_source_of_the_run(tmp_path, model, pairs):
    out = tmp_path / "run"
    shutil.copytree(model, out / "actor")
    config = tiny("dpo", out, str(out / "actor"), pairs, restart=True)
    with pytest.raises(ValueError, match=r"--model='.*actor' lies in '.*actor', which --restart moves aside; copy it"):
        dpo.run(config)
    assert (out / "actor" / "config.json").exists()


def test_a_row_that_does_not_fit_the_model_is_named(tmp_path, model, pairs):
    path = tmp_path / "long.jsonl"
    path.write_text(Path(pairs).read_text() + json.dumps({"prompt": "x" * 600, "chosen": "a", "rejected": "b"}) + "\n")
    with pytest.raises(ValueError, match=r"line 41 has \d+ tokens, more than the 512 positions of --model"):
        dpo.run(tiny("dpo", tmp_path / "run", model, str(path)))
    with pytest.raises(ValueError, match=r"--batch-size=64 must not exceed the \d+ pairs to train on"):
        dpo.run(tiny("dpo", tmp_path / "run", model, pairs, batch_size=64))
    assert not (tmp_path / "run").exists()
