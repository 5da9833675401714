"""The settings of a run: the loader, and the core's keys with their defaults and help sentences.

Lengths are in tokens, times in seconds. A settings file contains only the keys that differ from the
defaults. `play` has the sections of games, rollouts and partners, `learning` the algorithm's, and
`hardware` the sections of the model, the engine and the ranks. Features declare their own sections
(`features`). This room reads no environment variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from selfplay.config.features import (
    SECTIONS,
    context_of,
    section_class,
    typed,
    typed_engine,
    typed_methods,
)
from selfplay.config.hardware import EngineConfig, ModelConfig, ParallelConfig
from selfplay.config.hardware import LoraConfig as LoraConfig
from selfplay.config.hardware import ScratchConfig as ScratchConfig
from selfplay.config.learning import COMPARED_IN_GROUPS, AlgorithmConfig, OptimConfig
from selfplay.config.load import load, source_of
from selfplay.config.monitors import DEFAULT_MONITORS, parse_rule
from selfplay.config.options import options_at
from selfplay.config.play import DataConfig, EvalConfig, GameConfig, RewardConfig, RolloutConfig
from selfplay.config.plugins import check_name, has_options, named
from selfplay.config.schema import RULES
from selfplay.errors import SettingsError


@dataclass(frozen=True, slots=True, config=RULES)
class Config:
    """All settings of one run."""

    out: str = "runs/default"
    """run folder; a new start with the same folder resumes the run"""
    seed: int = Field(default=0, ge=0, le=1_000_000_000)
    """seed of the run; every random draw derives its own seed from it"""
    steps: int = Field(default=100, ge=0, le=10_000_000)
    """self-play steps (rollout plus update)"""
    save_every: int = Field(default=50, ge=1, le=10_000_000)
    """steps between checkpoints; the last step is always saved"""
    keep_checkpoints: int = Field(default=2, ge=1, le=10_000)
    """how many of the newest checkpoints are kept"""
    log_games_every: int = Field(default=50, ge=1, le=10_000_000)
    """write one of n games in full to games.jsonl"""
    log_groups_every: int = Field(default=50, ge=0, le=10_000_000)
    """write all games of step 1 and of every n-th step after it to groups.jsonl, instance by
    instance, with each seat's reward, return and advantage; 0 writes none"""
    threads: int = Field(default=0, ge=0, le=256)
    """CPU threads of PyTorch; 0 keeps PyTorch's default"""
    monitors: tuple[str, ...] = DEFAULT_MONITORS
    """rules over metrics.jsonl that warn or stop the run, as in 'stop if entropy < 0.05 over 5'; a
    list replaces the default rules (docs/monitors.md)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if there is one"""
    observers: tuple[Any, ...] = ("console", "page")
    """what else reads each step: console prints it, page updates report.html, wandb and tensorboard
    track it; or your own class as my_file.py:Name, with its settings as {my_file.py:Name: {KEY:
    VALUE}} (docs/observers.md)"""
    game: GameConfig = Field(default_factory=GameConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    warm_start: Any = Field(default_factory=dict, validate_default=True)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    policy_pool: Any = Field(default_factory=dict, validate_default=True)
    endpoint: Any = Field(default_factory=dict, validate_default=True)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    methods: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """methods added to GRPO with their settings, called in this order, as methods: {best_games:
    {weight: 0.1}}; built in: judge, recompute, auxiliary_imitation, best_games, resample, ppo; or
    your own classes as my_file.py:Name (docs/doors.md)"""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    engine: SerializeAsAny[EngineConfig] = Field(default_factory=dict, validate_default=True)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    policies: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """several policies that learn in one run, each with its own weights, by name, as policies:
    {user: {}, agent: {optim: {lr: 1e-5}}} (docs/policies.md); empty: one for all seats"""

    @field_validator(*SECTIONS)
    @classmethod
    def _options_of_sections(cls, given: Any, info: ValidationInfo) -> Any:
        """A feature's settings; `off`, which YAML reads as false, stands for the defaults."""
        name = str(info.field_name)
        given = {} if given in (False, "off") else given
        return typed(section_class(name), name, given, context_of(info))

    @field_validator("methods")
    @classmethod
    def _options_of_methods(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Each method's settings as an instance of its class."""
        if "algorithm" not in info.data:  # refused before
            return given
        return typed_methods(given, info.data["algorithm"].advantage, info)

    @field_validator("engine", mode="plain")
    @classmethod
    def _options_of_engine(cls, given: Any, info: ValidationInfo) -> EngineConfig:
        """The engine's settings as an instance of its kind's class."""
        return typed_engine(given, EngineConfig, info)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The names of the policies, in order; "" for a single one."""
        return (*self.policies,) or ("",)

    def of_policy(self, name: str) -> Config:
        """The complete settings of this policy, whose `rollout.partners` are its own."""
        own: Config = section_class("policies").settings(self, name) if self.policies else self
        return own

    @property
    def policy_of_seat(self) -> tuple[str, ...]:
        """The name of the policy that has each seat; "" for a single policy.

        Raises SettingsError for unknown roles, and for a seat without a policy or with several.
        """
        names: tuple[str, ...] = section_class("policies").of_seats(self)
        return names

    @property
    def play_options(self) -> Any:
        """The settings of a built-in play; None if it has none or is custom."""
        key = "rollout.play"
        return options_at(key, self) if has_options(key, self.rollout.play) else None

    @property
    def compares_turns(self) -> bool:
        """Whether only the turns of a built-in play are compared in groups, not games."""
        return getattr(self.play_options, "compares_turns", False)

    @property
    def further_instances(self) -> range:
        """The numbers of the additional instances that methods may play in a step, after its
        `rollout.instances`."""
        num = sum(getattr(of, "more_instances", 0) for of in self.methods.values())
        return range(self.rollout.instances, self.rollout.instances + num)

    @model_validator(mode="after")
    def check(self) -> Self:
        """Raise ValueError for contradictions between sections."""
        for rule in self.monitors:
            parse_rule(rule)
        names = [check_name("observers", named(each)[0]) for each in self.observers]
        classes = [each.rpartition(":")[2] for each in names]  # the keys of their states
        if twice := [each for each in classes if classes.count(each) > 1]:
            raise ValueError(f"observers must not repeat an observer, got {twice[0]} twice")
        self._check_model()
        features = (getattr(self, name) for name in SECTIONS)
        key = "rollout.opponents"
        opponents = options_at(key, self) if has_options(key, self.rollout.opponents) else None
        parts = (self.engine, self.play_options, opponents, *features, *self.methods.values())
        for options in parts:
            if (check := getattr(options, "check", None)) is not None:
                check(self)
        return self

    def _check_model(self) -> None:
        scratch = self.model.scratch
        if scratch and self.rollout.max_game_tokens > scratch.max_positions:
            raise ValueError(
                f"rollout.max_game_tokens must be at most model.scratch.max_positions "
                f"{scratch.max_positions}, got {self.rollout.max_game_tokens}"
            )
        if self.model.lora is not None and self.parallel.tp > 1:
            raise ValueError(
                f"parallel.tp must be 1 with model.lora, got {self.parallel.tp}: adapters do not "
                "support tensor parallel; use parallel.fsdp"
            )
        estimator, size = self.algorithm.advantage, self.rollout.group_size
        if size < 2 and estimator in COMPARED_IN_GROUPS and not self.compares_turns:
            raise ValueError(
                f"rollout.group_size must be at least 2 for {estimator}, got {size}: the baseline "
                "is the group's mean (reinforce_pp, ema and ppo accept groups of 1)"
            )
        if self.optim.master_dtype == "bfloat16" and self.model.dtype != "bfloat16":
            raise ValueError(
                f"model.dtype must be bfloat16 with optim.master_dtype bfloat16, got "
                f"{self.model.dtype}: float32 computation gains nothing from bfloat16 weights"
            )


def load_config(
    given: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Config:
    """The settings of a file or a mapping with `key=value` overrides applied in order.

    Raises:
        SettingsError: one line that begins with the file and line, or the override, at fault.
    """
    settings = Path(given) if isinstance(given, str) and given else given or None
    config: Config = section_class("policies").with_all_roles(load(Config, settings, overrides))
    for name in config.policy_names:
        each = load(Config, settings, overrides, own=f"policies.{name}") if name else config
        if (each.model.path is None) == (each.model.scratch is None):
            key = f"policies.{name}.model" if name and config.policies[name].model else "model"
            raise SettingsError(
                f"{source_of(settings)}: exactly one of {key}.path and {key}.scratch must be set"
            )
    return config
