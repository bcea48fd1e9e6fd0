"""Groups of processes for what lies on the host: verdicts, objects, counts.

A script that calls `init_process_group("nccl")` has a group that takes no tensor of the CPU. Over it a verdict would
wait for all that the GPU still has to do, and an object would go by whichever GPU is the current one. So the same
processes get a gloo group in addition, when they first need one. It goes with the group of all processes.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""By the group of all processes, of which a script may make a new one, and by ranks."""


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """`group`, or one of the same processes over gloo where `group` takes no tensors of the CPU.

    Valid until the group of all processes is destroyed. The first call may be collective over the processes of `group`,
    later ones are local.

    Args:
        group: one that this process is in; None is that of all processes.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    group = world if group is None else group
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks, made = tuple(dist.get_process_group_ranks(group)), _made.setdefault(world, {})
    assert list(ranks) == sorted(ranks), f"{ranks=}"  # new_group sorts them
    if ranks not in made:
        # Other processes need not call this, who may be somewhere else.
        made[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return made[ranks]
