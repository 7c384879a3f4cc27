"""What `counterpoise forecast` says: its tables and verdict as text, as rows of JSON, and as one HTML page.

Behind `experiments/forecast_command.py`, which runs the backtest; beside the plots.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from balancer.backtest_regimes import SCORED_REGIMES
from balancer.backtest_table import Score
from experiments import page
from experiments.forecast_plots import PLOTS

REGIME_WORDS = {
    "jump": "jump (the load jumps between origin and target)",
    "after": "after (within 40 samples of a jump)",
    "quiet": "quiet (settled, changing less than the layer's usual)",
    "moving": "moving (settled, changing more than the layer's usual)",
}
NOTES = (
    "TV: total variation, the share of the copies that sit elsewhere than forecast, mean over layers and "
    "origins. x best: over that of the best single forecaster, chosen in hindsight at each horizon and in "
    "each table. cover: share of the experts whose counted share lies in the band (live: of those that "
    "should get more than 5 copies); width: of the band, in shares. Counting noise alone: the TV that "
    "even the true shares would have."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table: which scores it is over ("all" or "first 40"; "all" or a regime), and its rows."""

    slice: str
    regime: str
    rows: list[Score]

    @property
    def title(self) -> str:
        """What it is over, in words."""
        if self.regime != "all":
            return f"{REGIME_WORDS[self.regime]}: {self.rows[0].num_scores} scores at the first horizon"
        if self.slice == "all":
            return "all origins"
        return self.slice if self.slice.endswith("targets") else f"{self.slice} origins"


def horizons_of(rows: Sequence[Score]) -> list[int]:
    """The horizons of a table, in order."""
    return sorted({row.horizon for row in rows})


def ordered(rows: Sequence[Score]) -> list[str]:
    """The forecasters of a table, the best first: by the geometric mean of their TV over the horizons."""

    def distance(name: str) -> float:
        return sum(math.log(max(row.tv, 1e-12)) for row in rows if row.forecaster == name and row.tv >= 0)

    return sorted(dict.fromkeys(row.forecaster for row in rows), key=distance)


def cells(rows: Sequence[Score], names: Sequence[str], columns: Sequence[str]) -> list[list[str]]:
    """A line of texts for each name: it, then the columns (of `head`) for each horizon."""
    found = {(row.forecaster, row.horizon): row for row in rows}
    show: dict[str, Callable[[Score], str]] = {
        "TV": lambda row: short(row.tv),
        "x best": lambda row: short(row.ratio_to_best_single, 3),
        "cover": lambda row: percent(row.coverage),
        "live": lambda row: percent(row.live_coverage),
        "width": lambda row: short(row.width),
        "rank TV": lambda row: short(row.rank_tv),
    }
    return [[n, *(show[c](found[n, h]) for h in horizons_of(rows) for c in columns)] for n in names]


def head(*, ranks: bool, wide: bool = False) -> list[str]:
    """The columns of one horizon.   wide: with the coverage of live experts."""
    return ["TV", "x best", "cover", *(["live"] if wide else []), "width", *(["rank TV"] if ranks else [])]


def text_table(table: Table, names: Sequence[str], *, ranks: bool = False) -> str:
    """A table for the terminal."""
    columns, horizons = head(ranks=ranks), horizons_of(table.rows)
    wide = max(22, *(len(name) + 1 for name in names))
    group = 8 * len(columns) + 2  # two blanks between the horizons
    above = " " * wide + "".join(f"{f'{h} steps ahead':>{group}}" for h in horizons)
    lines = [table.title, above, f"{'forecaster':<{wide}}" + _spaced(columns * len(horizons), len(columns))]
    lines += [
        f"{name:<{wide}}" + _spaced(line, len(columns)) for name, *line in cells(table.rows, names, columns)
    ]
    floors = {row.horizon: row.noise_floor for row in table.rows}
    noise = "".join(f"{short(floors[h]):>10}" + " " * (group - 10) for h in horizons)
    return "\n".join([*lines, f"{'counting noise alone':<{wide}}{noise}".rstrip(), best_singles(table.rows)])


def best_singles(rows: Sequence[Score]) -> str:
    """Who the best single forecaster is at each horizon, in words."""
    best = {row.horizon: row.best_single or "none" for row in rows}
    return "best single: " + ", ".join(f"{best[h]} at {h}" for h in horizons_of(rows))


