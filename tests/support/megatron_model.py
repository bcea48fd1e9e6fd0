"""A Megatron-style GPT in plain torch: the names of Megatron-LM and DeepSpeed, a forward written for the tests.

It is the oracle of everything here about Megatron. Sequences are rows of a batch without padding.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, HIDDEN, HEADS, LENGTH = 99, 48, 4, 64
DIM = HIDDEN // HEADS


class ParallelMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class MoE(nn.Module):
    """DeepSpeed's layer without capacity and noise: token by token."""

    def __init__(self, num_experts, top_k, is_residual):
        super().__init__()
        self.top_k, self.is_residual = top_k, is_residual
        if is_residual:
            self.mlp, self.coefficient = ParallelMLP(), nn.Linear(HIDDEN, 2)
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(HIDDEN, num_experts, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(ParallelMLP() for _ in range(num_experts))

    def forward(self, x):
        experts, rows = self.deepspeed_moe.experts.deepspeed_experts, []
        for token in x.reshape(-1, HIDDEN):
            gates = self.deepspeed_moe.gate.wg(token).softmax(-1)
            chosen = gates.argsort(descending=True)[: self.top_k].tolist()
            total = sum(gates[i] for i in chosen) if self.top_k == 2 else 1.0
            row = sum(gates[i] / total * experts[i](token) for i in chosen)
            if self.is_residual:
                experts_share, mlp_share = self.coefficient(token).softmax(-1)
                row = experts_share * row + mlp_share * self.mlp(token)
            rows.append(row)
        return torch.stack(rows).view_as(x)


class ParallelAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        contexts = []
        for head in self.query_key_value(x).split(3 * DIM, -1):  # each head's query, key and value together
            q, k, v = head.split(DIM, -1)
            scores = q @ k.transpose(-1, -2) / DIM**0.5
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            contexts.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
        return self.dense(torch.cat(contexts, -1))


class ParallelLayer(nn.Module):
    """A name of its own: the policy must know it by the names inside."""

    def __init__(self, num_experts, top_k, is_residual, attention_name):
        super().__init__()
        self.attention_name = attention_name
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        setattr(self, attention_name, ParallelAttention())
        self.mlp = MoE(num_experts, top_k, is_residual) if num_experts else ParallelMLP()

    def forward(self, x):
        x = x + getattr(self, self.attention_name)(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class OracleGPT(nn.Module):
    """`num_experts`: of each layer, 0 for none. Old names are those of Megatron-LM before its second release."""

    def __init__(self, num_experts=(0, 0), top_k=1, is_residual=False, has_old_names=False):
        super().__init__()
        self.num_experts, self.top_k, self.has_old_names = num_experts, top_k, has_old_names
        self.language_model = nn.Module()
        self.language_model.embedding = nn.Module()
        self.language_model.embedding.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.language_model.embedding.position_embeddings = nn.Embedding(LENGTH, HIDDEN)
        stack, attention = ("transformer", "attention") if has_old_names else ("encoder", "self_attention")
        self.stack = nn.Module()
        self.stack.layers = nn.ModuleList(ParallelLayer(n, top_k, is_residual, attention) for n in num_experts)
        self.stack.final_layernorm = nn.LayerNorm(HIDDEN)
        setattr(self.language_model, stack, self.stack)
        del self.stack
        self.stack_name = stack

    def forward(self, input_ids):
        model = self.language_model
        x = model.embedding.word_embeddings(input_ids)
        x = x + model.embedding.position_embeddings.weight[: input_ids.shape[1]]
        stack = getattr(model, self.stack_name)
        for layer in stack.layers:
            x = layer(x)
        return stack.final_layernorm(x) @ model.embedding.word_embeddings.weight.t()


def build_oracle(**options):
    torch.manual_seed(0)
    model = OracleGPT(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
        for name, parameter in model.named_parameters():
            if "embedding" in name:
                parameter.mul_(0.1)
    return model.eval()


def oracle_generate(model, prompt, num_tokens):
    """Greedy tokens after one unpadded prompt, and their log-probabilities."""
    row, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(num_tokens):
            scores = model(torch.tensor([row]))[0, -1].double().log_softmax(-1)
            row.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return row[len(prompt) :], logprobs


def _cut(name, tensor, rank, size):
    """What tensor-parallel rank `rank` of Megatron-LM keeps of a parameter."""
    if any(part in name for part in ("query_key_value", "dense_h_to_4h", "word_embeddings")):
        return tensor.chunk(size, 0)[rank]
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(size, 1)[rank]
    return tensor


def _in_order(tensor, version):
    """Rows of a shard's [H, 3, D] as that checkpoint version keeps them."""
    heads = tensor.unflatten(0, (-1, 3, DIM))
    order = {0: (1, 0, 2), 1: (0, 2, 1)}.get(version, (0, 1, 2))
    return heads.permute(*order, *range(3, heads.dim())).flatten(0, 2)


def save_megatron(model, folder, *, num_ranks=1, version=3, expert_files=False):
    """Writes the oracle as Megatron-LM (or, with experts' own files, DeepSpeed) does."""
    for rank in range(num_ranks):
        state, experts = {}, {}
        for name, tensor in model.state_dict().items():
            part = _cut(name, tensor, rank, num_ranks)
            if "query_key_value" in name and version is not None:
                part = _in_order(part, version)
            is_expert = expert_files and "deepspeed_experts" in name
            (experts if is_expert else state)[name] = part.contiguous().clone()
        args = argparse.Namespace(
            num_layers=len(model.num_experts), hidden_size=HIDDEN, num_attention_heads=HEADS,
            max_position_embeddings=LENGTH, topk=model.top_k, layernorm_epsilon=1e-5,
            bias_gelu_fusion=False, openai_gelu=False,
        )  # fmt: skip
        if expert_files:
            _save_as_deepspeed(state, experts, args, folder, rank, version)
            continue
        path = folder / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        content = {"checkpoint_version": version, "args": args, "model": _nested(state), "iteration": 7}
        torch.save(content, path / "model_optim_rng.pt")


def _nested(state):
    """Megatron's dictionaries of dictionaries; a stack's and a table's tensors keep flat names in theirs."""
    model = {}
    for name, tensor in state.items():
        first, second, rest = name.split(".", 2)
        place = model.setdefault(first, {}).setdefault(second, {})
        if second == "embedding":
            table, rest = rest.split(".", 1)
            place = place.setdefault(table, {})
        place[rest] = tensor
    return model


def _save_as_deepspeed(state, experts, args, folder, rank, version):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"module": _nested(state), "checkpoint_version": version, "args": args}
    torch.save(content, folder / f"mp_rank_{rank:02d}_model_states.pt")
    moe_layers = sorted({int(name.split(".layers.")[1].split(".")[0]) for name in experts})
    for index, layer in enumerate(moe_layers):
        names = [name for name in experts if f".layers.{layer}." in name]
        for expert in {name.split("deepspeed_experts.")[1].split(".")[0] for name in names}:
            own = {name: experts[name] for name in names if f"deepspeed_experts.{expert}." in name}
            torch.save(own, folder / f"layer_{index}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt")
