"""What `counterpoise replay` says: verdict, table and reasons, as text, as JSON, and as one HTML page.

Behind `replay_command.py`, which runs the policies; beside the plots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import page
from experiments.replay_plots import GIB, PLOTS
from experiments.replay_run import OFFLINE, PolicyRun, Replay, figures

Row = Mapping[str, Any]

WORDS = {
    "none": "nothing ever changes",
    "none+split": "nothing ever changes, exact split of every batch",
    "eplb": "greedy replicate-and-pack by the clock, homes free",
    "eplb-strong": "greedy by the clock, ranks renamed, only where it helps by 5 %, homes free",
    "even": "changes that pay, for an even share among replicas",
    "split": "few replicas, exact split of every batch",
    "lplb-ring": "replicas in a ring, exact split",
    "lplb-cube": "replicas in a cube, exact split",
    OFFLINE: "best in hindsight",
}
NOTES = (
    "busy: mean load of a rank over that of the hottest one, in the sum form (layers in series: the share "
    "of the time in which ranks are busy) and in the mean form (mean: over layers, for comparison with "
    "others); early: mean form over the first 20 scored samples, late: over those behind. Every sample is "
    "scored under what was decided on the samples before it. copies: slots that had to receive an expert, "
    "GiB: their weights. time lost: over an even load without replicas to fetch, by the cost model; regret: "
    "time and moves over those of the best in hindsight, which nobody beats that keeps the homes where it "
    "must; - for those who do not. gap: hottest rank above the limit that no placement can get below. "
    "shares: how an expert's rows are shared among its slots, evenly or by the exact split (either: "
    "whichever is faster for a sample). homes free: the policy also moves the experts themselves, which "
    "training with fixed homes cannot do (or pays for in optimizer state, which is not counted here)."
)
# plans whose reasons the page lists, the last ones among them
_REASONS = {"split": 12, "even": 8}
_FEW_REASONS, _LAST = 4, 2


def table_head() -> list[str]:
    """The columns of the table."""
    shares = ["busy %", "mean %", "early %", "late %"]
    rest = ["copies", "GiB", "plans", "plan ms", "lost s", "regret s", "gap %"]
    return ["policy", "shares", "homes", *shares, *rest]


def table_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line of texts for each policy."""
    return [
        [
            row["policy"],
            row["shares"],
            "free" if row["free_slots"] else "fixed",
            *(_bare(row[f"balancedness_{form}"]) for form in ("sum", "mean", "first20", "after20")),
            f"{row['moves']:,}",
            number(row["bytes_moved"] / GIB),
            f"{row['plans']:,}",
            number(row["plan_ms_median"]),
            number(row["time_lost_s"]),
            number(row["regret_s"]),
            _bare(row["gap_to_bound"]),
        ]
        for row in rows
    ]


def text_table(rows: Sequence[Row]) -> str:
    """The table for the terminal."""
    lines = [table_head(), *table_cells(rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))])
        for line in lines
    )


def verdicts(made: Replay, rows: Sequence[Row]) -> list[str]:
    """What was gained, at what cost, and what was left to gain, a sentence each."""
    by_name = {row["policy"]: row for row in rows}
    real = [row for row in rows if not row["sees_future"]]
    best = by_name.get("split") or min(real, key=lambda row: row["time_s"] + row["moves_s"])
    still = [by_name.get("none"), by_name.get("none+split")]
    others = [row for row in real if row not in (best, *still)]
    steps = int(made.stands_W.sum())
    said = [_gain(best, *still)]
    said.append(f"cost: {best['moves']:,} experts copied over {steps:,} steps{_in_gib(best)}")
    if others:
        near = min(others, key=lambda row: row["time_s"] + row["moves_s"])
        slower = near["time_s"] + near["moves_s"] >= best["time_s"] + best["moves_s"]
        place = "next best" if slower else "faster still by the cost model"
        said.append(
            f"{place}, {near['policy']} ({_words(near)}): ranks busy {percent(near['balancedness_sum'])}, "
            f"{near['moves']:,} experts copied{_in_gib(near)}"
        )
    if OFFLINE in by_name:
        said.append(_hindsight(by_name[OFFLINE], best, fixed_homes=made.setup.fixed_homes))
    if made.idle_layers:
        said.append(f"{made.idle_layers:,} times a layer had no load: left out of the means")
    return said


def reasons(run: PolicyRun) -> dict[str, str]:
    """When and how much a policy changed, and why: the first plans, and the last ones."""
    shown, most = list(run.changes), _REASONS.get(run.name, _FEW_REASONS)
    if len(shown) > most:
        shown = [*shown[: most - _LAST], *shown[-_LAST:]]
    return {f"step {one.step}: {one.moves:,} copies, {one.layers:,} layers": one.reason for one in shown}


