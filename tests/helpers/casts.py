"""Finished runs of several policies, each trained a little in a game of three seats, two roles."""

import shutil
from pathlib import Path

from tests.helpers.shared_work import once
from tests.helpers.tiny_run import TINY, begin_warm, run_tiny
from train import main as train

SETTINGS = """
steps: 0
device: cpu
threads: 1
observers: []
game: {name: tests.helpers.three_rooms, options: {brief: true}}
model: {scratch: {width: 32, layers: 2, heads: 2, kv_heads: 2, mlp_width: 64, max_positions: 192,
                  vocab_size: 300, tokenizer_games: 60}}
warm_start: {num_games: 200, batch_size: 8, epochs: 2, warmup_steps: 10, lr: 6.0e-3}
rollout: {max_turns: 8, max_retries: 1, max_new_tokens: 24, max_game_tokens: 180}
eval: {final_games: 1, talk_games: 0}
"""
TWO = f"{SETTINGS}policies: {{caller: {{}}, clerk: {{}}}}\n"


def cast_of(folder: Path, **policies: Path) -> Path:
    """A finished run of these policies, by name, as far as readers look; its start is a model."""
    for name, policy in policies.items():
        shutil.copytree(policy / "final", folder / "final" / name)
    shutil.copytree(next(iter(policies.values())) / "final", folder / "warm_start")
    (folder / "config.yaml").write_text(f"{TWO}out: {folder}\n")
    return folder


def casts() -> Path:
    """A folder of runs, only to read: `one` adds the numbers up, `zero` answers 0, both in all
    seats. The casts: `twins` of one's weights, `a` and `b` of both runs'."""

    def make(home: Path) -> None:
        runs = {name: home / name for name in ("one", "zero")}
        for (name, folder), teacher in zip(runs.items(), ("clerk", "guesser"), strict=True):
            (home / f"{name}.yaml").write_text(SETTINGS)
            words = [f"warm_start.teachers=[{teacher}]", f"out={folder}"]
            assert train(["--config", str(home / f"{name}.yaml"), *words]) == 0
        cast_of(home / "twins", caller=runs["one"], clerk=runs["one"])
        cast_of(home / "a", caller=runs["one"], clerk=runs["zero"])
        cast_of(home / "b", caller=runs["zero"], clerk=runs["one"])

    return once(("casts", SETTINGS), make)


PAIR = "policies={one: {seats: [0]}, other: {seats: [1], optim: {lr: 3.0e-4}}}"
# Each of three steps is saved; all that a policy keeps from step to step.
TRAINED = (
    *(PAIR, "steps=3", "save_every=1", "keep_checkpoints=3", "algorithm.kl=0.02"),
    *("algorithm.advantage=ema", "optim.schedule=constant", "policy_pool.every=1"),
    "policies.other.partners=[self, pool]",
)


def trained() -> Path:
    """A finished tiny run of two policies, one for each seat. Only to read."""

    def make(home: Path) -> None:
        begin_warm(home / "run")
        assert run_tiny(home / "run", *TRAINED) == 0

    return once(("trained cast", TINY), make) / "run"
