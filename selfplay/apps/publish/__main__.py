"""Write a finished run as a Hugging Face folder with a model card, and push it with --push.

    python -m selfplay.apps.publish runs/talk ORG/NAME
    HF_TOKEN=... python -m selfplay.apps.publish runs/talk ORG/NAME --push --private

The folder is RUN/hub unless --out names another: the weights and tokenizer of RUN/final, README.md
with its scores next to scripts (and to people, if `eval.py` has played their games) and
selfplay.yaml with the settings. Of a run with several policies each is published separately:
RUN/final/NAME goes to RUN/hub/NAME. Paths of this machine are cut to their last part, and
endpoints' addresses are removed.
"""

from __future__ import annotations

from dialop.terminal import open_terminal

open_terminal("selfplay.apps.publish")  # before the imports, which take seconds

# isort: split

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dialop.modules import KEPT
from selfplay.apps.publish.card import card, public_value, read_results
from selfplay.apps.report.run_files import run_above
from selfplay.atomic import altered, atomic_folder
from selfplay.checkpoint import served_by, step_of
from selfplay.config import Config
from selfplay.config.load import load, read_value
from selfplay.config.own_code import CODE, GAME, kept_in
from selfplay.config.text import dump
from selfplay.errors import SettingsError
from selfplay.metrics.run_folder import IMITATED_BOARDS
from selfplay.model.hub import FETCHED, SETTINGS
from selfplay.partners.checkpoints import Source, find_source, seats_of
from selfplay.preflight.command_line import Parser, refused
from selfplay.preflight.run import check_folder


