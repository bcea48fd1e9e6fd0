"""Prompts with their responses as padded tensors, and a model's log-probabilities and values of the response tokens.

The prompt is padded on its left and the response on its right, so that all responses begin in one column and a forward
pass needs logits only from there on. Padding is known from lengths, never from token ids: pad may equal EOS.

B: rows, P: prompt columns, T: response columns, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from hybrid_engine.config.notices import say_once
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.containers.routing import RecordedExperts, recomputation_contexts
from hybrid_engine.containers.towers import ImageInputs, forward_arguments
from hybrid_engine.ops.linear_divergence import HeadStates
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.rlhf.batches.head_log_probs import (
    AskedColumns,
    HeadLogProbs,
    Taught,
    WholeLogProbs,
    replays_routing,
    token_comparison,
    token_divergences,
    token_log_probs,
    token_states,
)
from hybrid_engine.rlhf.batches.packing import Layout, PackedRows, layout_of, pack, prompts_of
from hybrid_engine.rlhf.batches.passes import ROWS_PER_PASS, Items, RunPasses
from hybrid_engine.rlhf.options.shared import RunOptions

ROWS_PER_PASS_ON_CPU = 8
"""Rows of a forward pass without gradients on a CPU, whose caches hold the activations of fewer rows."""
NUM_POOLED = 16
"""Number of batches whose examples are sorted by length together."""
LARGEST_ORDER = 10**8
"""Largest number of examples of all epochs together, whose order is a single list."""


class HostRows(NamedTuple):
    """Tensors of `Sequences` in host memory, which are read without waiting for the device."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self.attention_mask.sum(dim=1).tolist()


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Token ids of prompts and responses, with masks that mark the real columns."""

    input_ids: torch.Tensor
    """`[B, P+T]` int64."""
    attention_mask: torch.Tensor
    """`[B, P+T]` int64, 1 on tokens."""
    response_mask: torch.Tensor
    """`[B, T]` bool, True on response tokens, the end-of-sequence token included; False on gaps and padding."""
    numbers: torch.Tensor | None = None
    """`[B]` int64 on the host: each row's number in the batch that it was chosen from; None unless `numbered`."""
    supports: Supports | None = None
    """`[B, T]`: the tokens that each response token was drawn from, over which every model's distribution of it is
    renormalised; None: all tokens.
    """
    routing: tuple[torch.Tensor, ...] | None = None
    """For each row `[n, L, k]` on the host: the experts that its first n tokens took in the rollout, which passes of a
    model that replays them take again (`replay_routing`); None: the model chooses.
    """

    images: tuple[ImageInputs | None, ...] | None = None
    """For each row the images of its prompt, one object for all answers to it, which passes of the model take; None: no
    row has any.
    """

    def with_records(self, supports: Supports | None, routing: tuple[torch.Tensor, ...] | None) -> "Sequences":
        """These rows with what their rollout recorded; see `supports` and `routing`."""
        return _with_host_rows(replace(self, supports=supports, routing=routing), self.on_host)

    def numbered(self) -> "Sequences":
        """These rows, which keep their present numbers when `rows` chooses from them."""
        numbers = torch.arange(len(self.response_mask))
        return _with_host_rows(replace(self, numbers=numbers), self.on_host)

    def to(self, device: torch.device) -> "Sequences":
        """Copies rows on the host to `device`, without waiting for the copy."""
        ids, mask, responses = (send_to_device(part, device) for part in self.on_host)
        moved = replace(self, input_ids=ids, attention_mask=mask, response_mask=responses)
        return _with_host_rows(moved, self.on_host)

    @property
    def position_ids(self) -> torch.Tensor:
        """`[B, P+T]`: the first real token of a row has position 0, regardless of padding before it."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    @property
    def responses(self) -> torch.Tensor:
        """The response columns of `input_ids`, `[B, T]`."""
        return self.input_ids[:, -self.response_mask.shape[1] :]

    @cached_property
    def on_host(self) -> HostRows:
        """The tensors in host memory; `rows` passes its part on, so that a rollout is read from the device once."""
        return HostRows(self.input_ids.cpu(), self.attention_mask.cpu(), self.response_mask.cpu())

    @property
    def items(self) -> Items:
        """Each row as an item by itself, as `micro_batches.deal` takes them."""
        width = self.input_ids.shape[1] - self.response_mask.shape[1]
        prompts = prompts_of(self.on_host.input_ids[:, :width], self.on_host.attention_mask[:, :width])
        return Items([(length,) for length in self.on_host.lengths], [(prompt,) for prompt in prompts])

    def rows(self, index: torch.Tensor) -> "Sequences":
        """The rows `index`, without the columns on either side that are padding in all of them.

        An `index` on the host avoids a wait for the device.
        """
        index = index.cpu()
        prompt_width = self.input_ids.shape[1] - self.response_mask.shape[1]
        mask = self.on_host.attention_mask[index]
        num_responses = int(mask[:, prompt_width:].sum(dim=1).max())
        first = prompt_width - int(mask[:, :prompt_width].sum(dim=1).max())
        columns = slice(first, prompt_width + num_responses), slice(num_responses)
        places = send_to_device(index, self.input_ids.device)
        chosen = Sequences(
            input_ids=self.input_ids[places, columns[0]],
            attention_mask=self.attention_mask[places, columns[0]],
            response_mask=self.response_mask[places, columns[1]],
            numbers=None if self.numbers is None else self.numbers[index],
            supports=None if self.supports is None else self.supports[index.numpy(), columns[1]],
            routing=None if self.routing is None else tuple(self.routing[row] for row in index.tolist()),
            images=None if self.images is None else tuple(self.images[row] for row in index.tolist()),
        )
        ids, mask, responses = self.on_host
        on_host = HostRows(ids[index, columns[0]], mask[index, columns[0]], responses[index, columns[1]])
        return _with_host_rows(chosen, on_host)


def _with_host_rows(sequences: Sequences, on_host: HostRows) -> Sequences:
    vars(sequences)["on_host"] = on_host  # the key under which cached_property stores it
    return sequences


def pad_prompts(prompts: list[list[int]], pad_token: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`prompts` padded on the left: ids and mask, each `[B, P]` int64."""
    if not prompts:  # a process may have no prompts while others have some
        return (empty := torch.zeros(0, 1, dtype=torch.int64, device=device)), empty
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_token] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def build_sequences(
    prompts: list[list[int]],
    responses: list[list[int]],
    pad_token: int,
    device: torch.device,
    learned: list[list[bool] | None] | None = None,
) -> Sequences:
    """Pads prompts and responses; a response that ended on its own includes its end-of-sequence token.

    `learned` marks for each response the tokens that the model wrote, None for all of them; the others are gaps.
    """
    prompt_ids, prompt_mask = pad_prompts(prompts, pad_token, torch.device("cpu"))
    width = max(len(response) for response in responses)
    padded = torch.tensor([response + [pad_token] * (width - len(response)) for response in responses])
    lengths = torch.tensor([len(response) for response in responses])
    batch = attach_responses(prompt_mask, torch.cat([prompt_ids, padded], dim=1), lengths)
    if learned is None or not any(learned):
        return batch.to(device)
    masks = [(mask or [True] * width) + [False] * width for mask in learned]
    is_learned = torch.tensor([mask[:width] for mask in masks])  # [B, T]
    return replace(batch, response_mask=batch.response_mask & is_learned).to(device)


