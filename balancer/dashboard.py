"""TensorBoard views of a run: scalars, text, the layout of the custom scalars page, heat maps of the load.

Last in the flow: it shows what metrics.py measured and decides nothing. It speaks to TensorBoard through
tensorboard's own event writer and protos, which need no torch; tensorboard, matplotlib and pillow are
imported on use. Many layers and experts go into heat maps and summaries: a scalar for each would swamp the
page and the disk.
"""

# tensorboard has no stubs and builds its protos at run time
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import io
import operator
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from balancer.heatmap import load_heatmap
from balancer.jsonl import JsonlSink, read_jsonl

__all__ = ["Dashboard", "JsonlSink", "load_heatmap", "read_jsonl", "training_layout"]

# category -> chart -> regular expressions of the tags that it draws
Layout = Mapping[str, Mapping[str, Sequence[str]]]

_PHASES = (
    "data", "route", "counts", "dispatch", "experts", "combine", "forward", "backward", "optimizer",
    "control", "step",
)  # fmt: skip
_FLUSH_EVERY_S = 10
_EVENTS = re.compile(r"tfevents\.(\d+)\.")


class Dashboard:
    """Writes one run's TensorBoard events into a folder.

    log_dir: made where missing. purge_step: None for a new run, which refuses a folder that holds events
    already; on resume the first step that is written again: TensorBoard drops what it has of that step and
    later ones. Tags sort as text: the caller pads numbers with zeros. Events reach the disk every few
    seconds, on `flush` and on `close`; use it as a context manager. Raises ValueError for events in the way
    or a negative step.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(log_dir)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: a file is in the way; choose another folder")
        if purge_step is None and any(folder.glob("*tfevents*")):
            raise ValueError(
                f"{folder}: holds events of a run already; choose another folder, or continue it with "
                "purge_step=STEP"
            )
        start = 0 if purge_step is None else _checked_step(purge_step, "purge_step")
        if purge_step is not None and folder.is_dir():
            _wait_for_later_name(folder)
        self._writer: Any = EventFileWriter(os.fspath(folder), flush_secs=_FLUSH_EVERY_S)
        # The first START of a folder opens the run and each later one means "restarted at this step". So a
        # new run writes one too: without it TensorBoard would take the first restart for the opening and
        # purge nothing.
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=start, session_log=session))

    def scalars(self, step: SupportsIndex, values: Mapping[str, SupportsFloat]) -> None:
        """Write scalars of one step, all in one event.

        step: 0 or more. values: tag -> number (NaN shows as a mark). Raises ValueError for a bad step, an
        empty tag or a value that is no number.
        """
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary()
        for tag, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"scalar {tag!r} is {value!r}, expected a number") from None
            summary.value.add(tag=_checked_tag(tag), simple_value=number)
        self._add(step, summary)

    def image(self, step: SupportsIndex, tag: str, rgb_HWC: NDArray[np.uint8]) -> None:
        """Write an image. rgb_HWC: [H, W, 3] uint8. Raises ValueError for another type or shape."""
        from PIL import Image
        from tensorboard.compat.proto import summary_pb2

        if rgb_HWC.dtype != np.uint8 or rgb_HWC.ndim != 3 or rgb_HWC.shape[2] != 3 or rgb_HWC.size == 0:
            raise ValueError(
                f"image {tag!r} is {rgb_HWC.dtype} {rgb_HWC.shape}, expected uint8 [height, width, 3]"
            )
        png = io.BytesIO()
        Image.fromarray(rgb_HWC).save(png, format="PNG")
        height, width, _ = rgb_HWC.shape
        image = summary_pb2.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=png.getvalue()
        )
        summary = summary_pb2.Summary()
        summary.value.add(tag=_checked_tag(tag), image=image)
        self._add(step, summary)

    def text(self, step: SupportsIndex, tag: str, markdown: str) -> None:
        """Write a text, shown as Markdown. Raises ValueError for a bad step or an empty tag."""
        from tensorboard.plugins.text import metadata

        self._add_string(
            step, _checked_tag(tag), markdown.encode(), metadata.create_summary_metadata(tag, "")
        )

    def layout(self, layout: Layout) -> None:
        """Write the layout of the custom scalars page, such as `training_layout()`.

        layout: category -> chart -> regular expressions; a chart draws the tags that match one of them. Write
        it once, at the start. Raises ValueError for a regular expression that is none.
        """
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        record = layout_pb2.Layout()
        for category, charts in layout.items():
            group = record.category.add(title=category)
            for title, patterns in charts.items():
                content = layout_pb2.MultilineChartContent(tag=[_checked_pattern(p, title) for p in patterns])
                group.chart.add(title=title, multiline=content)
        self._add_string(
            0, metadata.CONFIG_SUMMARY_TAG, record.SerializeToString(), metadata.create_summary_metadata()
        )

    def flush(self) -> None:
        """Bring all events to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_string(self, step: SupportsIndex, tag: str, text: bytes, metadata: Any) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        scalar = tensor_shape_pb2.TensorShapeProto()
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text], tensor_shape=scalar)
        summary = summary_pb2.Summary()
        summary.value.add(tag=tag, tensor=tensor, metadata=metadata)
        self._add(step, summary)

    def _add(self, step: SupportsIndex, summary: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        number = _checked_step(step, "step")
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=number, summary=summary))


