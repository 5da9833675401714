"""Two samples with the same prompt in one packed row, without padding: the prompt stands once."""

import torch

from selfplay.advantages.sample import Sample
from selfplay.learner.batch import pack

prompt, mask = [*range(100)], [0] * 100 + [1, 1]
ends = {"one": [7, 8], "other": [9, 8]}  # sampled
samples = [Sample(name, prompt + end, mask, [], []) for name, end in ends.items()]
batch = pack(samples, device=torch.device("cpu"))
print(len(batch.row.ids_N), "of", 2 * 102, "tokens, targets", batch.targets_M.tolist())
# 104 of 204 tokens, targets [7, 8, 9, 8]
