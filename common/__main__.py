"""The commands behind make: python -m common COMMAND.

Each imports what it needs when it runs, so that comparing two records does not need torch.
"""

from __future__ import annotations

import argparse
import sys

from .cli import Parser, guarded
from .errors import UsageError
from .interpreter import require_package, require_python
from .paths import IS_INSTALLED


def main(arguments: list[str] | None = None) -> int:
    return guarded(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    if IS_INSTALLED:
        raise UsageError("an installed package has no commands: run make in a checkout")
    parser = Parser(prog="python -m common")
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="build, check and measure steps")
    step.add_argument("names", nargs="+", metavar="STEP")
    profile = commands.add_parser(
        "profile", help="what compiler, SIMT runtime and Nsight Compute report about steps"
    )
    profile.add_argument("names", nargs="+", metavar="STEP")
    bench = commands.add_parser("bench", help="measure all steps").add_mutually_exclusive_group()
    bench.add_argument("--experiments", action="store_true", help="the experiments instead")
    bench.add_argument("--grid", action="store_true", help="over a grid of shapes")
    bench.add_argument("--distributions", action="store_true", help="on many kinds of inputs")
    bench.add_argument(
        "--large-head-dim", action="store_true", help="head_dim 256 and more, or v's own"
    )
    bench.add_argument("--decode", action="store_true", help="few queries on many keys")
    bench.add_argument("--lengths", action="store_true", help="packed sequences and windows")
    bench.add_argument("--latency", action="store_true", help="what small calls cost")
    bench.add_argument("--training", action="store_true", help="what training takes")
    bench.add_argument("--gpus", type=int, help="one sequence over so many GPUs")
    pictures = commands.add_parser("pictures", help="what heads look at, and what steps err")
    pictures.add_argument("names", nargs="*", metavar="STEP")
    commands.add_parser("train", help="train a GPT on attention() and on torch's")
    compare = commands.add_parser("compare", help="diff of two steps, and what it changes")
    compare.add_argument("first")
    compare.add_argument("second")
    worklog = commands.add_parser("worklog", help="write tables, numbers and plots from profiles/")
    worklog.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if something differs"
    )
    commands.add_parser("page", help="write docs/index.html, with all that worklog writes")
    compile_ = commands.add_parser(
        "compile", help="compile all steps with nvcc and report their resources"
    )
    compile_.add_argument(
        "--quarter",
        action="store_true",
        help="a quarter of the specializations, by turns with the commits",
    )
    commands.add_parser("lint", help="fail where a file in steps/ is malformed")
    launch = commands.add_parser("launch", help="launch a step once, for ncu to watch")
    launch.add_argument("name", metavar="STEP")
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    if options.command == "compare":
        return _compare(options.first, options.second)
    if options.command == "worklog":
        return _worklog(options.check)
    if options.command == "page":
        return _page()
    if options.command == "compile":
        from verify.compile_gate import compile_all
        from verify.turn import number_of_commits

        return compile_all(number_of_commits() % 4 if options.quarter else None)
    if options.command == "lint":
        from .catalog import require_well_formed

        require_well_formed()
        return 0
    if options.command == "launch":
        from .bench.ncu import launch_once
        from .catalog import find_step

        launch_once(find_step(options.name))
        return 0
    from .commands import (
        bench,
        bench_decode,
        bench_distributions,
        bench_grid,
        bench_large_head_dim,
        bench_latency,
        bench_lengths,
        bench_sharded,
        bench_training,
        pictures,
        profile,
        run_steps,
        train,
    )

    if options.command == "step":
        return run_steps(options.names)
    if options.command == "profile":
        return profile(options.names)
    if options.command == "pictures":
        return pictures(options.names)
    if options.command == "train":
        return train()
    if options.large_head_dim:
        return bench_large_head_dim()
    if options.decode:
        return bench_decode()
    if options.lengths:
        return bench_lengths()
    if options.latency:
        return bench_latency()
    if options.gpus is not None:
        return bench_sharded(options.gpus)
    if options.training:
        return bench_training()
    if options.distributions:
        return bench_distributions()
    return bench_grid() if options.grid else bench(options.experiments)


def _compare(first: str, second: str) -> int:
    """Prints the diff of two steps and what changes with it in the headline GPU's records."""
    from .paths import ROOT
    from .records import HEADLINE_GPU, PROFILES_DIR
    from .report.compare import change_table, find_two, source_diff
    from .report.record_set import load_record_set

    steps = find_two(first, second)
    table = change_table(load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT), *steps)
    print(f"{source_diff(*steps)}\n\n{table}", flush=True)
    return 0


def _worklog(check: bool) -> int:
    """Regenerates tables, numbers and plots from the records, or names what is out of date."""
    from .report.markdown import regenerate

    different = regenerate(check=check)
    for name in different:
        print(f"{name} differs: run make worklog" if check else f"wrote {name}")
    return 1 if check and different else 0


def _page() -> int:
    from .paths import ROOT
    from .report.markdown import PAGE

    _worklog(check=False)
    print(f"Open {(ROOT / PAGE).as_uri()} in a browser.")
    return 0


if __name__ == "__main__":
    require_python("-m", "common")
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        require_package(error, "-m", "common")
