"""Text given out token by token is the text decoded at the end, for every prefix, whatever the tokenizer."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hybrid_engine.generation.detokenize import IncrementalDetokenizer, TextOffsets, token_bytes
from hybrid_engine.generation.sampling import _ends_with_string

pytestmark = pytest.mark.quick

TEXT = [
    "The cat sat on the mat. Isn't it? I'm sure it's 3,14 or so!",
    "naïve café — 你好世界 🙂👨‍👩‍👧 héllo  two   spaces\nnew line\ttab",
    "he'll do n't go ' there ' , or won't he ? we 've been 's 're 'm",
] * 3
EMOJI = "🙂👍🏽👨‍👩‍👧🇩🇪é字ñ�"


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["</s>"]
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentencepiece_bpe():
    pieces = sorted({c for line in TEXT for c in line if ord(c) < 128 and c not in " \n\t"})
    words = ["▁", "th", "he", "▁th", "▁the", "at", "▁c", "▁cat"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *words]
    merges = [("t", "h"), ("h", "e"), ("▁", "th"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace_unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def wordpiece(cleans_up=False):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=not cleans_up)
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=140, special_tokens=["[UNK]", "[SEP]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]", clean_up_tokenization_spaces=cleans_up
    )


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_bpe,
    "metaspace": metaspace_unigram,
    "wordpiece": wordpiece,
    "cleaned up": lambda: wordpiece(cleans_up=True),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def sequences(tokenizer, rng):
    """Random tokens, text, emoji whole and cut, and random tokens in between."""
    anything = [rng.randrange(len(tokenizer)) for _ in range(120)]
    few = [rng.choice(anything[:9]) for _ in range(80)]
    text = tokenizer.encode("".join(rng.choice([*TEXT, *EMOJI]) for _ in range(12)), add_special_tokens=False)
    emoji = tokenizer.encode("".join(rng.choice(EMOJI) for _ in range(30)), add_special_tokens=False)
    noisy = [rng.choice(anything) if rng.random() < 0.1 else token for token in emoji]
    return [anything, few, text, emoji, noisy, anything[:1] * 70]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_and_what_is_held_back_are_the_decoded_text_of_every_prefix(tokenizer, skip_special_tokens):
    rng = random.Random(0)
    for tokens in [tokens for _ in range(6) for tokens in sequences(tokenizer, rng)]:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        shown = ""
        for count, token in enumerate(tokens, 1):
            shown += detokenizer.add(token)
            expected = tokenizer.decode(tokens[:count], skip_special_tokens=skip_special_tokens)
            assert shown + detokenizer.held == expected
        assert shown + detokenizer.finish() == expected


def test_text_is_not_held_back_for_longer_than_it_may_change(tokenizer):
    detokenizer, shown = IncrementalDetokenizer(tokenizer), ""
    tokens = tokenizer.encode("The cat sat on the mat and that is that at the end", add_special_tokens=False)
    for token in tokens:
        shown += detokenizer.add(token)
    assert len(detokenizer.held) <= 16 and len(shown) > 20


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_are_cut(tokenizer):
    rng = random.Random(1)
    for tokens in [tokens for _ in range(6) for tokens in sequences(tokenizer, rng)]:
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        if len(whole) < 8:
            continue
        at = rng.randrange(len(whole) - 4)
        stops = [whole[at : at + rng.randint(1, 4)], "never in there", whole[at : at + 2] + "?!"]
        detokenizer, shown, pieces = IncrementalDetokenizer(tokenizer, stops), "", []
        for token in tokens:
            pieces.append(detokenizer.add(token))
            if detokenizer.stopped is not None:
                break
        shown = "".join(pieces) + detokenizer.finish()
        assert detokenizer.stopped in stops
        assert whole.startswith(shown + detokenizer.stopped)
        assert not any(stop in shown for stop in stops)
        assert detokenizer.add(tokens[0]) == "" and detokenizer.held == ""


def test_a_stop_string_is_shown_on_demand():
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, ["sat on"], includes_stop=True)
    shown = "".join(detokenizer.add(token) for token in tokenizer.encode(TEXT[0]))
    assert shown == "The cat sat on" and detokenizer.stopped == "sat on"


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [3], None], ids=str)
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="stop_strings="):
        IncrementalDetokenizer(None, stops)


WIDE = "the cat 🙂 at 你好 he 👍🏽 é字 the"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("stop", ["🙂", "你好", "👍🏽", "é字 t", "cat 🙂", "at"])
def test_a_stop_string_of_several_bytes_ends_a_row_at_the_token_that_completes_it(name, stop):
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(WIDE, add_special_tokens=False)
    for prompt in (0, 1):
        ends = [
            _ends_with_string(tokenizer, (stop, "never"), tokens[:prompt], tokens[prompt:count])
            for count in range(prompt + 1, len(tokens) + 1)
        ]
        texts = [tokenizer.decode(tokens[:count]) for count in range(prompt, len(tokens) + 1)]
        expected = [stop in text and stop not in before for before, text in itertools.pairwise(texts)]
        assert ends.index(True) == expected.index(True)


def test_a_stop_string_of_several_bytes_is_found_in_a_tokenizer_in_python():
    """Its names are letters for bytes, which transformers' criteria do not know to be bytes."""
    tokenizer = ByT5Tokenizer()
    tokens = tokenizer("ab 🙂 c", add_special_tokens=False)["input_ids"]
    ends = [_ends_with_string(tokenizer, ("🙂",), tokens, tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert ends == [count == 7 for count in range(1, len(tokens) + 1)]  # also behind a prompt that has it
    ends = [_ends_with_string(tokenizer, ("🙂",), [], tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert ends == [count == 7 for count in range(1, len(tokens) + 1)]


def test_a_token_begins_behind_the_characters_that_those_before_it_finish(tokenizer):
    tokens = tokenizer.encode("the cat 🙂 sat 你好, on", add_special_tokens=False)
    offsets = TextOffsets(tokenizer, first=7)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    for place, token in enumerate(tokens):
        finished = tokenizer.decode(tokens[:place], skip_special_tokens=True).rstrip("\ufffd")
        assert offsets.next(token) == 7 + len(finished) and whole.startswith(finished)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_the_bytes_of_tokens_are_those_of_the_text(name):
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(WIDE, add_special_tokens=False)
    parts = [token_bytes(tokenizer, token) for token in tokens]
    assert b"".join(parts).decode().removeprefix(" ") == WIDE and len(parts) > len(WIDE.split())
    assert any(len(part) == 1 and part[0] > 127 for part in parts)  # part of a character, and no replacement for it


@pytest.mark.parametrize(("name", "text"), [("metaspace", "the cat sat"), ("wordpiece", "the mats")])
def test_the_bytes_of_a_token_have_the_space_before_a_word(name, text):
    tokenizer = TOKENIZERS[name]()
    parts = [token_bytes(tokenizer, token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(parts).decode().removeprefix(" ") == text


def test_an_id_beyond_the_tokenizer_has_no_bytes(tokenizer):
    assert token_bytes(tokenizer, len(tokenizer) + 3) == b""  # models have padded vocabularies


def test_the_bytes_of_a_special_token_are_its_name():
    assert token_bytes(byte_level(), 0) == b"</s>" and token_bytes(sentencepiece_bpe(), 1) == b"<s>"
