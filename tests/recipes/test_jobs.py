"""The three stages end to end with tiny sizes: what they write, how they stop and go on, what they refuse."""

import json
import shutil
import signal
import traceback
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybrid_engine.checkpoint.saving import LOCK_FILE
from hybrid_engine.cli import cli
from hybrid_engine.recipes import agent, grpo, online_dpo, ppo, sft
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.scores import RewardError
from hybrid_engine.rlhf.runs.run_folder import read_answers, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog
from tests.support.answers import check_followed
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after

pytestmark = pytest.mark.long

TINY = ppo.Config(
    steps=2, rollout_size=8, minibatch_size=4, micro_batch_size=2, max_new_tokens=8, eval_prompts=6, save_every=0
)  # fmt: skip
SIZES = "--max-examples 64 --batch-size 8"


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A folder with a tiny SFT model and a tiny reward model, made by the command."""
    out = tmp_path_factory.mktemp("stages")
    assert cli.main(f"sft --out {out} --vocab-size 300 --hidden-size 64 --num-layers 1 --epochs 1 {SIZES}".split()) == 0
    assert cli.main(f"reward --out {out} {SIZES}".split()) == 0
    return out


def new_run(stages, out):
    for name in ("sft", "reward"):
        shutil.copytree(stages / name, out / name)
    return str(out)


def test_sft_and_reward_write_folders_that_transformers_loads(stages):
    tokenizer = AutoTokenizer.from_pretrained(stages / "sft")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.padding_side == "left"
    assert AutoModelForCausalLM.from_pretrained(stages / "sft").config.vocab_size == len(tokenizer) == 300
    classifier = AutoModelForSequenceClassification.from_pretrained(stages / "reward")
    assert classifier.config.num_labels == 1 and classifier.config.score_std > 0
    assert len(read_metrics(stages / "sft-log" / "metrics.jsonl")) == 64 // 8
    accuracy = json.loads((stages / "reward-log" / "result.json").read_text())["held_out_accuracy"]
    assert {"all", "third person", "other function"} <= set(accuracy)


def test_a_finished_stage_is_not_run_again_unless_asked(stages, tmp_path):
    out = new_run(stages, tmp_path)
    marker = tmp_path / "sft" / "marker"
    marker.touch()
    tiny = sft.Config(out=out, vocab_size=300, hidden_size=64, num_layers=1, epochs=1, batch_size=8, max_examples=8)
    sft.run(tiny)
    assert marker.exists()
    sft.run(replace(tiny, restart=True))
    assert not marker.exists() and (tmp_path / "sft" / "config.json").exists()
    assert (tmp_path / "previous-1" / "sft" / "marker").exists()


def test_ppo_writes_metrics_plot_samples_and_an_actor_that_changed(stages, tmp_path):
    out = new_run(stages, tmp_path)
    ppo.run(replace(TINY, out=out, eval_every=1))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    assert abs(lines[0]["kl_per_sequence"]) < 1e-3 and lines[0]["logprob_difference_max"] < 1e-3
    for line in lines:
        assert line["first_ratio"] == pytest.approx(1, abs=1e-3)
        assert 0 <= line["judge_pass_rate"] <= 1 and line["generate_seconds"] > 0
        assert {"policy_loss", "value_loss", "clip_fraction", "approx_kl", "entropy_estimate", "length"} <= set(line)
        assert 0 <= line["cut_off_share"] <= 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        result["before"].keys() == result["after"].keys() > {"judge_pass_rate", "distinct_share", "top_opening_share"}
    )
    scores = [line["held_out_score"] for line in lines]
    assert result["best"] == {"score": max(scores), "step": scores.index(max(scores)) + 1}
    check_followed(read_answers(tmp_path / "answers.jsonl"), {0, 1, 2})
    AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert len(json.loads((tmp_path / "samples.json").read_text())) == 6
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "sft").state_dict()
    assert all(not torch.equal(actor[name], before[name]) for name in before)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "actor")) == 300


def test_in_exact_mode_rollout_and_trainer_are_never_apart(stages, tmp_path, capsys):
    ppo.run(replace(TINY, out=new_run(stages, tmp_path), exact=True, ppo_epochs=1))
    assert "to the bit and need no second pass" in capsys.readouterr().out
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        assert line["logprob_difference_max"] == 0.0 and line["first_ratio"] == 1.0


def test_partial_rollouts_of_ppo_go_on_as_if_they_had_not_been_interrupted(stages, tmp_path):
    config = replace(TINY, steps=4, save_every=1, ppo_epochs=1, eval_every=0, partial_rollouts=True)
    ppo.run(replace(config, out=new_run(stages, tmp_path / "whole")))
    torn = new_run(stages, tmp_path / "torn")
    with stopped_after(2):
        ppo.run(replace(config, out=torn))
    ppo.run(replace(config, out=torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    for name in ("score", "staleness", "stale_share", "first_ratio", "policy_loss", "value_loss", "actor_grad_norm"):
        assert [line[name] for line in ours] == [line[name] for line in theirs], name
    assert ours[0]["stale_share"] == 0 and all(0 < line["stale_share"] < 1 for line in ours[1:])


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(stages, tmp_path):
    config = replace(TINY, steps=4, save_every=2, ppo_epochs=1, eval_every=1)
    whole = new_run(stages, tmp_path / "whole")
    ppo.run(replace(config, out=whole))
    torn = new_run(stages, tmp_path / "torn")
    with stopped_after(3):
        ppo.run(replace(config, out=torn))
    with pytest.raises(ValueError, match=r"--resume: --kl-coef=0.5 but the interrupted run had 0.07"):
        ppo.run(replace(config, out=torn, resume=True, kl_coef=0.5))
    ppo.run(replace(config, out=torn, resume=True))

    for ours, theirs in zip(
        *(read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole")), strict=True
    ):
        for name in (
            "step",
            "score",
            "kl_per_sequence",
            "policy_loss",
            "value_loss",
            "actor_grad_norm",
            "learning_rate",
        ):
            assert ours[name] == theirs[name], name
    for folder in ("actor", "best"):
        models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / folder) for name in ("torn", "whole")]
        assert all(map(torch.equal, *(model.state_dict().values() for model in models)))
    results = [json.loads((tmp_path / name / "result.json").read_text())["best"] for name in ("torn", "whole")]
    assert results[0] == results[1]


def files_in(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / LOCK_FILE)
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_run_is_begun_again_only_when_asked_and_what_was_there_is_moved_aside(stages, tmp_path, capsys):
    config = replace(TINY, out=new_run(stages, tmp_path / "run"), steps=1, save_every=1)
    ppo.run(config)
    before = files_in(tmp_path / "run")
    with pytest.raises(ValueError, match=r"metrics.jsonl.*: --resume continues it, --restart moves it aside"):
        ppo.run(config)
    with pytest.raises(ValueError, match="--resume continues a run and --restart starts it over"):
        ppo.run(replace(config, resume=True, restart=True))
    assert files_in(tmp_path / "run") == before
    capsys.readouterr()
    ppo.run(replace(config, restart=True, seed=1, save_every=0))
    aside = tmp_path / "run" / "previous-1"
    assert f"The results of an earlier run were moved to {aside}\n" in capsys.readouterr().out
    stages_files = {path for path in before if path.parts[0] in ("sft", "reward")}
    assert files_in(aside) == {path: data for path, data in before.items() if path not in stages_files}
    assert {path: files_in(tmp_path / "run")[path] for path in stages_files} == {p: before[p] for p in stages_files}
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_ctrl_c_is_one_line_and_the_last_checkpoint_stays(stages, tmp_path, monkeypatch, capsys):
    out, write = new_run(stages, tmp_path / "run"), RunLog.write

    def interrupt_at_the_third_step(log, step, metrics, shown=()):
        write(log, step, metrics, shown)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    options = "--rollout-size 4 --minibatch-size 4 --steps 4 --max-new-tokens 4 --eval-prompts 3 --save-every 2"
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "write", interrupt_at_the_third_step)
        assert cli.main(f"ppo --out {out} {options}".split()) == 130
    captured = capsys.readouterr()
    assert captured.err == (
        "hybrid-engine: interrupted; the same command with --resume added continues from the last checkpoint\n"
    )
    assert cli.main(f"ppo --out {out} {options} --resume".split()) == 0
    assert "Continuing after step 2" in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_nothing_to_resume_and_other_options_are_refused_before_any_model_loads(stages, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "build_roles", None)
    config = replace(TINY, out=str(tmp_path), resume=True)
    with pytest.raises(ValueError, match=r"--resume: .*checkpoints' contains no complete checkpoint; leave it out"):
        ppo.run(config)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"no complete checkpoint; --restart starts over .* \(metrics.jsonl\)"):
        ppo.run(config)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("1")
    (tmp_path / "checkpoints" / "options.json").write_text(json.dumps(asdict(replace(config, gamma=0.5))))
    with pytest.raises(ValueError, match=r"--resume: --gamma=1.0 but the interrupted run had 0.5"):
        ppo.run(config)


def test_an_error_in_the_users_reward_keeps_its_traceback(stages, tmp_path, monkeypatch, capsys):
    """Whatever it raises, where it raises it: in the function, in a generator that it returns, or when imported.

    What it raises of answers is the cause of an error that names the reward and a prompt.
    """
    (tmp_path / "raising.py").write_text("def score(prompts, responses):\n    return int('x')\n")
    (tmp_path / "yielding.py").write_text("def score(prompts, responses):\n    yield int('x')\n")
    (tmp_path / "importing.py").write_text("int('x')\n")
    (tmp_path / "lacking.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    options = f"--model {stages / 'sft'} --rollout-size 4 --minibatch-size 4 --max-new-tokens 2 --eval-prompts 2"
    for name, kind in (
        ("raising", RewardError),
        ("yielding", RewardError),
        ("importing", ValueError),
        ("lacking", ModuleNotFoundError),
    ):
        with pytest.raises(kind) as raised:
            cli.main(f"ppo --out run --reward {name}:score {options}".split())
        error = raised.value.__cause__ if kind is RewardError else raised.value
        assert traceback.extract_tb(error.__traceback__)[-1].filename.endswith(f"{name}.py")
    assert "hybrid-engine:" not in capsys.readouterr().err


def test_where_the_output_is_no_terminal_each_step_has_a_line(tmp_path, capsys):
    with RunLog(tmp_path, "PPO", 3, TINY, first_step=1) as log:
        for step in (1, 2):
            log.write(step, {"score": step / 2, "kl": 1.0, "length": 7}, ["score", "length"])
    assert capsys.readouterr().out == "PPO 2/3  score 0.5  length 7\nPPO 3/3  score 1  length 7\n"


@pytest.mark.parametrize("recipe", [agent, grpo, online_dpo, ppo])
def test_the_line_of_each_step_has_the_share_of_answers_that_were_cut_off(recipe):
    assert "cut_off_share" in recipe.SHOWN


def test_the_old_option_for_answers_without_an_end_warns(tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "prepare", stop)
    with pytest.raises(KeyboardInterrupt):
        ppo.run(replace(TINY, out=str(tmp_path), missing_eos_score=-3.0))
    assert "--missing-eos-score is deprecated" in capsys.readouterr().out


def test_own_prompts_rewards_with_weights_and_adapter_run_without_the_judge(stages, tmp_path, monkeypatch, capsys):
    functions = (
        f"def {name}(responses): return [{value}] * len(responses)" for name, value in (("five", 5.0), ("one", 1.0))
    )
    (tmp_path / "own.py").write_text("\n".join(functions))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"f{n}(x)\n"}) + "\n" for n in range(80)))
    monkeypatch.chdir(tmp_path)
    options = "--rollout-size 4 --minibatch-size 4 --steps 2 --max-new-tokens 4 --eval-prompts 3 --lora-rank 2"
    sources = (
        f"--model {stages / 'sft'} --dataset prompts.jsonl --reward own:five own:one --reward-weights 1 2 --out run"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of a name that peft reads and transformers renamed
        assert cli.main(f"ppo {sources} {options} --missing-eos-score 7".split()) == 0
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == 2
    answers = read_answers(tmp_path / "run" / "answers.jsonl")
    assert [line["step"] for line in answers] == [0] * 3 + [2] * 3 and answers[0]["rewards"] == [7.0]
    assert all(line["score"] == 7.0 and "judge_pass_rate" not in line for line in metrics)
    assert all((line["reward_five"], line["reward_one"]) == (5.0, 1.0) for line in metrics)
    output = capsys.readouterr().out
    assert output.count("--missing-eos-score is deprecated and will be removed in the next version") == 1
    assert "E2E latency" not in output  # a step has one line, with its times
    assert all(output.count(f"PPO {step}/2") == 1 for step in (1, 2)) and output.count("generate_seconds") == 2
    assert not (tmp_path / "run" / "sft").exists() and not (tmp_path / "run" / "reward").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "actor")


def test_the_reward_lands_on_the_last_response_token_and_nowhere_else(stages, tmp_path, monkeypatch):
    seen = []
    gae = ppo.gae

    def spy(rewards, values, mask, gamma, lam):
        seen.append((rewards.clone(), mask.clone()))
        return gae(rewards, values, mask, gamma, lam)

    rollouts = []
    sample = ppo.sample

    def keep_rollout(*arguments, **options):
        rollouts.append(sample(*arguments, **options))
        return rollouts[-1]

    monkeypatch.setattr(ppo, "gae", spy)
    monkeypatch.setattr(ppo, "sample", keep_rollout)
    ppo.run(replace(TINY, out=new_run(stages, tmp_path), steps=1, kl_coef=0.0, missing_eos_penalty=3.25))
    ((rewards, mask),) = seen
    (rollout,) = rollouts
    raw = load_rewards([str(tmp_path / "reward")])(rollout.answers).total
    end_token = AutoTokenizer.from_pretrained(tmp_path / "sft").eos_token_id
    for row in range(len(rewards)):
        (position,) = rewards[row].nonzero()[:, 0].tolist()
        assert position == int(mask[row].sum()) - 1
        is_cut_off = rollout.sequences.responses[row, position].item() != end_token
        assert is_cut_off == rollout.answers.is_cut_off[row]
        assert rewards[row, position] == pytest.approx(raw[row] - 3.25 * is_cut_off)


def run_ppo_of(rank, world_size, config):
    ppo.run(config)


def test_two_processes_under_zero_3_sample_what_one_process_samples(stages, tmp_path):
    alone = replace(TINY, out=new_run(stages, tmp_path / "one"), steps=1)
    ppo.run(alone)
    shared = replace(alone, out=new_run(stages, tmp_path / "two"), zero_stage=3)
    run_distributed(run_ppo_of, 2, shared)
    (one,), (two,) = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("score", "kl_per_sequence", "kl_per_token", "length", "judge_pass_rate", "reward_with_kl"):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "actor")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"temperature": 0.0}, "--temperature=0.0 must be above 0"),
        (
            {"rollout_size": 65, "minibatch_size": 32},
            "--rollout-size=65 must be a positive multiple of 32; use 96",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        ppo.Config(**options)


def test_a_reward_that_cannot_be_found_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec, message in (("nowhere:f", "no module 'nowhere'"), ("json:nothing", "json has no function 'nothing'")):
        with pytest.raises(ValueError, match=message):
            load_rewards([spec])


def test_a_model_that_does_not_load_is_named_before_any_work(tmp_path, capsys):
    assert cli.main(["ppo", "--out", str(tmp_path / "run"), "--model", str(tmp_path / "nowhere")]) == 2
    assert f"--model='{tmp_path / 'nowhere'}' must be a Hugging Face folder or name" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_bad_input_is_one_line_and_status_2(tmp_path, capsys):
    assert cli.main(["ppo", "--out", str(tmp_path), "--dataset", str(tmp_path / "no.jsonl")]) == 2
    assert capsys.readouterr().err == (
        f"hybrid-engine: --dataset='{tmp_path / 'no.jsonl'}' must be an existing file; check the path\n"
    )
    assert list(tmp_path.iterdir()) == []
