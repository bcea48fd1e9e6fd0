"""RLHF's third step in the calling style of scripts written for DeepSpeed; only the imports say hybrid_engine.

    python tests/integration/step3/step3_like.py --actor_lora_dim 4 --enable_ema --output_dir out
    python -m torch.distributed.run --nproc_per_node 2 tests/integration/step3/step3_like.py --actor_zero_stage 3 \\
        --output_dir out

Five engines: the actor that trains and generates, the reference, the actor's moving average, the critic, the reward
model. What lies beside a script is in step3_utils.py, the models are tiny and random (tiny_models.py), and plain_ppo.py
is the same algorithm without any engine. Each process writes its losses to record_<rank>.json. The calling style is
DeepSpeed-Chat's, the code is not.
B: sequences; P: prompt length; T: whole length.
"""

import argparse
import json
import math
import os
import signal

import torch
from step3_utils import (
    add_lora,
    eval_ds_config,
    merge_lora,
    model_norm,
    moving_average,
    num_params,
    parameter_groups,
    print_rank_0,
    save_hf_format,
    save_zero_three_model,
    train_ds_config,
    train_only_lora,
)
from tiny_models import MIN_ANSWER, PAD, ValueModel, build_actor, prompt_batch
from torch.nn import functional as F
from transformers import get_scheduler, set_seed

import hybrid_engine as deepspeed
from hybrid_engine.accelerator import get_accelerator
from hybrid_engine.ops.adam import DeepSpeedCPUAdam, FusedAdam

KL_COEFFICIENT, REWARD_CLIP = 0.1, 5.0
RATIO_CLIP, VALUE_CLIP = 0.2, 0.2
GAMMA, LAMBDA = 1.0, 0.95
EMA_BETA = 0.9


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="RLHF, step 3, on tiny random models")
    parser.add_argument("--actor_zero_stage", type=int, default=0)
    parser.add_argument("--critic_zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true", help="optimizer state and parameters in the CPU's memory")
    parser.add_argument("--offload_reference_model", action="store_true")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--initial_scale_power", type=int, default=16)
    parser.add_argument("--loss_scale_window", type=int, default=100)
    parser.add_argument("--actor_lora_dim", type=int, default=0)
    parser.add_argument("--actor_lora_module_name", default="layers.")
    parser.add_argument("--only_optimize_lora", action="store_true")
    parser.add_argument("--actor_gradient_checkpointing", action="store_true")
    parser.add_argument("--critic_gradient_checkpointing", action="store_true")
    parser.add_argument("--unpin_actor_parameters", action="store_true")
    parser.add_argument("--release_inference_cache", action="store_true")
    parser.add_argument("--enable_ema", action="store_true")
    parser.add_argument("--align_overflow", action="store_true", help="actor and critic skip their steps together")
    parser.add_argument("--inject_overflow_at", type=int, nargs="*", default=[], help="actor steps, on the last rank")
    parser.add_argument("--record_norms", action="store_true", help="of all weights after each step")
    parser.add_argument("--steps", type=int, default=3, help="batches of prompts")
    parser.add_argument("--ppo_epochs", type=int, default=2)
    parser.add_argument("--per_device_generation_batch_size", type=int, default=4)
    parser.add_argument("--per_device_training_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--actor_learning_rate", type=float, default=3e-3)
    parser.add_argument("--actor_lora_learning_rate", type=float, default=6e-3)
    parser.add_argument("--critic_learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_warmup_steps", type=int, default=1)
    parser.add_argument("--max_answer_seq_len", type=int, default=7)
    parser.add_argument("--do_sample", action="store_true")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint_dir", help="saves all that is needed to go on after every batch of prompts")
    parser.add_argument("--resume", action="store_true", help="goes on from --checkpoint_dir")
    parser.add_argument("--crash_at", type=int, default=-1, help="dies before this batch of prompts is saved")
    parser.add_argument("--output_dir")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args(argv)


