"""Track whether launches may run at the same time as a step, on another stream.

The kernels for few tokens add partial sums in a workspace that all launches on a device share, so only one of them may run at a
time. Launches beside steps use torch's kernels instead, which have a workspace for each stream. These also need no compilation
for the shapes of every short clip or small image.
"""

from __future__ import annotations

from culet.kernels.block_flag import BlockFlag

beside_steps = BlockFlag()


def is_beside_steps() -> bool:
    return beside_steps.is_set
