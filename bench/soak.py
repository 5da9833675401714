"""Kills a tiny run again and again and checks that it ends like an uninterrupted one.

    python -m bench.soak [--kills 25] [--seed 0] [--out FOLDER]

It trains once without a break. Then it starts the same run in another folder, ends it with SIGKILL
at a random moment of a stage, starts it again, and so on. At the end both folders must have the
same files, and weights, logs, games and evaluations must be the same bit for bit, except for times
in seconds. Every stage is killed at least once if there are as many kills.

Each trainer is a process forked from one that has only imported its modules. If the stage ends
before its kill, the trainer waits for the kill at the stage's end.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selfplay.metrics.run_folder import holds_run

Goal = tuple[str, int, float]  # a stage, the number of its call, and seconds from its start
ROOT = Path(__file__).resolve().parents[1]
WARM_START, LOOP, END = range(3)
# A stage: its part of the run, its function, and the highest number of a call (per process) at
# which it is killed. With 3 steps per kill the run is longer than the kills of its loop.
STAGES: dict[str, tuple[int, str, str, int]] = {
    "tokenizer": (WARM_START, "selfplay.setup", "scratch_tokenizer", 1),
    "teachers' games": (WARM_START, "selfplay.warm_start.imitation", "_play", 2),
    "imitation": (WARM_START, "selfplay.warm_start.imitation", "optimizer_step", 40),
    "imitation's save": (WARM_START, "selfplay.warm_start.imitation", "begin_checkpoint", 1),
    "warm start's export": (WARM_START, "selfplay.warm_start.imitation", "export_atomically", 1),
    "evaluation before": (LOOP, "selfplay.setup", "held_out_at_start", 1),
    "play": (LOOP, "selfplay.step", "play", 3),
    "update": (LOOP, "selfplay.step", "update_policy", 3),
    "push": (LOOP, "selfplay.weight_sync.supervised", "SupervisedPolicy.push", 3),
    "snapshot": (LOOP, "selfplay.partners.pool", "export_atomically", 1),
    "evaluation": (LOOP, "selfplay.step", "validation", 1),
    "log": (LOOP, "selfplay.metrics.step_log", "Journal.on_step", 3),
    "save": (LOOP, "selfplay.step.ending", "save_learner", 1),
    "evaluation after": (END, "selfplay.api.run", "held_out", 1),
    "export": (END, "selfplay.api.run", "export_final", 1),
}
NOT_COMPARED = ("report.html", "config.yaml", "code.txt", ".lock", ".metadata", "manifest.json")
SETTINGS = (
    "model.scratch={width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 64,"
    " max_positions: 192, vocab_size: 400, tokenizer_games: 60}",
    "warm_start={num_games: 800, teachers: [solo, 'honest:tell=top'], batch_size: 8, epochs: 2,"
    " warmup_steps: 10, lr: 6.0e-3}",
    "rollout={instances: 3, group_size: 4, partners: [self, pool*2], max_turns: 4, max_retries: 1,"
    " max_new_tokens: 24, max_game_tokens: 160}",
    "policy_pool.every=2",
    "eval={every: 2, num_games: 4, final_games: 8, partners: [warm_start]}",
    "save_every=2",
    "log_games_every=5",
    "device=cpu",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--steps", type=int, help="self-play steps; default: 3 for each kill")
    parser.add_argument("--out", type=Path, help="keeps the two run folders here")
    asked = parser.parse_args(arguments)
    importlib.import_module("train")  # once, before the forks
    home = asked.out or Path(tempfile.mkdtemp(prefix="selfplay-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    steps = asked.steps or 3 * asked.kills
    straight, killed = home / "straight", home / "killed"
    for folder in filter(Path.exists, (straight, killed)):
        if not holds_run(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            parser.error(f"--out: {folder} must hold a run or nothing if it exists; move it")
    for folder in (straight, killed):
        shutil.rmtree(folder, ignore_errors=True)
        marks_of(folder).unlink(missing_ok=True)

    began_s = time.monotonic()
    if run(straight, steps) != 0:
        print(f"soak: the run without a break failed: {straight}.log", file=sys.stderr)
        return 1
    print(f"{steps} steps without a break: {time.monotonic() - began_s:.0f} s", flush=True)
    lasted_s: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for line in marks_of(straight).read_text().splitlines():
        stage, _, seconds = line.rpartition(" ")
        lasted_s[stage].append(float(seconds))

    rng, hits = random.Random(asked.seed), Counter[str]()
    for stage in plan(asked.kills, rng):
        delay_s = rng.uniform(0.0, statistics.median(lasted_s[stage]))
        began_s = time.monotonic()
        if run(killed, steps, (stage, rng.randint(1, STAGES[stage][3]), delay_s)) >= 0:
            print(f"soak: no kill in {stage}: the run ended first: {killed}.log", file=sys.stderr)
            return 1
        hit = [line for line in marks_of(killed).read_text().splitlines() if line in STAGES][-1]
        hits[hit] += 1
        spent_s = time.monotonic() - began_s
        print(f"kill {hits.total()} in {hit} after {spent_s:.1f} s", flush=True)
    if run(killed, steps) != 0:
        print(f"soak: the last start failed: {killed}.log", file=sys.stderr)
        return 1
    print(f"{hits.total()} kills: " + ", ".join(f"{stage} {hits[stage]}" for stage in hits))
    missed = [stage for stage in STAGES if not hits[stage]]
    apart = differences(straight, killed)
    if asked.kills >= len(STAGES) and missed:
        print(f"soak: never killed in {', '.join(missed)}", file=sys.stderr)
    if apart:
        print(f"soak: {', '.join(apart)} differ between {straight} and {killed}", file=sys.stderr)
    if apart or (asked.kills >= len(STAGES) and missed):
        return 1
    print(f"{len(contents(straight))} files are the same bit for bit, except for times in seconds")
    if asked.out is None:
        shutil.rmtree(home)
    return 0


def plan(kills: int, rng: random.Random) -> list[str]:
    """The stages to kill, in the order of the run's parts."""
    stages = list(STAGES)
    # Only the loop's stages repeat, so only they can be killed more than once.
    again = [stage for stage in stages if STAGES[stage][0] == LOOP]
    chosen = rng.sample(stages, min(kills, len(stages)))
    chosen += rng.choices(again, k=kills - len(chosen))
    rng.shuffle(chosen)

    def place(stage: str) -> tuple[int, int]:
        part = STAGES[stage][0]
        return part, 0 if part == LOOP else stages.index(stage)

    return sorted(chosen, key=place)


