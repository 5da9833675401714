"""Settings of the games: rules and boards, where instances come from, play, reward, judging."""

from __future__ import annotations

from dataclasses import dataclass

from dialop.matching.starts import checked_entries
from selfplay.config.collab import CollabConfig
from selfplay.config.partners import DriftMonitorConfig
from selfplay.config.player_spec import PERSON, SELF, parse_shares
from selfplay.config.settings import key, section

MAX_GAMES = 1_000_000  # that a step or an evaluation plays


@dataclass(frozen=True, slots=True, kw_only=True)
class GameConfig:
    """Which game, which instances, and what a seat may do and see."""

    name: str = key("matching", "game to play", choices=("matching", "collab"))
    size: int = key(8, "rows and columns of the board", low=2, high=8)
    p_observed: float = key(0.4, "chance that a seat sees a cell", low=0.01, high=1.0)
    scale: bool = key(True, "each seat's values are multiplied by a private factor from 1 to 10")
    max_value: int = key(
        100,
        "cell values, or collab's hidden numbers, are whole numbers below this",
        low=2,
        high=10_000,
    )
    hardness: float = key(
        1.25,
        "a solo plan is weak when its value times this is below the best",
        low=1.0,
        high=1000.0,
    )
    keep: str = key(
        "both",
        "instances kept: both seats' solo plans weak, exactly one weak, or all",
        choices=("both", "exactly_one", "all"),
    )
    messages: bool = key(True, "seats may send messages (false is the no-talk control)")
    brief: bool = key(False, "short texts for small from-scratch models instead of full rules")
    private_reasoning: bool = key(
        False, "text before the tag is allowed and hidden from the partner"
    )
    code_wall: str = key(
        "auto",
        "what code answers are graded behind: the strongest wall there is, one by name, or none "
        "(docs/collab.md)",
        choices=("auto", "namespaces", "landlock", "none"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage of a curriculum: what its fresh instances have in place of the game's own."""

    until_step: int = key(
        0, "the first self-play step the stage no longer covers", low=1, high=10_000_000
    )
    size: int | None = key(None, "board size; empty: the game's", low=2, high=8)
    p_observed: float | None = key(
        None, "chance that a seat sees a cell; empty: the game's", low=0.01, high=1.0
    )
    keep: str | None = key(
        None, "instances kept; empty: as the game says", choices=("both", "exactly_one", "all")
    )
    share: float = key(
        1.0, "share of the batch that is drawn so, the rest as the game says", low=0.0, high=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """Where games on recorded boards start: from their beginning, or from what people said."""

    entries: object = key(
        0,
        "first entries of each recorded game that are played as people played them: a number, "
        "'random', or a share of the words between 0 and 1 (docs/partners.md)",
    )

    def check(self) -> None:
        try:
            checked_entries(self.entries)
        except ValueError as error:
            raise ValueError(f"data.start.entries: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where training instances come from."""

    train: str = key(
        "generated", "'generated' (drawn online, seeded by run and index) or a file of instances"
    )
    validation: str = key(
        "generated", "instances of evaluations during training: 'generated' or a file"
    )
    test: str = key("generated", "held-out instances before and after: 'generated' or a file")
    start: StartConfig = section(StartConfig, "where games of data.train start")
    processes: int = key(
        1,
        "processes that draw instances: many at once for the warm start and evaluations, and "
        "a training step's while the one before it is played; on each rank that leads an engine",
        low=1,
        high=512,
    )
    curriculum: tuple[StageConfig, ...] = key(
        (), "stages of easier boards, [{until_step: 40, size: 2}]; then the game's own"
    )
    prioritized_replay: float = key(
        0.0,
        "share of a batch that comes back near the learning edge: drawn from remembered instances "
        "by how far the rewards of their groups spread",
        low=0.0,
        high=1.0,
    )
    replay_memory: int = key(64, "instances that edge remembers", low=1, high=1_000_000)

    def check(self) -> None:
        ends = [stage.until_step for stage in self.curriculum]
        if ends != sorted(set(ends)):
            raise ValueError(f"data.curriculum must rise in until_step, got {ends}")
        if self.start.entries != 0 and not self.train.endswith(".jsonl"):
            raise ValueError(
                f"data.start needs data.train to be a .jsonl of recorded games, got {self.train}"
            )
        if self.curriculum and self.train != "generated":
            raise ValueError(
                f"data.curriculum needs data.train generated, got {self.train}, whose boards are "
                "drawn already"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchConfig:
    """Credit of single turns: other turns are tried from the same state and played on."""

    turns: str = key(
        "none",
        "where a game is forked: at none or all of the policy's turns, at drawn ones, the first "
        "ones, or where an answer to something on the table is due (docs/branches.md)",
        choices=("none", "all", "random", "first", "decisions"),
    )
    per_game: int = key(
        1,
        "branch points a game: at most so many for first and decisions, so many numbers below "
        "rollout.max_turns drawn for random",
        low=1,
        high=1_000,
    )
    siblings: int = key(
        4,
        "turns compared at a branch point, the one the game itself took among them",
        low=2,
        high=1_000,
    )
    continuations: int = key(1, "games played on from each of these turns", low=1, high=1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How the games of a step are played."""

    instances: int = key(16, "instances a step, over all ranks", low=1, high=100_000)
    group_size: int = key(8, "episodes an instance", low=1, high=10_000)
    max_turns: int = key(
        30, "legal moves a game; a game at the limit ends without agreement", low=1, high=10_000
    )
    max_retries: int = key(
        2, "refused moves a turn before the game ends without agreement", low=0, high=1_000
    )
    max_new_tokens: int = key(256, "sampled tokens a try at a move", low=1, high=1_000_000)
    max_game_tokens: int = key(4096, "tokens of one seat's transcript", low=16, high=1_000_000)
    temperature: float = key(
        1.0, "sampling temperature; the loss uses the same", low=0.0, high=100.0
    )
    partners: tuple[str, ...] = key(
        ("self",),
        "who sits beside the policy, as 'spec*share' (docs/partners.md); with another than self "
        "the policy has either seat half the time",
    )
    branch: BranchConfig = section(BranchConfig, "turns tried again from the same state")

    def check(self) -> None:
        if self.temperature < 0.01:
            raise ValueError(
                f"rollout.temperature must be at least 0.01 in training, got {self.temperature}: "
                "greedy play has no gradient"
            )
        if self.instances * self.group_size > MAX_GAMES:
            raise ValueError(
                f"rollout.instances times rollout.group_size, the games of a step, must be at most "
                f"{MAX_GAMES}, got {self.instances} times {self.group_size}"
            )
        try:
            kinds = [spec.kind for spec, _ in parse_shares(self.partners)]
        except ValueError as error:
            raise ValueError(f"rollout.partners: {error}") from None
        if PERSON in kinds:
            raise ValueError(
                "rollout.partners must do without 'person', who can play in eval.py, got "
                f"{list(self.partners)}"
            )
        beside = set(kinds) != {SELF}
        if beside and self.group_size % 2:
            raise ValueError(
                "rollout.group_size must be even with another partner than self (half the games in "
                f"each seat), got {self.group_size}; nearest: {self.group_size + 1}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """What an episode earns."""

    kind: str = key(
        "score_norm",
        "value over the best possible; 1 for any agreement; or the first, and without an agreement "
        "table_share of what the last proposal was worth; or the sum of reward.collab's parts",
        choices=("score_norm", "accept", "regret", "collab"),
    )
    table_share: float = key(
        0.5,
        "with regret, the share an unaccepted last proposal earns; below 1, so that agreeing pays",
        low=0.0,
        high=0.99,
    )
    collab: CollabConfig = section(CollabConfig, "parts of a conversation's reward, kind collab")
    error_penalty: float = key(
        0.0, "subtracted for each refused move of the seat, floor 0", low=0.0, high=1000.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Held-out games during and after training."""

    every: int = key(
        0,
        "steps between evaluations; 0 evaluates only before and after self-play",
        low=0,
        high=10_000_000,
    )
    num_games: int = key(
        256, "held-out games of an evaluation during training", low=1, high=MAX_GAMES
    )
    final_games: int = key(1024, "held-out games before and after self-play", low=1, high=MAX_GAMES)
    human_words: str | None = key(
        None,
        "a .jsonl of recorded games; evaluations during training then log how far the policy's "
        "words are from people's",
    )
    drift_monitor: DriftMonitorConfig = section(
        DriftMonitorConfig, "a watch for a private language"
    )

    def check(self) -> None:
        watched = (
            "eval.drift_monitor.action"
            if self.drift_monitor.action != "off"
            else "eval.human_words"
        )
        if not self.every and (self.drift_monitor.action != "off" or self.human_words is not None):
            raise ValueError(f"eval.every must be at least 1 with {watched}, got 0")
