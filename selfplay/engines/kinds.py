"""The engines by `engine.kind`: the one place that knows which there are."""

from __future__ import annotations

from importlib import import_module

from selfplay.engines.base import Engine

KINDS = {
    "hf": "selfplay.engines.hf.HFEngine",
    "sglang": "selfplay.engines.sglang.engine.SGLangEngine",
}


def engine_kind(name: str) -> type[Engine]:
    """The class of the engine that `engine.kind` names. To read it needs none of its libraries."""
    module, _, attribute = KINDS[name].rpartition(".")
    kind: type[Engine] = getattr(import_module(module), attribute)
    return kind
