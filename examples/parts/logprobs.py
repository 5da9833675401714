"""Log-probs and entropies of the trained tokens of a packed row; all logits never exist at once."""

import torch

from selfplay.advantages.sample import Sample
from selfplay.config import ScratchConfig
from selfplay.learner.batch import pack
from selfplay.model.policy import policy_logprobs, scratch_model

model = scratch_model(ScratchConfig(width=32), vocab_size=128, seed=0)
batch = pack([Sample("one", [3, 1, 4, 9], [0, 0, 1, 1], [], [])], device=torch.device("cpu"))
logprobs_M, entropies_M = policy_logprobs(model, batch.row, batch.targets_M, temperature=0.7)
logits_MV = model(torch.tensor([[3, 1, 4, 9]])).logits[0, 1:3] / 0.7
print(torch.allclose(logprobs_M, logits_MV.log_softmax(-1)[[0, 1], [4, 9]], atol=1e-5))
# True
