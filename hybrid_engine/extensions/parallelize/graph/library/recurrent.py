"""Recurrent layers, a whole stack of which is one op: samples can be split."""

from hybrid_engine.extensions.parallelize.graph.calls import Call
from hybrid_engine.extensions.parallelize.graph.library.entries import annotate, of_text, whole
from hybrid_engine.extensions.parallelize.graph.rules import OpRule


@annotate("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> OpRule:
    """Packed sequences, a single one and those between whose layers dropout is drawn are not split."""
    is_packed = "batch_first" not in call.arguments
    if is_packed or len(call.shapes[0]) != 3 or (call["train"] and call["dropout"]):
        return whole(call)
    steps, result = ("b t^ i^", "b t^ o^") if call["batch_first"] else ("t^ b i^", "t^ b o^")
    states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    kept = [f"l^ b s{number}^" for number in range(len(states))]
    weights = ["?"] * len(call["params"])
    return of_text(call, f"{', '.join([steps, *kept, *weights])} -> {', '.join([result, *kept])}")
