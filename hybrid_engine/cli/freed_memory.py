"""What training frees stays with the process, instead of going back to the system and being fetched again page by page.

glibc gives the top of its heap back whenever more than some threshold of it is free. The activations of a training
pass are freed in its backward pass and taken again by the next one, each page then filled with zeros by the kernel:
10 000 to 45 000 pages a pass of 1 087 tokens through 6 layers of width 384. A step of GRPO with its rollout, as in
`benchmarks/bench_step.py`, takes 0.94 of its time without (six pairs, AMD EPYC, 2 threads, torch 2.13).
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEPT_BYTES = 2**30
LARGEST_BLOCK = 32 * 2**20  # to where glibc raises this threshold by itself; larger blocks go back at once
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Lets this process keep up to 1 GiB of what it frees; whether it does so now.

    Where the user has said in the environment what glibc is to do, or the allocator is another, nothing is changed.
    """
    return not any(name in os.environ for name in SETTINGS) and set_thresholds(LARGEST_BLOCK, KEPT_BYTES)


def set_thresholds(block_bytes: int, top_bytes: int) -> bool:
    """Blocks of fewer than `block_bytes` come from the heap, whose top goes back where more than `top_bytes` are free.

    False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # none of that name; on Windows there is no library without a name
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, block_bytes)) and bool(mallopt(M_TRIM_THRESHOLD, top_bytes))
