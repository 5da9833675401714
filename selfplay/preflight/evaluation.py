"""What eval.py can refuse before weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from selfplay.chat.rendering import Rendering
from selfplay.config import Config
from selfplay.evaluation.evaluate import check_room
from selfplay.evaluation.plan import EvalPlan
from selfplay.model.policy import described_in
from selfplay.partners.checkpoints import Source
from selfplay.preflight.run import check_endpoint, check_folder, check_machine
from selfplay.preflight.small_copy import check_copy


def check_plan(plan: EvalPlan) -> None:
    """Raise SettingsError for a folder, a machine or an endpoint that cannot be used."""
    check_folder(plan.out, what="--out")
    check_machine(plan.config.device, plan.config.engine)
    for player in plan.players:
        what = "--partners" if plan.rows else "--partner"
        check_endpoint(player.spec, plan.config.endpoint, what=what)


def check_policy(
    source: Source, rendering: Rendering, config: Config, instances: Sequence[Any]
) -> None:
    """Raise ValueError for a model that the engine cannot play, and for instances whose prompts
    leave no room for a reply."""
    described = AutoConfig.from_pretrained(described_in(source.weights))
    # A run checked its family before it trained. SGLang has families of its own.
    if source.settings is None and config.engine.kind == "hf":
        why = check_copy(described, engine=True)
        if why is not None:
            raise ValueError(
                f"{source.weights} is a {described.model_type}, which engine.kind=hf cannot play: "
                f"{why}; engine.kind=sglang may support it"
            )
    check_room(
        instances,
        rendering=rendering,
        game=config.game,
        rollout=config.rollout,
        max_positions=getattr(described.get_text_config(), "max_position_embeddings", None),
    )
