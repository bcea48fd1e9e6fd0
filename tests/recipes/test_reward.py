"""The reward model on a dataset of one's own: its loss, its margins, what is measured and how it goes on."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid_engine.recipes import reward
from hybrid_engine.rlhf.rewards.learned import build_classifier, load_scoring_tokenizer, load_value_model
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.runs.stages import seed_everything
from hybrid_engine.rlhf.tasks import corpus as corpora
from tests.support.chat import PLAIN_TEMPLATE, build_chat_tokenizer
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after


def save_model(folder, **special_tokens):
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).save_pretrained(folder)  # fmt: skip
    for name, token in special_tokens.items():
        setattr(tokenizer, name, token)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of conversations with margins, in which more of "a" is better."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    with path.open("w") as file:
        for n in range(24):
            question = {"role": "user", "content": f"{n}?"}
            good, bad = ({"role": "assistant", "content": text * (n % 3 + 1)} for text in ("aa", "b"))
            file.write(json.dumps({"chosen": [question, good], "rejected": [question, bad], "margin": n % 4}) + "\n")
    return str(path)


@pytest.fixture
def config(model, pairs, tmp_path):
    return reward.Config(
        out=str(tmp_path / "run"), model=model, dataset=pairs, batch_size=4, epochs=2, learning_rate=1e-2, save_every=0
    )


def metrics_of(config):
    return read_metrics(Path(config.out) / "reward-log" / "metrics.jsonl")


def weights_of(config):
    return AutoModelForSequenceClassification.from_pretrained(Path(config.out) / "reward").state_dict()


def test_it_learns_which_answers_are_better_and_keeps_the_best(config):
    config = replace(config, eval_every=5, lora_rank=2)
    folder = reward.run(config)
    lines = metrics_of(config)
    assert lines[-1]["accuracy"] > 0.9 and lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["learning_rate"] > lines[-1]["learning_rate"] > 0  # of the step itself, not of the next
    result = json.loads((folder.parent / "reward-log" / "result.json").read_text())
    assert result["held_out_accuracy"].keys() == {"all"} and result["held_out_loss"] > 0
    assert result["best"]["held_out_accuracy"] == max(line.get("held_out_accuracy", 0) for line in lines)
    best, last = (
        AutoModelForSequenceClassification.from_pretrained(folder.parent / name) for name in ("reward-best", "reward")
    )
    assert best.config.score_std > 0 and last.config.num_labels == 1
    assert (folder.parent / "reward-log" / "plot.png").exists()


def test_the_scores_of_good_answers_have_mean_0_and_deviation_1_where_they_are_used(config, monkeypatch):
    monkeypatch.setattr(corpora, "NUM_REFERENCES", 8)
    folder = reward.run(replace(config, epochs=1))
    reward.seed_everything(config.seed)  # as the run was: it takes the first pairs of a random order
    corpus = corpora.load_pair_corpus(config, AutoTokenizer.from_pretrained(folder), config.model)
    model = load_value_model(str(folder))
    scores = torch.stack(
        [model.head(model.backbone(torch.tensor([ids])).last_hidden_state)[0, -1, 0] for ids in corpus.references]
    )
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and scores.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("center_coef", [0.0, 0.1])
def test_the_first_loss_is_that_of_the_scores_with_their_margins(config, center_coef):
    config = replace(config, center_coef=center_coef, epochs=1)
    reward.run(config)
    seed_everything(config.seed)
    tokenizer = load_scoring_tokenizer(config.model)
    corpus = corpora.load_pair_corpus(config, tokenizer, config.model)
    net, losses = build_classifier(config.model, tokenizer).double(), []
    for index in corpus.batches[0]:
        pair = corpus.train[index]
        chosen, rejected = (net(torch.tensor([ids])).logits[0, 0] for ids in (pair.chosen, pair.rejected))
        loss = -logsigmoid(chosen - rejected - pair.margin) + center_coef * (chosen + rejected) ** 2
        losses.append(loss.item())
    assert len({corpus.train[index].margin for index in corpus.batches[0]}) > 1
    assert metrics_of(config)[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_the_split_into_micro_batches_changes_nothing(config):
    whole = replace(config, epochs=1, center_coef=0.1)
    split = replace(whole, micro_batch_size=1, out=config.out + "-split")
    for each in (whole, split):
        reward.run(each)
    for ours, theirs in zip(metrics_of(split), metrics_of(whole), strict=True):
        for name in ("loss", "grad_norm", "margin", "score"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_an_interrupted_run_goes_on_with_the_same_bits(config):
    config = replace(config, save_every=3, eval_every=2)
    whole, torn = replace(config, out=config.out + "-whole"), config
    reward.run(whole)
    with stopped_after(4):
        reward.run(torn)
    reward.run(replace(torn, resume=True))
    assert metrics_of(torn) == metrics_of(whole)
    assert all(map(torch.equal, weights_of(torn).values(), weights_of(whole).values()))


def test_a_longer_run_that_was_interrupted_goes_on(config, monkeypatch):
    config = replace(config, epochs=1, save_every=2, lr_scheduler_type="constant")
    longer, whole = replace(config, resume=True, epochs=2), replace(config, epochs=2, out=config.out + "-whole")
    reward.run(whole)
    reward.run(config)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(reward, "save_normalised", None)
        reward.run(longer)
    reward.run(longer)
    assert metrics_of(config) == metrics_of(whole)
    assert all(map(torch.equal, weights_of(config).values(), weights_of(whole).values()))


def run_reward(rank, world_size, config):
    reward.run(config)


def test_two_processes_under_zero_3_learn_with_an_adapter_what_one_does(config):
    alone = replace(config, epochs=1, batch_size=8, lora_rank=2, center_coef=0.1, eval_every=2)
    shared = replace(alone, zero_stage=3, out=config.out + "-two")
    reward.run(alone)
    run_distributed(run_reward, 2, shared)
    for ours, theirs in zip(metrics_of(shared), metrics_of(alone), strict=True):
        for name in ("loss", "margin", "score"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
    for ours, theirs in zip(weights_of(shared).items(), weights_of(alone).items(), strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-3, rtol=1e-2)


def test_padding_is_never_the_token_that_answers_end_with(tmp_path, capsys):
    both = save_model(tmp_path / "both", pad_token="<eos>", bos_token="<start>")
    tokenizer = load_scoring_tokenizer(both)
    assert tokenizer.pad_token == "<start>" and "'<start>' will be padding" in capsys.readouterr().out
    with pytest.raises(ValueError, match="pads with '<eos>', which ends answers; the score is read at the last"):
        load_scoring_tokenizer(save_model(tmp_path / "none", pad_token="<eos>"))
    of_turns = save_model(tmp_path / "turns", eos_token="<pad>", pad_token="<eos>", bos_token="<start>")
    assert load_scoring_tokenizer(of_turns).pad_token == "<start>"  # the template ends turns with <eos>


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 20},
            "23 of 24 rows cannot be used: line 22 has 25 tokens, more than --max-tokens=20; raise it",
        ),
        ({"batch_size": 64}, "--batch-size=64 must not exceed the 2"),
        ({"resume": True}, "reward-checkpoints' contains no complete checkpoint; leave it out"),
        ({"lora_rank": 17}, "--lora-rank=17 exceeds the width of --model="),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(config, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        reward.run(replace(config, **options))
    assert not (tmp_path / "run").exists()


def test_the_best_may_be_the_last_where_no_interval_ends(config):
    folder = reward.run(replace(config, epochs=1, eval_every=100))
    result = json.loads((folder.parent / "reward-log" / "result.json").read_text())
    accuracy = result["held_out_accuracy"]["all"]
    assert result["best"] == {"step": len(metrics_of(config)), "held_out_accuracy": accuracy}
    assert (folder.parent / "reward-best" / "config.json").exists()
