"""A custom engine: one prompt after the other, each token by a whole forward pass. It is slow and
short; it shows what an engine must do.

    python -m selfplay.check examples/engine/plain.py:PlainEngine
    python train.py --config configs/tiny.yaml out=runs/plain \
        engine.kind=examples/engine/plain.py:PlainEngine
"""

from functools import partial

import torch

from selfplay.engines.base import Completion, Engine
from selfplay.engines.waves import WaveScheduler
from selfplay.engines.weights import Compared
from selfplay.model.policy import load_model


class PlainEngine(Engine):
    """A copy of the model in the trainer's process, in fp32."""

    in_trainer, dtype = True, torch.float32

    def __init__(self, model):
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def start(cls, config, weights, world, *, load_format="auto"):
        return cls(load_model(str(weights), device=world.device, dtype=cls.dtype))

    def run_games(self, games, sampling, partners=None):
        answer = partial(self.generate_batch, sampling=sampling)
        return WaveScheduler(answer, partners=partners).run_games(games)

    def generate_batch(self, requests, sampling):
        return [self.generate(request, sampling) for request in requests]

    @torch.no_grad()
    def generate(self, request, sampling):
        """Sample until a stop id or the limit, from the request's own seed."""
        draws = torch.Generator().manual_seed(request.seed % 2**63)
        ids, logprobs, finish = [], [], "length"
        while len(ids) < request.max_new_tokens and finish == "length":
            text = torch.tensor([[*request.prompt_ids, *ids]], device=self.model.device)
            logits_V = self.model(input_ids=text).logits[0, -1].double().cpu()
            logprobs_V = torch.log_softmax(logits_V / (sampling.temperature or 1.0), 0)
            chosen = int(logprobs_V.argmax())
            if sampling.temperature:
                chosen = int(torch.multinomial(logprobs_V.exp(), 1, generator=draws))
            ids.append(chosen)
            logprobs.append(float(logprobs_V[chosen]))
            finish = "stop" if chosen in sampling.stop_ids else "length"
        return Completion(ids, logprobs, finish, self.version)

    def load(self, weights, version):
        self.model.load_state_dict(dict(weights.named()), strict=False)
        self.version = version

    def compare(self, weights):
        held = dict(self.model.named_parameters())
        different = sum(int((held[name] != tensor).sum()) for name, tensor in weights.named())
        return Compared(weights.num_elements, different)
