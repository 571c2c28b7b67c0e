"""One thread for each test process: tiny models gain nothing by more, and several processes with all cores each stall."""

import torch

torch.set_num_threads(1)
