"""Settings of earlier versions: the current name or replacement of each removed key.

`load` refuses a removed key and names its replacement. The settings of a run, which any version may
have written, are migrated instead (`migrated`).
"""

from __future__ import annotations

from typing import Any

MOVED = {
    "track": "a name in observers, as in observers=[console, page, wandb],",
    "reward.judge": "methods.judge.model",
    "reward.rubric": "methods.judge.rubric",
    "reward.judge_weight": "methods.judge.weight",
    "critic": "methods.ppo",
    "algorithm.resample": "methods.resample.instances",
    "algorithm.imitate_best": "methods.best_games.weight",
    "algorithm.old_logprobs": "methods.recompute",
    "algorithm.importance": "methods.recompute.importance",
    "algorithm.importance_cap": "methods.recompute.cap",
    "algorithm.constant_length": "the number in algorithm.aggregation",
    "algorithm.kl_ratio": "algorithm.kl_estimator=k3_ratio",
    "rollout.branch": "rollout.play=branches with rollout.options",
    "warm_start.auxiliary_weight": "methods.auxiliary_imitation.weight",
    "warm_start.auxiliary_games": "methods.auxiliary_imitation.games",
}


def migrated(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run of any version, with the keys of `MOVED` replaced by current ones."""
    if (tracker := _taken(values, "track")) not in (None, "none"):
        values["observers"] = [*(values.get("observers") or ("console", "page")), tracker]
    old = {name: value for name in MOVED if (value := _taken(values, name)) is not None}
    if not old:
        return values
    algorithm = values.get("algorithm") or {}
    if old.get("algorithm.kl_ratio"):
        algorithm["kl_estimator"] = f"{algorithm.get('kl_estimator', 'k3')}_ratio"
    if length := old.get("algorithm.constant_length"):
        algorithm["aggregation"] = length
    branch = old.get("rollout.branch") or {}
    if branch.get("turns", "none") != "none":
        values["rollout"] |= {"play": "branches", "options": branch}
    on = {
        "judge": old.get("reward.judge") not in (None, "rubric"),
        "recompute": old.get("algorithm.old_logprobs") == "recomputed",
        "auxiliary_imitation": old.get("warm_start.auxiliary_weight"),
        "best_games": old.get("algorithm.imitate_best"),
        "resample": old.get("algorithm.resample"),
        "ppo": algorithm.get("advantage") == "ppo",
    }
    methods: dict[str, Any] = {name: {} for name, is_on in on.items() if is_on}
    for name, value in old.items():
        section, method, *key = MOVED[name].split(".")
        if section == "methods" and method in methods and name != "algorithm.old_logprobs":
            methods[method] |= {key[0]: value} if key else value
    return {**values, "methods": {**methods, **(values.get("methods") or {})}}


def _taken(values: dict[str, Any], name: str) -> Any:
    """Remove a dotted key and return its value; None if it is absent."""
    section, _, key = name.rpartition(".")
    home = values.get(section) if section else values
    return home.pop(key, None) if isinstance(home, dict) else None
