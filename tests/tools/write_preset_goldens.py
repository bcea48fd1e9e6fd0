"""Writes tests/data/preset_goldens.json: advantages, loss and gradient of each preset on one batch, from formulas.

    python -m tests.tools.write_preset_goldens

Plain Python, number by number, from the papers and frameworks that `hybrid_engine/rlhf/options/algorithm.py` names; it
shares no code with this project and reads none of its presets. Gradients are central differences of the loss, in which
weights without a gradient are computed from "frozen", the log-probabilities before the change.
"""

import copy
import json
import math
import random
import statistics
from pathlib import Path

N, T, G, MAX_LENGTH = 8, 6, 4, 10
LENGTHS = [6, 3, 1, 5, 2, 6, 4, 4]


def write_batch():
    """Two groups of four with unequal lengths; ratios lie inside and outside of the clip, one above the dual clip."""
    draw = random.Random(0)
    rows = range(N)
    old = [[round(-draw.random() * 2 - 0.05, 6) for _ in range(T)] for _ in rows]
    new = [[round(value + draw.gauss(0, 0.3), 6) for value in row] for row in old]
    new[1][0] = round(old[1][0] + 1.7, 6)
    ref = [[round(value + draw.gauss(0, 0.4), 6) for value in row] for row in old]
    mask = [[float(t < LENGTHS[i]) for t in range(T)] for i in rows]
    scores = [1.0, 0.0, 0.25, 1.0, 0.5, -1.0, 3.0, 0.0]
    return {"scores": scores, "old": old, "logprobs": new, "ref": ref, "mask": mask}


def tokens():
    return [(i, t) for i in range(N) for t in range(LENGTHS[i])]


def groups(values):
    return [values[start : start + G] for start in range(0, N, G)]


def k1(batch, i, t):
    return batch["old"][i][t] - batch["ref"][i][t]


# ---------- advantages ----------


def standardised(eps):
    def advantages(batch):
        numbers = []
        for group in groups(batch["scores"]):
            mean, std = statistics.mean(group), statistics.stdev(group)
            numbers += [(score - mean) / (std + eps) for score in group]
        return on_tokens(numbers)

    return advantages


def centred(batch):
    return on_tokens([score - statistics.mean(group) for group in groups(batch["scores"]) for score in group])


def openrlhf(batch):
    outcome, returns = standardised(1e-9)(batch), zeros()
    for i, t in tokens():
        returns[i][t] = outcome[i][t] - sum(0.01 * k1(batch, i, later) for later in range(t, LENGTHS[i]))
    return returns


def over_the_mean(batch):
    numbers = []
    for group in groups(batch["scores"]):
        mean = statistics.mean(group)
        numbers += [(score - mean) / mean if mean > 0 else 0.0 for score in group]
    return on_tokens(numbers)


def nemo(batch):
    numbers = []
    for group in groups(batch["scores"]):
        for index, score in enumerate(group):
            others = group[:index] + group[index + 1 :]
            numbers.append((score - statistics.mean(others)) / (statistics.stdev(others) + 1e-6))
    return on_tokens(numbers)


def rloo(batch):
    kl = [sum(k1(batch, i, t) for t in range(LENGTHS[i])) for i in range(N)]
    numbers = []
    for group in groups([score - 0.05 * penalty for score, penalty in zip(batch["scores"], kl, strict=True)]):
        numbers += [score - (sum(group) - score) / (G - 1) for score in group]
    return on_tokens(numbers)


def reinforce_plus_plus(batch):
    returns = zeros()
    for i, t in tokens():
        returns[i][t] = batch["scores"][i] - sum(0.01 * k1(batch, i, later) for later in range(t, LENGTHS[i]))
    flat = [returns[i][t] for i, t in tokens()]
    mean, variance = statistics.mean(flat), max(statistics.pvariance(flat), 1e-8)
    for i, t in tokens():
        returns[i][t] = (returns[i][t] - mean) / math.sqrt(variance)
    return returns


def zeros():
    return [[0.0] * T for _ in range(N)]


def on_tokens(numbers):
    return [[numbers[i] if t < LENGTHS[i] else 0.0 for t in range(T)] for i in range(N)]


# ---------- loss ----------


def clipped(low=0.2, high=0.2, dual=None, kl=0.0):
    def loss(batch, advantage, i, t):
        new, old, ref = batch["logprobs"][i][t], batch["old"][i][t], batch["ref"][i][t]
        ratio = math.exp(new - old)
        value = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        if dual is not None and advantage < 0:
            value = min(value, -advantage * dual)
        return value + kl * (math.exp(ref - new) - (ref - new) - 1)

    return loss


