"""Plans that split each op along a name drawn by a seed: a stress test of how plans are carried out."""

import random
from functools import partial

from hybrid_engine.extensions.parallelize.planning.plan import Plan


def random_plan(graph, mesh, seed=1):
    """A plan that splits every op along a name drawn with `seed` over each axis, so that most edges change layouts."""
    draw = random.Random(seed)
    plan = Plan(graph=graph, mesh=tuple(mesh))
    for op in graph.ops.values():
        names = [None] * len(mesh)
        for axis in range(len(mesh)):
            possible = [
                name
                for name in op.rule.annotation.candidates
                if op.rule.can_split([*names[:axis], name, *names[axis + 1 :]], mesh)
            ]
            names[axis] = draw.choice(possible) if possible else None
        if any(names):
            plan.splits[op.key] = tuple(names)
    return plan


def _policy(graph, config, seed):
    return random_plan(graph, (config.plan_ngpus,), seed)


def random_splits(seed=1):
    """The policy of `parallelize` that makes `random_plan` over the processes of a unit."""
    return partial(_policy, seed=seed)
