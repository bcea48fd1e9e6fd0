"""The scheduler is plain Python, so its promises are checked over random rollouts without a model."""

import math
import random

import pytest

from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.scheduler import BlockPool, Scheduler

pytestmark = pytest.mark.quick


class Memory:
    """Stands for the KV workspace: what token each place of each block holds."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]
        self.states = {}

    def write(self, blocks, position, token):
        self.blocks[blocks[position // self.block_size]][position % self.block_size] = token

    def read(self, blocks, length):
        return [self.blocks[blocks[i // self.block_size]][i % self.block_size] for i in range(length)]

    def feed(self, slot, tokens, first):
        """Feeds the tokens from `first` on to the state in `slot`, which must have been fed those before."""
        if slot >= 0:
            assert first == 0 or self.states[slot] == tokens[:first]
            self.states[slot] = list(tokens)

    def copy(self, copy):
        self.blocks[copy.target][: copy.num_tokens] = self.blocks[copy.source][: copy.num_tokens]


def build(prompt_lengths, num_samples, max_new_tokens=25, num_shares=1, common=0, **limits):
    """The first `common` tokens of all prompts are equal."""
    options, sequences = GenerationOptions(max_new_tokens=max_new_tokens), []
    for index, length in enumerate(prompt_lengths):
        prompt = Prompt([1000 * (index + 1) * (i >= common) + i for i in range(length)])
        share = str(index % num_shares)
        sequences += [Sequence(prompt, len(sequences) + g, options, share=share) for g in range(num_samples)]
    return sequences, Scheduler(sequences, **({"max_prefill_tokens": 64} | limits))


def run(sequences, scheduler, lengths, mixes=False, chunk_tokens=None):
    """Plays the strategy's part, with the row's number and position for a token; returns the turns taken.

    Before every decode each running row must find its own prompt and response in its blocks, and a prefill what was
    fed before it. With `mixes` rows decode beside prefills.
    """
    memory = Memory(scheduler.pool.num_blocks, scheduler.block_size)
    order, turns = [], 0

    def draw(rows):
        for row in rows:
            row.tokens.append((row.row, len(row.tokens)))
            if len(row.tokens) == lengths[row.row]:
                order.append(row.row)
                scheduler.finish(row, "stop")

    def decode(rows):
        for row in rows:
            memory.write(row.blocks, len(row) - 1, row.tokens[-1])
            memory.feed(row.state_slot, row.prompt.tokens + row.tokens, len(row) - 1)
        for row in rows:
            assert memory.read(row.blocks, len(row)) == row.prompt.tokens + row.tokens

    while scheduler.has_work:
        turns += 1
        assert turns < 10_000, "no progress"
        scheduler.make_way()
        admission = scheduler.admit(chunk_tokens)
        assert len(scheduler.running) <= scheduler.max_running
        rows = scheduler.grow_beside(admission) if mixes and admission.prefills else []
        for prefill in admission.prefills:
            assert memory.read(prefill.blocks, prefill.first) == prefill.tokens[: prefill.first]
            memory.feed(prefill.state_slot, prefill.tokens[: prefill.last], prefill.first)
            for position in range(prefill.first, prefill.last):
                memory.write(prefill.blocks, position, prefill.tokens[position])
        decode(rows)
        draw(rows)
        for copy in admission.copies:
            memory.copy(copy)
        for source, target in admission.state_copies:
            memory.states[target] = memory.states[source]
        draw(admission.sequences)
        if admission.prefills or not scheduler.running:
            continue
        scheduler.grow()
        for copy in scheduler.close_gaps():
            memory.copy(copy)
        rows = list(scheduler.running)
        decode(rows)
        draw(rows)
    return order, turns


def count_turns(lengths, prompt_length, num_samples=1, mixes=False, chunk_tokens=None, **limits):
    """Pure prefill turns, turns that decode and the mean share of slots that decode while anything waits."""
    _, scheduler = build([prompt_length] * (len(lengths) // num_samples), num_samples, **limits)
    prefills, decodes, rows_while_waiting = 0, 0, []

    def draw(rows):
        for row in rows:
            row.tokens.append(0)
            if len(row.tokens) == lengths[row.row]:
                scheduler.finish(row, "stop")

    while scheduler.has_work:
        admission = scheduler.admit(chunk_tokens)
        beside = scheduler.grow_beside(admission) if mixes and admission.prefills else []
        draw(beside)
        draw(admission.sequences)
        if beside:
            decodes += 1
        elif admission.prefills:
            prefills += 1
        elif scheduler.running:
            scheduler.grow()
            decodes += 1
            rows_while_waiting += [len(scheduler.running)] if scheduler.waiting else []
            draw(list(scheduler.running))
    return prefills, decodes, sum(rows_while_waiting) / (len(rows_while_waiting) * scheduler.max_running)


def log_normal_lengths(count, mean, sigma, longest):
    rng = random.Random(0)
    mu = math.log(mean) - sigma**2 / 2
    return [min(longest, max(1, round(rng.lognormvariate(mu, sigma)))) for _ in range(count)]


LARGE = {"max_running": 256, "num_blocks": 256 * 20, "block_size": 64, "max_new_tokens": 1024}


def test_prompts_enter_in_bulk_so_that_decoding_seldom_stops_and_few_slots_wait():
    lengths = log_normal_lengths(1024, mean=256, sigma=0.8, longest=1024)
    prefills, decodes, busy = count_turns(lengths, 256, max_prefill_tokens=8192, **LARGE)
    assert 16 * prefills <= decodes, f"{prefills=} {decodes=}"
    assert busy >= 0.95, "slots are left empty for the sake of fewer prefills"


@pytest.mark.parametrize("mean", [64, 128, 256])
def test_prefills_that_rows_decode_beside_stop_nobody_however_short_answers_are(mean):
    lengths = log_normal_lengths(1024, mean=mean, sigma=0.8, longest=1024)
    prefills, decodes, busy = count_turns(lengths, 256, mixes=True, max_prefill_tokens=8192, **LARGE)
    assert 16 * prefills <= decodes, f"{prefills=} {decodes=}"
    assert prefills == 1, "nothing runs before the first"
    assert busy >= 0.95


def test_long_prompts_are_fed_in_chunks_beside_which_others_decode():
    """Each prompt of 4 000 tokens takes two turns, in which 63 others draw a token each."""
    lengths = log_normal_lengths(256, mean=256, sigma=0.8, longest=1024)
    limits = LARGE | {"max_running": 64, "num_blocks": 64 * 80}
    prefills, decodes, _ = count_turns(lengths, 4000, mixes=True, chunk_tokens=2048, max_prefill_tokens=8192, **limits)
    assert prefills == 1, "nothing runs before the first"
    assert decodes >= 2 * 254, "two turns for each of those that did not enter together"


def test_a_pass_that_is_full_of_tokens_does_not_wait_for_more_prompts():
    """Four prompts of 2 000 tokens fill a pass of 8 192, however many sequences run."""
    lengths = log_normal_lengths(512, mean=256, sigma=0.8, longest=1024)
    prefills, _, busy = count_turns(lengths, 2000, max_prefill_tokens=8192, **LARGE | {"num_blocks": 256 * 48})
    assert prefills == 512 / 4
    assert busy >= 0.98


def test_where_blocks_are_short_a_few_newcomers_are_enough():
    """Some twenty sequences have blocks; nobody waits for the sixteen that a full house would admit at once."""
    lengths = log_normal_lengths(128, mean=256, sigma=0.8, longest=1024)
    fits = 20 * 8  # of 512 tokens each
    _, _, busy = count_turns(lengths, 256, max_prefill_tokens=8192, **LARGE | {"num_blocks": fits})
    assert busy * 256 >= 15, "blocks lie idle"


def test_the_last_that_wait_enter_together_although_they_are_few():
    limits = {"max_running": 64, "num_blocks": 66, "block_size": 32, "max_prefill_tokens": 1024}
    sequences, scheduler = build([4] * 66, 1, **limits)
    for sequence in scheduler.admit().sequences:
        sequence.tokens.append(0)
    scheduler.finish(sequences[0], "stop")
    assert scheduler.admit().sequences == [], "a prefill for one, where two will wait for a place together"
    scheduler.finish(sequences[1], "stop")
    assert scheduler.admit().sequences == sequences[64:]


def test_samples_of_a_prefilled_prompt_enter_at_once():
    sequences, scheduler = build([4] * 9, 8, max_running=64, num_blocks=128, block_size=32)
    scheduler.admit()
    scheduler.finish(sequences[0], "stop")
    assert scheduler.admit().prefills == [], "the ninth prompt is not prefilled for one sample"
    sequences, scheduler = build([4] * 8, 9, max_running=64, num_blocks=128, block_size=32)
    assert len(scheduler.admit().prefills) == 8
    scheduler.finish(sequences[0], "stop")
    assert scheduler.admit().sequences == [sequences[64]]


@pytest.mark.parametrize(
    ("mixes", "chunk_tokens"), [(False, None), (True, None), (True, 3)], ids=["one kind a turn", "mixed", "in chunks"]
)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_random_rollouts_finish_keep_their_tokens_and_leak_no_block(num_shares, seed, mixes, chunk_tokens):
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4, 16, 64])
    num_samples = rng.choice([1, 1, 2, 5])
    prompts = [rng.randint(1, 20) for _ in range(rng.randint(1, 8))]
    lengths = [rng.randint(1, 25) for _ in range(len(prompts) * num_samples)]
    enough = -(-(20 + 25) // block_size) + 1
    sequences, scheduler = build(
        prompts,
        num_samples,
        max_running=rng.randint(1, 6),
        num_blocks=rng.randint(enough, 3 * enough),
        block_size=block_size,
        max_prefill_tokens=rng.choice([8, 64]),
        num_shares=num_shares,
        num_state_slots=rng.choice([0, rng.randint(2, 9)]),
        common=rng.choice([0, 7, 20]),
        caches_prefixes=rng.choice([False, True]),
    )
    order, _ = run(sequences, scheduler, lengths, mixes, chunk_tokens)
    assert sorted(order) == list(range(len(sequences)))
    assert [len(sequence.tokens) for sequence in sequences] == lengths
    assert sorted([*scheduler.pool.free, *scheduler.pool.idle]) == list(range(scheduler.pool.num_blocks))
    assert scheduler.states.free == list(range(scheduler.states.num_slots))
    assert set(scheduler.pool.num_owners) == {0}
    assert all(not sequence.prompt.blocks and sequence.prompt.num_waiting == 0 for sequence in sequences)


def test_a_finished_row_is_replaced_at_once():
    """Four slots, rows of 1 to 24 tokens: turns are the tokens over the slots, plus a prefill for each row."""
    lengths = [1 + (7 * i) % 24 for i in range(24)]
    sequences, scheduler = build([4] * 24, 1, max_running=4, num_blocks=4, block_size=32)
    _, turns = run(sequences, scheduler, lengths)
    longest_tail = max(lengths)
    assert turns <= sum(lengths) / 4 + len(lengths) + longest_tail


def test_a_prompt_is_prefilled_once_for_its_group_and_its_full_blocks_are_shared():
    sequences, scheduler = build([10], 5, max_running=5, num_blocks=32, block_size=4)
    admission = scheduler.admit()
    assert len(admission.prefills) == 1 and len(admission.sequences) == 5
    assert all(sequence.blocks[:2] == sequences[0].blocks[:2] for sequence in sequences)
    assert len({sequence.blocks[2] for sequence in sequences}) == 5
    assert [copy.num_tokens for copy in admission.copies] == [2] * 5
    assert len(scheduler.pool.free) == 32 - 2 - 5


def test_samples_that_start_later_fork_without_another_prefill():
    _, scheduler = build([6], 4, max_running=1, num_blocks=8, block_size=4)
    prefills = 0
    while scheduler.has_work:
        admission = scheduler.admit()
        prefills += len(admission.prefills)
        for row in admission.sequences:
            row.tokens.append(0)
            scheduler.finish(row, "stop")
    assert prefills == 1


def test_the_newest_sequence_is_preempted_and_the_oldest_never():
    sequences, scheduler = build([4, 4, 4], 1, max_running=3, num_blocks=6, block_size=4)
    scheduler.admit()
    assert [len(s.blocks) for s in sequences] == [1, 1, 1]
    for sequence in sequences:
        sequence.tokens.append(0)
    scheduler.grow()  # takes the last three blocks
    for sequence in sequences:
        sequence.tokens += [0] * 4
    scheduler.grow()
    assert scheduler.running == sequences[:2] and list(scheduler.waiting) == [sequences[2]]
    assert scheduler.num_preemptions == 1
    assert len(sequences[2].tokens) == 5, "what was drawn is kept"


def running_before(prompt_lengths, num_samples, **limits):
    """The first prompt's samples run when the others join the line."""
    sequences, _ = build(prompt_lengths, num_samples, **limits)
    first, others = sequences[:num_samples], sequences[num_samples:]
    for sequence in first:
        sequence.prompt.num_waiting = 0
    scheduler = Scheduler(first, max_prefill_tokens=64, longest=64, **limits)
    scheduler.admit()
    for sequence in first:
        sequence.tokens.append(0)
    for sequence in others:
        sequence.prompt.num_waiting = 0
    for sequence in others:
        scheduler.add(sequence)
    return sequences, scheduler


