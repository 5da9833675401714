"""Measures generated instances per second, by board size and number of worker processes.

python -m bench.generate_speed --num 200 --processes 1 2
"""

from __future__ import annotations

import argparse
import time

from dialop.kit import load_kit


def main() -> None:
    """Time one stream of instances for each size and number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--num", type=int, default=200, help="instances for each timing")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 6, 8], help="boards")
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="worker processes")
    args = parser.parse_args()
    print("| size | processes | instances/s |\n|---|---|---|")
    for size in args.sizes:
        for processes in args.processes:
            kit = load_kit("matching")
            begin_s = time.perf_counter()
            options = kit.Options(size=size)
            kit.generate(options, seed=1, start=0, num=args.num, processes=processes)
            wall_s = time.perf_counter() - begin_s
            print(f"| {size} | {processes} | {args.num / wall_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
