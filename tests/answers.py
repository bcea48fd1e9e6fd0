"""Answers for tests of rewards, whose tokens are characters."""

from hybrid_engine.recipes.rewards.answers import Answers


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
