"""Products of matrices and attention."""

from hybrid_engine.extensions.parallelize.graph.calls import Call
from hybrid_engine.extensions.parallelize.graph.library.entries import aligned, annotate, letters, of_text, whole
from hybrid_engine.extensions.parallelize.graph.rules import OpRule


@annotate("linear")
def linear(call: Call) -> OpRule:
    weight = "n k+" if call["weight"].dim() == 2 else "k+"
    result = "* n" if call["weight"].dim() == 2 else "*"
    return of_text(call, f"* k+, {weight}{', n +' if call['bias'] is not None else ''} -> {result}")


@annotate("addmm")
def addmm(call: Call) -> OpRule:
    bias = aligned(call.shapes[0], list(call.outputs[0].shape), ["m", "n"])
    return of_text(call, f"{bias} +, m k+, k+ n -> m n")


@annotate("mm")
def mm(call: Call) -> OpRule:
    return of_text(call, "m k+, k+ n -> m n")


@annotate("bmm")
def bmm(call: Call) -> OpRule:
    return of_text(call, "b m k+, b k+ n -> b m n")


@annotate("baddbmm")
def baddbmm(call: Call) -> OpRule:
    added = aligned(call.shapes[0], list(call.outputs[0].shape), ["b", "m", "n"])
    return of_text(call, f"{added} +, b m k+, b k+ n -> b m n")


@annotate("_grouped_mm", "grouped_mm_fallback")
def grouped_mm(call: Call) -> OpRule:
    """Rows that are sorted by experts, each by its expert's matrix, as transformers computes mixtures."""
    if [len(shape) for shape in call.shapes] != [2, 3, 1]:
        return whole(call)
    return of_text(call, "m^ k+, e^ k+ n, ? -> m^ n")


@annotate("matmul")
def matmul(call: Call) -> OpRule:
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
def einsum(call: Call) -> OpRule:
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
def attention(call: Call) -> OpRule:
    """Queries `* l d`, keys `* s d`, values `* s e`: samples and heads may be split, queries where it is not causal."""
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
    """The dimensions of a side of an annotation: `["b", "(h g)"]` of `"b (h g)"`."""
    return [part.replace("\0", " ") for part in text.replace("(h g)", "(h\0g)").split(" ")]
