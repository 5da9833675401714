"""The real engine that starts before its weights exist, beside a warm start."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from selfplay.engines.base import Request, Sampling
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.learner.update import optimizer_step
from selfplay.weight_sync.start import load_engine
from tests.helpers.interrupted import replaced
from tests.run.test_engine_beside import NUM, PROMPT, answers_as, warm_up
from tests.sglang import tiny


def test_it_gets_the_imitated_weights_though_it_is_killed_while_they_are_imitated(
    tmp_path: Path,
) -> None:
    """It has no weights when it starts or restarts, so what it answers it was given."""
    sampled, started = list[Any](), list[SGLangEngine]()

    def check(engine: Any) -> None:
        request = Request(PROMPT, NUM, seed=0)
        sampled.extend(engine.generate_batch([request], Sampling(1.0, ())))

    def kept(load: Any, *words: Any, **named: Any) -> Any:
        started.append(load(*words, **named))
        assert not started[0]._whole
        return started[0]

    def killed(step: Any, *words: Any, **named: Any) -> Any:
        if not started[0].lost and not sampled:
            os.kill(tiny.scheduler(started[0]), signal.SIGKILL)
        return step(*words, **named)

    fast = f"engine.fast={str(tiny.ENGINE['fast']).lower()}"
    words = ("engine.kind=sglang", fast, "engine.max_cache_tokens=8192", "engine.timeout_s=60")
    with ExitStack() as cleanup:
        for function, instead in ((load_engine, kept), (optimizer_step, killed)):
            cleanup.enter_context(replaced(function, instead))
        weights, engine = warm_up(tmp_path / "run", *words, check=check)
    assert engine is started[0] and engine._num_starts == 2
    assert answers_as(weights, sampled)
