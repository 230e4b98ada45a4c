"""One batch: token ids through the model, and what each tier keeps of every site into the tiers' buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from anchorage.errors import CaptureError
from anchorage.reduction import reduce_rows
from anchorage.store.format import ShardBuffer
from anchorage.trunk import Site, SiteReader, Trunk, find_sites, probe_sites, trimmed


class Capturer:
    """A loaded model and the sites to be read from it; fills buffers, one forward pass a batch.

    Args:
        trunk: the model without its head.
        names: site names of all tiers.
        device: where the model lies.
        overlap: on a GPU, let copies to the host run beside the forward pass; buffers must then be pinned.
    """

    def __init__(self, trunk: Trunk, names: Sequence[str], device: str, *, overlap: bool = False) -> None:
        self.trunk, self.device = trunk, device
        self._copies = torch.cuda.Stream(device) if overlap and device.startswith("cuda") else None
        self.sites, self.widths = probe_sites(trunk, find_sites(trunk, names), device)
        self._readers: dict[frozenset[str], SiteReader] = {}

    @property
    def overlaps(self) -> bool:
        """Whether copies run beside the forward pass, into buffers that must be pinned."""
        return self._copies is not None

    def fill(
        self,
        tokens: np.ndarray,
        targets: Mapping[str, tuple[ShardBuffer, slice]],
        first_row: int,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Run one batch and put what each tier keeps of it into the tiers' buffers, which hold it at return.

        Args:
            tokens: token ids ``[rows, seq_len]``.
            targets: by tier, its buffer and the buffer's rows to fill: the first ones of the batch.
            first_row: global number of the batch's first row, for messages.
            lengths: real tokens of each row where rows are padded.

        Raises:
            CaptureError: a value does not fit the storage dtype, or the model itself gives inf or NaN.
        """

        for buffer, rows in targets.values():
            buffer.put_tokens(tokens[: rows.stop - rows.start], rows.start, lengths)

        loads: list[torch.Tensor] = []

        def take(site: Site, value: torch.Tensor) -> None:
            for buffer, rows in targets.values():
                if site.name in buffer.shape.widths:
                    n_rows, shape = rows.stop - rows.start, buffer.shape
                    kept = reduce_rows(value[:n_rows], shape.reduce, None if lengths is None else lengths[:n_rows])
                    stored = buffer.rows_of(site.name, rows)
                    if self._copies is not None:
                        loads.append(_copy_beside(kept, stored, self._copies))
                    else:
                        stored.copy_(kept)
                        _check_fits(kept, stored, site.name, first_row, lengths if shape.ragged else None)

        wanted = frozenset(site for buffer, _ in targets.values() for site in buffer.shape.widths)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        sites = [site for site in self.sites if site.name in wanted]
        # Nothing past the deepest wanted site is computed; the values of the others do not change by a bit.
        with trimmed(self.trunk, max(site.depth for site in sites)):
            if wanted not in self._readers:
                self._readers[wanted] = SiteReader(self.trunk, sites)
            reader = self._readers[wanted]
            reader.read(ids, take, **({} if lengths is None else reader.padding(ids, lengths)))
        if self._copies is not None:
            self._copies.record_event().synchronize()  # until here a buffer may hold anything
            if not (torch.stack(loads) <= 1).all():
                self._fill_again(tokens, targets, first_row, lengths)

    def _fill_again(
        self,
        tokens: np.ndarray,
        targets: Mapping[str, tuple[ShardBuffer, slice]],
        first_row: int,
        lengths: Sequence[int] | None,
    ) -> None:
        """The same with every copy waited for: it names the site and row of a value that does not fit."""
        copies, self._copies = self._copies, None
        try:
            self.fill(tokens, targets, first_row, lengths)
        finally:
            self._copies = copies


def _copy_beside(kept: torch.Tensor, stored: torch.Tensor, copies: torch.cuda.Stream) -> torch.Tensor:
    """Queue a copy to pinned memory on a stream of its own, and go on with the forward pass.

    Returns:
        The largest absolute value over the storage dtype's largest, a scalar on the device; NaN where there is one.
    """
    low, high = torch.aminmax(kept)
    # Cast into a tensor of our own: the model may change its own in place before the copy has begun.
    cast = kept.to(stored.dtype, copy=True)
    copies.wait_stream(torch.cuda.current_stream(kept.device))
    with torch.cuda.stream(copies):
        stored.copy_(cast, non_blocking=True)
    cast.record_stream(copies)  # its memory is not to be given away while it is being copied
    return torch.maximum(-low, high).float() / torch.finfo(stored.dtype).max


def _check_fits(
    value: torch.Tensor, stored: torch.Tensor, site: str, first_row: int, lengths: Sequence[int] | None = None
) -> None:
    """Refuse a value that is not finite, or that the storage dtype turned into infinity.

    With ``lengths``, the values are ``[tokens, width]``, row after row.
    """
    low, high = torch.aminmax(value)
    limit = torch.finfo(stored.dtype).max
    if -low.item() <= limit and high.item() <= limit:  # false for NaN too
        return
    bad = ~torch.isfinite(stored).flatten(1).all(dim=1)
    if not bad.any():  # rounded down to the largest finite value: within half a unit in the last place
        return
    index = int(bad.nonzero()[0])
    row, dtype = value[index].float(), str(stored.dtype).removeprefix("torch.")
    if lengths is not None:
        index = int(np.searchsorted(np.cumsum(lengths), index, side="right"))
    where = f"site {site}, row {first_row + index}"
    if not torch.isfinite(row).all():
        raise CaptureError(
            f"{where}: the model itself gives inf or NaN; nothing of this shard is stored. Check the model."
        )
    raise CaptureError(
        f"{where}: maximum {row.abs().max().item():.6g} is beyond {dtype}'s {limit:.6g}; none of this shard is stored. "
        "Set capture.storage_dtype to bfloat16 or float32."
    )