def attach_responses(
    prompt_mask: torch.Tensor,
    sequences: torch.Tensor,
    lengths: torch.Tensor,
    supports: Supports | None = None,
    routing: Sequence[torch.Tensor] | None = None,
) -> Sequences:
    """The result of `engine.generate()` with its masks.

    Args:
        prompt_mask: `[B, P]`, as given to `generate()`.
        sequences: `[B, P+T]`, as returned.
        lengths: `[B]`, response tokens of each row.
        supports: `[B, T]`, as returned.
        routing: of each row, as returned.
    """
    num_columns = sequences.shape[1] - prompt_mask.shape[1]
    response_mask = torch.arange(num_columns, device=sequences.device) < lengths[:, None]  # [B, T]
    return Sequences(
        input_ids=sequences,
        attention_mask=torch.cat([prompt_mask, response_mask.to(prompt_mask.dtype)], dim=1),
        response_mask=response_mask,
        supports=supports,
        routing=None if routing is None else tuple(routing),
    )


def response_logprobs(model: nn.Module, batch: Sequences, temperature: float = 1.0) -> torch.Tensor:
    """`[B, T]` fp32: the log-probability of each response token, 0 on gaps and padding.

    It is renormalised over `batch.supports`, if the batch has them.
    """
    return _log_probs(model, batch, AskedColumns(batch.response_mask, temperature)).logprobs


