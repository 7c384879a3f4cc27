"""Warm: compile the kernels once an installation, so that no command waits for it later.

    python -m experiments.warm

numba keeps what it compiles beside the sources, or in the user's cache where that is not writable.
"""

import os


def main() -> int:
    """Compile the kernels of split, forecasters and layer, in the types that training uses."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: compiling wants no thread of it
    import torch

    from balancer.forecast import warm_forecast
    from balancer.split import warm_split
    from moe.warmup import warm

    warm_split()
    warm_forecast()
    for dtype in (torch.float32, torch.bfloat16):
        warm(dtype)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
