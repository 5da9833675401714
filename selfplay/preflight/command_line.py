"""The command lines of train.py and eval.py: parsing, help and errors, without importing torch."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NoReturn

import selfplay
from dialop.shown import error_text
from dialop.specs import nearest
from selfplay.config import Config, load_config
from selfplay.config.features import all_described
from selfplay.config.load import check_once, find_settings, read_value, shipped
from selfplay.config.play import GameConfig, options_of
from selfplay.config.schema import Described, chosen, describe, names_of
from selfplay.config.secrets import hidden, names_key
from selfplay.errors import SettingsError
from selfplay.evaluation.asked import YAML, EvalPlan

_Append = argparse._AppendAction
_SECTIONS = {field.name for field in fields(Config)}
# The commonly changed keys, which `train.py --help` shows.
COMMON = (
    *("out", "seed", "steps", "save_every", "device"),
    *("game.name", "data.train", "data.test"),
    *("model.path", "model.dtype", "model.lora", "model.lora.rank"),
    *("warm_start.num_games", "warm_start.teachers", "warm_start.epochs", "warm_start.lr"),
    *("rollout.instances", "rollout.group_size", "rollout.max_turns", "rollout.max_new_tokens"),
    *("rollout.max_game_tokens", "rollout.partners"),
    *("reward.function", "algorithm.advantage", "algorithm.loss", "algorithm.kl"),
    *("algorithm.minibatches", "optim.lr", "optim.schedule", "optim.tokens_per_microbatch"),
    *("engine.kind", "engine.mem_fraction", "parallel.tp", "parallel.fsdp"),
    *("eval.every", "eval.num_games", "eval.final_games", "observers"),
)
# Keys and sections that only train.py reads. A key does not declare its readers: add new ones here.
_OF_TRAINING = {
    *("out", "steps", "save_every", "keep_checkpoints", "log_games_every", "log_groups_every"),
    *("monitors", "observers"),
    *("warm_start", "policy_pool", "reward", "algorithm", "methods", "optim"),
}
_DASHES = "-\N{EN DASH}\N{EM DASH}"  # editors turn two hyphens into the other two


def typed(program: str) -> str:
    """The command as typed: the installed one (selfplay-train), else `program`."""
    name = Path(sys.argv[0]).name
    return name if name.startswith("selfplay-") else program


def last_line(folder: Path, *, page: Path) -> str:
    """The last line of a run: the paths of its policies and its page, and how to play with it."""
    play = f"{sys.orig_argv[0]} -m selfplay.apps.play"
    play = play if typed(play) == play else "selfplay-play"
    each = sorted(path.parent for path in folder.glob("final/*/config.json"))
    policies = f"policies are in {', '.join(map(str, each))}"
    where = policies if each else f"policy is in {folder / 'final'}"
    return f"the {where}, the page is {page}; to play: {play} {folder}"


def goes_on(folder: Path, save_every: int, by: str = "the same command") -> str:
    """How a run that was ended goes on `by` a new start, for its last line.

    A run without a complete checkpoint in its folder has its warm start at most, and takes its
    steps again from the first; `save_every` then says why nothing is saved yet.
    """
    if any(folder.glob("checkpoints/step_*")):
        return f"the last save is complete, and {by} continues from it"
    return (
        f"no checkpoint is saved yet (save_every: {save_every}), so {by} begins again with the "
        "first step"
    )


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError for an invalid command line.

    `program` is a file such as train.py, or a module. In the help text, the command as typed
    replaces `python FILE` or `python -m MODULE` in `about`.
    """

    def __init__(
        self, program: str, about: str | None, *, takes_settings: bool = True, **more: Any
    ) -> None:
        by_python = f"python {program}" if program.endswith(".py") else f"python -m {program}"
        self.program, self.takes_settings = program, takes_settings
        super().__init__(
            prog=typed(by_python),
            description=(about or "").replace(by_python, typed(by_python)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )
        self.add_argument("--version", action="version", version=f"selfplay {selfplay.__version__}")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also raise ValueError for an unknown option, before argparse reports what is missing,
        for an option without a value, and for one given twice: the last one would win."""
        words = list(sys.argv[1:] if args is None else args)
        given: set[str] = set()
        encoding = sys.getfilesystemencoding()
        for before, word in pairwise(["", *words]):
            if encoding != "utf-8" and any("\ud800" <= letter <= "\udfff" for letter in word):
                raise ValueError(
                    f"{word!a} has characters that the locale's encoding, {encoding}, lacks; set "
                    "PYTHONUTF8=1"
                )
            option, equals, value = word.partition("=")
            if not word or (equals and not value and option in self._option_string_actions):
                raise ValueError(f"{before if not word else option} must have a value, got ''")
            if word[0] in _DASHES and not word[1:2].isdigit() and option.strip(_DASHES):
                self._check_known(word)
            action = self._option_string_actions.get(option)
            if action is not None and action.nargs is None and not isinstance(action, _Append):
                if action.dest in given:
                    raise ValueError(f"{option} is given twice; remove one")
                given.add(action.dest)
        return super().parse_known_args(words, namespace)

    def check_settings(self, words: Sequence[str], *, trains: bool = True) -> None:
        """Raise ValueError unless all these words, the remaining arguments, are key=value with
        each key once. A program that does not train refuses keys that only training reads."""
        for word in words:
            key = word.partition("=")[0].strip()
            if not trains and key.partition(".")[0] in _OF_TRAINING:
                raise ValueError(f"{key} has no effect without training; remove it")
            if "=" in word and word[0] not in _DASHES:
                continue
            if "--config" in self._option_string_actions and _is_settings(word):
                raise ValueError(f"a settings file must be given as --config {word}, got {word!r}")
            # A shell splits an unquoted key=[{a: 1}] at its blanks.
            cut = word[0] not in _DASHES and any("=" in other for other in words)
            self._check_known(word, "; quote values that contain blanks" if cut else "")
        check_once(words)

    def _check_known(self, word: str, hint: str = "") -> None:
        option, _, value = word.partition("=")
        if option in self._option_string_actions:
            return
        name = option.lstrip(_DASHES)
        if self.takes_settings and name.partition(".")[0] in _SECTIONS:
            near = f"; write {name}={'VALUE' if names_key(name) else hidden(value) or 'VALUE'}"
        else:
            keys = [key for key in names_of(Config) if key.rpartition(".")[2] == name]
            keys.sort(key=lambda key: key not in COMMON)
            others = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
            near = nearest(option, self._option_string_actions)
            if self.takes_settings and keys:
                near = f"; write {keys[0]}={hidden(value) or 'VALUE'}{others}"
        raise ValueError(f"unknown argument {option!r}{near}{hint}")


def refused(program: str, error: Exception, *, status: int = 2) -> int:
    """Print the error as one line on stderr; returns the exit status.

    The line is written in one call, so that the lines of several ranks do not interleave.
    """
    sys.stderr.write(f"{typed(program)}: {' '.join(error_text(error).split())[:1500]}\n")
    return status


def parse_train(words: Sequence[str], about: str) -> tuple[argparse.Namespace, Config]:
    """The options of train.py and its settings. Exits after --help and --list.

    Raises:
        SettingsError, ValueError: for an invalid argument or setting.
    """
    usage = "%(prog)s --config FILE [key=value ...] [--dry-run [--gpu GB]]"
    parser = Parser("train.py", about, usage=usage, add_help=False)
    add = parser.add_argument
    add("--config", type=Path, help="YAML file with the settings that differ from the defaults")
    add("overrides", nargs="*", default=[], metavar="key=value", help="overriding settings")
    nothing = "print whether it fits, memory by phase, the first prompt and settings, without a run"
    add("--dry-run", action="store_true", help=nothing)
    add("--gpu", type=float, metavar="GB", help="with --dry-run: memory of one GPU, such as 80")
    add("--list", action="store_true", help="list the shipped configs")
    sections = "show the common settings, or every key of a section or of all"
    add("-h", "--help", nargs="?", const="", metavar="SECTION", help=sections)
    args, rest = parser.parse_known_intermixed_args(words)
    if args.help is not None:
        about_all = parser.format_help() if args.help in ("", "all") else ""
        print(f"{about_all}{help_of(args.help, args.config, args.overrides)}", end="")
        sys.exit(0)
    if args.list:
        print(shipped_configs(), end="")
        sys.exit(0)
    parser.check_settings([*rest, *args.overrides])
    if args.config is None:
        raise ValueError("--config FILE is required, e.g. --config tiny; --list shows all")
    if args.gpu is not None and not args.dry_run:
        raise ValueError("--gpu needs --dry-run")
    return args, load_config(args.config, args.overrides)


def parse_eval(words: Sequence[str], about: str) -> EvalPlan:
    """Parse the command line, with `key=value` words anywhere (`overrides`). Exits after --help.
    Raises ValueError for invalid arguments."""
    usage = "%(prog)s RUN [--games FILE] [options] [key=value ...]"
    parser = Parser("eval.py", about, usage=usage)
    add = parser.add_argument
    run = "a run, a Hugging Face folder or name; with --partners one or more, one row each"
    add("words", nargs="*", metavar="RUN", help=run)
    games = "a .parquet of instances, a .jsonl of recorded games, or 'generated' (default)"
    add("--games", default="generated", help=games)
    add("--num", type=int, help="games (default: eval.final_games, or all of the file)")
    add("--partner", help="see docs/partners.md (default: self, or the run's if seats are unequal)")
    row = "cross-play: folders and players, comma-separated; without a RUN they are also the rows"
    add("--partners", type=split_list, default=[], help=row)
    start = "start with people's recorded moves: a number, a share or random"
    add("--start", default="0", help=start)
    add("--out", type=Path, help="output folder (default: RUN/eval_ plus the arguments)")
    greedy = "0 is greedy; may be repeated (default: rollout.temperature, as in training)"
    add("--temperature", type=float, action="append", default=[], help=greedy)
    add("--config", type=Path, help="settings file (default: the run's)")
    args, rest = parser.parse_known_intermixed_args(words)
    given = vars(args)
    words = given.pop("words")
    overrides = [*rest, *(word for word in words if not _names_run(word))]
    parser.check_settings(overrides, trains=False)  # its errors name the nearest option
    runs = [Path(word) for word in words if _names_run(word)]
    return EvalPlan(**given, runs=runs, overrides=overrides)


def _is_settings(word: str) -> bool:
    """Whether a word that is not an option names a settings file, such as a shipped one."""
    return word[:1] not in _DASHES and find_settings(Path(word)).suffix in YAML


def _names_run(word: str) -> bool:
    """Whether a word is a RUN: neither an option nor a setting, whose name has no slash."""
    name, equals, _ = word.partition("=")
    is_setting = equals or (name.partition(".")[0] in _SECTIONS and not Path(word).exists())
    return word[:1] not in _DASHES and ("/" in name or not is_setting)


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated list. A comma inside a script's options, as in
    scripted:honest:tell=top,slip=0.1, does not split. Raises ArgumentTypeError if it is empty."""
    entries: list[str] = []
    for piece in map(str.strip, text.split(",")):
        if entries and re.fullmatch(r"\w+=[^/]*", piece):
            entries[-1] += f",{piece}"
        else:
            entries.append(piece)
    if not any(entries):
        raise argparse.ArgumentTypeError(f"must name a folder or a player, got {text!r}")
    return [entry for entry in entries if entry]


def help_of(section: str, config: Path | None, overrides: Sequence[str]) -> str:
    """The help text of a section (or key), of "all", or of the common keys ("").

    The sections game, methods and engine include the options of what the settings name there.
    """
    methods, engine = (read_value(config, overrides, key) for key in ("methods", "engine.kind"))
    methods = methods if isinstance(methods, dict) else {}
    entries = all_described(Config, methods, [engine] if isinstance(engine, str) else [])
    homes = {entry.name.partition(".")[0] for entry in entries if "." in entry.name}
    sections = [field.name for field in fields(Config) if field.name in homes]
    if not section:
        common = [entry for entry in entries if entry.name in COMMON]
        return (
            f"\nCommon settings:\n\n{describe(common)}\n"
            f"--help SECTION shows every key of one of {', '.join(sections)}; --help all shows "
            "all keys.\n"
        )
    entries += _options(config, overrides)
    each = re.sub(r"^policies\.\w+", "policies.NAME", section)
    names = (section, each.removeprefix("policies.NAME."), each)  # a policy's section is the run's
    shown = (chosen(entries, name) for name in names)
    found = entries if section == "all" else next(filter(None, shown), [])
    if not found:
        raise ValueError(
            f"--help must be followed by a section or all, got {section!r}"
            f"{nearest(section, [*(entry.name for entry in entries), 'all'])}; sections are "
            f"{', '.join(sections)}"
        )
    return describe(found)


def _options(config: Path | None, overrides: Sequence[str]) -> list[Described]:
    try:
        return options_of(str(read_value(config, overrides, "game.name") or GameConfig().name))
    except (SettingsError, ValueError):
        return []


def shipped_configs() -> str:
    """The settings files that ship with the project: one line each, name and first sentence."""
    lines = []
    for path in sorted(shipped("configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8").splitlines()
        comment = " ".join(line.strip("# ") for line in takewhile(lambda x: x[:1] == "#", text))
        sentence = comment.split(". ")[0].rstrip(".")
        lines.append(textwrap.fill(f"{path.stem:24}{sentence}", 100, subsequent_indent=" " * 24))
    return "\n".join(lines) + "\n"


def train() -> None:
    """The installed command `selfplay-train …`: `python train.py …`."""
    _run(shipped("train.py"))


def evaluate() -> None:
    """The installed command `selfplay-eval …`: `python eval.py …`."""
    _run(shipped("eval.py"))


def _run(program: Path) -> None:
    """Run a file as `__main__`. Unlike `runpy` it keeps `sys.argv[0]`, the command as typed."""
    code = compile(program.read_text(encoding="utf-8"), program, "exec")
    exec(code, {"__name__": "__main__", "__file__": str(program)})
