"""Bench table: the rows of `bench layer` as text, in the terminal and as Markdown."""

from typing import Any

Row = dict[str, Any]
# what a table's times are over, in words, and who stands in it
TABLES = (
    (
        "floor",
        "the floor's",
        ("counterpoise", "ds_native", "ds_autoep", "hf_eager", "hf_grouped", "observed"),
    ),
    (
        "balanced",
        "those of balanced routing",
        ("counterpoise", "replicas", "resident", "ds_native", "ds_autoep"),
    ),
    ("counterpoise", "those of plain dispatch", ("dedup",)),
)


def print_case(rows: list[Row]) -> None:
    """One block of figures."""
    found = {(row["contender"], row["metric"]): row["value"] for row in rows}
    for row in (r for r in rows if r["metric"] == "step_ms"):
        name = row["contender"]
        if row["value"] is None:
            print(f"  {name:<16} {row['why']}")
            continue
        base = next((base for base in ("floor", "balanced") if row[f"ratio_to_{base}"]), None)
        over = f"{row[f'ratio_to_{base}']:5.2f} of {base}" if base else ""
        peer = f"{row['ratio_to_best_peer']:5.2f} of the best other" if row["ratio_to_best_peer"] else ""
        mib = f"{found[name, 'peak_mib']:7.1f} MiB, sends {found[name, 'sent_mib']:7.1f}"
        if (name, "formula_mib") in found:
            mib += f" (formula {found[name, 'formula_mib']:.1f})"
        print(f"  {name:<16} {row['value']:8.1f} ms {over:>16} {peer:>23}  {mib}")


def markdown(rows: list[Row]) -> str:
    """The tables: a line for every case, times over those of the table's base, MiB in brackets.

    MiB: peak memory where the floor is the base, else what all ranks send in a step.
    """
    tables = []
    for base, words, names in TABLES:
        metric = "peak_mib" if base == "floor" else "sent_mib"
        cases = _cases(rows, base)
        shown = [name for name in names if any(r["contender"] == name and r["case"] in cases for r in rows)]
        if cases and shown:
            head = f"| case (times over {words}) | {base} ms | " + " | ".join(shown) + " |"
            lines = [head, "|---" * (len(shown) + 2) + "|"]
            tables.append(
                "\n".join(lines + [_line(rows, case, base, shown, metric) for case in cases]) + "\n"
            )
    return "\n".join(tables)


def _cases(rows: list[Row], base: str) -> list[str]:
    """Cases whose times are over the base's: of the bases that ran in a case, the first of TABLES."""
    ran: dict[str, set[str]] = {}
    for row in rows:
        ran.setdefault(row["case"], set()).add(row["contender"])
    bases = [name for name, _, _ in TABLES]
    return [case for case, names in ran.items() if next((b for b in bases if b in names), None) == base]


def _line(rows: list[Row], case: str, base: str, names: list[str], metric: str) -> str:
    found = {(row["contender"], row["metric"]): row for row in rows if row["case"] == case}
    base_ms = found[base, "step_ms"]["value"]
    cells = [case, "" if base_ms is None else f"{base_ms:.0f}"]
    for name in names:
        step, mib = found.get((name, "step_ms")), found.get((name, metric))
        if step is None:
            cells.append("")
        elif mib is None:
            cells.append(step["why"].split(":")[0])
        else:
            ratio = step.get(f"ratio_to_{base}") or (step["value"] / base_ms if base_ms else 0)
            cells.append(f"{ratio:.2f} ({mib['value']:.0f})")
    return "| " + " | ".join(cells) + " |"
