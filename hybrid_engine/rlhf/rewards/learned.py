"""Reward models: a sequence classifier's score of a response, and the critic that is initialized from one."""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hybrid_engine.config.checks import check_number
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.generation.detokenize import answer_ends
from hybrid_engine.optim.build import cast_module
from hybrid_engine.rlhf.batches.packing import Layout, layout_of, pack
from hybrid_engine.rlhf.batches.passes import RunPasses, split
from hybrid_engine.rlhf.batches.sequences import Sequences, ValueModel, build_sequences, last_token_scores
from hybrid_engine.rlhf.data.encoding import encode_scored
from hybrid_engine.rlhf.data.rows import CompletionRow, Turns
from hybrid_engine.rlhf.rewards.judges import RULES
from hybrid_engine.rlhf.rewards.scores import Answers, UnusableReference
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import (
    ADAPTER,
    explained,
    load_config,
    load_model,
    load_tokenizer,
    num_positions,
    save_stage,
    score_head,
)

ROWS_PER_PASS = 64
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "score.weight"


def load_scoring_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model whose classifier reads its score at the last token that is not padding.

    If it pads with a token that ends answers, the token that begins texts becomes the padding: it does not end answers.

    Raises:
        ValueError: it does not load, or has no other token to pad with.
    """
    tokenizer = load_tokenizer(source)
    ends = answer_ends(tokenizer)
    if tokenizer.pad_token_id not in ends:
        return tokenizer
    if tokenizer.bos_token_id in (None, *ends):
        raise ValueError(
            f"--model={source!r} pads with {tokenizer.pad_token!r}, which ends answers; the score is read at the last "
            "token that is not padding, so pad must differ: set another pad_token in its tokenizer"
        )
    end, tokenizer.pad_token = tokenizer.pad_token, tokenizer.bos_token
    say(f"--model={source!r} pads with {end!r}, which ends answers: {tokenizer.pad_token!r} will be padding")
    return tokenizer


def build_classifier(source: str, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A sequence classifier with one label on the body of `source`, without dropout; its head is N(0, 1/(d+1)).

    The head's initialization is that of Stiennon et al., arXiv 2009.01325 (after Huang et al., "N implementation
    details", item 3).
    """
    model = load_model(AutoModelForSequenceClassification, source, has_new_head=True, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    head = score_head(model, "model", source)
    torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    return model


def score_tokens(engine: Any, tokens: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """`[B]` fp32: the scores of prompts with finished answers, read at the last token of each."""
    if layout_of(engine) is not Layout.PADDED:
        return _score_packed(engine, tokens)
    batch = tokenizer.pad({"input_ids": tokens}, padding_side="right", return_tensors="pt").to(engine.device)
    return engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).float()


def _score_packed(engine: Any, tokens: Sequence[list[int]]) -> torch.Tensor:
    """The scores of packed sequences; the classifier itself would read only one score per row."""
    batch = build_sequences([row[:1] for row in tokens], [row[1:] for row in tokens], 0, engine.device)
    packed = pack(batch.on_host.input_ids, batch.on_host.attention_mask, layout_of(engine)).to(engine.device)
    module = engine.module
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    scores: list[torch.Tensor] = []
    hooks = [
        base.score.register_forward_hook(lambda head, given, output: scores.append(output)),
        # Sharding follows the model's output into the backward pass.
        module.register_forward_hook(lambda model, given, output: {"scores": scores[-1]}, prepend=True),
    ]
    try:
        found = engine(**packed.inputs, use_cache=False)["scores"]
    finally:
        for hook in hooks:
            hook.remove()
    last = packed.places.gather(1, batch.attention_mask.sum(dim=1, keepdim=True) - 1)  # every sequence begins at 0
    return found.float().flatten()[last.squeeze(1)]


@torch.no_grad()
def save_normalised(
    engine: Any, references: list[list[int]], tokenizer: PreTrainedTokenizerBase, folder: Path, sizes: RunPasses
) -> None:
    """Saves the classifier, with mean and standard deviation of the references' scores in its config; collective.

    Args:
        engine: a ZeroEngine of the classifier.
        references: good answers after their prompts, as tokens, whose scores define the normalization.
        tokenizer: saved with the model.
        folder: its place, complete or absent.
        sizes: of the run's passes.
    """
    engine.eval()
    score = partial(score_tokens, engine, tokenizer=tokenizer)
    parts = sizes.without_gradients(partial(split, references), score, ROWS_PER_PASS)
    scores = torch.cat(parts)
    config = engine.module.config
    spread = scores.std().item() if len(scores) > 1 else 0.0
    config.score_mean, config.score_std = scores.mean().item(), spread or 1.0  # without spread the score is not scaled
    save_stage(engine, tokenizer, folder)


def names_model(spec: str) -> bool:
    """Whether `--reward=spec` is the folder or the hub name of a model."""
    return Path(spec).exists() or (":" not in spec and spec not in RULES)


class LearnedReward:
    """A frozen sequence classifier's normalized score at the end-of-sequence token after the response."""

    def __init__(
        self,
        folder: str,
        model: Callable[[Sequences], torch.Tensor],
        tokenizer: PreTrainedTokenizerBase,
        num_positions: int | None,
        sizes: RunPasses,
    ):
        """`model` returns `[B, P+T]` normalized scores; it reads up to `num_positions` tokens, None if unlimited."""
        self.folder, self.model, self.tokenizer, self.num_positions = folder, model, tokenizer, num_positions
        self.sizes = sizes

    @classmethod
    def load(cls, folder: str, most_rows: int = 0, dtype: torch.dtype = torch.float32) -> "LearnedReward":
        """The model of `folder`, on this process's device in `dtype`.

        It scores `most_rows` answers at once; 0 uses the default.
        """
        tokenizer = load_tokenizer(folder, "reward")
        model = load_value_model(folder)
        cast_module(model, dtype)
        model = model.to(default_device()).eval().requires_grad_(False)
        return cls(folder, model, tokenizer, num_positions(model.backbone.config), RunPasses(most_rows=most_rows))

    @torch.no_grad()
    def __call__(self, answers: Answers) -> list[float]:
        """Scores finished answers; the caller must handle answers that were cut off.

        Raises:
            ValueError: there are conversations, and no chat template.
        """

        def score(rows: int) -> list[float]:
            return [score for batch in self.batches(answers, rows) for score in self.score(batch)]

        return self.sizes.until_fewer_rows_fit(score, ROWS_PER_PASS)

    def score(self, batch: Sequences) -> list[float]:
        """The scores of the answers of a batch."""
        return last_token_scores(self.model, batch).tolist()

    def batches(self, answers: Answers, num_rows: int) -> list[Sequences]:
        """Batches of `num_rows` answers after their prompts, as the model reads them, in order.

        The reward model's chat template renders conversations. A sequence with more tokens than the model has positions
        loses its beginning.
        """
        batches = []
        for start in range(0, len(answers), num_rows):
            rows = slice(start, start + num_rows)
            both = zip(answers.prompts[rows], answers.responses[rows], strict=True)
            pairs = [self._fit(*self._encode(prompt, response)) for prompt, response in both]
            prompts, responses = ([pair[part] for pair in pairs] for part in (0, 1))
            batches.append(build_sequences(prompts, responses, self.tokenizer.pad_token_id, default_device()))
        return batches

    def _encode(self, prompt: Turns, response: str) -> tuple[list[int], list[int]]:
        """The tokens of both, as the reward model was trained on them."""
        if isinstance(prompt, str):
            row = CompletionRow(prompt=prompt, completion=response)
        elif self.tokenizer.chat_template is None:
            raise UnusableReference(
                f"--reward={self.folder!r} has no chat template, but the prompts are conversations; add the template "
                "that the model was trained with to its tokenizer"
            )
        else:
            row = CompletionRow(prompt=list(prompt), completion=[{"role": "assistant", "content": response}])
        encoded = encode_scored(self.tokenizer, row)
        return encoded.prompt_ids, encoded.response_ids

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        """The last tokens that fit into the model's positions, with at least one of the prompt if it has any."""
        if self.num_positions is None:
            return prompt, response
        response = response[-(self.num_positions - 1) :]
        return prompt[-(self.num_positions - len(response)) :], response


def load_value_model(folder: str) -> ValueModel:
    """The reward model of `folder` with a number for every token, in units of its normalized score.

    The mean and deviation that the reward stage recorded in the config are folded into the head, (score - mean) /
    deviation; a model without them is used unchanged.

    Raises:
        ValueError: `folder`, which the option `reward` names, does not have exactly one label or has no head `score`.
    """
    num_labels = load_config(folder, "reward").num_labels
    if num_labels != 1:
        raise ValueError(
            f"--reward={folder!r} must be a sequence classifier with one label, the score, but has {num_labels}; train "
            "one, for example with `hybrid-engine reward`"
        )
    classifier = load_model(AutoModelForSequenceClassification, folder, "reward")
    score = score_head(classifier, "reward", folder)
    mean = getattr(classifier.config, "score_mean", 0.0)
    std = getattr(classifier.config, "score_std", 1.0)
    head = nn.Linear(score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(score.weight / std)
        head.bias.fill_(-mean / std)
    return ValueModel(getattr(classifier, classifier.base_model_prefix), head)


def shares_tokens(reward: str, actor: str) -> bool:
    """Whether the reward is a model that reads the same tokens as the actor, and so can initialize the critic."""
    return names_model(reward) and load_tokenizer(reward, "reward").get_vocab() == load_tokenizer(actor).get_vocab()


def critic_source(rewards: Sequence[str], actor: str) -> str | None:
    """The first of the rewards that can initialize the critic; None if there is none."""
    return next((spec for spec in rewards if shares_tokens(spec, actor)), None)


def build_critic(actor: str, rewards: Sequence[str]) -> ValueModel:
    """The critic: a reward model's weights if both read the same tokens, else the actor's body and a head of 0."""
    source = critic_source(rewards, actor)
    if source is not None:
        return load_value_model(source)
    backbone = load_model(AutoModel, actor)
    head = nn.Linear(backbone.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return ValueModel(backbone, head)


@dataclass(frozen=True, kw_only=True)
class RewardAdapter:
    """An adapter and a head for the base."""

    source: str
    """The value of `--reward`, for errors."""
    config: LoraConfig
    """Config for a causal model with the same body."""
    weights: dict[str, torch.Tensor]
    """Weights of the adapter, by peft's names."""
    head: nn.Linear
    """Head from hidden states to the normalized score."""


def find_adapter(spec: str) -> Path | None:
    """The folder of the adapter that `--reward=spec` names or contains; None if there is none."""
    folders = [Path(spec), Path(spec) / ADAPTER]
    return next((folder for folder in folders if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()), None)


def check_reward_adapter(spec: str, base: str) -> None:
    """Checks that the reward model `spec` is an adapter on the model `base`; reads no weights.

    Raises:
        ValueError: it has no adapter, or one on another base, of another kind than LoRA, or without a head `score`.
    """
    folder = find_adapter(spec)
    if folder is None:
        raise ValueError(
            f"--shared-base: --reward={spec!r} is not an adapter, but all roles share one base; train one with "
            f"`hybrid-engine reward --model {base} --lora-rank 8`, or leave --shared-base out"
        )
    with explained("reward", folder):
        config = PeftConfig.from_pretrained(str(folder))
    found = str(config.base_model_name_or_path)
    if found != base and Path(found).resolve() != Path(base).resolve():
        raise ValueError(
            f"--shared-base: the adapter of --reward={spec!r} belongs to the base {found!r}, but the actor's base is "
            f"{base!r}; train the reward on that base, or fix base_model_name_or_path in its adapter_config.json"
        )
    if not isinstance(config, LoraConfig) or "score" not in (config.modules_to_save or []):
        raise ValueError(
            f"--shared-base: the adapter of --reward={spec!r} must be LoRA with a head named score, as `hybrid-engine "
            f"reward --lora-rank 8` leaves it; it is {type(config).__name__} with {config.modules_to_save or 'no head'}"
        )


def read_reward_adapter(spec: str) -> RewardAdapter:
    """The adapter of the reward model `spec`, which passed `check_reward_adapter`; its head gives the normalized score.

    Raises:
        ValueError: its weights cannot be read, or do not have one head `score` with one label.
    """
    folder = find_adapter(spec)
    assert folder is not None, f"{spec=}"
    with explained("reward", folder):
        config = copy.deepcopy(PeftConfig.from_pretrained(str(folder)))
        weights = load_file(folder / WEIGHTS)
    heads = [weights.pop(name) for name in sorted(weights) if name.endswith(HEAD)]
    shapes = [tuple(head.shape) for head in heads]
    if len(heads) != 1 or len(shapes[0]) != 2 or shapes[0][0] != 1:
        raise ValueError(
            f"--reward={spec!r} must have one head named score, of one label ([1, hidden size]) but has "
            f"{', '.join(map(str, shapes)) or 'none'}; train it with `hybrid-engine reward`"
        )
    assert isinstance(config, LoraConfig)
    config.task_type, config.modules_to_save, config.inference_mode = "CAUSAL_LM", None, False
    has_model = (Path(spec) / "config.json").is_file()
    noted = load_config(spec, "reward") if has_model else None
    mean, std = getattr(noted, "score_mean", 0.0), getattr(noted, "score_std", 1.0)
    check_number(f"--reward={spec!r}: score_mean in its config.json", mean, -math.inf)
    check_number(f"--reward={spec!r}: score_std in its config.json", std, sys.float_info.min)
    head = nn.Linear(heads[0].shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(heads[0].float() / std)
        head.bias.fill_(-mean / std)
    return RewardAdapter(source=spec, config=config, weights=weights, head=head)