def half_prefilled(num_blocks=8):
    """One of 3 tokens that runs, and one of 10 in line of which 6 have been fed; blocks of 4."""
    sequences, scheduler = running_before([3, 10], 1, max_running=2, num_blocks=num_blocks, block_size=4)
    for last in (3, 6):
        (prefill,) = scheduler.admit(3).prefills
        assert (prefill.first, prefill.last, prefill.is_last) == (last - 3, last, False)
    assert scheduler.running == sequences[:1] and list(scheduler.waiting) == sequences[1:]
    return sequences, scheduler


@pytest.mark.parametrize(("shares", "most_fed"), [("ab", 16), ("aa", 64)])
def test_prompts_of_one_share_leave_the_rows_of_another_most_of_a_turn(shares, most_fed):
    """Requests whose rows end at once, as the scores of a prompt, never have many rows."""
    row = Sequence(Prompt([5] * 4), 0, GenerationOptions(max_new_tokens=25), share=shares[0])
    scheduler = Scheduler([row], max_running=16, num_blocks=64, block_size=32, max_prefill_tokens=64, longest=64)
    scheduler.admit(64)
    for number in range(40):
        prompt = Prompt([number] * (30 if number % 2 else 8))
        scheduler.add(Sequence(prompt, number + 1, GenerationOptions(max_new_tokens=1), share=shares[1]))
    fed = []
    for _ in range(4):
        row.tokens.append(0)
        admission = scheduler.admit(64)
        fed.append(sum(prefill.last - prefill.first for prefill in admission.prefills))
        for sequence in admission.sequences:
            scheduler.finish(sequence, "length")
    assert max(fed) <= most_fed and sum(fed) > 2 * most_fed, fed


