"""One thread: the machine is shared and the models are tiny."""

import torch

torch.set_num_threads(1)
