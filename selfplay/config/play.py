"""Settings of games: rules, instances, rollouts, partners, rewards, evaluation."""

from __future__ import annotations

from dataclasses import field
from numbers import Integral, Real
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from dialop.kit import Kit, games, load_kit
from dialop.starts import checked_entries
from selfplay.config.features import context_of, typed
from selfplay.config.own_code import is_own_game
from selfplay.config.player_spec import CHECKPOINT, SCRIPTED, WARM_START, parse_shares, parse_spec
from selfplay.config.plugins import PLUGINS, check_options, function_for, names_function
from selfplay.config.schema import RULES, Described, described

DEFAULT_GAME = "matching"
MAX_GAMES = 1_000_000  # per step and per evaluation


def check_num_games(num: object, *, what: str) -> None:
    """Raise ValueError, which begins with `what`, for an invalid number of games."""
    if not isinstance(num, Integral) or not 1 <= int(num) <= MAX_GAMES:
        raise ValueError(f"{what} must be an integer from 1 to {MAX_GAMES}, got {num!r}")


def check_temperature(value: object, *, what: str) -> None:
    """Raise ValueError, which begins with `what`, for an invalid sampling temperature."""
    if not (isinstance(value, Real) and (value == 0 or 0.01 <= float(value) <= 100)):
        raise ValueError(f"{what} must be 0 (greedy) or from 0.01 to 100, got {value!r}")


@dataclass(frozen=True, slots=True, config=RULES)
class GameConfig:
    """The game, its rules, and which instances are drawn."""

    name: str = Field(
        default=DEFAULT_GAME,
        description=f"game to play: {', '.join(games())}, a module such as my_package.my_game, or "
        "the path of a .py file (docs/your_game.md)",
    )
    # Without a hash: options may hold a dict or a list.
    options: Annotated[Any, Field(validate_default=True)] = field(default=None, hash=False)
    """settings that the game declares; --help game lists them for the game in --config"""

    @field_validator("options")
    @classmethod
    def _options_of_the_game(cls, options: Any, info: ValidationInfo) -> Any:
        """The options as an instance of the game's class."""
        if "name" not in info.data:  # refused before
            return options
        context, name = context_of(info), info.data["name"]
        if not context["imports"] and is_own_game(name):
            return options or {}
        options = {} if options is None else options
        return typed(load_kit(name).Options, "game.options", options, context)

    @property
    def is_imported(self) -> bool:
        """Whether the options are an instance of the game's class, not left as given (`load`)."""
        return not isinstance(self.options, dict)

    @property
    def kit(self) -> Kit:
        """The game's interface to the trainer: instances, new games, scripted players, texts."""
        return load_kit(self.name)


def options_of(name: str) -> list[Described]:
    """A game's options as text. Raises ValueError for an unknown game."""
    title = Described(f"game.options of {name}", None, "", (), f"only with game.name {name}")
    return [title, *described(load_kit(name).Options, "game.options")]


@dataclass(frozen=True, slots=True, config=RULES)
class DataConfig:
    """Sources of training and evaluation instances."""

    train: str = "generated"
    """training instances: 'generated' (drawn online from the run's seed), a file, or your own
    function as my_file.py:name, such as a curriculum (docs/doors.md)"""
    validation: str = "generated"
    """instances for evaluations during training: 'generated' or a file"""
    test: str = "generated"
    """held-out instances for the evaluations before and after training: 'generated' or a
    file"""
    start: object = 0
    """how much of each recorded game is replayed before the policy plays: a number of log
    entries, 'random', or a share of the words between 0 and 1 (docs/recorded_games.md)"""
    options: dict[str, object] = Field(default_factory=dict)
    """settings of your own function in `data.train`"""
    processes: int = Field(default=1, ge=1, le=512)
    """worker processes on each rank that leads an engine; they generate instances for the warm
    start and evaluations, and prefetch the next training step's instances"""

    @model_validator(mode="after")
    def check(self) -> Self:
        try:
            checked_entries(self.start)
        except ValueError as error:
            raise ValueError(f"data.start: {error}") from None
        if self.start != 0 and not self.train.endswith(".jsonl"):
            raise ValueError(
                f"data.start needs data.train to be a .jsonl of recorded games, got {self.train}"
            )
        check_options("data", self)
        return self

    @property
    def files(self) -> dict[str, str]:
        """The files and folders of instances, by the keys that name them. `open_run` keeps their
        digests, as those of every section with `files`."""
        named = {"train": self.train_file, "validation": self.validation, "test": self.test}
        return {f"data.{key}": of for key, of in named.items() if of and of != "generated"}

    @property
    def train_file(self) -> str | None:
        """The file of the training instances; None if a function returns them."""
        is_function = self.train in PLUGINS["data.train"].built_in or names_function(self.train)
        return None if is_function else self.train