class Engines:
    """The five engines of the third step."""

    def __init__(self, args, num_optimizer_steps):
        self.args, self.num_optimizer_steps = args, num_optimizer_steps
        # If the trained model is sharded, those beside it are too; otherwise they are small enough to be whole.
        actor_eval_stage = 3 if args.actor_zero_stage == 3 else 0
        critic_eval_stage = 3 if args.critic_zero_stage == 3 else 0
        self.actor = self._init_actor()
        ref_config = eval_ds_config(args, actor_eval_stage, args.offload_reference_model)
        self.ref, *_ = deepspeed.initialize(model=build_actor(args.seed), config=ref_config)
        self.actor_ema = self._init_ema(eval_ds_config(args, actor_eval_stage, args.offload_reference_model))
        self.critic = self._init_critic()
        self.reward, *_ = deepspeed.initialize(
            model=ValueModel(args.seed), config=eval_ds_config(args, critic_eval_stage)
        )
        if args.critic_gradient_checkpointing:
            self.critic.gradient_checkpointing_enable()

    def _init_actor(self):
        args = self.args
        model = build_actor(args.seed)
        if args.actor_lora_dim > 0:
            model = add_lora(model, args.actor_lora_module_name, args.actor_lora_dim)
            if args.only_optimize_lora:
                model = train_only_lora(model)
        ds_config = train_ds_config(args, args.actor_zero_stage, generates=True)
        return self._train_engine(model, args.actor_learning_rate, ds_config)

    def _init_ema(self, ds_config):
        args = self.args
        if not args.enable_ema:
            return None
        model = build_actor(args.seed)
        if args.actor_lora_dim > 0:
            model = add_lora(model, args.actor_lora_module_name, args.actor_lora_dim)
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        return engine

    def _init_critic(self):
        ds_config = train_ds_config(self.args, self.args.critic_zero_stage)
        return self._train_engine(ValueModel(self.args.seed), self.args.critic_learning_rate, ds_config)

    def _train_engine(self, model, learning_rate, ds_config):
        groups = parameter_groups(model, self.args.weight_decay, self.args.actor_lora_learning_rate)
        adam = DeepSpeedCPUAdam if self.args.offload else FusedAdam
        # An update by a gradient that is nothing but rounding would be a coin toss with a smaller eps.
        optimizer = adam(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-5)
        scheduler = get_scheduler(
            name="cosine",
            optimizer=optimizer,
            num_warmup_steps=self.args.num_warmup_steps,
            num_training_steps=self.num_optimizer_steps,
        )
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config)
        return engine

    def checkpointed(self):
        engines = {"actor": self.actor, "critic": self.critic, "actor_ema": self.actor_ema}
        return {name: engine for name, engine in engines.items() if engine is not None}


