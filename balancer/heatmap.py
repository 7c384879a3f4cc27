"""Heat maps as images for the dashboard: the expert load, layers x experts; the traffic, ranks x ranks.

Beside `balancer/dashboard.py`, which writes it to TensorBoard: one picture instead of a curve for every
expert of every layer. matplotlib (colours and text) is imported on use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.metrics import checked_load, load_shares, mean_balancedness, rank_load, sum_balancedness

# Heat map, in pixels: bounds of a cell, size that the cells together aim at, margins (left, right, top,
# bottom).
_CELL_W, _CELL_H, _AIM_W, _AIM_H = (2, 48), (4, 44), 1024, 480
_LEAST_W, _LEAST_H = 320, 140
_MARGINS = (58, 96, 34, 50)
_DPI = 100
# The colours span this many doublings to each side of the fair share: 1/8 to 8 times.
_DOUBLINGS = 3
_SCALE_LABELS = (">= 8", "4", "2", "1", "1/2", "1/4", "<= 1/8")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """What stands beside the rows, under the columns and under the scale of colours."""

    row: str
    column: str
    scale: str


def load_heatmap(tokens_per_expert_LE: ArrayLike, *, num_ranks: int | None = None) -> NDArray[np.uint8]:
    """Draw the load of all layers and experts as an image.

    tokens_per_expert_LE: [L, E] copies. num_ranks: P, contiguous homes, to give the balancedness of the ranks
    in the title; None gives that of the experts. Returns [H, W, 3] uint8: a row a layer (0 on top), a column
    an expert, the colour (cividis, on a scale of doublings that is the same at every step) the load over the
    layer's fair share, from 1/8 and less to 8 and more; a layer without load is white. Raises ValueError for
    a bad load or shape, or P that does not divide E.
    """
    load_LE = checked_load(tokens_per_expert_LE, "tokens_per_expert_LE")
    if load_LE.ndim != 2 or load_LE.shape[0] == 0:
        raise ValueError(
            f"tokens_per_expert_LE has shape {load_LE.shape}, expected [L, E] with one layer or more"
        )
    relative_LE = load_shares(load_LE) * load_LE.shape[1]
    doublings_LE = np.log2(np.maximum(relative_LE, 2.0 ** -(_DOUBLINGS + 1)))
    title = _heatmap_title(tokens_per_expert_LE, load_LE, num_ranks)
    return _draw_heatmap(doublings_LE, title, _Axes(row="layer", column="expert", scale="load / fair share"))


def traffic_heatmap(bytes_PP: ArrayLike) -> NDArray[np.uint8]:
    """Draw what the ranks send to one another as an image.

    bytes_PP: [P, P] bytes a step from rank (row) to rank (column). Returns [H, W, 3] uint8: the colour
    (cividis, on a scale of doublings that is the same at every step) is the amount over the mean of all pairs
    of two ranks, from 1/8 and less to 8 and more; the diagonal, and all of it where nothing is sent, is
    white. Raises ValueError for another shape, and for what is negative or not finite.
    """
    traffic_PP = np.asarray(bytes_PP, dtype=np.float64)
    if traffic_PP.ndim != 2 or traffic_PP.shape[0] != traffic_PP.shape[1] or traffic_PP.size == 0:
        raise ValueError(f"bytes_PP has shape {traffic_PP.shape}, expected [P, P] with one rank or more")
    if not np.isfinite(traffic_PP).all() or (traffic_PP < 0).any():
        raise ValueError("bytes_PP must be finite and 0 or more: bytes from rank to rank")
    pair_PP = ~np.eye(traffic_PP.shape[0], dtype=bool)
    mean = traffic_PP[pair_PP].mean() if pair_PP.any() else 0.0
    relative_PP = np.full(traffic_PP.shape, np.nan)
    if mean > 0:
        relative_PP[pair_PP] = np.maximum(traffic_PP[pair_PP] / mean, 2.0 ** -(_DOUBLINGS + 1))
    largest, total = traffic_PP.max() / 2**20, traffic_PP.sum() / 2**20
    title = f"sent a step: {total:.3g} MiB in all, {largest:.3g} MiB the largest pair"
    axes = _Axes(row="from", column="to rank", scale="bytes / mean pair")
    return _draw_heatmap(np.log2(relative_PP), title, axes)


def _heatmap_title(counts_LE: ArrayLike, load_LE: NDArray[np.float64], num_ranks: int | None) -> str:
    over = load_LE if num_ranks is None else rank_load(counts_LE, num_ranks)
    mean, total = float(mean_balancedness(over)), float(sum_balancedness(over))
    who = "experts" if num_ranks is None else f"{num_ranks} ranks"
    idle = int((load_LE.sum(axis=-1) == 0).sum())
    return f"balancedness of {who}: mean {mean:.3f}, sum {total:.3f}" + (
        f"; {idle} without load" if idle else ""
    )


def _draw_heatmap(doublings_LE: NDArray[np.float64], title: str, axes: _Axes) -> NDArray[np.uint8]:
    """Paint the cells as pixels and let matplotlib set the text only: its axes take 100 ms, this a third."""
    num_layers, num_experts = doublings_LE.shape
    # whole pixels a cell: else some rows and columns look thicker than others
    cell_w = max(_fit(_AIM_W // num_experts, _CELL_W), -(-_LEAST_W // num_experts))
    cell_h = max(_fit(_AIM_H // num_layers, _CELL_H), -(-_LEAST_H // num_layers))
    left, right, top, bottom = _MARGINS
    height, width = num_layers * cell_h, num_experts * cell_w
    ramp = np.linspace(_DOUBLINGS, -_DOUBLINGS, height)[:, None]
    scale_x = left + width + 16
    texts = [(left, top - 12, title, "left"), (left + width // 2, top + height + 34, axes.column, "center")]
    texts += [
        (left + (2 * e + 1) * cell_w // 2, top + height + 14, str(e), "center") for e in _ticks(num_experts)
    ]
    texts += [(left - 8, top + (2 * k + 1) * cell_h // 2, str(k), "right") for k in _ticks(num_layers)]
    texts += [(left - 8, top - 12, axes.row, "right")]
    for i, label in enumerate(_SCALE_LABELS):
        texts.append((scale_x + 20, top + i * (height - 1) // (len(_SCALE_LABELS) - 1), label, "left"))
    texts.append((scale_x + 7, top + height + 34, axes.scale, "center"))
    image = _set_text(texts, top + height + bottom, left + width + right)
    image[top : top + height, left : left + width] = (
        _colours(doublings_LE).repeat(cell_h, axis=0).repeat(cell_w, axis=1)
    )
    image[top : top + height, scale_x : scale_x + 14] = _colours(ramp).repeat(14, axis=1)
    return image


def _set_text(texts: Sequence[tuple[int, int, str, str]], height: int, width: int) -> NDArray[np.uint8]:
    """Return a white [height, width, 3] page with texts: (x, y of its middle, text, horizontal alignment)."""
    # figure and canvas by hand: pyplot would keep every figure and might open a window
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    canvas: Any = FigureCanvasAgg(figure)
    for x, y, text, align in texts:
        figure.text(x / width, 1 - y / height, text, ha=align, va="center", fontsize=9)
    canvas.draw()
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3].copy()


def _colours(doublings_HW: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the colour of each cell, [H, W, 3]; NaN is white."""
    from matplotlib import colormaps

    table: Any = colormaps["cividis"].with_extremes(bad="white")
    level_HW = (doublings_HW + _DOUBLINGS) / (2 * _DOUBLINGS)
    rgba = table(np.ma.masked_invalid(np.clip(level_HW, 0.0, 1.0)), bytes=True)
    return np.asarray(rgba, dtype=np.uint8)[..., :3]


def _fit(size: int, bounds: tuple[int, int]) -> int:
    return min(max(size, bounds[0]), bounds[1])


def _ticks(num: int) -> range:
    """Return up to 16 places at a round distance, from 0 on."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, num) if num <= 16 * step or step >= num)
    return range(0, num, step)