def reinforce(batch, advantage, i, t):
    return -advantage * batch["logprobs"][i][t]


def log_ratios(batch, i, now="logprobs"):
    return [batch[now][i][t] - batch["old"][i][t] for t in range(LENGTHS[i])]


def gspo(low, high):
    def loss(batch, advantage, i, t):
        ratio = math.exp(statistics.mean(log_ratios(batch, i)))
        return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))

    return loss


def sapo(batch, advantage, i, t):
    ratio, tau = math.exp(log_ratios(batch, i)[t]), 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def gmpo(batch, advantage, i, t):
    numbers = [min(x, 0.4) if advantage > 0 else max(x, -0.4) for x in log_ratios(batch, i)]
    return -advantage * math.exp(statistics.mean(numbers))


def dppo(batch, advantage, i, t):
    now, before = math.exp(batch["frozen"][i][t]), math.exp(batch["old"][i][t])
    if now - before > 0.15 if advantage > 0 else before - now > 0.15:
        return 0.0
    return -advantage * min(now / before, 20.0) * batch["logprobs"][i][t]


def prime_rl(batch, advantage, i, t):
    now, before = math.exp(batch["frozen"][i][t]), math.exp(batch["old"][i][t])
    is_masked = now - before > 0.2 if advantage > 0 else now - before < -0.2
    policy = 0.0 if is_masked else -advantage * (now / before) * batch["logprobs"][i][t]
    return policy + 1e-3 * log_ratios(batch, i)[t] ** 2


def vespo(batch, advantage, i, t):
    weight = math.exp(sum(log_ratios(batch, i, "frozen")))
    k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return -advantage * weight**k * math.exp(decay * (1 - weight)) * batch["logprobs"][i][t]


def token_mean(losses):
    return sum(map(sum, losses)) / sum(LENGTHS)


def sample_mean(losses):
    return sum(sum(row) / len(row) for row in losses) / N


def sum_mean(losses):
    return sum(map(sum, losses)) / N


def constant_mean(losses):
    return sum(map(sum, losses)) / (N * MAX_LENGTH)


PRESETS = {
    "deepseekmath": (standardised(1e-6), clipped(kl=0.04), sample_mean),
    "trl": (standardised(1e-4), clipped(), token_mean),
    "verl": (standardised(1e-6), clipped(dual=3.0), token_mean),
    "openrlhf": (openrlhf, clipped(), token_mean),
    "nemo": (nemo, clipped(kl=0.01), token_mean),
    "slime": (standardised(1e-6), clipped(), sample_mean),
    "prime-rl": (centred, prime_rl, token_mean),
    "skyrl": (standardised(1e-6), clipped(kl=0.001), token_mean),
    "dapo": (standardised(1e-6), clipped(high=0.28), token_mean),
    "dr-grpo": (centred, clipped(), constant_mean),
    "gspo": (standardised(1e-6), gspo(3e-4, 4e-4), sample_mean),
    "luspo": (standardised(1e-6), gspo(2e-3, 2.5e-3), sum_mean),
    "sapo": (standardised(1e-6), sapo, sample_mean),
    "gmpo": (standardised(1e-6), gmpo, sample_mean),
    "dppo": (standardised(1e-6), dppo, token_mean),
    "vespo": (standardised(1e-6), vespo, token_mean),
    "maxrl": (over_the_mean, clipped(), token_mean),
    "rloo": (rloo, reinforce, sum_mean),
    "reinforce++": (reinforce_plus_plus, clipped(), token_mean),
}


def step_loss(batch, advantages, token_loss, aggregate):
    return aggregate([[token_loss(batch, advantages[i][t], i, t) for t in range(LENGTHS[i])] for i in range(N)])


def gradient(batch, *arguments):
    slopes = zeros()
    for i, t in tokens():
        kept, sides = batch["logprobs"][i][t], []
        for step in (1e-5, -1e-5):
            batch["logprobs"][i][t] = kept + step
            sides.append(step_loss(batch, *arguments))
        batch["logprobs"][i][t] = kept
        slopes[i][t] = (sides[0] - sides[1]) / 2e-5
    return slopes


def main():
    batch = write_batch()
    result = {"group_size": G, "max_length": MAX_LENGTH, "batch": batch}
    for name, (advantages_of, token_loss, aggregate) in PRESETS.items():
        advantages = advantages_of(batch)
        arguments = batch | {"frozen": copy.deepcopy(batch["logprobs"])}, advantages, token_loss, aggregate
        result[name] = {
            "advantages": advantages,
            "loss": step_loss(*arguments),
            "gradient": gradient(*arguments),
        }
    path = Path(__file__).parents[1] / "data" / "preset_goldens.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
