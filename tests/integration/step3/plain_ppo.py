"""The algorithm of step3_like.py in plain PyTorch, fp32, one process, no engine: what its losses are held to.

What `num_shards` processes do, each on prompts of its own, is one step on the mean of their losses. Generation is
transformers' own, in the adapted model. S: sequences of one shard; A: answer length.
"""

import copy
import math
from dataclasses import dataclass, field

import torch
from tiny_models import MIN_ANSWER, PAD, ValueModel, build_actor, prompt_batch
from torch import nn
from transformers import LlamaForCausalLM

KL_COEFFICIENT, REWARD_CLIP = 0.1, 5.0
RATIO_CLIP, VALUE_CLIP = 0.2, 0.2
GAMMA, LAMBDA = 1.0, 0.95
EMA_BETA = 0.9
MAX_NORM = 1.0


@dataclass
class PlainRun:
    """What a run came to."""

    losses: list[list[tuple[float, float]]]
    """For each shard the losses of actor and critic at each training call."""
    sequences: list[list[torch.Tensor]] = field(default_factory=list)
    """For each batch of prompts the sequences of each shard, `[S, P + A]`."""
    num_params: list[int] = field(default_factory=list)
    """Of actor and critic, adapters included."""
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Of actor, critic and, if there is one, the moving average; adapters merged."""


class Adapted(nn.Module):
    """A frozen linear plus a low-rank product."""

    def __init__(self, linear: nn.Linear, dim: int):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.right = nn.Parameter(torch.empty(linear.in_features, dim))
        self.left = nn.Parameter(torch.zeros(dim, linear.out_features))
        nn.init.kaiming_uniform_(self.right, a=math.sqrt(5))

    def delta(self):
        return (self.right @ self.left).t() / self.left.shape[0]

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.linear.weight + self.delta())


def build_adapted_actor(args) -> LlamaForCausalLM:
    model = build_actor(args.seed)
    if args.actor_lora_dim > 0:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and args.actor_lora_module_name in name:
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, Adapted(module, args.actor_lora_dim))
        if args.only_optimize_lora:
            for name, param in model.named_parameters():
                param.requires_grad = name.endswith((".left", ".right"))
    return model


def merged_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by the names they have without adapters."""
    weights = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Adapted):
                weights[f"{name}.weight"] = module.linear.weight + module.delta()
    for name, param in model.named_parameters():
        if not name.endswith((".left", ".right", ".linear.weight")):
            weights[name] = param.detach().clone()
    return weights


def build_optimizer(model: nn.Module, learning_rate: float, args, num_steps: int):
    """AdamW without decay of norms, faster for adapters; a cosine after a linear warm-up."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            is_adapter, decay = name.endswith((".left", ".right")), 0.0 if "norm" in name else args.weight_decay
            rate = args.actor_lora_learning_rate if is_adapter else learning_rate
            groups.setdefault((rate, decay), []).append(param)
    optimizer = torch.optim.AdamW(
        [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()],
        betas=(0.9, 0.95),
        eps=1e-5,
    )

    def factor(step):
        if step < args.num_warmup_steps:
            return step / args.num_warmup_steps
        progress = (step - args.num_warmup_steps) / (num_steps - args.num_warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def token_logprobs(model, sequences):
    logits = model(sequences, attention_mask=(sequences != PAD).long()).logits[:, :-1]
    return torch.distributions.Categorical(logits=logits).log_prob(sequences[:, 1:])


def token_values(model, sequences):
    return model.forward_value(sequences, (sequences != PAD).long(), return_value_only=True)[:, :-1]


@dataclass
class Experience:
    """One shard's sequences and what the models said before they were trained on them; `[S, A]` but the first."""

    sequences: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor

    def rows(self, begin, end):
        return Experience(**{name: tensor[begin:end] for name, tensor in vars(self).items()})


@torch.no_grad()
def make_experience(sequences, prompt_width, actor, ref, critic, reward) -> Experience:
    answers = slice(prompt_width - 1, None)
    mask = (sequences != PAD).float()[:, 1:][:, answers]
    logprobs = token_logprobs(actor, sequences)[:, answers]
    values = token_values(critic, sequences)[:, answers]
    scores = reward.forward_value(sequences, (sequences != PAD).long(), prompt_length=prompt_width)["chosen_end_scores"]
    rewards = -KL_COEFFICIENT * (logprobs - token_logprobs(ref, sequences)[:, answers])
    for row, length in enumerate(mask.sum(1).int().tolist()):
        rewards[row, length - 1] += scores[row].clamp(-REWARD_CLIP, REWARD_CLIP)
    advantages = generalized_advantages(rewards * mask, values * mask)
    return Experience(sequences, mask, logprobs, values * mask, advantages)