def training_layout() -> dict[str, dict[str, list[str]]]:
    """Return the custom scalars layout of a training run: category -> chart -> regular expressions of tags.

    Balance: balance/{balancedness_mean,balancedness_sum,max_violation,entropy,dead_experts},
    balance/layer_NN. Control: control/..., of the loops that act. Collapse: collapse/..., of the monitor;
    both are means and the worst layer. Loss: loss/{total,ce,balance,z}, bpb/valid/DOMAIN,
    optim/{lr,grad_norm}. Speed: time_ms/PHASE, speed/tokens_per_s, comm/PHASE_mib.
    """
    return {
        "Balance": {
            "balancedness (1 = even)": ["^balance/balancedness_(mean|sum)$"],
            "balancedness of each layer": ["^balance/layer_[0-9]+$"],
            "max violation (0 = even)": ["^balance/max_violation$"],
            "normalised entropy (1 = even)": ["^balance/entropy$"],
            "dead experts": ["^balance/dead_experts$"],
        },
        "Control": {
            "balance loss, coefficient": ["^control/balance_loss_(mean|most)$"],
            "bias gain, reinforcement": ["^control/(gain_mean|reinforcement_most)$"],
            "gain / reinforcement (over 1 = holds)": ["^control/gain_margin_least$"],
            "largest bias": ["^control/bias_largest$"],
            "share of biases at their limit": ["^control/bias_saturation_most$"],
            "routers' learning rate, factor": ["^control/router_lr_factor$"],
        },
        "Collapse": {
            "worst layer (3 = collapsing, 4 = collapsed)": ["^collapse/state_worst$"],
            "layers that collapse": ["^collapse/layers_collapsing$"],
            "least entropy (1 = even)": ["^collapse/entropy_least$"],
            "least effective experts": ["^collapse/effective_experts_least$"],
            "most dead experts": ["^collapse/dead_experts_most$"],
            "largest share": ["^collapse/max_share_most$"],
            "violation over its floor": ["^collapse/excess_(mean|most)$"],
            "chart over its limit (1 = sign)": ["^collapse/slow_chart_most$"],
            "growth of the unevenness": ["^collapse/growth_most$"],
            "autocorrelation": ["^collapse/autocorrelation_most$"],
            "dispersion of the counts (1 = chance)": ["^collapse/dispersion_mean$"],
            "changes of domain": ["^collapse/switches_mean$"],
            "tokens near a choice, over before": ["^collapse/swap_density_least$"],
            "logits over before, ln": ["^collapse/logit_rise_most$"],
            "confidence": ["^collapse/confidence_mean$"],
        },
        "Loss": {
            "loss": ["^loss/(total|ce)$"],
            "balance loss (1 = even)": ["^loss/balance$"],
            "router z-loss": ["^loss/z$"],
            "validation, bits per byte": ["^bpb/valid/.+$"],
            "learning rate": ["^optim/lr$"],
            "gradient norm": ["^optim/grad_norm$"],
        },
        "Speed": {
            "tokens per second": ["^speed/tokens_per_s$"],
            "time per phase, ms": [f"^time_ms/({'|'.join(_PHASES)})$"],
            "sent per phase, MiB a step": ["^comm/[a-z]+_mib$"],
        },
    }


def _wait_for_later_name(folder: Path) -> None:
    """Wait until a new event file sorts after those there: TensorBoard reads files in the order of their
    names, which carry the time in whole seconds."""
    newest = max((name.group(1) for name in map(_EVENTS.search, os.listdir(folder)) if name), default="0")
    patience_s = time.monotonic() + 2.0  # a clock that was set back is no reason to wait for it
    while int(time.time()) <= int(newest) and time.monotonic() < patience_s:
        time.sleep(0.02)


def _checked_step(step: SupportsIndex, name: str) -> int:
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"{name}={number} must be 0 or more")
    return number


def _checked_tag(tag: str) -> str:
    if not tag.strip():
        raise ValueError(f"tag {tag!r} is empty; name it group/figure")
    return tag


def _checked_pattern(pattern: str, chart: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"chart {chart!r}: {pattern!r} is no regular expression ({error})") from None
    return pattern
