"""Settings that exclude each other are refused with the key that has to change."""

import pytest

from selfplay.config import load_config
from selfplay.errors import SettingsError
from selfplay.rollout.seat_rules import check_players

BASE = ("model.scratch={}", "rollout.max_game_tokens=1000", "game.options.scale=false")
BRANCH = "rollout.branch.turns=decisions"
FIRST, BESIDE = "warm_start={num_games: 4, first_games: 2}", "rollout.partners=[self,pool]"
HONEST = "rollout.partners=[scripted:honest]"
EXACT = ("engine.kind=sglang", "engine.exact=true", "model.dtype=bfloat16")
FILE = ("data.train=games.jsonl", "game.options.brief=true")
# The key or the choice that the message names, and settings of which one has to change.
REFUSED: list[tuple[str, ...]] = [
    ("dual_clip", "algorithm.dual_clip=0.5"),
    ("dual_clip", "algorithm.dual_clip=3.0", "algorithm.loss=cispo"),
    ("constant_length", "algorithm.aggregation=constant"),
    ("constant_length", "algorithm.constant_length=9"),
    ("kl_estimator", "algorithm.kl=0.1", "algorithm.kl_estimator=k1"),
    ("old_logprobs", "algorithm.importance=token"),
    (r"algorithm\.importance", "algorithm.importance_cap=3.0"),
    ("group_size", "rollout.group_size=1"),
    ("group_size", HONEST, "rollout.group_size=2"),
    ("group_size", BESIDE, "rollout.group_size=5"),
    ("group_size", BESIDE, "rollout.group_size=2"),
    (r"rollout\.partners", "rollout.partners=[honest]"),
    ("grpo.*nearest is rloo", "algorithm.advantage=rlo"),
    (r"parallel\.tp", "algorithm.advantage=ppo", "parallel.tp=2"),
    (r"parallel\.tp", "model.lora={}", "parallel.tp=2"),
    (r"model\.lora\.targets must name", "model.lora.targets=[]"),
    ("critic", "critic.lam=0.5"),
    (r"rollout\.branch.*ema", BRANCH, "algorithm.advantage=ema"),
    ("group_size", BRANCH, "rollout.group_size=1"),
    (r"game\.name", BRANCH, "game.name=collab", "game.options=null"),
    (r"game\.name must be a valid string, got 3", "game.name=3"),
    (r"engine\.sessions", BRANCH, "engine.sessions=true"),
    ("resample.*decisions", "rollout.branch.turns=all", "algorithm.resample=4"),
    ("siblings", BRANCH, "rollout.branch.siblings=1"),
    ("first_teachers", FIRST),
    (r"warm_start\.lora needs model\.lora", "warm_start.lora=true"),
    (r"warm_start\.optimizer", "warm_start={lora: true, optimizer: muon}", "model.lora={}"),
    (r"chat_roles.0 .*'assistant'.*tool", "warm_start.chat_roles=[tool]"),
    (r"chat_roles .*at least 1 item", "warm_start.chat_roles=[]"),
    ("first_teachers", "warm_start.first_teachers=[solo]"),
    ("first_games", "warm_start={num_games: 4, first_games: 5, first_teachers: [solo]}"),
    (r"first_teachers: .*nearest is solo", FIRST, "warm_start.first_teachers=[sole]"),
    (r"the weight in 'sole\*' must be a number", "warm_start.teachers=[sole*]"),
    (r"game\.options\.brief", "warm_start.recorded=people.jsonl", "game.options.brief=true"),
    (r"reward\.rubric must be a text file", "reward.judge=endpoint:small@http://127.0.0.1:8000/v1"),
    (r"reward\.judge must be rubric, checkpoint", "reward.judge=self"),
    (r"reward\.judge must be rubric, checkpoint.*got 'gpt-4'", "reward.judge=gpt-4"),
    (r"reward\.judge must name a model with", "reward.rubric=rubric.md"),
    (r"data\.start needs data\.train", *FILE, "data.start=3", "data.train=generated"),
    (r"data\.start", *FILE, "data.start=half"),
    (r"model\.dtype.*optim\.master_dtype", "optim.master_dtype=bfloat16"),
    (r"parallel\.offload", "parallel.offload=all", BESIDE),
    (r"engine\.kind must be sglang", "engine.exact=true"),
    (r"engine\.tp_size must be 1", *EXACT, "engine.tp_size=2"),
    (r"engine\.attention must be auto or fa3", *EXACT, "engine.attention=triton"),
    (r"model\.dtype must be bfloat16", *EXACT, "model.dtype=float32"),
    (r"engine\.exact must be false", *EXACT, "model.lora={}"),
    (r"engine\.exact must be false", *EXACT, "parallel.tp=2"),
]
ACCEPTED: list[tuple[str, ...]] = [
    ("algorithm.advantage=ppo", "rollout.group_size=1"),
    ("algorithm.advantage=ppo", "rollout.group_size=2", HONEST),
    ("rollout.branch.turns=all", "rollout.group_size=1"),
    ("model.lora={}",),
    ("track=none",),
    ("algorithm.advantage=ema", "rollout.group_size=1"),
    ("engine.sessions=true",),
    EXACT,
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[1:])[:80])
def test_settings_that_exclude_each_other_are_refused(case: tuple[str, ...]) -> None:
    named, *overrides = case
    with pytest.raises(SettingsError, match=named) as refused:
        check_players(load_config(None, [*BASE, *overrides]))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("overrides", ACCEPTED)
def test_settings_that_fit_are_taken(overrides: tuple[str, ...]) -> None:
    check_players(load_config(None, [*BASE, *overrides]))
