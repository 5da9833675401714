"""A custom loss: REINFORCE that stays close to the sampling policy.

    python -m selfplay.check examples/method/squared_ratio.py:loss algorithm.options.tau=0.1
    python train.py --config configs/tiny.yaml out=runs/squared_ratio \
        algorithm.loss=examples/method/squared_ratio.py:loss algorithm.options.tau=0.1
"""

from selfplay.learner.loss import ratio


def loss(logprobs_M, batch, algorithm):
    """-A log pi + tau / 2 (log r)^2, as in Kimi k1.5 (arXiv 2501.12599, section 2.3.2)."""
    logs_M = logprobs_M - batch.old_logprobs_M
    penalty_M = 0.5 * algorithm.options["tau"] * logs_M.square()
    losses_M = -batch.advantages_M * logprobs_M + penalty_M
    return losses_M, {"ratio_mean": ratio(logs_M), "squared_log_ratio": logs_M.square()}
