"""The arguments of `counterpoise train`, and the table of all settings that its help shows."""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import fields

from experiments.config import SECTIONS, check_section, defaults_of, settable, to_toml_value


def help_table(sections: Sequence[str] | None = None) -> str:
    """Every settable key with its default, choices and help, one paragraph each; all sections by default."""
    lines: list[str] = []
    for section in sections or SECTIONS:
        check_section(section, "help")
        defaults = defaults_of(section)
        by_name = {entry.name: entry for entry in fields(SECTIONS[section])}
        lines += [f"[{section}]"]
        for name in settable(section):
            metadata = by_name[name].metadata
            default = f" = {to_toml_value(defaults[name])}" if name in defaults else " (must be set)"
            lines += [f"  {section}.{name}{default}"]
            text = metadata["help"]
            if "choices" in metadata:
                text += f"; one of {', '.join(metadata['choices'])}"
            lines += textwrap.wrap(text, width=100, initial_indent="      ", subsequent_indent="      ")
        lines += [""]
    return "\n".join(lines)


def train_parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise train`; its help shows every setting."""
    parser = argparse.ArgumentParser(
        prog="counterpoise train",
        description="Train a mixture-of-experts model, expert-parallel, under DeepSpeed. Without a launcher "
        "(deepspeed, torchrun) it starts the ranks itself.",
        epilog="settings (TOML sections, or --set section.key=value), with their defaults:\n\n"
        + help_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="PATH",
        help="TOML of the run, a path or a packaged name (default: tiny.toml; on --resume the run's own)",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting; repeatable",
    )
    add(
        "--name",
        metavar="NAME",
        help="name of the run (default: the config's stem and a free number)",
    )
    add("--runs-dir", metavar="DIR", default="runs", help="where run directories are (default: runs)")
    add(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="continue RUN (the one named by --name without a value) from its last complete checkpoint",
    )
    add(
        "--reshape",
        action="store_true",
        help="with --resume: on another number of ranks, EP size or ZeRO stage (--ranks, and --set of "
        "train.ep_size, train.micro_batch, train.accumulation, train.deepspeed); the global batch stays",
    )
    add(
        "--ranks",
        metavar="N",
        type=int,
        help="ranks to start, if no launcher has (default: one a GPU, else 2; on --resume the run's own)",
    )
    add("--deepspeed_config", metavar="PATH", help="DeepSpeed's JSON; stands for --set train.deepspeed=PATH")
    add("--local_rank", "--local-rank", metavar="N", type=int, help="appended by the deepspeed launcher")
    add(
        "--hostfile",
        metavar="F",
        help="several nodes: start through the deepspeed launcher",
    )
    return parser
