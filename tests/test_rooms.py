"""The house: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the inside out. A module imports from its own room and from the rooms above it. A new module
# is added to the room whose words it speaks (docs/design.md, "Rooms").
ROOMS: dict[str, tuple[str, ...]] = {
    "games": ("dialop",),
    "set-up": (
        "selfplay.config.tree",
        "selfplay.config.settings",
        "selfplay.config.player_spec",
        "selfplay.config",
        "selfplay.games",
        "selfplay.data.instances",
        "selfplay.data.prepare_collab",
        "selfplay.metrics.bootstrap",
        "selfplay.data.prefetch",
        "selfplay.data.stream",
    ),
    "tokens": (
        "selfplay.chat.transcript",
        "selfplay.chat.tokenizer",
        "selfplay.chat.template",
        "selfplay.chat.markers",
        "selfplay.chat.thinking",
        "selfplay.chat.rendering",
    ),
    "engines": ("selfplay.engines",),
    "turns": (
        "selfplay.rollout.players",
        "selfplay.rollout.text_players",
        "selfplay.rollout.episode",
        "selfplay.rollout.branches",
        "selfplay.rollout.driver",
        "selfplay.rollout.seating",
    ),
    "credit": (
        "selfplay.credit.rewards",
        "selfplay.credit.baselines",
        "selfplay.credit.gae",
        "selfplay.credit.sample",
        "selfplay.credit.returns",
        "selfplay.credit.advantages",
        "selfplay.partners.ratings",
    ),
    "tensors": (
        "selfplay.distributed",
        "selfplay.model.attention",
        "selfplay.model.logprob",
        "selfplay.model.liger",
        "selfplay.model.lora",
        "selfplay.model.hub",
        "selfplay.model.families",
        "selfplay.model.scratch",
        "selfplay.model.stored",
        "selfplay.model.policy",
        "selfplay.learner.batch",
        "selfplay.learner.loss",
        "selfplay.learner.mismatch",
        "selfplay.colocation.noise_floor",
        "selfplay.learner.critic",
        "selfplay.learner.learner",
        "selfplay.learner.token_means",
        "selfplay.learner.reference",
        "selfplay.learner.recompute",
        "selfplay.credit.compare",
        "selfplay.learner.objective",
        "selfplay.learner.ppo",
        "selfplay.learner.rounding",
        "selfplay.learner.optimizer",
        "selfplay.learner.optimizer_step",
        "selfplay.learner.policy_update",
    ),
    "carriers": (
        "selfplay.colocation.weight_sync",
        "selfplay.checkpoint",
        "selfplay.partners.policy_pool",
        "selfplay.colocation.offload",
        "selfplay.colocation.handover",
        "selfplay.colocation.sync_check",
    ),
    "people": (
        "selfplay.metrics.log",
        "selfplay.metrics.run_lock",
        "selfplay.metrics.branches",
        "selfplay.metrics.games",
        "selfplay.metrics.step",
        "selfplay.metrics.journal",
        "selfplay.evaluation.evaluate",
        "selfplay.evaluation.word_drift",
        "selfplay.evaluation.held_out",
        "selfplay.evaluation.report",
        "selfplay.evaluation.sources",
        "selfplay.evaluation.crossplay_sources",
        "selfplay.evaluation.crossplay_report",
        "selfplay.evaluation.drawings",
    ),
    "threshold": (
        "selfplay.warm_start",
        "selfplay.credit.dynamic_sampling",
        "selfplay.setup",
        "selfplay.partners.partners",
        "selfplay.evaluation.crossplay",
        "selfplay.evaluation.drift_monitor",
        "selfplay.partners.judge",
        "selfplay.preflight.run",
        "selfplay.model.small_copy",
        "selfplay.preflight.model",
    ),
    "doors": ("train", "eval"),
}
ORDER = list(ROOMS)

WITHOUT_TORCH = ("games", "set-up", "tokens", "turns", "credit", "people")
# Rooms that need no word of the games' rules: what they carry is the same for any game.
WITHOUT_GAMES = ("tokens", "engines", "credit", "tensors", "carriers")
ONLY_IN = {
    "sglang": ("selfplay.engines.sglang.engine",),
    "wandb": ("selfplay.metrics.log",),
    "httpx": ("selfplay.engines.endpoint",),
    "torch.distributed": ("selfplay.distributed", *ROOMS["carriers"]),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> list[Path]:
    inside = [path for folder in ("dialop", "selfplay") for path in (ROOT / folder).rglob("*.py")]
    doors = [ROOT / f"{name}.py" for name in ROOMS["doors"]]
    return sorted(inside) + [path for path in doors if path.exists()]


FILES = {module_name(path): path for path in source_files()}


def within(module: str, home: str) -> bool:
    """`home` names a module or a package; engines.sglang also covers engines.sglang_push."""
    alike = home == "selfplay.engines.sglang.engine" and module.startswith(home)
    return module == home or module.startswith(home + ".") or alike


def room_of(module: str) -> str | None:
    for room, homes in ROOMS.items():
        if any(within(module, home) for home in homes):
            return room
    return None


def imports_of(module: str) -> list[tuple[str, int]]:
    """Everything the module imports, wherever in it, as (dotted name, line).

    `from a import b` counts as a.b when that is a module of ours or b may be a module of a library.
    Imports only for type checkers count as well: a room that knows a type knows the thing.
    """
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*home, base] if base else home)
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def own_module(name: str) -> str | None:
    """The module of ours that importing `name` reaches, None for a library."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


