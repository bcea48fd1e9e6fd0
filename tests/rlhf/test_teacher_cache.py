"""Stored passes of a teacher: read as written, refused if they are of something else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.ops.linear_divergence import TopTokens
from hybrid_engine.rlhf.experience.teacher_cache import (
    IDENTITY_FILE,
    PassIdentity,
    StoredPass,
    begin_pass,
    publish_pass,
    weights_digest,
    write_rows,
)
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama
from tests.support.small_actors import save_small_actor

PROMPTS, ANSWERS = [[5, 6], [7], [8, 9, 10], [5]], [[11, 12], [13, 14, 15], [16], [6, 11, 12]]


@pytest.fixture
def identity():
    return PassIdentity.of("teacher", arithmetic.build_tokenizer(), 1.0, 3, "digest")


@pytest.fixture
def stored(tmp_path, identity):
    """A pass that two processes wrote, and what they wrote."""
    generator = torch.Generator().manual_seed(0)
    scored = [
        TopTokens(
            torch.randint(90, (len(answer), 3), generator=generator),
            -torch.rand(len(answer), 3),
            -torch.rand(len(answer)),
        )
        for answer in ANSWERS
    ]
    begin_pass(tmp_path / "unfinished")
    for rank in range(2):
        rows = slice(rank, None, 2)
        write_rows(tmp_path / f"unfinished/part-{rank}.safetensors", PROMPTS[rows], ANSWERS[rows], scored[rows])
    publish_pass(tmp_path / "unfinished", tmp_path / "pass", identity)
    return tmp_path / "pass", scored


def test_an_answer_is_found_by_its_tokens_in_any_order(stored, identity):
    folder, scored = stored
    found = StoredPass(folder, identity)
    for row in (3, 0, 2, 1):
        (likely,) = found.score([PROMPTS[row]], [ANSWERS[row]])
        assert all(map(torch.equal, likely, scored[row]))
    found.check(PROMPTS, ANSWERS)
    with pytest.raises(ValueError, match=r"--teacher-cache=.* has no answer of the tokens \[12\]"):
        found.check([[5, 6, 11]], [[12]])  # where an answer begins is a part of it
    assert StoredPass(folder, replace(identity, teacher="a copy")).num_likeliest == 3
    with pytest.raises(ValueError, match=r"--teacher-cache=.* has no answer of the tokens \[12\]"):
        found.score([[5, 6, 11]], [[12]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": "other", "weights": "other"}, "is of the teacher 'teacher', not 'other'"),
        ({"weights": "other"}, "is of other weights than 'teacher' has now"),
        ({"vocabulary": "other"}, "is of other tokens"),
        ({"template": "other"}, "is of another chat template"),
        ({"temperature": 2.0}, "is of --teacher-temperature=1.0, not 2.0"),
        ({"num_likeliest": 4}, "is of --teacher-top-k=3, not 4"),
    ],
)
def test_a_pass_of_something_else_is_refused_by_name(stored, identity, changes, words):
    with pytest.raises(ValueError, match=f"--teacher-cache='{stored[0]}' {words}"):
        StoredPass(stored[0], replace(identity, **changes))


def test_the_identity_follows_tokens_and_template():
    tokenizer = arithmetic.build_tokenizer()
    first = PassIdentity.of("teacher", tokenizer, 1.0, 3, "digest")
    tokenizer.chat_template = "{{ messages }}"
    second = PassIdentity.of("teacher", tokenizer, 1.0, 3, "digest")
    tokenizer.add_tokens(["other"])
    third = PassIdentity.of("teacher", tokenizer, 1.0, 3, "digest")
    assert first == replace(second, template=first.template) and first.template != second.template
    assert second == replace(third, vocabulary=second.vocabulary) and second.vocabulary != third.vocabulary


def test_an_unfinished_or_damaged_pass_is_refused(stored, identity):
    folder, _ = stored
    path = folder / "part-1.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"ids": tensors["ids"][:-1].clone()}, path)
    with pytest.raises(ValueError, match=r"is damaged: part-1.safetensors has other sizes"):
        StoredPass(folder, identity)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"is damaged: part-1.safetensors"):
        StoredPass(folder, identity)
    (folder / IDENTITY_FILE).write_text(json.dumps({"teacher": "teacher"}))
    with pytest.raises(ValueError, match=r"is damaged: pass.json"):
        StoredPass(folder, identity)
    (folder / IDENTITY_FILE).unlink()
    with pytest.raises(ValueError, match="has no complete pass"):
        StoredPass(folder, identity)


def test_weights_that_were_trained_further_have_another_digest(tmp_path):
    tokenizer = arithmetic.build_tokenizer()
    folder = save_small_actor(tmp_path / "model", tokenizer)
    first = weights_digest(folder)
    assert weights_digest(save_small_actor(tmp_path / "copy", tokenizer)) == first
    torch.manual_seed(1)
    build_small_llama(tokenizer, hidden_size=64, num_layers=1).save_pretrained(folder)
    assert weights_digest(folder) != first


def test_one_weight_in_the_middle_of_a_file_changes_the_digest(tmp_path):
    folder = save_small_actor(tmp_path / "model", arithmetic.build_tokenizer())
    path = Path(folder) / "model.safetensors"
    first, content = weights_digest(folder), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != first
