"""Settings of earlier versions: what each key that is gone is called now, or what does its work.

`load` refuses them with it. The settings of a run, which any version may have written, are read
with the names of today (`of_today`).
"""

from __future__ import annotations

from typing import Any

MOVED = {
    "critic": "methods.ppo",
    "algorithm.resample": "methods.resample.instances",
    "algorithm.imitate_best": "methods.best_games.weight",
    "algorithm.old_logprobs": "methods.recompute",
    "algorithm.importance": "methods.recompute.importance",
    "algorithm.importance_cap": "methods.recompute.cap",
    "warm_start.auxiliary_weight": "methods.auxiliary_imitation.weight",
    "warm_start.auxiliary_games": "methods.auxiliary_imitation.games",
}


def of_today(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run of any version, with the names of today for what `MOVED` has."""
    old = {name: _taken(values, name) for name in MOVED}
    if all(value is None for value in old.values()):
        return values
    advantage = (values.get("algorithm") or {}).get("advantage")
    on = {
        "recompute": old["algorithm.old_logprobs"] == "recomputed",
        "auxiliary_imitation": old["warm_start.auxiliary_weight"],
        "best_games": old["algorithm.imitate_best"],
        "resample": old["algorithm.resample"],
        "ppo": advantage == "ppo",
    }
    methods: dict[str, Any] = {name: {} for name, is_on in on.items() if is_on}
    for name, value in old.items():
        _, method, *key = MOVED[name].split(".")
        if method in methods and value is not None and name != "algorithm.old_logprobs":
            methods[method] |= {key[0]: value} if key else value
    return {**values, "methods": methods}


def _taken(values: dict[str, Any], name: str) -> Any:
    """The value of a dotted key, which is taken out; None if it is not there."""
    section, _, key = name.rpartition(".")
    home = values.get(section) if section else values
    return home.pop(key, None) if isinstance(home, dict) else None
