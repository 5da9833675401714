"""The section `warm_start` of the settings; read without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from dialop.kit import switch
from selfplay.config import Config
from selfplay.config.schema import RULES


@dataclass(frozen=True, slots=True, config=RULES)
class WarmStartConfig:
    """Supervised imitation (SFT) of scripted players, of people and of your own chats before
    self-play; `warm_start: off` turns off the warm start of a base file."""

    num_games: int = Field(default=0, ge=0, le=10_000_000)
    """scripted games to imitate; 0 without recorded games and chats skips the warm start"""
    teachers: tuple[str, ...] = ("honest",)
    """scripted players as 'name:option=value*weight'; each seat samples one by weight"""
    first_games: int = Field(default=0, ge=0, le=10_000_000)
    """how many of the num_games are played by first_teachers; all passes over them come before the
    other games, as a first lesson on a simpler game"""
    first_teachers: tuple[str, ...] = ()
    """the teachers of the first games"""
    recorded: str | None = None
    """a .jsonl of recorded human games to imitate as well, both seats of each; evaluations
    exclude the imitated instances (docs/recorded_games.md)"""
    recorded_share: float = Field(default=0.5, ge=0.01, le=1.0)
    """share of the recorded instances to imitate, selected by digest; the others can be used for
    evaluation"""
    recorded_repeats: int = Field(default=1, ge=1, le=1_000)
    """how often a pass contains each recorded game; each scripted game is contained once"""
    chats: str | None = None
    """your own chats to imitate as well: a .jsonl or .parquet file, or a folder saved by
    `datasets`, with `messages` in each row (docs/your_data.md); a pass contains each chat once"""
    chat_roles: tuple[Literal["assistant", "user"], ...] = Field(
        default=("assistant",), min_length=1
    )
    """whose turns in the chats are imitated; the others are context"""
    batch_size: int = Field(default=16, ge=1, le=100_000)
    """transcripts per optimizer step"""
    epochs: int = Field(default=1, ge=1, le=1_000)
    """passes over the transcripts"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonal updates for the matrices inside the model, which learn faster from random
    weights; AdamW for the rest"""
    lora: bool = False
    """train only adapters as in model.lora and merge them into the weights that self-play starts
    from; false trains all weights"""
    lr: float = Field(default=1e-3, ge=0.0, le=10.0)
    """peak learning rate of the imitation; self-play uses optim.lr"""
    warmup_steps: int = Field(default=50, ge=0, le=10_000_000)
    """optimizer steps of linear learning-rate warm-up"""
    keep: Literal["same", "all"] = "same"
    """instances that the teachers play: same applies the game's own filter, all keeps every
    instance (much faster to generate where the filter keeps few)"""

    @property
    def imitates(self) -> bool:
        """Whether there is a warm start."""
        return self.num_games > 0 or self.recorded is not None or self.chats is not None

    @property
    def files(self) -> dict[str, str]:
        """The files and folders of what is imitated, by the keys that name them."""
        named = {"recorded": self.recorded, "chats": self.chats}
        return {f"warm_start.{key}": of for key, of in named.items() if of is not None}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for settings of the warm start that contradict each other."""
        if self.lora and self.optimizer == "muon":
            raise ValueError("warm_start.optimizer must be adamw with warm_start.lora, got muon")
        if (self.first_games > 0) != bool(self.first_teachers):
            raise ValueError(
                "warm_start.first_teachers and warm_start.first_games must be set together, "
                f"got {list(self.first_teachers)} with {self.first_games} first games"
            )
        if self.first_games > self.num_games:
            raise ValueError(
                "warm_start.first_games must be at most warm_start.num_games, "
                f"{self.num_games}, got {self.first_games}"
            )
        return self

    def check(self, config: Config) -> None:
        """Raise ValueError for settings of other sections that do not fit."""
        if self.lora and config.model.lora is None:
            raise ValueError("warm_start.lora needs model.lora, which sets the adapters, got null")
        if self.recorded is None or not config.game.is_imported:
            return
        rules = config.game.options
        if switch(rules, "brief") or not switch(rules, "messages", default=True):
            raise ValueError(
                "game.options.brief must be false and game.options.messages true with "
                "warm_start.recorded: people wrote their messages in the full game"
            )