def test_a_chunk_takes_no_slot_and_the_last_one_brings_the_sequence_in():
    sequences, scheduler = half_prefilled()
    scheduler.admit(3)
    admission = scheduler.admit(3)
    assert [(prefill.first, prefill.is_last) for prefill in admission.prefills] == [(9, True)]
    assert admission.sequences == sequences[1:] and scheduler.running == sequences


def test_what_is_left_of_a_prompt_is_fed_at_once_where_nobody_decodes_any_more():
    sequences, scheduler = half_prefilled()
    scheduler.finish(sequences[0], "stop")
    (prefill,) = scheduler.admit(3).prefills
    assert (prefill.first, prefill.is_last) == (6, True)


def test_a_sequence_that_is_cancelled_half_prefilled_gives_its_blocks_back():
    sequences, scheduler = half_prefilled()
    scheduler.cancel(sequences[1])
    scheduler.cancel(sequences[0])
    assert scheduler.pool.free == list(range(8)) and not scheduler.has_work


def test_who_runs_takes_the_blocks_of_who_is_half_prefilled_and_is_not_preempted_for_it():
    sequences, scheduler = half_prefilled(num_blocks=5)  # one and three: one is free
    sequences[0].tokens.append(0)
    scheduler.grow()
    sequences[0].tokens += [0] * 4
    assert scheduler.admit(3).prefills == [], "the chunk would make a row wait that has no block"
    scheduler.grow()
    assert scheduler.num_preemptions == 0 and len(sequences[0].blocks) == 3
    scheduler.finish(sequences[0], "stop")
    (prefill,) = scheduler.admit(3).prefills
    assert (prefill.first, prefill.is_last) == (0, True), "it begins anew"


