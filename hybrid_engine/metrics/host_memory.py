"""Host memory that this process may use: what the machine has, within the limits of its container and its shell.

Servers and rollouts size their KV workspace by it, plans of `parallelize` their devices, and `hybrid-engine doctor`
shows it. A container's limit is that of its control group or of a group above it (Linux, Documentation/admin-guide:
cgroup-v2.rst, cgroup-v1/memory.rst); the shell's is `ulimit -v`.
"""

import functools
import resource
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
V2_FILES = ("memory.max", "memory.current", "")
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Names of the files with limit and use, and the prefix of a group's sums in memory.stat."""


def host_memory_bytes() -> tuple[int, int]:
    """Returns the bytes available without swapping, and the total: the least that machine, container and shell allow.

    File pages that the kernel can drop count as available, in a container as on the machine.
    """
    free, total = _machine()
    bounds = [(free, total), *_containers(ROOT, total), *_address_space(ROOT)]
    return max(0, min(free for free, _ in bounds)), min(total for _, total in bounds)


def _machine() -> tuple[int, int]:
    if sys.platform == "linux":
        with open(ROOT / "proc/meminfo", "rb", buffering=0) as file:  # each rollout reads it several times
            total, _, available = (int(line.split()[1]) * 1024 for line in file.read(256).splitlines()[:3])
        return available, total
    import psutil  # here, not at the top: Linux does not need it

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _containers(root: Path, total: int) -> Iterator[tuple[int, int]]:
    """Yields free and total bytes of each control group with a limit below the machine's `total`."""
    for folder, (limit_file, use_file, prefix) in _groups(root):
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit != "max" and int(limit) < total:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                used = int((folder / use_file).read_text())
                yield int(limit) - max(0, used - cached), int(limit)
        except (OSError, ValueError):  # the group is gone, or its files are not for this process
            continue


@functools.cache
def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's control groups that can limit memory, the groups above them included.

    In a container the path may be one of the host, and its group is then what is mounted as the root.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        is_v1 = "memory" in controllers.split(",")
        if not is_v1 and controllers:
            continue
        mount, files = root / "sys/fs/cgroup", V1_FILES if is_v1 else V2_FILES
        mount = mount / "memory" if is_v1 else mount
        inside = PurePosixPath(path.lstrip("/"))
        groups = [] if ".." in inside.parts else [mount / inside, *(mount / above for above in inside.parents)]
        found += [(folder, files) for folder in dict.fromkeys([*groups, mount]) if (folder / files[0]).exists()]
    return found


def _address_space(root: Path) -> Iterator[tuple[int, int]]:
    """Yields free and total bytes of `ulimit -v`, if it is set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return
    num_pages = int((root / "proc/self/statm").read_text().split()[0])
    yield limit - num_pages * resource.getpagesize(), limit
