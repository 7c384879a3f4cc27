"""The `counterpoise` command: finds the subcommand and hands it its arguments untouched.

It stands at the very start of the flow. A subcommand's module is imported only when it is called, so that
`counterpoise --help` and a wrong word answer at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

Main = Callable[[Sequence[str]], int | None]


def _doctor() -> Main:
    from experiments.doctor import main

    return main


def _train() -> Main:
    from experiments.train import main

    return main


def _sample() -> Main:
    from experiments.sample import main

    return main


def _bench() -> Main:
    from experiments.bench import main

    return main


def _trace() -> Main:
    from experiments.trace_command import main

    return main


def _forecast() -> Main:
    from experiments.forecast_command import main

    return main


def _replay() -> Main:
    from experiments.replay_command import main

    return main


def _plan() -> Main:
    from experiments.plan_command import main

    return main


def _demo() -> Main:
    from experiments.replay_command import demo_main

    return demo_main


def _weights() -> Main:
    from experiments.weights_command import main

    return main


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A subcommand: one line of help, and how to get at its `main(argv) -> exit code`."""

    help: str
    load: Callable[[], Main]


COMMANDS: dict[str, Command] = {
    "doctor": Command(help="what this machine has, and what to do about what it lacks", load=_doctor),
    "train": Command(help="train a model (train --help lists every setting with its unit)", load=_train),
    "trace": Command(help="load traces: info, convert, synth (steps, copies of experts)", load=_trace),
    "forecast": Command(
        help="how well a trace's load could have been foreseen (horizons in training steps)", load=_forecast
    ),
    "replay": Command(
        help="what placement policies would have made of a trace (times in s, weights in GiB)", load=_replay
    ),
    "plan": Command(help="where the experts should go for the load of a trace, and why", load=_plan),
    "demo": Command(help="replay a synthetic trace with all policies: a page in seconds", load=_demo),
    "bench": Command(
        help="measure: bench forecast, layer, placement, skew, split, stages (times in ms)", load=_bench
    ),
    "sample": Command(help="continue a prompt with the model of a run (length in tokens)", load=_sample),
    "weights": Command(help="import, export or upcycle weights (sizes in MiB and tensors)", load=_weights),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    argv: arguments without the program's name; those of the process by default. A user's mistake
    (ValueError) prints one line and gives 2, as a wrong command does; Ctrl-C gives 130.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return run_command(COMMANDS[arguments[0]].load, arguments[1:])
    top = parser()
    top.parse_args(arguments)  # help, version, or the error for an unknown command
    return top.error(f"the command must come first, not {arguments[0]}")


def run_command(load: Callable[[], Main], argv: Sequence[str]) -> int:
    """Loads a command and runs it on `argv`, turning a ValueError into one line on stderr and exit code 2."""
    try:
        return load()(argv) or 0
    except ValueError as error:
        print(f"counterpoise: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The top level of the command line: the commands with their help."""
    top = argparse.ArgumentParser(
        prog="counterpoise",
        description="Train mixture-of-experts models under expert parallelism, measure every row, keep the "
        "experts balanced. Times are in seconds, sizes in bytes, lengths in tokens.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"counterpoise {_version()}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, title="commands (each has --help)")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    return top


def _version() -> str:
    try:
        return version("counterpoise")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
