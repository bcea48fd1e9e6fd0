"""Rules for norms, softmax, dropout, embeddings, losses, convolutions, pooling, products and attention.

Some ops run other code if they are split along a dimension of which each process has a part; that code is here too.
"""

from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_engine.extensions.parallelize.graph.annotations import OnPart, OpCall, OpPart, OpRule, TensorPattern
from hybrid_engine.extensions.parallelize.graph.library import aligned, annotate, letters, of_text, op_name, whole

NLL = OnPart(lambda self, target, **arguments: nll_on_part(self, target, **arguments))


@annotate("layer_norm", "rms_norm")
def norm(call: OpCall) -> OpRule:
    shape = call["normalized_shape"]
    inner = " ".join(f"n{position}^" for position in range(len(shape)))
    return of_text(call, ", ".join([f"* {inner}"] + [inner] * (len(call.tensors) - 1)) + f" -> * {inner}")


@annotate("group_norm")
def group_norm(call: OpCall) -> OpRule:
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    return of_text(call, ", ".join([f"n c^ {rest}"] + ["c^"] * (len(call.tensors) - 1)) + f" -> n c^ {rest}")


@annotate("batch_norm")
def batch_norm(call: OpCall) -> OpRule:
    return whole(call)


@annotate("_native_batch_norm_legit_functional", "_native_batch_norm_legit")
def batch_norm_in_training(call: OpCall) -> OpRule:
    """Only channels can be split, as statistics cover all samples: result, mean, deviation, two running ones."""
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    results = ", c" * (len(call.outputs) - 1)
    return of_text(call, f"n^ c {rest}{', c' * (len(call.tensors) - 1)} -> n^ c {rest}{results}")


