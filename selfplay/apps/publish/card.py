"""The model card of a run: its training, its scores next to people and scripts, its games.

Players' texts are untrusted: they are escaped or in code blocks, so that they cannot act as
Markdown. Reads the run folder's JSON files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dialop.shown import escaped, fenced
from selfplay.checkpoint import home_of
from selfplay.config import Config, GameConfig, RolloutConfig
from selfplay.config.player_spec import SELF
from selfplay.config.text import changed
from selfplay.data.instances import GENERATED
from selfplay.errors import SettingsError
from selfplay.evaluation.rows import SCRIPT, Row, one_game, read_rows, with_partners
from selfplay.evaluation.tables import (
    COLUMNS,
    TALK_EFFECT,
    VIEW_EFFECT,
    columns_of,
    score_meaning,
    score_table,
    silent_text,
    table,
)
from selfplay.metrics.records import game_text
from selfplay.metrics.step_log import plain_json
from selfplay.model.hub import is_hub_name
from selfplay.policies.options import PolicyConfig
from selfplay.rollout.seat_rules import chosen_seats, partner_seats

Rows = Mapping[str, Row]
_MALFORMED = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError),
    *(ArithmeticError, yaml.YAMLError),
)
_POLICY = ("sampled", "greedy")  # rows of the policy with itself
# The measures that a table shows next to the score, if a row has them.
_SHOWN = ("agreement", "messages", "words", "errors", "honesty")
# The folders of checkpoint:PATH unless it is ORG/NAME, and the address of endpoint:MODEL@URL.
_FOLDERS = re.compile(
    r"(?<=checkpoint:)(?=[/.~$]|[^*\s]*/\.\./)(?:(?:(?!checkpoint:| with )[^/])*/(?!\*|\s|$))+"
)
# Paths of this machine, not plain relative ones: /, ~, ~name, $HOME, .., x/.., C:\\, file:.
_PATH = re.compile(r"[/\\~$]|\.\.?[/\\]|[A-Za-z]:[/\\]|file:|[^:]*[/\\]\.\.[/\\]")
_ADDRESS = re.compile(r"(endpoint:[^@]*@https?://)[^\s*]*[^\s*,]")


@dataclass(frozen=True, slots=True)
class Results:
    """The results in a run folder: rows of held-out games before and after self-play, and the
    evaluations that `eval.py` wrote into it. `left_out` are the folders of those of other policies
    and of other steps."""

    before: Rows
    after: Rows
    evaluations: Sequence[Mapping[str, Any]]
    left_out: Sequence[str] = ()


def read_results(run: Path, policy: str = "", *, step: int = -1) -> Results:
    """Read the result files of a finished run about this policy of it ("" for the only one) after
    `step` steps, or about the cast that it is of. Raises SettingsError for a file that cannot be
    read."""
    before = run / "held_out_before.json"
    paths = sorted(run.glob("eval_*/evaluation.json"))
    pages = {path.parent.name: _read(path, ("games", "num_games", "rows")) for path in paths}
    own = [name for name, page in pages.items() if _is_of(page, policy, step)]
    at_start = _read(before, _POLICY) if before.exists() else {}
    after = _read(run / "held_out_after.json", _POLICY)
    return Results(
        before=at_start if one_game([*at_start.values(), *after.values()]) else {},
        after=after,
        evaluations=[pages[name] for name in own],
        left_out=[name for name in pages if name not in own],
    )


def _is_of(page: Mapping[str, Any], policy: str, step: int) -> bool:
    """Whether an evaluation is of the policy ("" for a run's only one), or of the cast with it,
    after `step` steps: its weights are the final export or the checkpoint of that step. An export
    of a run that went on has another step; evaluations before 2026-11-30 do not record it. An old
    one that names no weights is of a run's only policy."""
    if (weights := page.get("weights")) is None:
        return not policy and "players" not in page
    named = weights if isinstance(weights, Mapping) else {policy: weights}
    checkpoint = Path(f"checkpoints/step_{step:06d}")
    return policy in named and all(
        page.get("step", step) == step
        and any(
            Path(str(path)).match(str(place))
            for place in (Path("final") / name, home_of(checkpoint, name) / "hf")
        )
        for name, path in named.items()
    )


def _read(path: Path, names: Sequence[str]) -> dict[str, Any]:
    try:
        page: dict[str, Any] = plain_json(path.read_bytes())
        if missing := [name for name in names if name not in page]:
            raise LookupError(f"no {', '.join(missing)}")
        rows = read_rows(page["rows"] if "rows" in names else page)
        page = {**page, "rows": rows} if "rows" in names else rows
        if names[0] not in page:
            raise LookupError(f"a script named {names[0]} replaces the policy")
        for record in (record for row in rows.values() for record in row.examples.values()):
            _example(record)
        _table(rows), _question(page)
    except _MALFORMED as error:
        raise SettingsError(f"{path} must have the games of an evaluation: {error!r}") from None
    return page


def card(
    name: str,
    config: Config,
    results: Results,
    *,
    code: str,
    step: int,
    served: Sequence[str] = (),
    policy: str = "",
    mates: Sequence[str] = (),
    rest: Sequence[int] = (),
    own_game: str = "",
) -> str:
    """The Markdown of README.md in the hub's repository `name` (ORG/NAME).

    `code` is the last paragraph of the run's code.txt, `step` the number of self-play steps,
    `served` the notes for a server of the policy, `policy` its name in a run with several, `mates`
    the names of the others and `rest` its setting of that name. `own_game` is the published file of
    the game in `code/`.
    """
    game = config.game.kit.TITLE if config.game.is_imported else Path(config.game.name).stem
    base = config.model.path
    sampled = results.after["sampled"]
    silent = escaped(silent_text(results.after, sampled.talk))
    settings = [f"{key}={value}" for key, _, value in changed(config, Config()) if key != "out"]
    start = "random weights" if base is None else escaped(Path(base).name)
    if _on_hub(base):
        start = f"[{base}](https://huggingface.co/{base})"
    cast = "cast, " if mates else ""
    rows = {
        f"{cast}{row}, {stage}": of
        for stage, rows in (("before self-play", results.before), ("after", results.after))
        for row, of in rows.items()
        if not row.startswith(SCRIPT)
    } | {row: of for row, of in results.after.items() if row.startswith(SCRIPT)}
    written = ModelCard.from_template(
        _front_matter(name, config.game, base, sampled, whose=" of the cast" if mates else ""),
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=name,
        title=name.split("/")[1],
        seats=seats_of(config.game, config.rollout),
        game=game,
        start=start,
        step=step,
        rested=sum(not PolicyConfig(rest=tuple(rest)).trains(number) for number in range(step)),
        own_game=own_game,
        served=[escaped(line) for line in served],
        mates=" and ".join(map(escaped, mates)),
        partner=_partner_for(config) if mates else "",
        config=config,
        held_out=f"{len(sampled.scores)} {_held_out(config.data.test)}",
        score=score_meaning(columns_of([sampled.measures])),
        talk=f"{TALK_EFFECT}{silent and f'; {silent}'}",
        view=VIEW_EFFECT if sampled.view else "",
        scores=_table(rows),
        evaluations=[
            (heading, _table(page["rows"]))
            for heading, page in _headed(results.evaluations, config, policy, step)
        ],
        settings=fenced("\n".join(settings) or "nothing"),
        code=fenced(public_code(code)),
        examples=[(escaped(label), _example(game)) for label, game in sampled.examples.items()],
    )
    return f"{written.content}\n"


def _example(record: Mapping[str, Any]) -> str:
    seats = [{**seat, "player": without_paths(seat["player"])} for seat in record["seats"]]
    return fenced(game_text({**record, "seats": seats}))


def _headed(
    pages: Sequence[Mapping[str, Any]], config: Config, policy: str, step: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each evaluation under a heading of its own: its games, who played in which seats after how
    many steps, and how it differs from the run's settings."""
    seen = Counter[str]()
    for page in pages:
        games = f"{page['num_games']} games of {escaped(Path(str(page['games'])).name)}"
        aborted = max(row.measures.get("num_void", 0.0) for row in page["rows"].values())
        games += f" ({aborted:.0f} aborted)" * (aborted > 0)
        who = "the cast" if isinstance(page.get("weights"), Mapping) else f"the policy {policy}"
        after = f" of step {step}" if "weights" in page and step >= 0 else ""
        heading = f"{games}, by `eval.py`: {escaped(who.strip())}{after}{_seats(page, config.game)}"
        used = page.get("temperatures", usual := [config.rollout.temperature])
        heading += _question(page)
        heading += f", at temperature {', '.join(f'{t:g}' for t in used)}" if used != usual else ""
        seen[heading] += 1
        yield heading + (f" ({seen[heading]})" if seen[heading] > 1 else ""), page


def _seats(page: Mapping[str, Any], game: GameConfig) -> str:
    """The seats of the policy in the games that its rows keep, as " in seat 0 (user), 1 (user)",
    " in all seats", or ", the seats in turn" if it changes seats from game to game; "" without
    games. Seats have no names if the game's code is not imported here."""
    rows = [row for name, row in page["rows"].items() if name.startswith("policy")]
    seats = [each["seats"] for row in rows for each in (*row.games, *row.examples.values())]
    seatings = {
        tuple(s for s, seat in enumerate(each) if seat["player"] == "policy") for each in seats
    }
    if len(seatings) != 1:
        return ", the seats in turn" if seatings else ""
    (own,) = seatings
    if len(own) == len(seats[0]):
        return " in all seats"
    called = game.kit.ROLES if game.is_imported else ()
    return " in seat " + ", ".join(f"{s} ({escaped(called[s])})" if called else str(s) for s in own)


def _partner_for(config: Config) -> str:
    """A script that can play the first seat that one of several policies lacks, best a baseline: a
    policy of one role alone has no partner to play with by default. Of a game that is not imported
    the scripts are unknown."""
    if not config.game.is_imported:
        return "scripted:NAME"
    kit, (seat, *_) = config.game.kit, partner_seats(config.game, config.rollout)
    able = (name for name in (*kit.BASELINES, *kit.SCRIPT_NAMES) if kit.seated(name)[seat] == name)
    return f"{SCRIPT}{next(able, 'NAME')}"


def _question(page: Mapping[str, Any]) -> str:
    """How an evaluation differs from the policy's play with itself under the run's settings: the
    partner, other settings, the games' start; "" if it does not."""
    partner = str(page.get("partner", SELF))
    whom = "" if partner == SELF else f", with {escaped(without_paths(partner))}"
    words = [escaped(f"--{key}={page[key]}") for key in ("config", "start") if key in page]
    words += [escaped(_public_word(word)) for word in page.get("overrides", ())]
    return f"{whom}, under {' '.join(words)}" if words else whom


def public_value(value: Any) -> Any:
    """Settings with paths cut to their last part, also in checkpoint:PATH, and without addresses of
    endpoints."""
    if isinstance(value, Mapping):
        return {name: public_value(part) for name, part in value.items()}
    if isinstance(value, list):
        return [public_value(part) for part in value]
    return ",".join(map(_public_text, value.split(","))) if isinstance(value, str) else value


def _public_text(text: str) -> str:
    """An entry of a list such as --partners. Another user's home is only "~"."""
    last = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    if _PATH.match(text):
        return "~" if last.startswith("~") else last
    return without_paths(text)


def public_code(code: str) -> str:
    """A paragraph of code.txt without the paths of this machine in its command and in the names of
    the user's files. Raises ValueError for a command with an unclosed quotation mark."""
    lines = []
    for what, _, rest in (line.partition(" ") for line in code.splitlines()):
        own, sha256, digest = rest.rpartition(" sha256 ")
        if what == "command":
            rest = shlex.join(map(_public_word, shlex.split(rest)))
        elif sha256:
            rest = f"{public_value(own)}{sha256}{digest}"
        lines.append(f"{what} {rest}")
    return "\n".join(lines)


def _public_word(word: str) -> str:
    """A word of a command, such as key=value."""
    key, equals, text = word.partition("=")
    if not equals:
        return str(public_value(word))
    value = public_value(yaml.safe_load(text))
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return f"{key}={value}"


def without_paths(text: str) -> str:
    """A partner's name without the folders and addresses of this machine."""
    return _FOLDERS.sub("", _ADDRESS.sub(r"\1an-endpoint", text))


def _front_matter(
    name: str, game: GameConfig, base: str | None, sampled: Row, *, whose: str
) -> ModelCardData:
    """The metadata for the hub's index. `whose` says that the score is not the policy's alone."""
    mean, low, high = sampled.interval
    return ModelCardData(
        model_name=name.split("/")[1],
        base_model=base if _on_hub(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["selfplay", "self-play", "grpo", "dialogue", game.name],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=game.name,
                dataset_name=f"{len(sampled.scores)} held-out games of {game.name}",
                metric_type="score",
                metric_name=f"mean score{whose}, 95 % interval [{low:.3f}, {high:.3f}]",
                metric_value=round(mean, 4),
            )
        ],
    )


def seats_of(game: GameConfig, rollout: RolloutConfig) -> str:
    """The seats that the policy plays in the game."""
    if not game.is_imported:  # custom code
        named = " and the ".join(rollout.policy_seats)
        return f"the seat of the {named}" if named else "the policy's seats"
    seats, roles = chosen_seats(game, rollout), game.kit.ROLES
    if seats is None:
        return "both seats" if len(roles) == 2 else "all seats"
    return f"the seat of the {' and the '.join(dict.fromkeys(roles[seat] for seat in seats))}"


def _held_out(source: str) -> str:
    if source == GENERATED:
        return "instances of the held-out stream, from which training never draws"
    return f"instances of the file {escaped(Path(source).name)} (`data.test`)"


def _on_hub(path: str | None) -> bool:
    return path is not None and is_hub_name(path)


def _table(rows: Rows) -> str:
    shown = with_partners(rows, all_of_them=True)
    measured = {measure for row in shown.values() for measure in row.measures}
    headings = {measure: heading for measure, heading, _ in COLUMNS}
    columns = {measure: headings[measure] for measure in _SHOWN if measure in measured}
    named = {escaped(without_paths(name)): row for name, row in shown.items()}
    return table(*score_table(named, columns))