def test_samples_fork_from_a_prompt_that_was_fed_in_chunks():
    sequences, scheduler = running_before([4, 10], 2, max_running=4, num_blocks=16, block_size=4)
    fed = [scheduler.admit(4) for _ in range(3)]
    assert [[prefill.last for prefill in admission.prefills] for admission in fed] == [[4], [8], [10]]
    assert [len(admission.sequences) for admission in fed] == [0, 0, 2]
    assert fed[2].prefills[0].owner is sequences[2].prompt
    assert sequences[2].blocks[:2] == sequences[3].blocks[:2]


def test_gaps_are_closed_so_that_rows_own_the_lowest_blocks():
    sequences, scheduler = build([4] * 5, 1, max_running=5, num_blocks=5, block_size=32)
    scheduler.admit()
    for sequence in sequences:
        sequence.tokens.append(0)
    scheduler.finish(sequences[0], "stop")
    scheduler.finish(sequences[2], "stop")
    assert len(scheduler.running) == 3
    copies = scheduler.close_gaps()
    assert sorted(sequence.blocks[0] for sequence in scheduler.running) == [0, 1, 2]
    assert {(copy.source, copy.target) for copy in copies} == {(3, 0), (4, 2)}
    assert scheduler.close_gaps() == []


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_finished_sequences_keep_stands_in_nobodys_way(goes_on):
    """Kept blocks are room: the one that waits enters at once, whether it goes on from a kept sequence or begins."""
    options = GenerationOptions(max_new_tokens=4)
    scheduler = Scheduler([], max_running=2, num_blocks=4, block_size=4, max_prefill_tokens=64, longest=16)
    first, other = (Sequence(Prompt(list(range(6))), row, options, is_kept=True) for row in range(2))
    for sequence in (first, other):
        scheduler.add(sequence)
        scheduler.admit()
        sequence.tokens.append(1)
        scheduler.finish(sequence, "stop")
    assert scheduler.pool.free == []
    prompt = Prompt([*first.prompt.tokens, 1, 2, 3, 4] if goes_on else [9, 9, 9])
    scheduler.add(Sequence(prompt, 2, options, begins_from=first if goes_on else None))
    admission = scheduler.admit()
    assert len(admission.sequences) == 1
    assert admission.prefills[0].first == (first.num_fed if goes_on else 0)


