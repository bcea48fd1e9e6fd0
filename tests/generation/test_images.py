"""Rollouts with images: each row as the model's forward answers it alone, however rows are batched, cut and kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hybrid_engine.containers.towers import split
from hybrid_engine.generation import step
from hybrid_engine.rlhf.batches.sequences import attach_responses, response_logprobs
from tests.support.distributed import run_distributed
from tests.support.family_checks import adapted, build_engine
from tests.support.vision_models import FAMILIES, IMAGE, PAD, batch, build

COUNTS = [1, 0, 3, 2, 1]
GREEDY = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "seed": 3}
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
EXAMPLES = ("llava-onevision", "qwen3-vl", "gemma3")
"""One axis of positions; three, with features after layers; attention in both directions."""


def row_alone(name, counts, row):
    """The arguments of the model for one row of `batch`, without padding."""
    made, tokens = batch(name, counts), ("input_ids", "attention_mask", *TOKEN_TYPES)
    kept = made["attention_mask"][row].bool()
    alone = {key: made[key][row : row + 1, kept] for key in tokens if key in made}
    if not counts[row]:
        return alone
    first, number = sum(counts[:row]), counts[row]
    pixels = made["pixel_values"]
    if name in ("idefics3", "smolvlm"):
        return alone | {key: made[key][row : row + 1, :number] for key in ("pixel_values", "pixel_attention_mask")}
    if name == "internvl":  # every second image of a row has two tiles
        tiles = [count + count // 2 for count in counts]
        return alone | {"pixel_values": pixels[sum(tiles[:row]) : sum(tiles[: row + 1])]}
    images = slice(first, first + number)
    others = ("image_sizes", "image_grid_thw", "image_position_ids")
    alone |= {key: made[key][images] for key in others if key in made}
    if "batch_num_images" in made:
        alone["batch_num_images"] = made["batch_num_images"][row : row + 1]
    if "image_grid_thw" in made:
        patches = made["image_grid_thw"].prod(1)
        return alone | {"pixel_values": pixels[patches[:first].sum() : patches[: first + number].sum()]}
    return alone | {"pixel_values": pixels[images]}


@torch.no_grad()
def check(model, name, counts, output, atol=1e-5):
    """The model's forward in fp64, on each row alone, chooses the tokens of `output` with its log-probabilities."""
    model.double()
    num_tokens = output.logprobs.shape[1]
    for row, response in enumerate(output.sequences[:, -num_tokens:]):
        given = {k: v.double() if v.is_floating_point() else v for k, v in row_alone(name, counts, row).items()}
        new = {"input_ids": response, "attention_mask": torch.ones_like(response)}
        new |= dict.fromkeys(TOKEN_TYPES, torch.zeros_like(response))
        given = {k: torch.cat([v, new[k][None]], 1) if k in new else v for k, v in given.items()}
        scores = model(**given, use_cache=False).logits[0, -num_tokens - 1 : -1].log_softmax(-1)
        assert torch.equal(scores.argmax(-1), response), (name, row)
        torch.testing.assert_close(output.logprobs[row], scores.amax(-1).float(), atol=atol, rtol=0)


def generate(engine, made, **options):
    return engine.generate(**made, return_dict_in_generate=True, **{**GREEDY, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_with_images_are_answered_as_each_alone(name):
    engine = build_engine(build(name))
    assert engine.generator.fallback_reason is None and engine.generator.model.tower is not None
    atol = 1e-4 if name == "qwen3.5" else 1e-5  # its recurrence adds up in fp32 where the oracle does in fp64
    check(build(name), name, COUNTS, generate(engine, batch(name, COUNTS)), atol)


@pytest.mark.parametrize("name", EXAMPLES)
def test_chunks_small_blocks_and_preemption_change_nothing(name, monkeypatch):
    monkeypatch.setattr(step, "CHUNK_TOKENS_ON_CPU", 5)  # in the middle of images
    limits = {"enabled": True, "kv_block_size": 4, "max_running": 5}
    made, num_tokens = batch(name, COUNTS), 20
    limits["max_kv_blocks"] = -(-int(made["attention_mask"].sum(1).max() + num_tokens) // 4) + 2
    engine = build_engine(build(name), hybrid_engine=limits)
    check(build(name), name, COUNTS, generate(engine, made, max_new_tokens=num_tokens))
    assert engine.latency_stats()["preemptions"] > 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_order_of_rows_changes_no_sample_and_pixels_do(name):
    engine = build_engine(build(name))
    sample = partial(generate, engine, **SAMPLED)
    one = sample(batch(name, [1, 2]))
    other = batch(name, [1, 2])
    other["pixel_values"] = other["pixel_values"] * -1
    assert not torch.equal(one.sequences, sample(other).sequences)
    joined = {k: torch.cat([v, other[k]]) for k, v in batch(name, [1, 2]).items()}
    both = sample(joined)
    assert torch.equal(both.sequences[:2], one.sequences)
    assert torch.equal(both.sequences[2:], sample(other).sequences)


def test_a_group_in_repeated_rows_is_prefilled_once_and_other_pixels_are_another_group():
    engine = build_engine(build("qwen3-vl"))
    made = batch("qwen3-vl", [1, 1])
    same = {k: torch.cat([v[:1]] * 3) for k, v in made.items() if k not in ("pixel_values", "image_grid_thw")}
    grid, patches = made["image_grid_thw"][:1], made["pixel_values"][: made["image_grid_thw"][0].prod()]
    same |= {"image_grid_thw": torch.cat([grid] * 3), "pixel_values": torch.cat([patches, patches, -patches])}
    seen = []
    forward = type(engine.generator.model).forward

    def watch(model, given, *others):
        seen.append(given)
        return forward(model, given, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.generator.model), "forward", watch)
        generate(engine, same, max_new_tokens=2)
    assert len(seen[0].lengths) == 2  # of three rows


def test_an_adapter_on_the_text_and_the_tower_is_in_the_rollout():
    name = "llava-onevision"
    engine = build_engine(adapted(build(name)))
    assert any("vision_tower" in key and "lora" in key for key, _ in engine.module.named_parameters())
    check(adapted(build(name)), name, COUNTS, generate(engine, batch(name, COUNTS)))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*EXAMPLES, "smolvlm"])