@dataclass(frozen=True, slots=True, config=RULES)
class RolloutConfig:
    """How the games of a step are played."""

    instances: int = Field(default=16, ge=1, le=100_000)
    """instances per step, over all ranks"""
    group_size: int = Field(default=8, ge=1, le=10_000)
    """episodes per instance"""
    max_turns: int = Field(default=30, ge=1, le=10_000)
    """limit of valid moves per game, over all seats; a move that keeps the turn, such as a tool
    call, counts too. A game that reaches it ends without agreement"""
    max_retries: int = Field(default=2, ge=0, le=1_000)
    """retries after an invalid move in one turn; then the game ends without agreement"""
    max_new_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """limit of sampled tokens per attempted move"""
    max_game_tokens: int = Field(default=4096, ge=16, le=1_000_000)
    """limit of tokens in one seat's transcript; a turn that reaches it ends the game without
    agreement, and does not count as an invalid move"""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    """sampling temperature; the loss uses the same one. Groups of greedy games have no variance"""
    partners: tuple[str, ...] = ("self",)
    """partners as 'spec*share' (docs/partners.md); with a partner other than self, the policy
    plays each seat equally often and the partner all others"""
    opponents: Annotated[str, function_for("rollout.opponents")] = "shares"
    """which partners play a step: shares, as in `rollout.partners`, with a pool member drawn
    uniformly; or your own class as my_file.py:Name, which may depend on the step and on the results
    so far (docs/doors.md)"""
    player: Annotated[str, function_for("rollout.player")] = "policy"
    """how the policy plays a seat: policy; endpoint_seat, by a program of yours that uses a chat
    endpoint (docs/endpoint_seat.md); or your own class as my_file.py:Name, which may change what it
    reads (docs/your_reward.md)"""
    play: Annotated[str, function_for("rollout.play")] = "plain"
    """how a game is played to its end: plain, turn by turn; branches, with sibling turns at branch
    points (docs/branches.md); or your own function as my_file.py:name (docs/doors.md)"""
    policy_seats: tuple[str, ...] = ()
    """roles that the policy plays in every game, such as [agent]; the partner plays the others.
    With all roles the policy plays alone, or with a partner in one seat after the other. Empty
    means the roles that the game names, or all if it names none"""
    options: dict[str, object] = Field(default_factory=dict)
    """settings of the play branches, or of your own class or function in `rollout`, such as
    opponents"""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.instances * self.group_size > MAX_GAMES:
            raise ValueError(
                "rollout.instances * rollout.group_size (the games of a step) must be at most "
                f"{MAX_GAMES}, got {self.instances} * {self.group_size}"
            )
        try:
            parse_shares(self.partners)
        except ValueError as error:
            raise ValueError(f"rollout.partners: {error}") from None
        check_options("rollout", self)
        return self

    @property
    def forks(self) -> bool:
        """Whether a game may be copied and continued from a turn: then a prompt may not continue
        its game's last prompt, as engine.sessions requires."""
        return self.play != "plain"


@dataclass(frozen=True, slots=True, config=RULES)
class RewardConfig:
    """The reward of an episode."""

    function: Annotated[str, function_for("reward.function")] = "score_norm"
    """score_norm: the game's own rewards, such as the score divided by the best possible score;
    accept: 1 for any agreement; regret: as score_norm, but without an agreement half the
    score_norm of the last proposal; message_credit: for each message also how much it raised
    what the other seats can reach (docs/advantages.md); or your own function as
    my_file.py:name (docs/your_reward.md)"""
    token_cost: float = Field(default=0.0, ge=0.0, le=1000.0)
    """penalty for each token that the seat sampled"""
    message_cost: float = Field(default=0.0, ge=0.0, le=1000.0)
    """penalty for each word of the seat's messages; the total cost of tokens and words is at most
    1"""
    error_penalty: float = Field(default=0.0, ge=0.0, le=1000.0)
    """penalty for each invalid move of the seat, subtracted from its reward"""
    options: dict[str, object] = Field(default_factory=dict)
    """settings of your own reward function that has a parameter `options`"""

    @model_validator(mode="after")
    def check(self) -> Self:
        check_options("reward", self)
        return self


@dataclass(frozen=True, slots=True, config=RULES)
class EvalConfig:
    """Games on held-out instances, during training and before and after it."""

    every: int = Field(default=0, ge=0, le=10_000_000)
    """steps between evaluations; 0 evaluates only before and after self-play"""
    num_games: int = Field(default=256, ge=1, le=MAX_GAMES)
    """games of an evaluation during training"""
    final_games: int = Field(default=1024, ge=1, le=MAX_GAMES)
    """games of the evaluations before and after self-play"""
    talk_games: int = Field(default=256, ge=0, le=MAX_GAMES)
    """how many of these games, and of eval.py's, are played again, with messages of other games,
    with empty ones and with another private view, to measure the talk effect and the view effect
    (docs/evaluation.md); 0: none"""
    partners: tuple[str, ...] = ()
    """fixed partners: evaluations during training play the games once more with each and log
    eval_score/PARTNER. warm_start (the policy at the start of self-play, a second copy of the model
    in memory), scripted:NAME or checkpoint:PATH"""

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.partners and not self.every:
            raise ValueError(f"eval.every must be at least 1 with eval.partners, got {self.every}")
        for number, partner in enumerate(self.partners):
            try:
                kind = parse_spec(partner).kind if partner != WARM_START else CHECKPOINT
            except ValueError as error:
                raise ValueError(f"eval.partners: {error}; or warm_start") from None
            if kind not in (SCRIPTED, CHECKPOINT):
                raise ValueError(
                    "eval.partners must be warm_start, scripted:NAME or checkpoint:PATH (fixed "
                    f"partners), got {partner!r}"
                )
            if partner in self.partners[:number]:
                raise ValueError(f"eval.partners must not repeat a partner, got {partner!r} twice")
        return self
