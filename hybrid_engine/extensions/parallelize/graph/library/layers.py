"""Norms, softmax, dropout, embeddings, losses, convolutions and pooling."""

from dataclasses import replace
from string import ascii_lowercase

from hybrid_engine.extensions.parallelize.graph.annotations import TensorPattern
from hybrid_engine.extensions.parallelize.graph.calls import Call
from hybrid_engine.extensions.parallelize.graph.library.entries import annotate, letters, of_text, op_name, whole
from hybrid_engine.extensions.parallelize.graph.library.vocabulary import CROSS_ENTROPY, EMBEDDING, LOG_SOFTMAX, NLL
from hybrid_engine.extensions.parallelize.graph.rules import OpRule


@annotate("layer_norm", "rms_norm")
def norm(call: Call) -> OpRule:
    shape = call["normalized_shape"]
    inner = " ".join(f"n{position}^" for position in range(len(shape)))
    return of_text(call, ", ".join([f"* {inner}"] + [inner] * (len(call.tensors) - 1)) + f" -> * {inner}")


@annotate("group_norm")
def group_norm(call: Call) -> OpRule:
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    return of_text(call, ", ".join([f"n c^ {rest}"] + ["c^"] * (len(call.tensors) - 1)) + f" -> n c^ {rest}")


@annotate("batch_norm")
def batch_norm(call: Call) -> OpRule:
    return whole(call)


@annotate("_native_batch_norm_legit_functional", "_native_batch_norm_legit")
def batch_norm_in_training(call: Call) -> OpRule:
    """Statistics are of all samples, so that channels alone can be split: result, mean, deviation, running two."""
    rest = " ".join(f"{letter}^" for letter in ascii_lowercase[3 : 1 + len(call.shapes[0])])
    results = ", c" * (len(call.outputs) - 1)
    return of_text(call, f"n^ c {rest}{', c' * (len(call.tensors) - 1)} -> n^ c {rest}{results}")


@annotate("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(call: Call) -> OpRule:
    """Each element by itself; the second and third result are empty."""
    rest = " ".join(ascii_lowercase[3 : 1 + len(call.shapes[0])])
    rule = of_text(call, f"n c {rest}{', c' * (len(call.tensors) - 1)} -> n c {rest}")
    outputs = (*rule.annotation.outputs, *[TensorPattern(None)] * (len(call.outputs) - 1))
    return replace(rule, annotation=replace(rule.annotation, outputs=outputs))


@annotate("log_softmax")
def log_softmax(call: Call) -> OpRule:
    """Also along its dimension, of which parts exchange the maximum and the sum."""
    if not call.shapes[0]:
        return whole(call)
    side = " ".join(names := letters(len(call.shapes[0])))
    return of_text(call, f"{side} -> {side}", on_part={names[call.dim()]: LOG_SOFTMAX})


@annotate("softmax", "_softmax", "_log_softmax", "cumsum", "flip", "sort", "argsort", "topk", "cumprod")
@annotate("glu", "logcumsumexp", "cummax", "cummin", "roll", "tril", "triu")
def along_one_dim(call: Call) -> OpRule:
    """Works along one dimension (of `tril`: the last two; of `flip` and `roll`: several), the others being batch."""
    num_dims = len(call.shapes[0])
    dims = call.arguments.get("dim", call.arguments.get("dims", [-1, -2]))
    if dims == []:
        return whole(call)
    cut = {dim % num_dims for dim in (dims if isinstance(dims, list | tuple) else [dims])} if num_dims else set()
    side = " ".join(name + "^" * (position in cut) for position, name in enumerate(letters(num_dims)))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("native_dropout", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(call: Call) -> OpRule:
    """Not split where it draws, so that all ranks draw the same noise whatever the plan."""
    if call["train"] and call["p"]:
        return whole(call)
    side = " ".join(letters(len(call.shapes[0])))
    return of_text(call, f"{side} -> {', '.join([side] * len(call.outputs))}")


@annotate("prelu")
def prelu(call: Call) -> OpRule:
    names = letters(len(call.shapes[0]))
    slopes = names[1] if call.shapes[1] != [1] else "1"
    return of_text(call, f"{' '.join(names)}, {slopes} -> {' '.join(names)}")


@annotate("embedding")
def embedding(call: Call) -> OpRule:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return whole(call)
    return of_text(call, "v+ e, * -> * e", on_part={"v": EMBEDDING})


@annotate("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def cross_entropy(call: Call) -> OpRule:
    """Samples may be split where the loss is their sum or not reduced; a mean is a sum by the time it comes here.

    So may classes, where all count alike.
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
def pointwise_loss(call: Call) -> OpRule:
    names = letters(len(call.shapes[0]), "+" if call["reduction"] == 2 else "")
    if call["reduction"] == 1 or any(shape != call.shapes[0] for shape in call.shapes):
        return whole(call)
    side = " ".join(names)
    return of_text(call, f"{', '.join([side] * len(call.tensors))} -> {side if call['reduction'] == 0 else ''}")


@annotate("conv1d", "conv2d", "conv3d", "convolution")
def convolution(call: Call) -> OpRule:
    """Samples, channels out and (as a sum) channels in; images are not cut."""
    num_dims = len(call["weight"].shape)
    if call.arguments.get("transposed") or len(call.shapes[0]) != num_dims:
        return whole(call)
    images, kernel = (" ".join(f"{letter}{position}^" for position in range(num_dims - 2)) for letter in "xy")
    channels = ("c+", "o") if call["groups"] == 1 else ("c^", "o^")
    inner = "c+" if call["groups"] == 1 else "i^"
    bias = f", {channels[1]} +" if call["bias"] is not None else ""
    return of_text(call, f"n {channels[0]} {images}, {channels[1]} {inner} {kernel}{bias} -> n {channels[1]} {images}")


@annotate("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: Call) -> OpRule:
    """Samples, channels out and (as a sum) channels in; with groups samples alone."""
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
def pooled(call: Call) -> OpRule:
    num_images = {"1": 1, "2": 2, "3": 3}[op_name(call.op).rstrip("d")[-1]]
    lead = len(call.shapes[0]) - num_images
    names = [name + "^" * (position >= lead) for position, name in enumerate(letters(len(call.shapes[0])))]
    return of_text(call, f"{' '.join(names)} -> {', '.join([' '.join(names)] * len(call.outputs))}")
