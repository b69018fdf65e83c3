"""Parcels under way: what may be leaving, what has to come back, and when.

Two queues lie between device and host, with at most a window of bytes in each. Without a plan the oldest parcel's
device bytes go when the window is full, or when the host finds its copy done in forward, and the way back is as far
ahead as the window reaches. With a plan `end_forward` and `begin_backward` say how far both queues should be
(`budget.Pace`).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from gemworks.netmem.arena import PinnedArena
from gemworks.netmem.movers import Mover
from gemworks.netmem.parcels import Parcel, State


class ParcelQueues:
    """Sends parcels, lets their device bytes go and brings them back.

    Args:
        arena: where the host copies lie.
        mover: who copies.
        window_bytes: most bytes that may be in flight each way.

    Not safe in several threads by itself, but for `let_go`: its owner calls the rest one at a time.
    """

    def __init__(self, arena: PinnedArena, mover: Mover, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.num_sent = 0
        self.moved_up_bytes = self.moved_down_bytes = 0
        self.num_rescued = 0
        self.largest_parcel_bytes = self.peak_in_flight_bytes = 0
        self._arena, self._mover = arena, mover
        self._graveyard: deque[tuple[Parcel, ...]] = deque()
        self._live: OrderedDict[int, Parcel] = OrderedDict()  # by order of saving
        self._leaving: deque[Parcel] = deque()
        self._leaving_bytes = 0
        self._returning: OrderedDict[int, Parcel] = OrderedDict()  # brought ahead of need
        self._returning_bytes = 0
        self.num_paced = 0  # forwards under way that end in `end_forward`
        self.forget_pace()

    @property
    def num_live(self) -> int:
        """Parcels not closed yet."""
        return len(self._live)

    @property
    def in_flight_bytes(self) -> int:
        """Leaving plus returning now."""
        return self._leaving_bytes + self._returning_bytes

    def parcel_bytes(self, start: int) -> tuple[int, ...]:
        """Sizes of the live parcels from that one on."""
        return tuple(p.nbytes for at, p in self._live.items() if at >= start)

    # -- one parcel ----------------------------------------------------------------------------------------------------

    def send(self, storage: torch.UntypedStorage) -> Parcel:
        """A new parcel on its way to the host.

        Raises:
            PinnedMemoryExhaustedError: the arena has no room; nothing was started.
        """
        parcel = Parcel(self.num_sent, storage, self._arena, self._mover)
        self.num_sent += 1
        self._live[parcel.sequence] = parcel
        self._leaving.append(parcel)
        self._leaving_bytes += parcel.nbytes
        self.largest_parcel_bytes = max(self.largest_parcel_bytes, parcel.nbytes)
        self.moved_up_bytes += parcel.nbytes
        self._note_in_flight()
        return parcel

    def fetch(self, parcel: Parcel) -> torch.UntypedStorage:
        """Its bytes on the device, usable on the compute stream from now on."""
        if parcel.state is State.LEAVING:
            self.num_rescued += 1
        if parcel.state is State.AWAY:
            # brought ahead, but for a later time than this one: their host copies are intact, so give their room to
            # this one. What was saved after it is asked for before it or by the same node, so that stays.
            for later in sorted(at for at in self._returning if at < parcel.sequence):
                if self._returning_bytes + parcel.nbytes <= self.window_bytes:
                    break
                self._forget_returning(later).settle()
            self.moved_down_bytes += parcel.nbytes
        self._forget_returning(parcel.sequence)
        return parcel.fetch()

    def unpacked(self, parcels: Sequence[Parcel]) -> None:
        """A tensor that consists of fetched parcels was given back: bring what is needed after it."""
        current = min(p.num_passes for p in parcels)
        for parcel in parcels:
            parcel.unpacked()
        self._look_ahead(min(p.sequence for p in parcels), current)

    def _forget_returning(self, sequence: int) -> Parcel:
        parcel = self._returning.pop(sequence, None)
        if parcel is not None:
            self._returning_bytes -= parcel.nbytes
            return parcel
        return self._live[sequence]

    def let_go(self, parcels: tuple[Parcel, ...]) -> None:
        """A handle died: only leave a note, this may run in any thread and inside a locked section."""
        self._graveyard.append(parcels)

    def reap(self) -> None:
        """Close the parcels whose handles have all died."""
        while self._graveyard:
            for parcel in self._graveyard.popleft():
                parcel.num_handles -= 1
                if parcel.num_handles <= 0:
                    self._close(parcel)

    def close_orphans(self) -> None:
        """Close what was sent and got no handle, because an error came in between."""
        for parcel in [p for p in self._live.values() if not p.num_handles]:
            self._close(parcel)

    def _close(self, parcel: Parcel) -> None:
        if parcel in self._leaving:
            self._leaving.remove(parcel)
            self._leaving_bytes -= parcel.nbytes
        if parcel.sequence in self._returning:
            self._forget_returning(parcel.sequence)
        parcel.close()
        del self._live[parcel.sequence]

    # -- pace ----------------------------------------------------------------------------------------------------------

    def forget_pace(self) -> None:
        """Only the window counts until the next `begin_backward`."""
        # set there: parcels before this one are ahead of need, and how many bytes of them may be back
        self._ahead_of = 0
        self._ahead_bytes = math.inf
        self._staying_bytes = math.inf

    def end_forward(self, leaving_bytes: float) -> None:
        """See `OffloadEngine.end_forward`."""
        while self._leaving and self._leaving_bytes - self._leaving[0].nbytes >= leaving_bytes:
            self._depart_oldest()

    def begin_backward(self, start: int, end: int, returning_bytes: float, staying_bytes: float) -> None:
        """See `OffloadEngine.begin_backward`."""
        returning = sum(p.nbytes for at, p in self._returning.items() if at < start)
        there = returning + self._leaving_before(start)
        while self._leaving and self._leaving[0].sequence < start:
            there -= self._leaving[0].nbytes
            if there < staying_bytes:
                break
            self._depart_oldest()
        self._ahead_of, self._ahead_bytes, self._staying_bytes = start, returning_bytes, staying_bytes
        self._look_ahead(end, min((p.num_passes for at, p in self._live.items() if at < end), default=0))

    def _look_ahead(self, sequence: int, num_passes: int) -> None:
        """Bring what was saved before this one, latest first, as far as the pace and the window reach.

        A node of the graph asks for its tensors in the order of saving: what more than `num_passes` backward passes are
        through with lies before this one too and is not needed again in this pass.
        """
        ahead_bytes = sum(p.nbytes for at, p in self._returning.items() if at < self._ahead_of)
        most_bytes = min(self._ahead_bytes, self._staying_bytes - self._leaving_before(self._ahead_of))
        for earlier in reversed(self._live):
            if earlier >= sequence:
                continue
            parcel = self._live[earlier]
            if parcel.state is not State.AWAY or parcel.num_passes > num_passes:
                continue
            if earlier < self._ahead_of:
                if ahead_bytes >= most_bytes:
                    break
                ahead_bytes += parcel.nbytes
            if self._returning_bytes + parcel.nbytes > self.window_bytes:
                break
            parcel.bring()
            self._returning[earlier] = parcel
            self._returning_bytes += parcel.nbytes
            self.moved_down_bytes += parcel.nbytes
            self._note_in_flight()

    def _leaving_before(self, sequence: int) -> int:
        return sum(p.nbytes for p in self._leaving if p.sequence < sequence and p.state is State.LEAVING)

    def _note_in_flight(self) -> None:
        self.peak_in_flight_bytes = max(self.peak_in_flight_bytes, self.in_flight_bytes)

    # -- device bytes go -----------------------------------------------------------------------------------------------

    def drain(self, limit_bytes: int) -> None:
        """Let bytes go, oldest first, until at most that many are leaving; compute waits for their copies."""
        while self._leaving and self._leaving_bytes > limit_bytes:
            self._depart_oldest()

    def let_go_of_done(self) -> None:
        """Let the bytes go whose copies the host finds done: in forward, and where no pace says it.

        The host is ahead of the device by as much as it happens to be, so what it finds done in backward lies anywhere
        on the device's way: a tensor let go there may be the next one to be asked for, and come back while compute
        waits.
        """
        while not self.num_paced and self._leaving and self._leaving[0].has_left():
            self._depart_oldest()

    def _depart_oldest(self) -> None:
        parcel = self._leaving.popleft()
        self._leaving_bytes -= parcel.nbytes
        if parcel.state is State.LEAVING:
            parcel.depart()