def gather_logprobs(logits, labels):
    return F.log_softmax(logits.float(), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class PPOTrainer:
    """Makes experience with the engines and trains actor and critic on it."""

    def __init__(self, engines, args):
        self.args = args
        self.actor, self.critic, self.ref, self.reward = engines.actor, engines.critic, engines.ref, engines.reward
        self.z3_enabled = args.actor_zero_stage == 3
        self.num_train_calls = 0

    def train(self):
        self.actor.train()
        self.critic.train()

    def eval(self):
        for engine in (self.actor, self.critic, self.ref, self.reward):
            engine.eval()

    def generate_experience(self, prompts, mask):
        self.eval()
        assert not self.actor.module.training and not self.reward.module.training
        with torch.no_grad():
            seq = self.actor.module.generate(
                prompts,
                attention_mask=mask,
                max_length=prompts.shape[1] + self.args.max_answer_seq_len,
                min_new_tokens=MIN_ANSWER,
                pad_token_id=PAD,
                synced_gpus=self.z3_enabled,
                do_sample=self.args.do_sample,
            )
        self.train()
        assert self.actor.module.training and self.critic.module.training
        attention_mask = seq.not_equal(PAD).long()
        with torch.no_grad():
            logits = self.actor(seq, attention_mask=attention_mask).logits
            logits_ref = self.ref(seq, attention_mask=attention_mask).logits
            scored = self.reward.forward_value(seq, attention_mask, prompt_length=prompts.shape[1])
            values = self.critic.forward_value(seq, attention_mask, return_value_only=True).detach()[:, :-1]
        return {
            "prompts": prompts,
            "input_ids": seq,
            "attention_mask": attention_mask,
            "logprobs": gather_logprobs(logits[:, :-1], seq[:, 1:]),
            "ref_logprobs": gather_logprobs(logits_ref[:, :-1], seq[:, 1:]),
            "values": values.float(),
            "rewards": scored["chosen_end_scores"].detach().float(),
        }

    def train_rlhf(self, experience):
        seq, attention_mask = experience["input_ids"], experience["attention_mask"]
        start = experience["prompts"].shape[1] - 1
        mask = attention_mask[:, 1:][:, start:]
        with torch.no_grad():
            advantages, returns, old_values = advantages_and_returns(experience, start, mask)
        batch = {"input_ids": seq, "attention_mask": attention_mask}

        logits = self.actor(**batch, use_cache=False).logits
        logprobs = gather_logprobs(logits[:, :-1], seq[:, 1:])[:, start:]
        actor_loss = actor_loss_fn(logprobs, experience["logprobs"][:, start:], advantages, mask)
        self.actor.backward(actor_loss * self._overflow_factor())
        if not self.args.align_overflow:
            self.actor.step()

        values = self.critic.forward_value(**batch, return_value_only=True, use_cache=False)[:, :-1][:, start:]
        critic_loss = critic_loss_fn(values.float(), old_values, returns, mask)
        self.critic.backward(critic_loss)
        if self.args.align_overflow:
            self._align_overflow()
            self.actor.step()
        self.critic.step()
        self.num_train_calls += 1
        return actor_loss, critic_loss

    def _overflow_factor(self):
        is_last_rank = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return math.inf if is_last_rank and self.num_train_calls in self.args.inject_overflow_at else 1.0

    def _align_overflow(self):
        actor_overflow = self.actor.optimizer.check_overflow(external=True)
        critic_overflow = self.critic.optimizer.check_overflow(external=True)
        if actor_overflow and not critic_overflow:
            self.critic.optimizer.skip_step = True
        elif critic_overflow and not actor_overflow:
            self.actor.optimizer.skip_step = True
        if actor_overflow or critic_overflow:
            print_rank_0(f"OVERFLOW: {actor_overflow=} {critic_overflow=}, both models skip this step")

    def get_overflow(self):
        # There is no loss scale in other precisions, and nothing to skip.
        if self.args.dtype != "fp16":
            return False, False
        return self.actor.optimizer.overflow, self.critic.optimizer.overflow


def advantages_and_returns(experience, start, mask):
    """Advantages, returns and old values of the answers, `[B, T - P]`; rewards and values after an end are zero."""
    logprobs, ref_logprobs = experience["logprobs"][:, start:], experience["ref_logprobs"][:, start:]
    length = mask.shape[1]
    last = mask.sum(dim=1, keepdim=True) - 1
    rewards = -KL_COEFFICIENT * (logprobs - ref_logprobs)
    rewards.scatter_add_(1, last, experience["rewards"].clamp(-REWARD_CLIP, REWARD_CLIP)[:, None])
    old_values = experience["values"][:, start:] * mask
    rewards = rewards * mask
    advantage, reversed_advantages = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(length)):
        next_values = old_values[:, t + 1] if t + 1 < length else 0.0
        delta = rewards[:, t] + GAMMA * next_values - old_values[:, t]
        advantage = delta + GAMMA * LAMBDA * advantage
        reversed_advantages.append(advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + old_values, old_values


def actor_loss_fn(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp((logprobs - old_logprobs) * mask)
    clipped = ratio.clamp(1 - RATIO_CLIP, 1 + RATIO_CLIP)
    return (torch.max(-advantages * ratio, -advantages * clipped) * mask).sum() / mask.sum()


def critic_loss_fn(values, old_values, returns, mask):
    clipped = torch.max(torch.min(values, old_values + VALUE_CLIP), old_values - VALUE_CLIP)
    return 0.5 * (torch.max((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()


def mini_batches(experience, size):
    return [
        {name: tensor[begin : begin + size] for name, tensor in experience.items()}
        for begin in range(0, len(experience["input_ids"]), size)
    ]


def save_models(engines, args):
    stages = {
        "actor": args.actor_zero_stage,
        "critic": args.critic_zero_stage,
        "actor_ema": args.actor_zero_stage,
    }
    for name, engine in engines.checkpointed().items():
        folder = os.path.join(args.output_dir, name)
        merge_lora(engine)
        if torch.distributed.get_rank() == 0:
            save_hf_format(engine, folder)
        if stages[name] == 3:
            save_zero_three_model(engine, folder)
    torch.distributed.barrier()


def save_checkpoints(engines, args, step):
    for name, engine in engines.checkpointed().items():
        engine.save_checkpoint(os.path.join(args.checkpoint_dir, name), tag=f"step{step}", client_state={"step": step})


def load_checkpoints(engines, args):
    """The batch of prompts to go on with."""
    states = {}
    for name, engine in engines.checkpointed().items():
        _, states[name] = engine.load_checkpoint(os.path.join(args.checkpoint_dir, name))
    return states["actor"]["step"] + 1


def all_reduce_mean(number):
    tensor = torch.tensor([number], device=get_accelerator().current_device_name())
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
    return (tensor / torch.distributed.get_world_size()).item()


def train_on(trainer, engines, experience, args):
    """PPO on one batch of experience; what happened in each training call."""
    rows = []
    for _ in range(args.ppo_epochs):
        for batch in mini_batches(experience, args.per_device_training_batch_size):
            actor_loss, critic_loss = trainer.train_rlhf(batch)
            if args.enable_ema:
                moving_average(engines.actor, engines.actor_ema, EMA_BETA, args.actor_zero_stage)
            actor_overflow, critic_overflow = trainer.get_overflow()
            rows.append(
                {
                    "actor_loss": actor_loss.item(),
                    "critic_loss": critic_loss.item(),
                    "actor_overflow": actor_overflow,
                    "critic_overflow": critic_overflow,
                    "actor_scale": engines.actor.optimizer.cur_scale,
                    "critic_scale": engines.critic.optimizer.cur_scale,
                    "learning_rate": engines.actor.get_lr()[0],
                }
            )
            if args.record_norms:
                rows[-1] |= {"actor_norm": model_norm(engines.actor), "critic_norm": model_norm(engines.critic)}
    return rows


def main(argv=None):
    args = parse_args(argv)
    if args.local_rank != -1:
        get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    args.global_rank = torch.distributed.get_rank()
    set_seed(args.seed)
    get_accelerator().manual_seed_all(args.seed)
    torch.distributed.barrier()

    calls_per_batch = args.ppo_epochs * args.per_device_generation_batch_size // args.per_device_training_batch_size
    engines = Engines(args, args.steps * calls_per_batch // args.gradient_accumulation_steps)
    trainer = PPOTrainer(engines, args)
    first_step = load_checkpoints(engines, args) if args.resume else 0
    counts = [num_params(engine) for engine in (engines.actor, engines.critic)]
    record = {"first_step": first_step, "num_params": counts, "training": [], "sequences": []}
    for step in range(first_step, args.steps):
        prompts, mask = prompt_batch(step, args.global_rank, args.per_device_generation_batch_size)
        experience = trainer.generate_experience(prompts.to(device), mask.to(device))
        if args.actor_gradient_checkpointing:
            engines.actor.gradient_checkpointing_enable()
        rows = train_on(trainer, engines, experience, args)
        if args.actor_gradient_checkpointing:
            engines.actor.gradient_checkpointing_disable()
        record["sequences"].append(experience["input_ids"].tolist())
        record["training"] += rows
        reward = all_reduce_mean(experience["rewards"].mean().item())
        print_rank_0(f"step: {step} | actor loss: {rows[-1]['actor_loss']} | critic loss: {rows[-1]['critic_loss']}")
        print_rank_0(f"average reward score: {reward}")
        if step == args.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if args.checkpoint_dir:
            save_checkpoints(engines, args, step)

    if args.output_dir:
        save_models(engines, args)
        with open(os.path.join(args.output_dir, f"record_{args.global_rank}.json"), "w") as file:
            json.dump(record, file)
    return record


if __name__ == "__main__":
    main()
