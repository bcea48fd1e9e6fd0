"""Answers for tests: some to be judged, whose tokens are characters, and those that a run follows."""

from typing import Any

from hybrid_engine.rlhf.rewards.scores import Answers


def answers_of(prompts, responses, **columns) -> Answers:
    """One token per character, and an end-of-sequence token, 0, behind each response."""
    return Answers(
        prompts=prompts,
        responses=responses,
        prompt_ids=[[ord(character) for character in str(prompt)] for prompt in prompts],
        response_ids=[[*map(ord, response), 0] for response in responses],
        is_cut_off=[False] * len(prompts),
        columns=columns,
        decode=lambda ids: "".join(chr(token) for token in ids if token),
    )


def check_followed(lines: list[dict[str, Any]], steps: set[int]) -> None:
    """Whether `answers.jsonl` has answers at these steps, and how likely the first ones' tokens became meanwhile."""
    assert {line["step"] for line in lines} == steps
    first, last = ([line for line in lines if line["step"] == step] for step in (min(steps), max(steps)))
    for before, after in zip(first[:16], last[:16], strict=True):
        assert before["prompt"] == after["prompt"]
        assert [len(tokens) for tokens in before["tokens"]] == before["lengths"]
        assert [len(values) for values in after["logprobs"]] == before["lengths"]
        assert all(number <= 0 for values in after["logprobs"] for number in values)
    assert [line["logprobs"] for line in first[:16]] != [line["logprobs"] for line in last[:16]]