def test_a_block_is_free_only_when_its_last_owner_releases_it():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    shared = pool.share(blocks)
    pool.release(blocks)
    assert pool.free == [2]
    pool.release(shared)
    assert pool.free == [0, 1, 2]


def prefix_scheduler(prompts, **limits):
    """One row for each prompt, blocks of 4, and a cache of prefixes."""
    options = GenerationOptions(max_new_tokens=4)
    limits = {"max_running": 8, "num_blocks": 16, "block_size": 4, "max_prefill_tokens": 64, "longest": 64} | limits
    sequences = [Sequence(Prompt(tokens), row, options) for row, tokens in enumerate(prompts)]
    return sequences, Scheduler(sequences, caches_prefixes=True, **limits)


def play_one(scheduler, tokens, salt=b""):
    """Adds a row, ends it after a token, and returns the first token of its prefill."""
    scheduler.add(Sequence(Prompt(tokens, salt=salt), 0, GenerationOptions(max_new_tokens=4)))
    admission = scheduler.admit()
    for row in admission.sequences:
        row.tokens.append(0)
        scheduler.finish(row, "stop")
    return admission.prefills[0].first


def test_prompts_that_begin_alike_share_the_full_blocks_of_the_beginning_in_the_same_pass():
    sequences, scheduler = prefix_scheduler([[*range(10), tail, tail] for tail in (70, 71, 72)])
    admission = scheduler.admit()
    assert [prefill.first for prefill in admission.prefills] == [0, 8, 8]
    assert all(sequence.blocks[:2] == sequences[0].blocks[:2] for sequence in sequences)
    assert len({sequence.blocks[2] for sequence in sequences}) == 3
    assert scheduler.kept.num_reused_tokens == 16 and scheduler.kept.num_prompt_tokens == 36


