"""The forms in which load traces are read, and how a file's form is told from its ending and first bytes.

Between `balancer/trace.py`, whose `load_trace` calls this, and the readers.

    folder               written by TraceWriter; a run's folder means its loads/     trace_folder.py
    npz                  a zip of arrays                                             trace_npz.py
    sglang-pt            dumps of SGLang's recorder                                  adapters/sglang.py
    sglang-json, json    JSON in one piece; json also one sample a line              trace_json.py
    vllm, megatron       JSON lines                                                  trace_lines.py
    exp-counts, csv      text                                                        trace_text.py
"""

import re
from pathlib import Path

from balancer.adapters.sglang import PATTERN, read_sglang_pt
from balancer.trace_folder import HEADER_NAME
from balancer.trace_json import read_plain_json, read_sglang_json
from balancer.trace_lines import LAYER_NAMES, LOAD_NAMES, STEP_NAMES, read_megatron, read_vllm
from balancer.trace_npz import read_npz
from balancer.trace_parts import Loads
from balancer.trace_text import read_csv, read_exp_counts

FORMATS = ("folder", "npz", "sglang-pt", "sglang-json", "vllm", "megatron", "exp-counts", "csv", "json")
_ENDINGS = {".npz": "npz", ".npy": "npz", ".pt": "sglang-pt", ".pth": "sglang-pt", ".csv": "csv"}
# enough for the names of the fields, which stand before or between the counts of one sample
_HEAD_BYTES = 2**20
_FIELD = re.compile(rb'"([A-Za-z_]{1,40})"\s{0,8}:')


def find_format(place: Path, given: str | None) -> tuple[Path, str]:
    """Return where the trace is (a run's loads/), and its form: the one given, or the one found.

    Raises ValueError for a path that is not there, an unknown form, or a file that looks like none.
    """
    if given is not None and given not in FORMATS:
        raise ValueError(f"format={given!r} is unknown; use one of {', '.join(FORMATS)}")
    if not place.exists():
        raise ValueError(f"{place}: no load trace there; nothing of that name")
    if place.is_dir():
        return _in_folder(place, given)
    if given == "folder":
        raise ValueError(f"{place}: a file; the form folder is a folder with {HEADER_NAME}")
    return place, given or _ENDINGS.get(place.suffix.lower()) or _by_content(place)


def _in_folder(place: Path, given: str | None) -> tuple[Path, str]:
    if given not in (None, "folder", "sglang-pt"):
        raise ValueError(f"{place}: a folder; the form {given} is a file")
    if given == "sglang-pt":
        return place, given
    if not (place / HEADER_NAME).exists():
        if (place / "loads").is_dir():
            return place / "loads", "folder"
        if given is None and any(place.glob(PATTERN)):
            return place, "sglang-pt"
    return place, "folder"


def _by_content(place: Path) -> str:
    with open(place, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:2] == b"PK":
        return "sglang-pt" if b"/data.pkl" in head else "npz"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        found = _json_format({name.decode("ascii") for name in _FIELD.findall(text)})
        if found:
            return found
    if text.startswith(b"step,"):
        return "csv"
    if b"exp_counts" in text:
        return "exp-counts"
    raise ValueError(
        f"{place}: cannot be read as a load trace: its form cannot be told from its ending or beginning; "
        f"say it with format= (--format): one of {', '.join(FORMATS)}"
    )


def _json_format(names: set[str]) -> str | None:
    """Return the form that fields belong to, None for no form."""
    if "top_indices" in names:
        return "megatron"
    if "logical_count" in names:
        return "sglang-json"
    if "tokens_per_expert" in names and not names & set(LAYER_NAMES) and names & {"step", "steps"}:
        return "json"
    if names & {*LOAD_NAMES, "physical_expert_load"} and names & set(STEP_NAMES):
        return "vllm"
    return "sglang-json" if "physical_to_logical_map" in names else None


def read_loads(place: Path, form: str, num_experts: int | None, assume_map_constant: bool) -> Loads:
    """Read a file of one form other than "folder"; an OSError becomes a ValueError with its name."""
    try:
        if form == "sglang-pt":
            return read_sglang_pt(place, assume_map_constant)
        if form == "megatron":
            return read_megatron(place, num_experts)
        simple = {
            "npz": read_npz,
            "sglang-json": read_sglang_json,
            "vllm": read_vllm,
            "exp-counts": read_exp_counts,
            "csv": read_csv,
            "json": read_plain_json,
        }
        return simple[form](place)
    except OSError as error:
        raise ValueError(f"{place}: cannot be read: {error.strerror}") from None
