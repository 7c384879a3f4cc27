"""StepSums: the sums of one step, as columns of one table, so that one reduction carries all of them.

LoadMeter.record -> device[...], host[...] -> stacked -> all-reduce -> columns, arrays
"""

import numpy as np
import torch


class StepSums:
    """The sums of one step, [L, width] float64 by name: those of tensors, and those of figures of the host.

    Figures that the host knows stay there until the reduction: each would cost the device a kernel a batch.
    """

    def __init__(
        self, num_layers: int, on_device: dict[str, int], on_host: dict[str, int], device: torch.device
    ) -> None:
        self._widths = on_device | on_host
        self._device_LX = torch.zeros(num_layers, sum(on_device.values()), dtype=torch.float64, device=device)
        self._host_LX = torch.zeros(num_layers, sum(on_host.values()), dtype=torch.float64)
        self.device = dict(zip(on_device, self._device_LX.split(list(on_device.values()), dim=1)))
        host = self._host_LX.split(list(on_host.values()), dim=1)
        self.host = {name: part.numpy() for name, part in zip(on_host, host)}

    @property
    def size(self) -> int:
        """Numbers in all columns of all layers."""
        return self._device_LX.numel() + self._host_LX.numel()

    def stacked(self, extra_X: torch.Tensor | None) -> torch.Tensor:
        """All columns and the caller's figures as one vector on the device."""
        host_LX = self._host_LX
        if self._device_LX.is_cuda:  # pinned: the copy does not wait for the device
            host_LX = host_LX.pin_memory().to(self._device_LX.device, non_blocking=True)
        parts = [torch.cat([self._device_LX, host_LX], dim=1).reshape(-1)]
        if extra_X is not None:
            parts.append(extra_X.to(self._device_LX))
        return torch.cat(parts)

    def arrays(self, host_X: np.ndarray) -> dict[str, np.ndarray]:
        """The columns [L, width] of such a vector on the host, by name; views."""
        table_LX = host_X[: self.size].reshape(self._device_LX.shape[0], -1)
        return dict(zip(self._widths, np.split(table_LX, np.cumsum([*self._widths.values()])[:-1], axis=1)))

    def columns(self, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns [L, width] of such a vector, by name."""
        table_LX = stacked[: self.size].view(self._device_LX.shape[0], -1)
        return dict(zip(self._widths, table_LX.split(list(self._widths.values()), dim=1)))