@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        ([*range(9)], 8),
        ([*range(8)], 4),  # its last token is fed: the next one is drawn from its logits
        ([*range(4)], 0),
        ([9, *range(1, 9)], 0),
        ([*range(7), 9, 9], 4),
        ([*range(4, 8), *range(4, 8), 8], 0),  # a block's tokens at another place
    ],
)
def test_a_prefix_is_found_by_all_tokens_before_its_end(tokens, first):
    _, scheduler = prefix_scheduler([])
    play_one(scheduler, list(range(8)))
    assert play_one(scheduler, tokens, salt=b"another") == 0
    assert play_one(scheduler, tokens) == first


def test_blocks_that_have_been_idle_for_longest_are_reused_first():
    _, scheduler = prefix_scheduler([], num_blocks=7)
    one, two, three = ([number] * 8 for number in (1, 2, 3))
    play_one(scheduler, one)
    play_one(scheduler, two)
    assert play_one(scheduler, [*one, 5]) == 8
    play_one(scheduler, three)
    assert play_one(scheduler, [*three, 5]) == 8 and play_one(scheduler, [*one, 5]) == 8
    assert play_one(scheduler, [9] * 16) == 0
    assert play_one(scheduler, [*two, 5]) == 0 and len(scheduler.pool.free) + len(scheduler.pool.idle) == 7


def test_what_is_fed_after_a_kept_answer_is_not_found_by_others():
    """A decoded token is rounded in another way than a prefilled one."""
    options = GenerationOptions(max_new_tokens=4)
    first, scheduler = Sequence(Prompt(list(range(6))), 0, options, is_kept=True), prefix_scheduler([])[1]
    scheduler.add(first)
    scheduler.admit()
    first.tokens += [6, 7, 8]
    scheduler.grow()
    scheduler.finish(first, "stop")
    scheduler.add(Sequence(Prompt(list(range(16))), 1, options, begins_from=first))
    assert scheduler.admit().prefills[0].first == 8
    assert play_one(scheduler, list(range(16))) == 4


def test_a_sequence_that_is_preempted_finds_its_prompt_again():
    sequences, scheduler = prefix_scheduler([[1] * 8, [2] * 8], num_blocks=6)
    scheduler.admit()
    for sequence in sequences:
        sequence.tokens.append(0)
    scheduler.recompute(sequences[1])
    prefill = scheduler.admit().prefills[0]
    assert (prefill.owner, prefill.first, prefill.last) == (sequences[1], 8, 9)


@pytest.mark.parametrize("limits", [{"longest": 4}, {"num_state_slots": 3}, {"block_size": 64}])
def test_prefixes_are_not_shared_where_a_sequence_is_one_block_or_has_a_state(limits):
    _, scheduler = prefix_scheduler([], **limits)
    assert play_one(scheduler, [1, 1, 1]) == play_one(scheduler, [1, 1, 1, 1]) == 0
    assert not scheduler.pool.idle


def shares_in_line(num_of_a, lengths_of_b, max_new_tokens=25, **limits):
    """Requests of share a, of which the first run, and then those of share b in line."""
    a, _ = build([4] * num_of_a, 1, max_new_tokens, **limits)
    for sequence in a:
        sequence.share, sequence.prompt.num_waiting = "a", 0
    scheduler = Scheduler(a, max_prefill_tokens=64, longest=64, **limits)
    take_turn(scheduler)
    options = GenerationOptions(max_new_tokens=max_new_tokens)
    b = [Sequence(Prompt([7] * length), row, options, share="b") for row, length in enumerate(lengths_of_b)]
    for sequence in b:
        scheduler.add(sequence)
    return a, b, scheduler


def take_turn(scheduler):
    """A turn in which each row gets a token, and nobody ends."""
    scheduler.make_way()
    started = scheduler.admit().sequences
    for row in scheduler.running:
        row.tokens.append(0)
    scheduler.grow()
    return started


@pytest.mark.parametrize("max_running", [4, 64, 256])
def test_the_one_request_of_a_share_starts_before_the_rest_of_anothers(max_running):
    limits = {"max_running": max_running, "num_blocks": 600, "block_size": 32}
    a, (b,), scheduler = shares_in_line(max_running + 64, [4], **limits)
    while len(scheduler.running) < max_running:
        scheduler.waiting.remove(b)
        take_turn(scheduler)
        scheduler.add(b)
    assert take_turn(scheduler) == [b]
    assert scheduler.num_preemptions == 1 and scheduler.running[:-1] == a[: max_running - 1]
    assert list(scheduler.waiting) == a[max_running - 1 :], "who made way is the first of its share again"
    for _ in range(3):
        assert take_turn(scheduler) == [], "and nobody makes way for a share that has its part, or wants no more"


