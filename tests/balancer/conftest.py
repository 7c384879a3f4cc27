"""What the tests of the trace readers share: a writer of each form, made apart from the readers.

trace_writers[name](folder, counts_WLE, steps_W) -> path
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from balancer.trace import TraceWriter

Writer = Callable[[Path, np.ndarray, list[int]], Path]


def _text(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _folder(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    with TraceWriter(folder / "loads", *counts.shape[1:]) as writer:
        for step, table in zip(steps, counts):
            writer.append(step, table)
    return folder / "loads"


def _npz(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    np.savez_compressed(folder / "t.npz", counts=counts, steps=np.array(steps))
    return folder / "t.npz"


def _json(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    record = {"steps": list(steps), "tokens_per_expert": counts.tolist()}
    return _text(folder / "t.json", [json.dumps(record, indent=1)])


def _step_records(counts: np.ndarray, steps: list[int]) -> list[dict]:
    return [{"step": s, "tokens_per_expert": t.tolist()} for s, t in zip(steps, counts)]


def _json_list(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    return _text(folder / "t.json", [json.dumps(_step_records(counts, steps))])


def _json_lines(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    return _text(folder / "t.jsonl", [json.dumps(record) for record in _step_records(counts, steps)])


def _csv(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    lines = [",".join(["step", "layer", *(f"expert_{e}" for e in range(counts.shape[2]))])]
    for step, table in zip(steps, counts):
        lines += [",".join(map(str, [step, layer, *row])) for layer, row in enumerate(table.tolist())]
    return _text(folder / "t.csv", lines)


def _csv_long(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    lines = ["step,layer,expert,count"]
    for (w, layer, expert), count in np.ndenumerate(counts):
        lines.append(f"{steps[w]},{layer},{expert},{count}")
    return _text(folder / "t.csv", lines)


def _exp_counts(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    lines = ["[2026-01-01 10:00:00] [INFO] loss 3.21"]
    for step, table in zip(steps, counts):
        for layer, row in enumerate(table.tolist()):
            lines.append(f"rank 0 step {step} layer {layer} exp_counts: tensor({row}, device='cuda:0')")
    return _text(folder / "t.log", lines)


def _vllm(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    records = [{"iteration": s, "expert_load": t.tolist()} for s, t in zip(steps, counts)]
    return _text(folder / "t.jsonl", [json.dumps(record) for record in records])


def _vllm_layers(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    lines = []
    for step, table in zip(steps, counts):
        for layer, row in reversed(list(enumerate(table.tolist()))):
            lines.append(json.dumps({"step": step, "layer_id": layer, "load": row}))
    return _text(folder / "t.jsonl", lines)


def _slots(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return physical counts [..., L, S] and a map [L, S]: homes, a replica of expert 0, an empty slot."""
    num_layers, num_experts = counts.shape[-2:]
    spare = np.zeros((*counts.shape[:-1], 2), dtype=np.int64)
    spare[..., 0] = counts[..., 0] // 3
    physical = np.concatenate([counts, spare], axis=-1)
    physical[..., 0] -= spare[..., 0]
    return physical, np.tile([*range(num_experts), 0, -1], (num_layers, 1))


def _vllm_physical(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    physical, slot_map = _slots(counts)
    same = {"physical_to_logical_map": slot_map.tolist()}
    records = [{"step": s, "physical_expert_load": t.tolist(), **same} for s, t in zip(steps, physical)]
    return _text(folder / "t.jsonl", [json.dumps(record) for record in records])


def _megatron(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    """Two ranks, one expert a token; rank 0 takes a third of the tokens."""
    lines = []
    for step, table in zip(steps, counts):
        for layer, row in enumerate(table.tolist()):
            for rank, part in enumerate(([n // 3 for n in row], [n - n // 3 for n in row])):
                ids = [[expert] for expert, n in enumerate(part) for _ in range(n)]
                record = {"step": step, "stage": 0, "block": "decoder", "layer": layer, "rank": rank}
                lines.append(json.dumps({**record, "num_tokens": len(ids), "topk": 1, "top_indices": ids}))
    return _text(folder / "t.jsonl", lines)


def _sglang_json(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    return _text(folder / "t.json", [json.dumps({"logical_count": counts.tolist()})])


def _sglang_stat(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    import torch

    dump = {"rank": 0, "logical_count": torch.from_numpy(counts.copy())}
    torch.save({**dump, "average_utilization_rate_over_window": None}, folder / "t.pt")
    return folder / "t.pt"


def _sglang_passes(folder: Path, counts: np.ndarray, steps: list[int]) -> Path:
    import torch

    physical, slot_map = _slots(counts)
    records = []
    for step, table in zip(steps, physical):
        for rank, part in enumerate((table // 2, table - table // 2)):
            record = {"forward_pass_id": step, "rank": rank, "gatherer_key": "primary"}
            record["global_physical_count"] = torch.from_numpy(part)
            records.append({**record, "physical_to_logical_map": torch.from_numpy(slot_map)})
    torch.save({"records": records, "last_physical_to_logical_map": torch.zeros(1, 1)}, folder / "t.pt")
    return folder / "t.pt"


@pytest.fixture(scope="session")
def trace_writers() -> dict[str, Writer]:
    """A writer of every form that `load_trace` reads, by the names of TRACE_WRITERS in the tests."""
    return {
        "folder": _folder,
        "npz": _npz,
        "json": _json,
        "json-list": _json_list,
        "json-lines": _json_lines,
        "csv": _csv,
        "csv-long": _csv_long,
        "exp-counts": _exp_counts,
        "vllm": _vllm,
        "vllm-layers": _vllm_layers,
        "vllm-physical": _vllm_physical,
        "megatron": _megatron,
        "sglang-json": _sglang_json,
        "sglang-pt-stat": _sglang_stat,
        "sglang-pt-passes": _sglang_passes,
    }
