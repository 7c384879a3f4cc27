"""The words of `counterpoise trace info`: lines for a terminal, of the figures of `trace_info.py`."""

import math

import numpy as np

from experiments.trace_info import Info, mean_known

_BARS = " .:-=+*#%@"


def text(info: Info, place: str, form: str) -> list[str]:
    """The lines of `trace info`."""
    meta = {key: value for key, value in info.meta.items() if key != "copies_per_step"}
    lines = [
        f"{place}: load trace ({form})",
        f"samples   {info.samples:,} x {_plural(info.layers, 'layer')} x {_plural(info.experts, 'expert')}",
    ]
    if not info.samples:
        return [*lines, "it holds no sample yet"]
    lines += [f"steps     {info.first_step} to {info.last_step}{_sampling_text(info)}"]
    lines += [f"copies    {_copies_text(info)}"]
    if meta:
        lines += ["meta      " + ", ".join(f"{key}={_short(value)}" for key, value in meta.items())]
    lines += ["", *_table(info)]
    floor = "" if info.violation_floor is None else f" (MaxVio of chance alone: {info.violation_floor:.3f})"
    lines += [
        f"means over layers and samples{floor}; balancedness of {_plural(info.ranks, 'rank')}: mean, sum form"
    ]
    lines += ["", f"entropy   |{sparkline(info.entropy_W)}| 0 to 1, {info.first_step} to {info.last_step}"]
    if info.changes:
        lines += [
            "",
            "biggest changes between samples (total variation: the share of the copies that moved)",
        ]
        lines += [
            f"  {c.total_variation:.3f}  layer {c.layer:<3} steps {c.from_step}-{c.to_step}"
            for c in info.changes
        ]
    return lines


def _sampling_text(info: Info) -> str:
    if info.interval is None:
        return ""
    words = f", every {info.interval}" if info.interval > 1 else ", every step"
    if info.gaps:
        missing = sum(number for _, number in info.gaps)
        where = ", ".join(f"{number} after {step}" for step, number in info.gaps[:3])
        more = ", ..." if len(info.gaps) > 3 else ""
        words += f"; {missing} sample{'s' * (missing > 1)} missing ({where}{more})"
    if info.irregular:
        words += f"; {_plural(info.irregular, 'distance')} between samples irregular"
    return words


def _copies_text(info: Info) -> str:
    least, most = info.copies or (0, 0)
    said = info.meta.get("copies_per_step")
    if least != most:
        words = f"{least:,} to {most:,} a layer and sample: not constant"
        return words + (f", though the meta says {said:,}: counts were lost or taken twice" if said else "")
    if said is not None and said != least:
        return f"{least:,} in every layer of every sample, but the meta says {_short(said)}"
    return f"{least:,} in every layer of every sample: conserved"


def _table(info: Info) -> list[str]:
    head = f"{'phase':<11}{'steps':>17}{'entropy':>9}{'MaxVio':>9}"
    head += f"{'effective':>11}{'dead':>7}{'balancedness':>16}"
    rows = [head]
    for p in info.phases:
        steps = f"{p.first_step} to {p.last_step}" if p.samples > 1 else str(p.first_step)
        balance = f"{_figure(p.mean_balancedness, 3)} {_figure(p.sum_balancedness, 3)}"
        rows.append(
            f"{p.name:<11}{steps:>17}{_figure(p.entropy, 3):>9}{_figure(p.max_violation, 2):>9}"
            f"{_figure(p.effective_experts, 1):>11}{_figure(p.dead_experts, 1):>7}{balance:>16}"
        )
    return rows


def sparkline(values: list[float | None], width: int = 60) -> str:
    """A curve in a line of characters, darker for more: means of up to `width` pieces, "?" where unknown."""
    if not values:
        return ""
    cells = []
    known = np.array([np.nan if v is None else v for v in values])
    for part in np.array_split(known, min(width, len(values))):
        mean = mean_known(part)
        cells.append("?" if mean is None else _BARS[min(len(_BARS) - 1, math.floor(mean * len(_BARS)))])
    return "".join(cells)


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _short(value: object) -> str:
    written = str(value)
    return written if len(written) <= 40 else written[:37] + "..."