def generalized_advantages(rewards, values):
    """GAE as a sum: of all later temporal differences, weighted by (gamma lambda) to the power of their distance."""
    length = rewards.shape[1]
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    differences = rewards + GAMMA * following - values
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    weights = torch.where(distance >= 0, (GAMMA * LAMBDA) ** distance.clamp(min=0).float(), 0.0)
    return differences @ weights.t()


def actor_loss(model, batch: Experience):
    logprobs = token_logprobs(model, batch.sequences)[:, -batch.mask.shape[1] :]
    ratio = ((logprobs - batch.logprobs) * batch.mask).exp()
    gain = torch.minimum(batch.advantages * ratio, batch.advantages * ratio.clip(1 - RATIO_CLIP, 1 + RATIO_CLIP))
    return -(gain * batch.mask).sum() / batch.mask.sum()


def critic_loss(model, batch: Experience):
    values = token_values(model, batch.sequences)[:, -batch.mask.shape[1] :]
    near = batch.values + (values - batch.values).clip(-VALUE_CLIP, VALUE_CLIP)
    returns = batch.advantages + batch.values
    errors = torch.maximum((values - returns).square(), (near - returns).square())
    return (errors * batch.mask).sum() / batch.mask.sum() / 2


class PlainStepper:
    """A model's steps: gradients added up over micro-batches, clipped, applied."""

    def __init__(self, model, learning_rate, args, num_steps):
        self.model, self.num_micro_batches, self.pending = model, args.gradient_accumulation_steps, 0
        self.optimizer, self.scheduler = build_optimizer(model, learning_rate, args, num_steps)

    def step(self, losses):
        """One micro-batch, given each shard's loss."""
        (sum(losses) / len(losses) / self.num_micro_batches).backward()
        self.pending += 1
        if self.pending == self.num_micro_batches:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], MAX_NORM)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.pending = 0


def run(args, num_shards: int, sequences: list[list[torch.Tensor]] | None = None) -> PlainRun:
    """Trains as step3_like.py does with `args` on `num_shards` processes.

    Args:
        args: of step3_like.py.
        num_shards: processes there.
        sequences: for each batch of prompts each shard's, instead of generating greedily.
    """
    actor, critic = build_adapted_actor(args), ValueModel(args.seed)
    ref, reward = build_actor(args.seed), ValueModel(args.seed)
    average = copy.deepcopy(actor) if args.enable_ema else None
    size = args.per_device_training_batch_size
    begins = range(0, args.per_device_generation_batch_size, size)
    num_steps = args.steps * args.ppo_epochs * len(begins) // args.gradient_accumulation_steps
    actor_stepper = PlainStepper(actor, args.actor_learning_rate, args, num_steps)
    critic_stepper = PlainStepper(critic, args.critic_learning_rate, args, num_steps)
    result = PlainRun(losses=[[] for _ in range(num_shards)])
    for step in range(args.steps):
        prompts = [prompt_batch(step, shard, args.per_device_generation_batch_size) for shard in range(num_shards)]
        rollouts = sequences[step] if sequences else [generate(actor, *prompt, args) for prompt in prompts]
        result.sequences.append(rollouts)
        experiences = [make_experience(rows, prompts[0][0].shape[1], actor, ref, critic, reward) for rows in rollouts]
        for begin in [*begins] * args.ppo_epochs:
            batches = [experience.rows(begin, begin + size) for experience in experiences]
            losses = [(actor_loss(actor, batch), critic_loss(critic, batch)) for batch in batches]
            actor_stepper.step([loss for loss, _ in losses])
            critic_stepper.step([loss for _, loss in losses])
            for shard, (loss, value_loss) in enumerate(losses):
                result.losses[shard].append((loss.item(), value_loss.item()))
            if average is not None:
                move(average, actor)
    result.num_params = [sum(param.numel() for param in model.parameters()) for model in (actor, critic)]
    models = {"actor": actor, "critic": critic, "actor_ema": average}
    result.weights = {name: merged_weights(model) for name, model in models.items() if model is not None}
    return result


@torch.no_grad()
def generate(model, prompts, mask, args):
    lengths = {"max_length": prompts.shape[1] + args.max_answer_seq_len, "min_new_tokens": MIN_ANSWER}
    return model.generate(prompts, attention_mask=mask, **lengths, do_sample=False, pad_token_id=PAD)


@torch.no_grad()
def move(average, model):
    for mean, param in zip(average.parameters(), model.parameters(), strict=True):
        mean.mul_(EMA_BETA).add_(param, alpha=1 - EMA_BETA)