def marks_of(folder: Path) -> Path:
    """The file in which trainers of a folder note their stages: the seconds of each finished stage,
    and the stage of the kill."""
    return folder.with_suffix(".marks")


def run(folder: Path, steps: int, goal: Goal | None = None) -> int:
    """Train in the folder in a forked process, to the end or to the goal's kill; returns its exit
    status, which is negative for a process that was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with folder.with_suffix(".log").open("ab") as log:
                for handle in (1, 2):
                    os.dup2(log.fileno(), handle)
            words = ["--config", str(ROOT / "configs" / "tiny.yaml"), f"out={folder}"]
            mark_stages(marks_of(folder), goal)
            status = importlib.import_module("train").main([*words, *SETTINGS, f"steps={steps}"])
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mark_stages(marks: Path, goal: Goal | None) -> None:
    """Wrap the stages of this process so that they note their seconds. The goal's call, or the
    first stage of a later part of the run, is killed from outside after the goal's delay; if it
    ends before, it waits."""

    def marked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def note(word: object) -> None:
            with marks.open("a") as file:
                file.write(f"{stage} {word}\n" if word else f"{stage}\n")

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            wanted = goal is not None and (
                goal[:2] == (stage, calls) or STAGES[stage][0] > STAGES[goal[0]][0]
            )
            if goal is not None and wanted:
                note("")
                subprocess.Popen(["sh", "-c", f"sleep {goal[2]:f}; kill -9 {os.getpid()}"])
            began_s = time.monotonic()
            result = function(*arguments, **options)
            if wanted:
                signal.pause()
            note(time.monotonic() - began_s)
            return result

        return call

    for stage, (_, module, name, _) in STAGES.items():
        *owners, name = name.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, marked(stage, getattr(owner, name)))


def contents(folder: Path) -> dict[str, object]:
    """The contents that must be the same, by file. Logs are without times and memory. Excluded are
    a state's `.metadata` (torch writes a random name into it), the manifest, and the report, which
    shows times and the folder's name."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name in NOT_COMPARED:
            continue
        if path.name in ("metrics.jsonl", "warm_start.jsonl", "page.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            measured = ("_s", "_gib")  # of this process
            found[name] = [{k: v for k, v in x.items() if not k.endswith(measured)} for x in lines]
        else:
            found[name] = path.read_bytes()
    return found


def differences(one: Path, other: Path) -> list[str]:
    mine, yours = contents(one), contents(other)
    names = sorted(mine.keys() | yours.keys())
    return [name for name in names if mine.get(name) != yours.get(name)]


if __name__ == "__main__":
    sys.exit(main())
