"""Runs the commands of README.md and docs/*.md that work on a CPU, in a clone after `make train`,
and prints the result of each.

    git clone . ../fresh && cd ../fresh && make train ARGS="steps=2 warm_start.num_games=640"
    .venv/bin/python -m docs.tools.documented [--only TEXT]

Commands are run as written, except that placeholders are filled in (RUN is runs/talk) and long runs
have fewer games and steps; the table shows what ran. Servers must answer a request. If
SELFPLAY_HUMAN_GAMES is set, commands on recorded games run too. Exit status 1 if a command failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
PROGRAMS = r"(?:\w+=\S* )*(?:python|torchrun|make|pip|docker|source|tensorboard|echo|selfplay-\w+) "
GPU_BENCHES = "loop|peers|rollout|update"
RECORDED = {"optimization": "matching", "planning": "planning", "mediation": "mediation"}
# A command needs what the first matching pattern says.
NEEDS = {
    r"--dry-run|ORG/NAME .*--num|train.py.*ORG/NAME": "a model of the hub",
    r"eval.py.*optimization\.jsonl": "a policy that reads full tables",
    r"--nproc-per-node [48]|train.py.*(_h200|smollm2_[14])|[qQ]wen|-gpu|\[gpu\]": "GPUs",
    rf"bench\.({GPU_BENCHES})\b": "GPUs",
    r"^docker": "a container engine",
    r"HF_TOKEN": "a token of the hub",
    r"sglang\.|collect_env|endpoint:": "SGLang (tests/sglang/test_serve.py)",
    r"^(make|pip|source)|selfplay-": "an environment of its own",
    r"chat_templates": "files of its own",
}
STAND_INS = {
    r"runs/no_kl/checkpoints/\w+": "runs/no_kl",
    r"\bRUN(?=[/ …]|$)…?": "runs/talk",
    r"eval.py FOLDER": "eval.py runs/talk",
    r"--out FOLDER": "--out runs/out",
    r"--config CONFIG": "--config configs/talk.yaml",
    r"MODEL.ORG/NAME|((?:eval.py |checkpoint:))ORG/NAME": r"\1runs/talk/hub",
    r"\bORG/NAME": "me/talk",
    r"rows\.jsonl": "examples/collab/tasks.jsonl",
    r" \[key=value …\]": "",
    r"seed=S\b": "seed=1",
    r"(bench\.compare_runs .*)": r"\1 --out runs",
    r"^torchrun": "python -m torch.distributed.run",
}
COPIES = ("a", "b", "c", "other", "no_kl", "tiny_s0", "tiny_s1", "tiny_s2")  # of runs/talk
SMALL = "steps=2 save_every=2 warm_start.num_games=640 eval.num_games=16 eval.final_games=16"


def parts(page: Path) -> Iterator[tuple[str, bool]]:
    """The lines of a page's code blocks (continued lines joined) and its inline code; each with a
    flag that is True for lines of a block."""
    for line in re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8")).splitlines():
        if line.startswith("    "):
            yield line.strip(), True
        else:
            yield from ((code, False) for code in re.findall(r"`([^`]+)`", line))


def commands() -> dict[str, str]:
    """Each command of a code block and each bench, with the first page that contains it."""
    found: dict[str, str] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for part, block in parts(page):
            command = re.split(r"\s+#\s", part)[0]
            if re.match(PROGRAMS if block else r"python -m bench\.", f"{command} "):
                found.setdefault(command, page.name)
    return found


def runnable(command: str, number: int) -> str:
    """The command with its placeholders filled and its sizes cut."""
    for pattern, given in STAND_INS.items():
        command = re.sub(pattern, given, command)
    if "train.py" in command and "--help" not in command and "--dry-run" not in command:
        cut = {word.split("=")[0] for word in SMALL.split()}
        words = [word for word in command.split(" ") if word.split("=")[0] not in cut | {"out"}]
        own = re.search(r"(\w+)\.yaml", command)
        out = f"runs/{own[1] if own else 'talk'}"
        out = f"runs/documented_{number}" if Path(out).exists() else out
        return " ".join([*words, SMALL, f"out={out}"])
    if "eval.py" in command and ".jsonl" not in command:
        return re.sub(r" --num \d+|$", " --num 16", command, count=1)
    return re.sub(r"--num 1\d+", "--num 20", command) if "bench." in command else command


def run(command: str) -> tuple[int, str]:
    """(status, last line). A server's page is fetched, and the server ended."""
    program = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    try:
        assert program.stdout
        if re.search(r"selfplay\.apps\.play(?!.*--terminal)|^tensorboard", command):
            found = next(filter(None, (re.search(r"http://\S+", s) for s in program.stdout)))
            with urllib.request.urlopen(found[0], timeout=60) as page:
                return (0 if page.status == 200 else 1), found[0].split("?")[0]
        lines = program.communicate(timeout=LIMIT_S)[0].strip().splitlines()
        return program.returncode, lines[-1] if lines else ""
    except StopIteration:
        return 1, "the server gave no address"
    except OSError as error:
        return 1, str(error)
    except subprocess.TimeoutExpired:
        return 124, f"more than {LIMIT_S} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="commands that contain this text")
    only = parser.parse_args().only
    recorded = os.environ.get("SELFPLAY_HUMAN_GAMES")
    for name, game in RECORDED.items() if recorded else ():
        shutil.copy(Path(recorded or "") / f"{game}.jsonl", f"{name}.jsonl")
    for name in COPIES:
        shutil.copytree("runs/talk", f"runs/{name}", dirs_exist_ok=True)
    failed = 0
    for number, (command, page) in enumerate(commands().items()):
        if only not in command:
            continue
        reason = next((why for what, why in NEEDS.items() if re.search(what, command)), "")
        if not recorded and re.search(r"\b(optimization|planning|mediation)\.jsonl", command):
            reason = "DialOp's recorded games"
        if "played.jsonl" in command and not Path("runs/talk/played.jsonl").exists():
            reason = "a game that you played"
        if reason:
            print(f"not run\t{page}\t{command}\tneeds {reason}", flush=True)
            continue
        command, began_s = runnable(command, number), time.monotonic()
        status, last = run(command)
        # `replay` exits with 1 if a recorded game breaks a rule; two files have one such game.
        failed += status != 0 and not last.endswith(" games agree")
        print(f"{status}\t{page}\t{command}\t{time.monotonic() - began_s:.0f} s", flush=True)
        if status:
            print(f"\t{last}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