def read_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for invalid arguments."""
    parser = Parser("selfplay.apps.publish", __doc__, takes_settings=False)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run, or its final/NAME")
    add("name", metavar="ORG/NAME", help="the repository on the hub")
    add("--out", type=Path, help="output folder (default: RUN/hub)")
    add("--code", action="store_true", help="add RUN/code, the run's custom game and functions")
    add("--push", action="store_true", help="upload the folder; needs HF_TOKEN or `hf auth login`")
    add("--private", action="store_true", help="make a new repository private")
    args = parser.parse_args(words)
    try:
        validate_repo_id(args.name)
        if "/" not in args.name:
            raise HFValidationError(f"it has no organisation or user: {args.name!r}")
    except HFValidationError as error:
        raise ValueError(f"ORG/NAME must be a hub name such as me/tiny: {error}") from None
    if args.private and not args.push:
        raise ValueError("--private has no effect without --push")
    if args.push and huggingface_hub.get_token() is None:
        raise ValueError("--push needs a token: set HF_TOKEN or run `hf auth login`")
    return args


def find_finished(run: Path) -> Source:
    """The policy of a finished run. Raises SettingsError or ValueError for another folder, and for
    a run with several policies."""
    settings = [home / "config.yaml" for home in (run, *run.parents[:2])]
    source = find_source(run) if any(map(Path.is_file, settings)) else None
    if source is None or not (source.policy or settings[0].is_file()):
        raise ValueError(f"RUN must be a run folder with a config.yaml, got {run}{run_above(run)}")
    final = source.home / "final" / source.policy
    if source.weights != final or not (source.home / "held_out_after.json").is_file():
        raise ValueError(f"RUN must be finished, with final/ and held_out_after.json, got {run}")
    return source


def write_folder(source: Source, name: str, out: Path, *, with_code: bool = False) -> None:
    """Write the repository `name` of a finished run's policy into `out`, atomically; `with_code`
    adds the run's copies of the user's files. None of them is imported.

    Raises SettingsError or ValueError for a run that cannot be published.
    """
    run, weights = source.home, source.weights
    if out.exists() and any(out.iterdir()):
        found = altered(out) or ("" if (out / SETTINGS).is_file() else f"{SETTINGS} is missing")
        if found:
            raise ValueError(
                f"--out must be a new folder or an unchanged earlier --out, got {out}: {found}"
            )
    own_home = f"policies.{source.policy}" if source.policy else ""
    config = load(Config, run / "config.yaml", code="none", own=own_home)
    every = read_value(run / "config.yaml", [], "policies") or {}
    if source.policy:
        own = (every[source.policy] or {}).get("seats") or [source.policy]
        if config.game.is_imported:
            roles = config.game.kit.ROLES
            own = [roles[seat] for seat in seats_of(source, roles, source.policy)]
        named = tuple(dict.fromkeys(map(str, own)))
        config = replace(config, rollout=replace(config.rollout, policy_seats=named))
    copies = kept_in(run / CODE)
    if with_code and copies is None:
        raise ValueError(f"--code needs copies of custom code, got no {run / CODE / KEPT}")
    if config.game.name.endswith(".py") and not with_code:
        raise ValueError(
            f"RUN must have a game that readers can import, got game.name {config.game.name}; use "
            "a module, such as my_package.my_game, or --code, which publishes the run's copy"
        )
    config = replace(config, out=f"runs/{name.split('/')[1]}")
    settings = public_value(yaml.safe_load(dump(config)))
    public = load(Config, settings, code="none")
    files = [
        file
        for file in sorted(weights.iterdir())
        if any(file.match(pattern) for pattern in FETCHED)
        and file.name not in ("progress.json", "evaluation.json")
    ]
    boards = [run / IMITATED_BOARDS] if (run / IMITATED_BOARDS).exists() else []
    for file in (*files, *boards, run / "code.txt"):
        if file.is_symlink() or not file.is_file():
            raise ValueError(f"{file} must be a file of this run, got a link or no file")
    code = (run / "code.txt").read_text(encoding="utf-8", errors="backslashreplace").strip()
    if "started " not in code:
        raise ValueError(f"{run / 'code.txt'} must say when the run started, got {code[:80]!r}")
    results = read_results(run, source.policy, step=step_of(weights))
    if results.left_out:
        others = ", ".join(results.left_out)
        print(f"not in the card, because of another policy or step: {others}", flush=True)
    text = card(
        name,
        public,
        results,
        code=code[code.rindex("started ") :],
        step=step_of(weights),
        served=served_by(weights),
        own_game=copies.named.get(f"{GAME} {config.game.name}", "") if copies else "",
        policy=source.policy,
        mates=[name for name in every if name != source.policy],
        rest=(every.get(source.policy) or {}).get("rest") or (),
    )
    with atomic_folder(out) as new:
        for file in (*files, *boards):  # evaluations of the copy must exclude these boards too
            shutil.copy2(file, new / file.name)
        (new / "README.md").write_text(text, encoding="utf-8", errors="backslashreplace")
        (new / SETTINGS).write_text(dump(public), encoding="utf-8")
        for name in copies.files if with_code and copies else ():
            (new / CODE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / CODE / name, new / CODE / name)


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload the folder; returns the repository's URL. Raises OSError if the hub refuses or cannot
    be reached."""
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a selfplay policy"
        )
    except Exception as error:
        raise OSError(f"{name} cannot be uploaded to the hub: {error}") from error
    return str(address)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for invalid arguments, 1 if the upload fails."""
    try:
        args = read_arguments(words)
        source = find_finished(args.run)
        out = args.out or source.home / "hub" / source.policy
        check_folder(out, what="--out")
        write_folder(source, args.name, out, with_code=args.code)
    except (SettingsError, ValueError, LookupError, OSError) as error:
        return refused("selfplay.apps.publish", error)
    print(f"wrote {out}; read {out / 'README.md'} before you share it")
    if not args.push:
        print(f"to upload it: python -m selfplay.apps.publish {args.run} {args.name} --push")
        return 0
    try:
        print(f"pushed to {push(out, args.name, private=args.private)}")
    except OSError as error:
        return refused("selfplay.apps.publish", error, status=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