def response_logprobs_and_entropy(
    model: nn.Module, batch: Sequences, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`response_logprobs`, and the entropy in nats of each token's distribution, 0 on gaps; `[B, T]` fp32 each."""
    found = _log_probs(model, batch, AskedColumns(batch.response_mask, temperature, with_entropy=True))
    assert found.entropy is not None
    return found.logprobs, found.entropy


def response_logprobs_and_sharper(
    model: nn.Module, batch: Sequences, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`response_logprobs`, and the same at half the temperature without a gradient; `[B, T]` fp32 each, one pass."""
    found = _log_probs(model, batch, AskedColumns(batch.response_mask, temperature, with_sharper=True))
    assert found.sharper is not None
    return found.logprobs, found.sharper


def response_states(model: nn.Module, batch: Sequences, temperature: float = 1.0) -> HeadStates | WholeLogProbs:
    """The distributions of the response tokens under `model`, in the order of the True cells of the response mask.

    Without gradients; see `token_states`.
    """
    run = _pass_of(model, batch, AskedColumns(batch.response_mask, temperature))
    stated = token_states(model, run.asked, run.inputs)
    if run.order is None:
        return stated
    back = run.order.argsort()
    if isinstance(stated, WholeLogProbs):
        return WholeLogProbs(stated.logprobs[back])
    return stated._replace(hidden=stated.hidden[back])


def response_divergences(
    model: nn.Module,
    taught: Sequence[Taught],
    batch: Sequences,
    temperature: float,
    beta: float,
    num_top: int = 0,
) -> torch.Tensor:
    """`[B, T]` fp32: the divergence of each response token's distribution from a teacher's, 0 on gaps and padding.

    `taught` are the teachers' distributions, whose tokens are numbered in the order of the True cells of the response
    mask; the other arguments are those of `token_divergences`.
    """
    run = _pass_of(model, batch, AskedColumns(batch.response_mask, temperature))
    return run.unpack(token_divergences(model, run.in_order(taught), run.asked, beta, num_top, run.inputs))


def response_comparison(
    model: nn.Module, taught: Sequence[Taught], batch: Sequences, temperature: float, beta: float, num_top: int = 0
) -> dict[str, torch.Tensor]:
    """`token_comparison` of the response tokens, `[B, T]` fp32 each; the arguments of `response_divergences`."""
    run = _pass_of(model, batch, AskedColumns(batch.response_mask, temperature))
    found = token_comparison(model, run.in_order(taught), run.asked, beta, num_top, run.inputs)
    return {name: run.unpack(values) for name, values in found.items()}


def _log_probs(model: nn.Module, batch: Sequences, asked: AskedColumns) -> HeadLogProbs:
    run = _pass_of(model, batch, asked)
    found = token_log_probs(model, run.asked, run.inputs)
    return HeadLogProbs(*(None if part is None else run.unpack(part) for part in found))


class _ForwardPass(NamedTuple):
    """A forward pass in the layout of a model."""

    asked: AskedColumns
    """Where the requested tokens are in it."""
    inputs: dict[str, torch.Tensor]
    """The arguments of the model's forward."""
    unpack: Callable[[torch.Tensor], torch.Tensor]
    """Makes `[B, T]` of its results."""
    order: torch.Tensor | None
    """`[N]`: the number of each requested token of the pass among those of the padded batch; None: the same order."""

    def in_order(self, taught: Sequence[Taught]) -> Sequence[Taught]:
        """`taught`, whose tokens are numbered in the padded batch, with the numbers that they have in the pass."""
        if self.order is None:
            return taught
        back = self.order.argsort()
        return [part.renumbered(back) for part in taught]


def _pass_of(model: nn.Module, batch: Sequences, asked: AskedColumns) -> _ForwardPass:
    mask, packed, device = batch.on_host.response_mask, packed_for(model, batch), asked.mask.device
    supports = None if batch.supports is None else batch.supports[mask.numpy()]
    if batch.routing is not None and replays_routing(model):
        asked = asked._replace(routing=_routing_of(batch.routing, batch.on_host.attention_mask, packed).to(device))
    if packed is None:
        asked = asked._replace(cells=_cells(mask, device), supports=supports)
        return _ForwardPass(asked, model_inputs(batch), lambda found: found, None)
    # A sequence begins with its prompt, so each requested token follows a token of its own sequence.
    numbers = packed.numbers(mask)[:, 1:]
    in_rows = numbers >= 0
    order = numbers[in_rows]
    asked_packed = asked._replace(
        mask=send_to_device(in_rows, device),
        cells=_cells(in_rows, device),
        supports=None if supports is None else supports[order.numpy()],
    )
    is_same = torch.equal(order, torch.arange(len(order)))
    return _ForwardPass(
        asked_packed,
        packed.inputs,
        lambda found: packed.gather(pad(found, (1, 0)), asked.mask),
        None if is_same else send_to_device(order, device),
    )


def _routing_of(
    routing: Sequence[torch.Tensor], attention_mask: torch.Tensor, packed: PackedRows | None
) -> RecordedExperts:
    """The experts of all cells of a pass over rows `[B, P+T]`, on the host."""
    if packed is None:
        num_cells, places = attention_mask.numel(), torch.arange(attention_mask.numel()).view(attention_mask.shape)
    else:
        num_cells = packed.input_ids.numel()
        places = packed.places if packed.places_on_host is None else packed.places_on_host
    of_rows = [row[mask][: len(part)] for part, row, mask in zip(routing, places, attention_mask.bool(), strict=True)]
    cells = torch.cat(of_rows)
    experts = torch.zeros(num_cells, *routing[0].shape[1:], dtype=routing[0].dtype)
    experts[cells] = torch.cat([part[: len(row)] for part, row in zip(routing, of_rows, strict=True)])
    is_recorded = torch.zeros(num_cells, dtype=torch.bool)
    is_recorded[cells] = True
    return RecordedExperts(experts, is_recorded)


def _cells(mask: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows and columns of the True cells of a mask on the host, on `device`."""
    return tuple(send_to_device(mask.nonzero().T.contiguous(), device))


def packed_for(model: nn.Module, batch: Sequences) -> PackedRows | None:
    """`batch` packed for a forward pass of `model`.

    None if its layout is padded, rows have images, or all have a single token.
    """
    layout = layout_of(model)
    if layout is Layout.PADDED or batch.images is not None or max(batch.on_host.lengths) < 2:
        return None
    return packed_rows(batch, layout)


def packed_rows(batch: Sequences, layout: Layout) -> PackedRows:
    """`batch` packed in a layout that is not padded."""
    prompt_columns = batch.input_ids.shape[1] - batch.response_mask.shape[1]
    packed = pack(batch.on_host.input_ids, batch.on_host.attention_mask, layout, prompt_columns)
    return packed.to(batch.input_ids.device)


def model_inputs(batch: Sequences, packed: PackedRows | None = None) -> dict[str, torch.Tensor]:
    """Arguments of a model's forward: the padded rows, or `packed`."""
    if packed is not None:
        return packed.inputs
    of_images = forward_arguments(batch.images or (), batch.on_host.attention_mask)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        **{name: send_to_device(tensor, batch.input_ids.device) for name, tensor in of_images.items()},
    }


class ValueModel(nn.Module):
    """A transformer body and a linear head: a number for every token, the value (or score) of the tokens so far.

    Its weights are those of a transformers sequence-classification model with one label, which reads the same head only
    at the last token.
    """

    def __init__(self, backbone: nn.Module, head: nn.Linear):
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, batch: Sequences) -> torch.Tensor:
        """`[B, P+T]` fp32; values at padding are undefined."""
        packed = packed_for(self, batch)
        hidden = self.backbone(**model_inputs(batch, packed), use_cache=False).last_hidden_state
        values = self.head(hidden).squeeze(-1).float()
        return values if packed is None else packed.gather(values, batch.attention_mask.bool())


def response_values(model: Callable[[Sequences], torch.Tensor], batch: Sequences) -> torch.Tensor:
    """`[B, T]` fp32: the value of the state before each response token, 0 on gaps and padding."""
    values = model(batch)[:, -batch.response_mask.shape[1] - 1 : -1]
    return torch.where(batch.response_mask, values, 0.0)


def last_token_scores(model: Callable[[Sequences], torch.Tensor], batch: Sequences) -> torch.Tensor:
    """`[B]` fp32: the number at the last response token, the end-of-sequence token where there is one."""
    scores = model(batch)[:, -batch.response_mask.shape[1] :]
    positions = torch.arange(scores.shape[1], device=scores.device)
    last = torch.where(batch.response_mask, positions, -1).amax(dim=1, keepdim=True)  # [B, 1]
    return scores.gather(1, last).squeeze(1)


def in_parts(
    compute: Callable[[Any, Sequences], torch.Tensor], model: Any, batch: Sequences, sizes: RunPasses
) -> torch.Tensor:
    """`compute(model, batch)`, which is `[B, T]` and 0 on padding, over a few rows at a time to limit memory.

    Collective, with at least one row on every process; an error on one process is raised on all. If one of them runs
    out of memory, all begin again with half as many rows at a time (`passes.py`).
    """
    num_rows, num_columns = batch.response_mask.shape
    most = ROWS_PER_PASS_ON_CPU if batch.input_ids.device.type == "cpu" else ROWS_PER_PASS
    parts = sizes.without_gradients(
        lambda rows: torch.arange(num_rows).split(rows),
        lambda part: compute(model, batch.rows(part)),
        most,
    )
    return torch.cat([pad(part, (0, num_columns - part.shape[1])) for part in parts])


def note_rows(table: torch.Tensor, rows: list[int], values: torch.Tensor) -> None:
    """Writes `values [R, T]`, detached, into the first columns of `rows` of `table`."""
    table[send_to_device(torch.tensor(rows), table.device), : values.shape[1]] = values.detach()


def pad_numbers(rows: list[list[float]], num_columns: int, device: torch.device) -> torch.Tensor:
    """`[B, num_columns]` fp32: the numbers of each row, followed by 0."""
    return send_to_device(torch.tensor([row + [0.0] * (num_columns - len(row)) for row in rows]), device)


def batches_of_similar_length(
    lengths: list[int], batch_size: int, generator: torch.Generator, num_pooled: int = NUM_POOLED
) -> list[list[int]]:
    """One epoch over `lengths`: batches of `batch_size` indices in random order, of similar length within a batch.

    Indices are sorted within pools of `num_pooled` batches; with 1, each batch is a random one, sorted by itself.
    Indices that do not fill a batch are left out of this epoch.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches, size = [], num_pooled * batch_size
    for start in range(0, len(order), size):
        pool = sorted(order[start : start + size], key=lambda index: lengths[index])
        batches += [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    return [full[index] for index in torch.randperm(len(full), generator=generator).tolist()]


def epochs_of_similar_length(
    lengths: list[int], batch_size: int, num_epochs: int, seed: int, num_pooled: int = NUM_POOLED
) -> list[list[int]]:
    """The batches of a whole run, step by step; the same for the same arguments, so that a resumed run can continue.

    Raises:
        ValueError: there are fewer examples than one batch holds, or more in all epochs than a list should hold.
    """
    if len(lengths) * num_epochs > LARGEST_ORDER:
        raise ValueError(
            f"--epochs={num_epochs} over {len(lengths)} training examples makes more than {LARGEST_ORDER}; lower it"
        )
    if len(lengths) < batch_size:
        raise ValueError(f"--batch-size={batch_size} must not exceed the {len(lengths)} training examples; lower it")
    if rest := len(lengths) % batch_size:
        say_once(
            f"{rest} of {len(lengths)} examples are left out of each epoch, others each time: a batch always has "
            f"--batch-size={batch_size}"
        )
    generator = torch.Generator().manual_seed(seed)
    epochs = [batches_of_similar_length(lengths, batch_size, generator, num_pooled) for _ in range(num_epochs)]
    return [batch for epoch in epochs for batch in epoch]


def recompute_activations(model: nn.Module, config: RunOptions) -> nn.Module:
    """`model`, whose layers store only their inputs if `config.activation_checkpointing` is set.

    Raises:
        ValueError: transformers does not support recomputation for its layers.
    """
    if not config.activation_checkpointing:
        return model
    inner: Any = model.backbone if isinstance(model, ValueModel) else model
    if not getattr(inner, "supports_gradient_checkpointing", False):
        raise ValueError(
            f"--activation-checkpointing: transformers recomputes no layers of {type(inner).__name__}; leave it out"
        )
    # The name since transformers 5.23 comes first.
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": recomputation_contexts})
    return model