def verdicts(rows: Sequence[Score], combinations: Sequence[str], kind: str = "") -> list[str]:
    """A sentence for each horizon: the combination against the best single, or that against persistence.

    kind: says what sort of single forecaster stands in the rows.
    """
    single = f"the best single forecaster {kind}".rstrip()
    sentences = []
    for horizon in horizons_of(rows):
        here = {row.forecaster: row for row in rows if row.horizon == horizon}
        combined = [name for name in combinations if name in here]
        best = next(iter(here.values())).best_single
        if combined and best:
            row = here[combined[0]]
            sentences.append(
                f"{row.forecaster}: {_apart(row.ratio_to_best_single)} {single} ({best}) "
                f"at {horizon} steps{_luck(row)}"
            )
        elif best and best != "persistence" and not math.isnan(here[best].skill):
            sentences.append(
                f"{best}: the best single forecaster at {horizon} steps, "
                f"{_apart(1 - here[best].skill)} persistence"
            )
        elif best:
            sentences.append(f"{best}: the best single forecaster at {horizon} steps")
    return sentences


def json_rows(tables: Sequence[Table], intervals: Mapping[str, str]) -> list[dict[str, Any]]:
    """All rows with slice and kind of interval; NaN as None, as JSON has none."""
    rows = []
    for table in tables:
        for row in table.rows:
            plain = {
                key: None if isinstance(value, float) and math.isnan(value) else value
                for key, value in asdict(row).items()
            }
            rows.append({**plain, "slice": table.slice, "interval": intervals[row.forecaster]})
    return rows


def html_page(
    title: str,
    said: Sequence[str],
    named: Mapping[str, str],
    tables: Sequence[Table],
    pictures: Mapping[str, bytes],
    combinations: Sequence[str],
    *,
    ranks: bool = False,
) -> str:
    """The report.

    said: the verdicts. named: facts of the trace and settings, in words. tables: the first over all origins.
    pictures: PNG by the names of PLOTS. combinations: stressed in the tables.
    """
    parts = [page.bullets(said), page.facts(named), page.words(NOTES, note=True)]
    parts.append(_html_section("Forecasters", tables[:1], combinations, ranks))
    drawn = [page.picture(pictures[name], words) for name, (_, words) in PLOTS.items()]
    parts.append(page.section("Plots", drawn))
    by_regime = [table for table in tables if table.regime in SCORED_REGIMES]
    parts.append(_html_section("By regime", by_regime, combinations, ranks))
    slices = [table for table in tables[1:] if table.regime == "all"]
    if slices:
        parts.append(_html_section("Parts of the trace", slices, combinations, ranks))
    return page.page(title, parts)


def short(value: float, digits: int = 4) -> str:
    """A figure as text, "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share as a percentage, "-" for NaN."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _html_section(
    heading: str, tables: Sequence[Table], combinations: Sequence[str], ranks: bool
) -> page.Html:
    parts = []
    for table in tables:
        if not table.rows[0].num_scores and all(row.num_scores == 0 for row in table.rows):
            parts.append(page.words(f"{table.title}: none", note=True))
            continue
        names, horizons, columns = ordered(table.rows), horizons_of(table.rows), head(ranks=ranks, wide=True)
        floors = {row.horizon: row.noise_floor for row in table.rows}
        lines = cells(table.rows, names, columns)
        lines.append(["counting noise alone"])
        for h in horizons:
            lines[-1] += [short(floors[h]), *[""] * (len(columns) - 1)]
        groups = [("", 1), *((f"{h} steps ahead", len(columns)) for h in horizons)]
        caption = f"{table.title}; {best_singles(table.rows)}"
        strong = [i for i, name in enumerate(names) if name in combinations]
        parts.append(
            page.table(
                ["forecaster", *columns * len(horizons)],
                lines,
                groups=groups,
                strong=strong,
                caption=caption,
            )
        )
    return page.section(heading, parts)


def _spaced(texts: Sequence[str], columns: int) -> str:
    return "".join(f"{text:>{8 if i % columns else 10}}" for i, text in enumerate(texts))


def _apart(ratio: float) -> str:
    if math.isnan(ratio):
        return "as far off as"
    away = 100 * (ratio - 1)
    if abs(away) < 0.05:
        return "level with"
    return f"{abs(away):.1f} % {'below' if away < 0 else 'above'}"


def _luck(row: Score) -> str:
    """Whether the difference is more than luck, by twice its standard error."""
    base = row.tv - row.difference
    if math.isnan(row.difference_se) or not base > 0:
        return " (too few origins to tell it from luck)"
    error = 200 * row.difference_se / base
    verdict = "more than luck" if abs(row.difference) > 2 * row.difference_se else "may be luck"
    return f" (+- {error:.1f} %: {verdict})"