def test_the_trainers_pass_has_the_rollouts_log_probabilities_and_the_models_gradients(name):
    model, made = build(name), batch(name, [1, 0, 2])
    engine = build_engine(model)
    prompts = [row[kept.bool()].tolist() for row, kept in zip(made["input_ids"], made["attention_mask"], strict=True)]
    tower, given = (
        engine.generator.model.tower,
        {k: v for k, v in made.items() if k not in ("input_ids", "attention_mask")},
    )
    images = [own for own in split(model, tower, given, prompts) for _ in range(2)]
    options = {**SAMPLED, "num_return_sequences": 2, "suppress_tokens": [IMAGE]}  # which would be taken for an image's
    output = generate(engine, made, **options)
    mask = made["attention_mask"].repeat_interleave(2, 0)
    sequences = replace(attach_responses(mask, output.sequences, output.lengths), images=tuple(images))
    sequences = sequences.rows(torch.tensor([5, 0, 3, 1]))
    found = response_logprobs(model, sequences)
    torch.testing.assert_close(found, output.logprobs[[5, 0, 3, 1]], atol=1e-5, rtol=0)
    ours = gradients(model, -found.sum())
    # The same four sequences by the model's own forward, each alone.
    losses = []
    for number in (5, 0, 3, 1):
        alone, answer = row_alone(name, [1, 0, 2], number // 2), output.sequences[number, -6:]
        new = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}
        new |= dict.fromkeys(TOKEN_TYPES, torch.zeros_like(answer))
        alone = {k: torch.cat([v, new[k][None]], 1) if k in new else v for k, v in alone.items()}
        scores = model(**alone, use_cache=False).logits[0, -7:-1].log_softmax(-1)
        losses.append(-scores.gather(1, answer[:, None]).sum())
    own = gradients(model, sum(losses))
    assert ours.keys() == own.keys() and any("vis" in key for key in own)
    for key, gradient in own.items():
        torch.testing.assert_close(ours[key], gradient, atol=1e-4, rtol=1e-4, msg=key)


def rollout_of_ranks(rank, world_size):
    config = {"train_batch_size": world_size, "zero_optimization": {"stage": 3}}
    engine = build_engine(build("qwen3-vl"), **config)
    counts = [COUNTS[:2], COUNTS[1:2]][rank]  # one process has no image
    made = batch("qwen3-vl", counts)
    return counts, generate(engine, made)


def test_sharded_weights_are_whole_while_the_tower_runs():
    for counts, output in run_distributed(rollout_of_ranks, 2):
        check(build("qwen3-vl"), "qwen3-vl", counts, output)


def wrong(change):
    """The arguments of a batch after `change`, and the message of the error."""
    made = batch("qwen3-vl", [0, 1])
    change(made)
    return made


def _without_images(made):
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
        del made[name]


def _without_types(made):
    del made["mm_token_type_ids"]


def _without_placeholders(made):
    made["input_ids"][made["input_ids"] == IMAGE] = 7


def _with_one_too_many(made):
    made["input_ids"][1, -1] = IMAGE


def _with_another_image(made):
    made["pixel_values"] = torch.cat([made["pixel_values"]] * 2)
    made["image_grid_thw"] = torch.cat([made["image_grid_thw"]] * 2)


def _with_too_few_patches(made):
    made["pixel_values"] = made["pixel_values"][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_images, r"row 1: \d+ image tokens \(id 50\) and no image; pass pixel_values"),
        (_without_types, "mm_token_type_ids is missing"),
        (_without_placeholders, "1 images and the rows have placeholders for 0"),
        (_with_one_too_many, r"row 1: \d+ image tokens, and its images have \d+"),
        (_with_another_image, "2 images and the rows have placeholders for 1"),
        (_with_too_few_patches, r"pixel_values has \d+ entries and its images \d+"),
    ],
)
def test_images_and_placeholders_that_differ_are_refused(change, message):
    engine = build_engine(build("qwen3-vl"))
    with pytest.raises(ValueError, match=message):
        generate(engine, wrong(change))


def test_rows_of_images_that_differ_from_the_prompts_are_refused():
    engine = build_engine(build("smolvlm"))
    made = batch("smolvlm", [1, 1])
    made["pixel_values"] = made["pixel_values"][:1]
    with pytest.raises(ValueError, match="pixel_values has 1 rows for 2 prompts"):
        generate(engine, made)


def test_options_that_containers_do_not_serve_keep_the_images():
    name, options = "qwen3-vl", {"num_beams": 2, "do_sample": False, "max_new_tokens": 3, "eos_token_id": None}
    made = batch(name, [1, 0])
    own = build(name).generate(**made, **options)
    assert torch.equal(build_engine(build(name)).generate(**made, **options), own)
