"""Kills a tiny run again and again and checks that it ends like an uninterrupted one.

    python -m bench.soak [--kills 25] [--seed 0] [--out FOLDER]

It trains once without a break. Then it starts the same run in another folder, ends it with SIGKILL
at a random moment of a stage, starts it again, and so on. At the end both folders must hold the
same files, and weights, logs, games and evaluations must be the same bit for bit, except for times
in seconds. Every stage is killed at least once if there are as many kills.

Each trainer is a process forked from one that has only imported its modules. It writes a mark when
it enters and leaves a stage. It is killed at a random moment of the stage. If the stage ends before
that, the trainer waits for the kill at the stage's end.
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
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_START, LOOP, END = range(3)
# A stage: its part of the run, its function, and the highest number of a call (per process) at
# which it is killed. With 3 steps per kill the run is longer than the kills of its loop.
STAGES: dict[str, tuple[int, str, str, int]] = {
    "tokenizer": (WARM_START, "selfplay.setup", "scratch_tokenizer", 1),
    "teachers' games": (WARM_START, "selfplay.warm_start", "_play", 2),
    "imitation": (WARM_START, "selfplay.warm_start", "optimizer_step", 40),
    "imitation's save": (WARM_START, "selfplay.warm_start", "save_checkpoint", 1),
    "warm start's export": (WARM_START, "selfplay.setup", "export_atomically", 1),
    "evaluation before": (LOOP, "selfplay.setup", "held_out_at_start", 1),
    "play": (LOOP, "train", "play", 3),
    "update": (LOOP, "selfplay.step", "update_policy", 3),
    "push": (LOOP, "selfplay.weight_sync.supervisor", "PolicySupervisor.push_weights", 3),
    "snapshot": (LOOP, "selfplay.partners.partners", "export_atomically", 1),
    "evaluation": (LOOP, "selfplay.step", "validation", 1),
    "log": (LOOP, "selfplay.metrics.step_log", "Journal.step", 3),
    "save": (LOOP, "train", "save_learner", 1),
    "evaluation after": (END, "train", "held_out", 1),
    "export": (END, "selfplay.step", "finish", 1),
}
NOT_COMPARED = ("report.html", "config.yaml", "code.txt", ".lock", ".metadata", "manifest.json")
SETTINGS = (
    "model.scratch={width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 64,"
    " max_positions: 192, vocab_size: 400, tokenizer_games: 60}",
    "warm_start={num_games: 800, teachers: [solo, 'honest:tell=top'], batch_size: 8, epochs: 2,"
    " warmup_steps: 10, lr: 6.0e-3, auxiliary_weight: 0.1, auxiliary_games: 2}",
    "rollout={instances: 3, group_size: 4, partners: [self, pool*2], max_turns: 4, max_retries: 1,"
    " max_new_tokens: 24, max_game_tokens: 160}",
    "policy_pool.every=2",
    "eval={every: 2, num_games: 4, final_games: 8, partner: warm_start}",
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
    for folder in (straight, killed):
        shutil.rmtree(folder, ignore_errors=True)

    trainer = Trainer(straight, steps)
    if trainer.run_to_the_end() != 0:
        print(f"soak: the run without a break failed: {trainer.log}", file=sys.stderr)
        return 1
    print(f"{steps} steps without a break: {trainer.seconds:.0f} s", flush=True)
    durations = {stage: statistics.median(times) for stage, times in trainer.durations.items()}

    rng, hits = random.Random(asked.seed), Counter[str]()
    for stage in plan(asked.kills, rng):
        trainer = Trainer(killed, steps)
        hit = trainer.kill_in(stage, durations[stage], rng)
        if hit is None:
            print(f"soak: no kill in {stage}: the run ended first: {trainer.log}", file=sys.stderr)
            return 1
        hits[hit] += 1
        print(f"kill {hits.total()} in {hit} after {trainer.seconds:.1f} s", flush=True)
    trainer = Trainer(killed, steps)
    if trainer.run_to_the_end() != 0:
        print(f"soak: the last start failed: {trainer.log}", file=sys.stderr)
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


class Trainer:
    """One process that trains in the folder until its end or its kill."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.durations: dict[str, list[float]] = {}
        self.seconds = 0.0
        self.log = folder.with_suffix(".log")
        self._words = ["--config", str(ROOT / "configs" / "tiny.yaml"), f"out={folder}"]
        self._words += [*SETTINGS, f"steps={steps}"]

    def run_to_the_end(self) -> int:
        """Train without a kill and time the stages; return the exit status."""
        self._follow({}, None)
        return self._wait()

    def kill_in(self, stage: str, duration_s: float, rng: random.Random) -> str | None:
        """Kill at a random moment of the stage. Returns the stage in which the process died, None
        if it ended before."""
        part, _, _, latest = STAGES[stage]
        delay_s = rng.uniform(0.0, duration_s)
        goal = {"stage": stage, "call": rng.randint(1, latest)}
        reached = self._follow(goal, part)
        if reached:
            time.sleep(delay_s)
            os.kill(self._pid, signal.SIGKILL)
        status = self._wait()
        self._read_marks()
        return self._stack[-1] if self._stack else "between stages" if status < 0 else None

    def _follow(self, goal: dict[str, Any], part: int | None) -> bool:
        """Start, and read marks until the goal is reached (True) or the process ends. A later part
        of the run than the goal's counts as reached."""
        reading, writing = os.pipe()
        self._began_s = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reading)
            self._train(writing, goal)
        os.close(writing)
        self._marks, self._stack = os.fdopen(reading), list[str]()
        for line in self._marks:
            self._note(mark := json.loads(line))
            stage = mark["stage"]
            if goal and (mark["what"] == "goal" or STAGES[stage][0] > (part or 0)):
                return True
        return False

    def _train(self, marks: int, goal: dict[str, Any]) -> None:
        """Train and exit. Runs in the forked process."""
        status = 1
        try:
            with self.log.open("ab") as log:
                for handle in (1, 2):
                    os.dup2(log.fileno(), handle)
            status = train_with_marks(marks, goal, self._words)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read_marks(self) -> None:
        with self._marks:
            for line in self._marks:
                self._note(json.loads(line))

    def _note(self, mark: dict[str, Any]) -> None:
        self.seconds = time.monotonic() - self._began_s
        if mark["what"] == "begins":
            self._stack.append(mark["stage"])
        elif mark["what"] == "ends":
            self._stack.pop()
            self.durations.setdefault(mark["stage"], []).append(mark["seconds"])


