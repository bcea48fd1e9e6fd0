"""The threads that a thread's own products are shared out to."""

import ctypes

import torch

_SOFT = 1
"""omp_pause_soft: everything may be used again, and is built again then."""


def give_back_openmp_pool() -> bool:
    """Ends the threads that the caller's operations on a CPU are shared out to; its next operation starts them again.

    Every thread that computes has such a pool of its own. GNU's OpenMP counts the threads of all pools, and once they
    are more than the CPUs, none waits actively for work any more: each operation of any thread wakes its pool through
    the kernel, which took a quarter more time for decoding 64 rows on two CPUs (`GOMP_SPINCOUNT` in its manual). So a
    thread that hands the model to another one gives its pool back first.

    Returns:
        Whether there is none now; False where OpenMP is not used, older than 5.0, or the caller is in a parallel part.
    """
    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (AttributeError, OSError):
        return False
    return pause(_SOFT) == 0
