"""What the ranks of a group tell each other on the host, before they exchange any tensor.

A collective whose ranks disagree hangs, or returns nonsense. So each call begins with one small
exchange over Gloo: what a rank is about to do, or why it cannot. It takes the hosts about a
millisecond and does not touch the GPU, whose queue stays filled meanwhile.

A rank that fails answers the others' next exchange with the reason. One that has waited for another
in vain, and so failed as well, says that, and so learns the reason if there is one. Where that
happens while tensors travel, the group is at an end: nobody knows which of them have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, _get_process_group_store

from ..errors import UsageError

MESSAGE_BYTES = 2048  # of a rank
REASON_LENGTH = 300  # the most characters of why a rank cannot go on; in JSON they may be six bytes
# Keys of the messages of a rank that cannot go on: why it has failed, before or while tensors
# travel; or that it has waited for another one in vain.
ERROR, END, LOST = "error", "end", "lost"


class PeerError(RuntimeError):
    """Another rank has failed, or did not answer within the group's time-out."""

    def __init__(self, message: str, was_told: bool = False) -> None:
        super().__init__(message)
        self.was_told = was_told  # by that rank, which waits for no answer


class Agreement:
    """Lets the ranks of a group compare what they do. Making and calling it is collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.timeout = _timeout_of(group)
        self.count = 0  # of exchanges: the same on all ranks
        self._end: str | None = None  # why no more can be agreed on
        # Not by new_group(), which ranks may not know by the same name (transport.py).
        with connecting(group):
            store = dist.PrefixStore("attention_worklog", _get_process_group_store(group))
            # A store may outlive the groups that were made with it.
            generation = store.add(f"made on rank {self.rank}", 1)
            store = dist.PrefixStore(f"{generation}", store)
            self._gloo = dist.ProcessGroupGloo(store, self.rank, self.size, self.timeout)

    def gather(self, terms: Mapping[str, object]) -> list[dict]:
        """The terms of all ranks, in order. Raises PeerError where one has failed, or is silent."""
        if self._end:
            raise PeerError(f"the group cannot be used after a failure: {self._end}", was_told=True)
        all_terms = self._exchange(terms)
        self._raise_told(all_terms)
        if any(LOST in theirs for theirs in all_terms):
            raise PeerError(
                f"ranks of {self.size} have lost each other: {all_terms}", was_told=True
            )
        return all_terms

    def _raise_told(self, all_terms: Sequence[Mapping[str, object]]) -> None:
        """Raises PeerError where a rank has said why it failed."""
        for rank, theirs in enumerate(all_terms):
            if told := theirs.get(ERROR) or theirs.get(END):
                message = f"rank {rank} of {self.size} has failed: {told}"
                if END in theirs:
                    self._end = message
                raise PeerError(message, was_told=True)

    def require_same(self, terms: Mapping[str, object], **others: object) -> list[dict]:
        """gather(), where all ranks must give the same terms, but for the others.

        Raises UsageError on all ranks where they do not.
        """
        all_terms = self.gather({**terms, **others})
        for name in terms:
            ranks: dict[str, list[str]] = {}
            for rank, theirs in enumerate(all_terms):
                ranks.setdefault(str(theirs.get(name)), []).append(str(rank))
            if len(ranks) > 1:
                told = "; ".join(
                    f"{value} on {'rank' if len(its) == 1 else 'ranks'} {', '.join(its)}"
                    for value, its in ranks.items()
                )
                raise UsageError(f"the ranks must have the same {name}, not {told}")
        return all_terms

    @contextmanager
    def telling(self, travelling: bool = False) -> Iterator[None]:
        """Where the body fails, the other ranks are told why: in their next gather(), or in this
        one, if they have waited for this rank in vain and so failed, too.

        After a failure while tensors were travelling the group is at an end.
        """
        try:
            yield
        except PeerError as lost:
            if lost.was_told:
                raise
            self._end = str(lost)
            self._raise_told(self._last_words(LOST, str(lost)))
            raise
        except Exception as error:  # which others may notice only at the end of their time-out
            reason = f"{type(error).__name__}: {error}"
            self._last_words(END if travelling else ERROR, reason, patience=2)
            if travelling:
                self._end = f"rank {self.rank} of {self.size} has failed: {reason}"
            raise

    def _last_words(self, key: str, reason: str, patience: int = 1) -> list[dict]:
        """What the others say meanwhile, if they do."""
        try:
            return self._exchange({key: f"{reason:.{REASON_LENGTH}}"}, patience)
        except PeerError:  # nobody listens
            return []

    def _exchange(self, terms: Mapping[str, object], patience: int = 1) -> list[dict]:
        """The messages of all ranks. Waits for so many time-outs, and then raises PeerError."""
        mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message = json.dumps(terms).encode()
        assert len(message) <= MESSAGE_BYTES, terms
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = [torch.empty_like(mine) for _ in range(self.size)]
        self.count += 1
        options = AllgatherOptions()
        options.timeout = patience * self.timeout
        try:
            self._gloo.allgather([received], [mine], options).wait()
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} has no answer from the others within "
                f"{self.timeout.total_seconds():g} s: one has ended, or does not make this call "
                f"({first_line(error)})"
            ) from None
        return [json.loads(bytes(r.tolist()).rstrip(b"\0")) for r in received]


# For as long as the groups exist. Nothing here may keep one alive: destroy_process_group() ends the
# threads of a group only if it is the last to know it.
_agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """The group's; the first call is collective."""
    if group not in _agreements:
        _agreements[group] = Agreement(group)
    return _agreements[group]


@contextmanager
def connecting(group: dist.ProcessGroup) -> Iterator[None]:
    """Around what connects the ranks of a group anew: raises PeerError where one does not come."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {group.rank()} of {group.size()} could not be connected to the others: one has "
            f"ended, or does not make this call ({first_line(error)})"
        ) from None


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device_type in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(device_type)).options._timeout
        except RuntimeError:  # the group has no backend for such devices
            continue
    raise UsageError(f"the group has the backend {dist.get_backend(group)}, not NCCL or Gloo")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