def json_record(made: Replay, rows: Sequence[Row], named: Mapping[str, str]) -> dict[str, Any]:
    """All that was found, as plain values."""
    setup = made.setup
    return {
        "trace": dict(named),
        "setup": {
            "num_layers": setup.num_layers,
            "num_experts": setup.num_experts,
            "num_ranks": setup.num_ranks,
            "num_slots": setup.num_slots,
            "num_nodes": setup.num_nodes,
            "fixed_homes": setup.fixed_homes,
            "every_steps": setup.every_steps,
        },
        "scored_samples": len(made.steps_W),
        "steps": int(made.stands_W.sum()),
        "idle_layers": made.idle_layers,
        "rows": [dict(row) for row in rows],
        "plans": {
            run.name: [
                {"step": one.step, "moves": one.moves, "layers": one.layers, "reason": one.reason}
                for one in run.changes
            ]
            for run in made.runs
            if not run.sees_future
        },
    }


def html_page(
    title: str, made: Replay, said: Sequence[str], named: Mapping[str, str], pictures: Mapping[str, bytes]
) -> str:
    """The report.   said: the verdicts. named: facts in words. pictures: PNG by the names of PLOTS."""
    rows = [figures(made, run) for run in made.runs]
    first, *others = PLOTS
    strong = [i for i, row in enumerate(rows) if row["policy"] in ("split", "even")]
    table = page.table(table_head(), table_cells(rows), strong=strong)
    drawn = [page.picture(pictures[name], PLOTS[name][1]) for name in others]
    parts = [
        page.bullets(said),
        page.picture(pictures[first], PLOTS[first][1]),
        page.section("Policies", [table, page.words(NOTES, note=True), page.facts(_legend(rows))]),
        page.section("Plots", drawn),
        page.section("Why each plan was made", _reason_tables(made)),
        page.section("What was replayed", [page.facts(named)]),
    ]
    return page.page(title, parts)


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage, "-" for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _bare(share: float | None) -> str:
    """A share in per cent, without the sign."""
    return "-" if share is None else f"{100 * share:.2f}"


def number(value: float | None) -> str:
    """Three figures, "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _legend(rows: Sequence[Row]) -> dict[str, str]:
    return {row["policy"]: _words(row) for row in rows}


def _words(row: Row) -> str:
    return WORDS.get(row["policy"], f"{row['shares']} shares")


def _gain(best: Row, none: Row | None, split: Row | None) -> str:
    """none: nothing changes;  split: the same with the exact split, whose gain is no planner's."""
    text = f"{best['policy']} ({_words(best)}): ranks busy {percent(best['balancedness_sum'])} of the time"
    if none is None or none is best:
        return text
    faster = none["time_s"] / best["time_s"]
    text += f" instead of {percent(none['balancedness_sum'])}; expert layers {faster:.2f} times as fast"
    if split is not None and split is not best:
        alone = none["time_s"] / split["time_s"]
        text += (
            f" ({split['policy']}, the exact split alone: {percent(split['balancedness_sum'])}, "
            f"{alone:.2f} times)"
        )
    return f"{text} by the cost model"


def _hindsight(ideal: Row, best: Row, *, fixed_homes: bool) -> str:
    """What was left to gain; ours is not compared where it moved homes that the optimum had to keep."""
    homes = "homes kept, " if fixed_homes else ""
    text = (
        f"the best that anybody could have done with these placements, {homes}knowing the future: "
        f"{percent(ideal['balancedness_sum'], 1)}"
    )
    if best["regret_s"] is None:
        return f"{text}; {best['policy']} moved homes, so its time is not compared"
    lost = 100 * best["regret_s"] / (ideal["time_s"] + ideal["moves_s"])
    return f"{text}; {best['policy']} takes {lost:.1f} % longer, fetching replicas included"


def _in_gib(row: Row) -> str:
    return f" ({number(row['bytes_moved'] / GIB)} GiB)" if row["moves"] else ""


def _reason_tables(made: Replay) -> list[page.Html]:
    """Ours first: what plans by the clock has one reason only."""
    parts = []
    for run in sorted((run for run in made.runs if run.changes), key=lambda run: run.name not in _REASONS):
        shown = reasons(run)
        more = "" if len(shown) == len(run.changes) else f"; the first {len(shown) - _LAST}, the last {_LAST}"
        parts.append(page.words(f"{run.name}: {len(run.changes):,} plans{more}"))
        parts.append(page.facts(shown))
    return parts or [page.words("no policy changed anything")]
