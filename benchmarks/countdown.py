"""A model that counts down to its end, so that answers have chosen lengths in every engine without touching any.

Token n is followed by token n - 1 and token 0 ends the sequence: a prompt that ends in token n is answered by
exactly n tokens, and one that ends in token T + 1 by T tokens without an end. A prompt that ends in the start
token is answered by n tokens with probability `probabilities[n - 1]`, independently for every sample.

The layers are those of any Llama, or of another family, and cost what they cost; only the embeddings are so large
that what layers write to the residual stream is small, and the last token's embedding reaches the LM head nearly
unchanged: the size of neither input nor output of a layer with a norm before it depends on theirs. Counting tokens have
orthogonal embeddings E[n]; row n - 1 of the head is along E[n], which makes the next logit `PEAK` and all
others about 0. The start token's direction is in the rows of all first tokens, at `PEAK` + log-probability.

V vocabulary, E hidden size, T most new tokens; ids 0 to T + 1 count, T + 2 starts, others are filler, V - 1 pads.
"""

import math
from statistics import NormalDist

import torch
from common import Shape, llama_config
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

EOS = 0
# A filler token is drawn once in exp(PEAK - log V) tokens: never in a benchmark.
PEAK = 30.0
EMBEDDING_SCALE = 100.0


def start_token(shape: Shape) -> int:
    """Whoever's prompt ends in it draws the length of the answer."""
    return shape.new_tokens + 2


def log_normal_mu(longest: int, mean: float, sigma: float) -> float:
    """mu for which a log-normal length, rounded and clipped to 1 .. `longest`, has this mean; by bisection."""
    low, high = -2.0, math.log(longest) + 2
    for _ in range(60):
        middle = (low + high) / 2
        probabilities = log_normal_probabilities(longest, middle, sigma)
        below = sum(n * p for n, p in enumerate(probabilities.tolist(), 1)) < mean
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def log_normal_probabilities(longest: int, mu: float, sigma: float) -> torch.Tensor:
    """Probability of each length 1 .. `longest` `[T]` float64: exp(mu + sigma z), rounded and clipped."""
    normal = NormalDist(mu, sigma)
    below = [0.0, *(normal.cdf(math.log(n + 0.5)) for n in range(1, longest)), 1.0]
    return torch.tensor(below, dtype=torch.float64).diff()


def build_countdown_model(shape: Shape, probabilities: torch.Tensor, seed: int = 0) -> LlamaForCausalLM:
    """A Llama, in fp32 and eval mode. `probabilities [T]` of the answer's length after the start token.

    Raises:
        ValueError: the hidden size or the vocabulary is too small to count that far.
    """
    torch.manual_seed(seed)
    return teach_countdown(
        LlamaForCausalLM(llama_config(shape, shape.positions, bos_token_id=None)), shape, probabilities
    )


def teach_countdown(model: PreTrainedModel, shape: Shape, probabilities: torch.Tensor) -> PreTrainedModel:
    """`model` made to count down, with a head of its own; in eval mode.

    Raises:
        ValueError: the hidden size or the vocabulary is too small to count that far.
    """
    _check_sizes(shape)
    for name, value in (("eos_token_id", EOS), ("pad_token_id", shape.vocab - 1), ("final_logit_softcapping", None)):
        setattr(model.config, name, value)
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(torch.nn.Linear(shape.hidden, shape.vocab, bias=False))
        model.get_output_embeddings().weight.data.normal_(std=0.02)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=shape.vocab - 1)
    # Of tokens 1 .. T + 1 and of the start token, orthonormal.
    directions, _ = torch.linalg.qr(torch.randn(shape.hidden, start_token(shape), dtype=torch.float64))
    directions = directions.T.float()  # [T + 2, E]
    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_()
        # Entries of mean square 1, as after the final norm: a row `x * direction / sqrt(E)` then gives logit x.
        embedding[1 : start_token(shape) + 1] = directions * math.sqrt(shape.hidden)
        embedding.mul_(EMBEDDING_SCALE)
        rows = PEAK * directions[:-1]  # of tokens 0 .. T
        first = PEAK + probabilities.clamp(min=1e-12).log().float()
        rows[: shape.new_tokens] += first[:, None] * directions[-1]
        head[: shape.new_tokens + 1] = rows / math.sqrt(shape.hidden)
    return model.eval()


def _check_sizes(shape: Shape) -> None:
    needed = start_token(shape)
    if shape.hidden < needed:
        raise ValueError(
            f"--new-tokens={shape.new_tokens} needs {needed} orthogonal directions, more than --hidden={shape.hidden}; "
            f"lower the one or raise the other"
        )
    if shape.vocab < 2 * needed:
        raise ValueError(
            f"--vocab={shape.vocab} must be at least {2 * needed} with --new-tokens={shape.new_tokens}, to leave "
            f"filler beside the counting tokens; raise it"
        )


def build_prompts(shape: Shape, last: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """`[B, P]` filler that ends in the tokens `last [B]`."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.prompts, shape.prompt_tokens)
    prompts = torch.randint(start_token(shape) + 1, shape.vocab - 1, size, generator=generator)
    prompts[:, -1] = last
    return prompts


def check_countdown(answer: list[int], new_tokens: int) -> None:
    """Raises RuntimeError unless `answer` counts down, to its end or until it had all `new_tokens`."""
    is_countdown = len(answer) > 0 and answer == list(range(answer[0], answer[0] - len(answer), -1))
    if not is_countdown or not (answer[-1] == EOS or len(answer) == new_tokens):
        raise RuntimeError(f"the answer is no countdown to {EOS}: {answer}")
