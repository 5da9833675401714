"""How often an engine samples rare tokens, beside what their probabilities say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from selfplay.engines.base import Engine, Request, Sampling


@torch.no_grad()
def rare_draws(
    model: PreTrainedModel,
    engine: Engine,
    requests: Sequence[Request],
    temperature: float,
    *,
    nats: float,
) -> tuple[float, float, int]:
    """Sample the requests and count the tokens of a probability below exp(-nats).

    Returns the expected count, its standard deviation, and the count. The expectation is the sum
    over the sampled positions of all rare tokens' probability, by the model's own softmax. Given
    the text before it each position is a draw of its own, so the variances add up.
    """
    expected = variance = 0.0
    count = 0
    completions = engine.generate_batch(requests, Sampling(temperature, ()))
    for request, completion in zip(requests, completions, strict=True):
        ids_T = torch.tensor([*request.prompt_ids, *completion.ids], device=model.device)
        logits_TV = model(ids_T[None]).logits[0, len(request.prompt_ids) - 1 : -1].double()
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        mass_T = (logprobs_TV.exp() * (logprobs_TV < -nats)).sum(-1)
        expected += mass_T.sum().item()
        variance += (mass_T * (1 - mass_T)).sum().item()
        own_T = logprobs_TV.gather(1, ids_T[len(request.prompt_ids) :, None])[:, 0]
        count += int((own_T < -nats).sum())
    return expected, math.sqrt(variance), count