def test_shares_that_want_more_have_as_many_rows_each():
    a, b, scheduler = shares_in_line(20, [4] * 20, max_running=8, num_blocks=64, block_size=32)
    for _ in range(4):
        take_turn(scheduler)
    assert [row for row in scheduler.running if row.share == "a"] == a[:4]
    assert [row for row in scheduler.running if row.share == "b"] == b[:4]
    for ended in (a[0], b[0]):
        scheduler.finish(ended, "stop")
    started = take_turn(scheduler)
    assert {row.row for row in started if row.share == "a"} == {4} and scheduler.num_preemptions == 4
    assert [row for row in started if row.share == "b"] == b[4:5]


def test_a_share_whose_rows_end_at_once_does_not_keep_another_from_a_second_row():
    """It never has a row when the next one is chosen; the tokens that it was served count."""
    options = GenerationOptions(max_new_tokens=25)
    b = [Sequence(Prompt([5] * 4), number, options, share="b") for number in range(3)]
    scheduler = Scheduler(b[:1], max_running=16, num_blocks=64, block_size=32, max_prefill_tokens=64, longest=64)
    scheduler.admit(64)
    for number in range(200):
        ends_at_once = GenerationOptions(max_new_tokens=1)
        scheduler.add(Sequence(Prompt([number] * 64), 3 + number, ends_at_once, share="a"))
    scheduler.add(b[1])
    for _ in range(12):
        for row in scheduler.running:
            row.tokens.append(0)
        for sequence in scheduler.admit(64).sequences:
            if sequence.share == "a":
                scheduler.finish(sequence, "length")
    assert scheduler.running == b[:2]


def test_a_share_that_comes_back_is_not_served_for_the_time_when_it_asked_for_nothing():
    _, b, scheduler = shares_in_line(60, [4], max_running=4, num_blocks=64, block_size=32)
    for _ in range(20):
        take_turn(scheduler)
    scheduler.finish(b[0], "stop")
    for _ in range(200):
        take_turn(scheduler)
    back = [Sequence(Prompt([7] * 4), 100 + number, b[0].options, share="b") for number in range(20)]
    for sequence in back:
        scheduler.add(sequence)
    for _ in range(10):
        take_turn(scheduler)
    assert [row.share for row in scheduler.running].count("a") == 2


def test_rows_make_way_where_blocks_are_short_and_the_largest_share_loses_its_newest():
    a, (b,), scheduler = shares_in_line(6, [9], max_running=16, num_blocks=6, block_size=8)
    assert scheduler.running == a[:5] and len(scheduler.pool.free) == 1
    assert take_turn(scheduler) == [b], "two blocks, and a spare one"
    assert scheduler.running == [*a[:3], b] and list(scheduler.waiting) == a[3:]
    while len(scheduler.running) == 4:
        take_turn(scheduler)
    assert scheduler.running == [*a[:2], b], "the newest of the largest share, not the newest of all"


def test_a_prompt_whose_samples_wait_gives_its_blocks_up_for_another_share():
    """Nothing runs, and the first in line needs the blocks that another share's prompt keeps."""
    sequences, _ = build([8, 20], 2, max_running=1, num_blocks=6, block_size=4)
    for sequence in sequences:
        sequence.prompt.num_waiting = 0
        sequence.share = "a" if sequence.row < 2 else "b"
    scheduler = Scheduler(sequences, max_running=1, num_blocks=6, block_size=4, max_prefill_tokens=64, longest=24)
    (first,) = scheduler.admit().sequences
    assert first is sequences[0] and sequences[0].prompt.blocks
    scheduler.finish(first, "stop")
    started = []
    for _ in range(3):
        (row,) = scheduler.admit().sequences
        started.append(row)
        row.tokens.append(0)
        scheduler.finish(row, "stop")
    assert started == [sequences[2], sequences[1], sequences[3]] and not scheduler.has_work
    assert scheduler.pool.free == list(range(6))