def train_with_marks(marks: int, goal: dict[str, Any], words: Sequence[str]) -> int:
    """Train with stages that write to the file `marks` when they begin and end. The goal's call
    waits at its end to be killed."""

    def tell(stage: str, what: str, seconds: float = 0.0) -> None:
        line = json.dumps({"stage": stage, "what": what, "seconds": seconds})
        os.write(marks, f"{line}\n".encode())

    def marked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            wanted = goal.get("stage") == stage and goal["call"] == calls
            tell(stage, "begins")
            if wanted:
                tell(stage, "goal")
            began_s = time.monotonic()
            result = function(*arguments, **options)
            if wanted:
                signal.pause()
            tell(stage, "ends", time.monotonic() - began_s)
            return result

        return call

    for stage, (_, module, name, _) in STAGES.items():
        *owners, name = name.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, marked(stage, getattr(owner, name)))
    status: int = importlib.import_module("train").main(words)
    return status


def contents(folder: Path) -> dict[str, object]:
    """The contents that must be the same, by file. Logs are without times in seconds. Excluded are
    a state's `.metadata` (torch writes a random name into it), the manifest with its hash, and the
    report, which shows times and the folder's name."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name in NOT_COMPARED:
            continue
        if path.name in ("metrics.jsonl", "warm_start.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in x.items() if not k.endswith("_s")} for x in lines]
        else:
            found[name] = path.read_bytes()
    return found


def differences(one: Path, other: Path) -> list[str]:
    mine, yours = contents(one), contents(other)
    names = sorted(mine.keys() | yours.keys())
    return [name for name in names if mine.get(name) != yours.get(name)]


if __name__ == "__main__":
    sys.exit(main())
