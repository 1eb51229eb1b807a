import torch

# Shared fixtures stay few; this file also puts tests/ on the path, for `oracles` and the helpers of `core`.
torch.set_num_threads(1)
