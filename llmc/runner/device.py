"""A runner's interface to its device: upload words, download results, and capture graphs.

The host never waits for the device here except in `Download.wait`. On a GPU, copies go through
pinned memory and are ordered by the stream; on CPU there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmc.runner.graphs import CudaGraphs, GraphBackend
from llmc.runner.rows import Words


class Download(Protocol):
    """Tensors being copied to the host."""

    def wait(self) -> list[Tensor]: ...


class Device(Protocol):
    """The device of a runner. `graphs` is None if it cannot capture graphs."""

    graphs: GraphBackend | None

    def upload(self, words: Words, home: Tensor | None = None) -> Tensor:
        """-> int32 words on the device, for the step that is being launched.

        They are in `home` [W] int32, on the device, if it is given and they fit. Steps launched
        before this one have read it by the time that it is overwritten.
        """

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start copying tensors to the host; steps launched later may overwrite the originals."""


class _Here:
    """Results that are already on the host."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors


class HostDevice:
    """The CPU: launching is synchronous."""

    def __init__(self, graphs: GraphBackend | None = None) -> None:
        self.graphs = graphs

    def upload(self, words: Words, home: Tensor | None = None) -> Tensor:
        here = torch.from_numpy(words)
        if home is None or words.size > home.numel():
            return here
        return home[: words.size].copy_(here)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _Here([tensor.clone() for tensor in tensors])


class _Event:
    """Pinned copies and the event recorded after them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Tensor]:
        self._event.synchronize()
        return self._tensors


class CudaDevice:
    """One GPU and its current stream.

    Uploads use a ring of pinned buffers. It has one more than the maximum of steps in flight, so
    that the next buffer is always free without waiting.
    """

    def __init__(self, device: torch.device, *, max_in_flight: int) -> None:
        self.graphs: GraphBackend | None = CudaGraphs()
        self._device = device
        self._ring: list[Tensor] = [torch.empty(0)] * (max_in_flight + 1)
        self._used: list[torch.cuda.Event | None] = [None] * len(self._ring)
        self._next = 0

    def upload(self, words: Words, home: Tensor | None = None) -> Tensor:
        i = self._next
        self._next = (i + 1) % len(self._ring)
        used = self._used[i]
        if used is not None:
            used.synchronize()  # already done, unless steps are submitted without reading results
        if self._ring[i].numel() < words.size:
            self._ring[i] = torch.empty(2 * words.size, dtype=torch.int32, pin_memory=True)
        pinned = self._ring[i][: words.size]
        pinned.numpy()[:] = words
        if home is None or words.size > home.numel():
            sent = pinned.to(self._device, non_blocking=True)
        else:
            sent = home[: words.size].copy_(pinned, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._used[i] = done
        return sent

    def download(self, tensors: Sequence[Tensor]) -> Download:
        copies = []
        for tensor in tensors:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(pinned.copy_(tensor, non_blocking=True))
        return _Event(copies)


def open_device(device: torch.device, *, max_in_flight: int) -> Device:
    if device.type == "cuda":
        return CudaDevice(device, max_in_flight=max_in_flight)
    return HostDevice()