@pytest.mark.parametrize("module", [name for name in FILES if name != "selfplay"])
def test_every_module_has_a_room(module: str) -> None:
    assert room_of(module) is not None, (
        f"{module} stands in no room: add it to ROOMS in tests/test_rooms.py, to the room whose "
        f"words it speaks (rooms: {', '.join(ORDER)})"
    )


@pytest.mark.parametrize("module", list(FILES))
def test_a_module_imports_only_from_its_room_and_those_above(module: str) -> None:
    room = room_of(module)
    if room is None:
        assert imports_of(module) == [], f"{module} must not import anything"
        return
    wrong = []
    for name, line in imports_of(module):
        target = own_module(name)
        if target in (None, "selfplay"):
            continue
        other = room_of(target)
        if other is None or ORDER.index(other) > ORDER.index(room):
            wrong.append(f"line {line}: {module} ({room}) imports {target} ({other})")
        if other == "doors" and target != module:
            wrong.append(f"line {line}: {target} is a door, nothing imports it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", list(FILES))
def test_a_library_is_imported_only_where_it_belongs(module: str) -> None:
    room, wrong = room_of(module), []
    for name, line in imports_of(module):
        library = name.split(".")[0]
        if library == "torch" and room in WITHOUT_TORCH:
            wrong.append(f"line {line}: {module} must not know torch, its room is {room}")
        if library == "dialop" and room in WITHOUT_GAMES:
            wrong.append(f"line {line}: {module} must not know games, its room is {room}")
        for restricted, homes in ONLY_IN.items():
            inside = name == restricted or name.startswith(restricted + ".")
            if inside and not any(within(module, home) for home in homes):
                wrong.append(f"line {line}: {restricted} belongs in {', '.join(homes)} alone")
    assert not wrong, "\n".join(wrong)


def test_the_check_itself_sees_what_it_should() -> None:
    names = [name for name, _ in imports_of("selfplay.metrics.log")]
    assert {"json", "wandb", "selfplay.config.Config", "tqdm.tqdm"} <= set(names)
    assert own_module("selfplay.config.Config") == "selfplay.config"
    assert own_module("selfplay.engines.base.Request") == "selfplay.engines.base"
    assert own_module("torch.nn") is None
    assert room_of("selfplay.engines.sglang.weights") == "engines"
    assert room_of("selfplay.losses") is None
