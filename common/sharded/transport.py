"""Moves tensors around the ring of a group's ranks, while the GPU computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from ..errors import UsageError
from ..ring_lanes import MOST_BLOCKS, choose_blocks
from .agreement import PeerError, agreement_of, connecting, first_line


@dataclass(frozen=True)
class Lane:
    """A way around the ring of ranks, whose transfers occupy so many SMs of the GPU.

    turn: 1, to the next rank, or -1, to the previous one.
    """

    group_ref: ref[dist.ProcessGroup]
    turn: int
    to_rank: int
    from_rank: int
    sms: int
    explaining: Callable[[], AbstractContextManager]

    def pass_on(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], None]:
        """Sends contiguous tensors to one neighbour, and fills others from the other one.

        Starts after what the current stream has been given so far. The function that it returns
        makes that stream wait for the end (and on a CPU the caller).
        """
        group = self.group_ref()
        if group is None:
            raise PeerError("the process group has been destroyed")
        operations = [dist.P2POp(dist.isend, t, self.to_rank, group) for t in sent]
        operations += [dist.P2POp(dist.irecv, t, self.from_rank, group) for t in received]
        with self.explaining():
            works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            with self.explaining():
                for work in works:
                    work.wait()

        return wait


class Transport:
    """Moves tensors between the ranks of a group. Making and calling it is collective."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        _require_backend(group, device_type)
        self.rank, self.size = group.rank(), group.size()
        self.agreement = agreement_of(group)
        self._group, self._is_nccl = ref(group), device_type == "cuda"
        self._groups = {0: self._group}  # by the most blocks of their communicators; 0: as given

    def lane(self, turn: int, messages: int, message_bytes: int, flops: float) -> Lane:
        """One on which the messages travel in the time of a computation, on as few SMs as do it."""
        if not self._is_nccl:
            return self.lane_of(turn, 0, 0)
        return self.lane_of(turn, *choose_blocks(messages, message_bytes, flops, self.size))

    def lane_of(self, turn: int, most_blocks: int, sms: int) -> Lane:
        """One whose communicator has at most so many thread blocks; a message uses sms of them."""
        if most_blocks not in self._groups:
            self._groups[most_blocks] = self._narrow_group(most_blocks)
        group = self._groups[most_blocks]
        if most_blocks and group is self._group:
            sms = MOST_BLOCKS[-1]
        to_rank, from_rank = (
            dist.get_global_rank(self._group(), (self.rank + i) % self.size) for i in (turn, -turn)
        )
        return Lane(group, turn, to_rank, from_rank, sms, self._explaining)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends each rank its part; what they have sent to this one has these shapes."""
        sent = torch.cat([part.reshape(-1) for part in parts])
        lengths = [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(lengths))
        with self._explaining():
            dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=lengths,
                input_split_sizes=[part.numel() for part in parts],
                group=self._group(),
            )
        return [t.view(*shape) for t, shape in zip(received.split(lengths), shapes, strict=True)]

    def _narrow_group(self, most_blocks: int) -> ref[dist.ProcessGroup]:
        """The same ranks, with a communicator of so many thread blocks; or the group as it is.

        Without the ranks outside of it, torch names a new group after how many a rank is in, and
        ranks that are in unequal numbers of groups would never find each other. And where the ranks
        are bound to devices, torch splits it off the communicator of all ranks, which all would
        have to take part in.
        """
        group = self._group()
        is_bound = dist.group.WORLD.bound_device_id is not None
        if is_bound and group.size() < dist.get_world_size():
            return self._group
        counts = self.agreement.gather({"groups": len(_world.pg_names)})
        if any(theirs != counts[0] for theirs in counts):
            return self._group
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.agreement.timeout
        options.config.min_ctas = options.config.max_ctas = most_blocks
        # Blocks of a cluster lie close together on the GPU, and the SMs that are free may not.
        options.config.cga_cluster_size = 0
        with connecting(group):
            narrow = dist.new_group(
                dist.get_process_group_ranks(group),
                timeout=self.agreement.timeout,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=True,
            )
        return ref(narrow)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:  # of this rank
            raise
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} has lost another rank, or waited for it for "
                f"{self.agreement.timeout.total_seconds():g} s: {first_line(error)}"
            ) from error


_transports: WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]] = WeakKeyDictionary()


def transport_of(group: dist.ProcessGroup, device_type: str) -> Transport:
    """The group's; the first call is collective."""
    by_device = _transports.setdefault(group, {})
    if device_type not in by_device:
        by_device[device_type] = Transport(group, device_type)
    return by_device[device_type]


def _require_backend(group: dist.ProcessGroup, device_type: str) -> None:
    try:
        group._get_backend(torch.device(device_type))
    except RuntimeError:
        raise UsageError(
            f"the group has the backend {dist.get_backend(group)}, which moves no {device_type} "
            "tensors: NCCL moves CUDA tensors, Gloo those of a CPU"
        ) from None
