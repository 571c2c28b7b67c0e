"""Track whether launches belong to a step of fixed shape, which a GPU captures once and replays.

In a replay, the host's part of a launch costs nothing. Kernels that take tensor descriptors need more work on the host, so
they are only worth choosing for a replay. A step of fixed shape that is not captured launches the same kernels to get the same
results.
"""

from __future__ import annotations

from culet.kernels.block_flag import BlockFlag

replayed = BlockFlag()


def is_replayed() -> bool:
    return replayed.is_set