@annotate("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(call: OpCall) -> OpRule:
    """Each element is computed independently; the second and third results are empty."""
    rest = " ".join(ascii_lowercase[3 : 1 + len(call.shapes[0])])
    rule = of_text(call, f"n c {rest}{', c' * (len(call.tensors) - 1)} -> n c {rest}")
    outputs = (*rule.annotation.outputs, *[TensorPattern(None)] * (len(call.outputs) - 1))
    return replace(rule, annotation=replace(rule.annotation, outputs=outputs))


@annotate("log_softmax")
def log_softmax(call: OpCall) -> OpRule:
    """Can also be split along its dimension; the parts then exchange the maximum and the sum."""
    if not call.shapes[0]:
        return whole(call)
    side = " ".join(names := letters(len(call.shapes[0])))
    return of_text(call, f"{side} -> {side}", on_part={names[call.dim()]: LOG_SOFTMAX})


@annotate("softmax", "_softmax", "_log_softmax", "cumsum", "flip", "sort", "argsort", "topk", "cumprod")
@annotate("glu", "logcumsumexp", "cummax", "cummin", "roll", "tril", "triu")
def along_one_dim(call: OpCall) -> OpRule:
    """Works along one dimension (`tril`: the last two; `flip` and `roll`: several); the others are batch dimensions."""
    num_dims = len(call.shapes[0])
    dims = call.arguments.get("dim", call.arguments.get("dims", [-1, -2]))
    if dims == []:
        return whole(call)
    cut = {dim % num_dims for dim in (dims if isinstance(dims, list | tuple) else [dims])} if num_dims else set()
    side = " ".join(name + "^" * (position in cut) for position, name in enumerate(letters(num_dims)))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("native_dropout", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(call: OpCall) -> OpRule:
    """Not split in training, so that all ranks draw the same noise under any plan."""
    if call["train"] and call["p"]:
        return whole(call)
    side = " ".join(letters(len(call.shapes[0])))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("prelu")
def prelu(call: OpCall) -> OpRule:
    names = letters(len(call.shapes[0]))
    slopes = names[1] if call.shapes[1] != [1] else "1"
    return of_text(call, f"{' '.join(names)}, {slopes} -> {' '.join(names)}")


@annotate("embedding")
def embedding(call: OpCall) -> OpRule:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return whole(call)
    return of_text(call, "v+ e, * -> * e", on_part={"v": EMBEDDING})


@annotate("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def cross_entropy(call: OpCall) -> OpRule:
    """Samples can be split if the loss is a sum or not reduced; `normalise` rewrites most means as sums.

    Classes can be split too if all of them have the same weight.
    """
    reduction = call["reduction"]
    logits, target = call.arguments[next(iter(call.arguments))], call["target"]
    if reduction == 1 or logits.dim() != 2 or target.dim() != 1:
        return whole(call)
    row = "m+" if reduction == 2 else "m"
    is_plain = call["weight"] is None and not call.arguments.get("label_smoothing") and op_name(call.op) != "nll_loss"
    classes = "c+" if is_plain else "c^"
    weight = ", c^" if call["weight"] is not None else ""
    text = f"{row} {classes}, {row}{weight} -> {'m' if reduction == 0 else ''}"
    on_part = {"c": CROSS_ENTROPY if "label_smoothing" in call.arguments else NLL}
    return of_text(call, text, on_part=on_part if is_plain else None)


@annotate("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div")
@annotate("binary_cross_entropy", "soft_margin_loss")
def pointwise_loss(call: OpCall) -> OpRule:
    names = letters(len(call.shapes[0]), "+" if call["reduction"] == 2 else "")
    if call["reduction"] == 1 or any(shape != call.shapes[0] for shape in call.shapes):
        return whole(call)
    side = " ".join(names)
    return of_text(call, f"{', '.join([side] * len(call.tensors))} -> {side if call['reduction'] == 0 else ''}")


@annotate("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: OpCall) -> OpRule:
    """Can be split along samples, output channels and (as a sum) input channels; not along image dimensions."""
    num_dims = len(call["weight"].shape)
    if call.arguments.get("transposed") or len(call.shapes[0]) != num_dims:
        return whole(call)
    images, kernel = (" ".join(f"{letter}{position}^" for position in range(num_dims - 2)) for letter in "xy")
    channels = ("c+", "o") if call["groups"] == 1 else ("c^", "o^")
    inner = "c+" if call["groups"] == 1 else "i^"
    bias = f", {channels[1]} +" if call["bias"] is not None else ""
    return of_text(call, f"n {channels[0]} {images}, {channels[1]} {inner} {kernel}{bias} -> n {channels[1]} {images}")


@annotate("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: OpCall) -> OpRule:
    """Can be split along samples, output channels and (as a sum) input channels; with groups along samples only."""
    num_dims = len(call["weight"].shape)
    if len(call.shapes[0]) != num_dims:
        return whole(call)
    images, kernel = (" ".join(f"{letter}{position}^" for position in range(num_dims - 2)) for letter in "xy")
    into, out = ("c+", "o") if call["groups"] == 1 else ("c^", "o^")
    part, bias = (out, f"{out} +") if call["groups"] == 1 else ("i^", "o^")
    bias = f", {bias}" if call["bias"] is not None else ""
    return of_text(call, f"n {into} {images}, {into} {part} {kernel}{bias} -> n {out} {images}")


@annotate("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d")
@annotate("adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d")
@annotate("adaptive_avg_pool3d", "adaptive_max_pool1d", "upsample_nearest1d", "upsample_linear1d")
def pooled(call: OpCall) -> OpRule:
    num_images = {"1": 1, "2": 2, "3": 3}[op_name(call.op).rstrip("d")[-1]]
    lead = len(call.shapes[0]) - num_images
    names = [name + "^" * (position >= lead) for position, name in enumerate(letters(len(call.shapes[0])))]
    return of_text(call, f"{' '.join(names)} -> {', '.join([' '.join(names)] * len(call.outputs))}")


def embedding_on_part(weight: Tensor, indices: Tensor, *, part: OpPart, padding_idx: int = -1, **_: Any) -> Tensor:
    """The rows `indices` of the whole weight, zeros for rows of other parts; IndexError if no part has one.

    The row `padding_idx` gets no gradient.
    """
    place, is_here = _place(indices, weight.shape[0], part)
    found = F.embedding(place, weight)
    if padding_idx >= 0:
        found = torch.where((indices == padding_idx)[..., None], found.detach(), found)
    return found.masked_fill(~is_here[..., None], 0.0)


def nll_on_part(
    log_probs: Tensor, target: Tensor, *, part: OpPart, reduction: int, ignore_index: int, **_: Any
) -> Tensor:
    """The losses of the targets in this part of the classes, 0 for other targets; their sum if `reduction` is 2.

    `log_probs` is [m, c], a part of the classes.
    """
    is_counted = target != ignore_index
    place, is_here = _place(torch.where(is_counted, target, 0), log_probs.shape[1], part)
    losses = -log_probs.gather(1, place[:, None]).squeeze(1)
    losses = losses.masked_fill(~(is_here & is_counted), 0.0)
    return losses.sum() if reduction == 2 else losses


def log_softmax_on_part(self: Tensor, dim: int, *, part: OpPart, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """The log-softmax along `dim`, of which each process holds a part. Collective."""
    logits = self if dtype is None else self.to(dtype)
    is_short = logits.dtype in (torch.float16, torch.bfloat16)
    found: Tensor = _LogSoftmax.apply(logits.float() if is_short else logits, dim, part)
    return found.to(logits.dtype) if is_short else found


def cross_entropy_on_part(self: Tensor, target: Tensor, *, part: OpPart, **arguments: Any) -> Tensor:
    """This part's term of the losses; the logits [m, c] are a part of the classes. Collective."""
    return nll_on_part(log_softmax_on_part(self, 1, part=part), target, part=part, **arguments)


EMBEDDING = OnPart(embedding_on_part)


LOG_SOFTMAX = OnPart(log_softmax_on_part, num_reductions=3)


CROSS_ENTROPY = OnPart(cross_entropy_on_part, num_reductions=3)


def _place(indices: Tensor, size: int, part: OpPart) -> tuple[Tensor, Tensor]:
    """The position of each index in this part of `size` (0 if it is in another part), and whether it is in this part.

    An index outside all parts is unchanged and too large for any part, so that looking it up raises an error, as on one
    process.
    """
    place = indices - part.index * size
    is_here = (place >= 0) & (place < size)
    is_elsewhere = ~is_here & (indices >= 0) & (indices < size * part.count)
    return torch.where(is_here, place, indices).masked_fill(is_elsewhere, 0), is_here


class _LogSoftmax(torch.autograd.Function):
    """log_softmax along a dimension that is split over processes; saves only its result, as PyTorch's does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dim: int, part: OpPart) -> Tensor:
        assert part.all_reduce is not None, f"{part=}"
        shifted = logits - part.all_reduce(logits.amax(dim, keepdim=True), "max")
        total = part.all_reduce(shifted.exp().sum(dim, keepdim=True), "sum")
        result = shifted.sub_(total.log())
        ctx.save_for_backward(result)
        ctx.dim, ctx.part = dim, part
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        total = ctx.part.all_reduce(gradient.sum(ctx.dim, keepdim=True), "sum")
        return gradient - result.exp().mul_(total), None, None


@annotate("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: OpCall) -> OpRule:
    """Not split: packed sequences, a single sequence, and layers with dropout between them in training."""
    is_packed = "batch_first" not in call.arguments
    if is_packed or len(call.shapes[0]) != 3 or (call["train"] and call["dropout"]):
        return whole(call)
    steps, result = ("b t^ i^", "b t^ o^") if call["batch_first"] else ("t^ b i^", "t^ b o^")
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    kept = [f"l^ b s{number}^" for number in range(len(states))]
    weights = ["?"] * len(call["params"])
    return of_text(call, f"{', '.join([steps, *kept, *weights])} -> {', '.join([result, *kept])}")


@annotate("linear")
def linear(call: OpCall) -> OpRule:
    weight = "n k+" if call["weight"].dim() == 2 else "k+"
    result = "* n" if call["weight"].dim() == 2 else "*"
    return of_text(call, f"* k+, {weight}{', n +' if call['bias'] is not None else ''} -> {result}")


@annotate("addmm")
def addmm(call: OpCall) -> OpRule:
    bias = aligned(call.shapes[0], list(call.outputs[0].shape), ["m", "n"])
    return of_text(call, f"{bias} +, m k+, k+ n -> m n")


@annotate("mm")
def mm(call: OpCall) -> OpRule:
    return of_text(call, "m k+, k+ n -> m n")


@annotate("bmm")
def bmm(call: OpCall) -> OpRule:
    return of_text(call, "b m k+, b k+ n -> b m n")


@annotate("baddbmm")
def baddbmm(call: OpCall) -> OpRule:
    added = aligned(call.shapes[0], list(call.outputs[0].shape), ["b", "m", "n"])
    return of_text(call, f"{added} +, b m k+, b k+ n -> b m n")


@annotate("_grouped_mm", "grouped_mm_fallback")
def grouped_mm(call: OpCall) -> OpRule:
    """Rows sorted by expert, each multiplied by its expert's matrix, as in transformers' mixtures of experts."""
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return whole(call)
    return of_text(call, "m^ k+, e^ k+ n, ? -> m^ n")


@annotate("matmul")
def matmul(call: OpCall) -> OpRule:
    left, right = call.shapes
    if len(left) == 1 or len(right) == 1:
        first = "k+" if len(left) == 1 else "* k+"
        second = "k+" if len(right) == 1 else "* k+ n"
        lead = "*" if len(left) > 1 or len(right) > 1 else ""
        return of_text(call, f"{first}, {second} -> {lead}{' n' * (len(right) > 1)}")
    batch = list(call.outputs[0].shape)[:-2]
    names = letters(len(batch))
    sides = [aligned(shape[:-2], batch, names) for shape in (left, right)]
    return of_text(call, f"{sides[0]} m k+, {sides[1]} k+ n -> {aligned(batch, batch, names)} m n")


@annotate("einsum")
def einsum(call: OpCall) -> OpRule:
    equation = call["equation"].replace(" ", "")
    if "." in equation or "->" not in equation:
        return whole(call)
    operands, result = equation.split("->")
    summed = set(operands.replace(",", "")) - set(result)
    if any(len(set(part)) < len(part) for part in operands.split(",")):
        return whole(call)
    sides = [" ".join(name + "+" * (name in summed) for name in part) for part in operands.split(",")]
    return of_text(call, f"{', '.join(sides)} -> {' '.join(result)}")


@annotate("scaled_dot_product_attention")
def attention(call: OpCall) -> OpRule:
    """Queries `* l d`, keys `* s d`, values `* s e`: split along samples, heads, and queries if not causal."""
    if call["dropout_p"]:
        return whole(call)
    query, key = call["query"], call["key"]
    batch = list(query.shape)[:-2]
    names = letters(len(batch))
    lead, keys = " ".join(names), " ".join(names)
    sizes = {}
    if call["enable_gqa"] and query.shape[-3] != key.shape[-3]:
        lead, keys = " ".join([*names[:-1], "(h g)"]), " ".join([*names[:-1], "h"])
        sizes = {"h": key.shape[-3]}
    length = "l^" if call["is_causal"] else "l"
    text = f"{lead} {length} d^, {keys} s^ d^, {keys} s^ e^"
    if call["attn_mask"] is not None:
        shape = list(call["attn_mask"].shape)
        grouped = [*batch, query.shape[-2], key.shape[-2]]
        text += ", " + aligned(shape, grouped, [*_lead_names(lead), length, "s^"])
    return of_text(call, f"{text} -> {lead} {length} e^", sizes)


def _lead_names(text: str) -> list[str]:
    """The dimensions of one side of an annotation: `["b", "(h g)"]` for `"b (h g)"`."""
    return [part.replace("\0", " ") for part in text.replace("(h g)", "(h\0g)").split(" ")]
