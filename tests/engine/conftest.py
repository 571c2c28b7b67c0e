"""Each test process uses one thread. Tiny models gain nothing from more, and processes that each use all cores stall."""

import torch

torch.set_num_threads(1)
