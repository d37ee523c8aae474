"""Waiting for processes that work alone: at a store in the main process.

A collective call gives up after --collective_timeout, and does not say who is missing. At the store a process that works may
take hours, while one that is lost is noticed as soon: each process gives a sign of life once a second. It is not the store
through which the processes have found each other, for that may lie in a launcher, which may be killed.
"""

import contextlib
import faulthandler
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from utils.core.bars import duration, print_progress
from utils.core.entrypoint import PATIENCE, at_end, leave_now, within
from utils.core.errors import LostProcess
from utils.core.launcher import in_thread

PERIOD = 1.0  # seconds between two signs of life, and between two looks at those of the others
TOLD_AFTER = 120.0  # seconds, after which it is said, once, what is waited for
LONGEST = 86400.0  # seconds that the work of one process may take: a day
_GRACE = 3  # looks at a process that has ended, before it is said: what ended it may reach this one, too
_WORKS, _ENDED = "works", "ended"  # states


class Sign(NamedTuple):
    """The newest sign of life of a process, JSON in the store."""

    tick: int  # grows with each one
    number: int  # of waits that it has come to
    state: str


class Waiting:
    """What a process among several has to do with the others at the store. Every method is for the main thread."""

    def __init__(self, rank: int, num_processes: int, patience: float):
        """`patience`: seconds without a sign of life, after which a process counts as lost."""
        self._rank, self._ranks, self.patience = rank, range(num_processes), patience
        self._number, self._tick = 0, 0  # of waits so far, which is the same for each process; of signs of life
        self._state = _WORKS
        self._signs = {rank: Sign(0, 0, _WORKS) for rank in self._ranks}
        self._answers = 0  # of the store
        self.lost = False  # whether the connection to the store is
        self._waits = False
        # One connection for the signs of life, one for waiting: a call has the other calls of its connection wait.
        self._store, self._signs_store = _connections(rank, patience)
        self._store.set(f"place/{rank}", _place())
        self._beside: dict[int, int] = {}  # ranks on this machine, and their process numbers
        self._knows_places = False
        self._show()
        at_end(self._end)
        threading.Thread(target=self._live, name="signs of life", daemon=True).start()

    def meet(self, what: str, words: str, longest: float) -> list[str]:
        """Returns the `words` of all processes once all have called it, from the work `what`. Raises LostProcess where one
        ends, gives no sign of life, or comes more than `longest` seconds later than this one."""
        self._number += 1
        self._waits = True
        answer, look = in_thread(lambda: self._exchange(self._number, words)), _Look(self, what, longest)
        while not wait([answer], PERIOD).done:
            look.again()
        if isinstance(answer.exception(), RuntimeError):  # of the store
            self.lost = True
            while True:  # until it is known who has ended
                time.sleep(PERIOD)
                look.again()
        self._waits = False
        return answer.result()

    # ---- in a thread that lasts until all have come

    def _exchange(self, number: int, words: str) -> list[str]:
        keys = [f"{number}/{rank}" for rank in self._ranks]
        # Names of files may be no UTF-8.
        self._store.set(keys[self._rank], words.encode(errors="backslashreplace").decode())
        if number > 2:  # whoever comes to this wait has left the one before, to which all had come from that one
            self._store.delete_key(f"{number - 2}/{self._rank}")
        self._store.wait(keys, timedelta(seconds=2 * LONGEST))
        return [value.decode() for value in self._store.multi_get(keys)]

    # ---- in a thread that lasts as long as the process

    def _live(self) -> None:
        while not self.lost:
            time.sleep(PERIOD)
            try:
                self._show()
                if self._signs_store.check(["given up"]):
                    time.sleep(PERIOD)  # whoever gave up says why
                    self._leave()
                if self._waits:
                    self._read_signs()
                self._answers += 1
            except RuntimeError:
                self.lost = True

    def _show(self) -> None:
        self._tick += 1
        self._signs_store.set(f"sign/{self._rank}", json.dumps([self._tick, self._number, self._state]))

    def _read_signs(self) -> None:
        keys = {rank: f"sign/{rank}" for rank in self._ranks}
        if not self._signs_store.check(list(keys.values())):  # not all have begun
            keys = {rank: key for rank, key in keys.items() if self._signs_store.check([key])}
        signs = {rank: Sign(*json.loads(value)) for rank, value in zip(keys, self._signs_store.multi_get(list(keys.values())))}
        self._find_places()
        gone = {rank: signs[rank]._replace(state=_ENDED) for rank, pid in self._beside.items() if _is_gone(pid)}
        self._signs = self._signs | signs | gone

    def _find_places(self) -> None:
        """Those of this machine, whose end is seen at once; of others only their signs of life tell."""
        places = {rank: f"place/{rank}" for rank in self._ranks}
        if self._knows_places or not self._signs_store.check(list(places.values())):
            return
        self._knows_places = True
        here = _place().rpartition(" ")[0]
        for rank, place in zip(places, self._signs_store.multi_get(list(places.values()))):
            machine, _, pid = place.decode().rpartition(" ")
            if here and machine == here and rank != self._rank:
                self._beside[rank] = int(pid)

    def _leave(self) -> None:
        if not self._waits:  # it hangs, and so cannot end by itself
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print(f"the Python stacks of rank {self._rank}, for which the others waited:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        leave_now(1)

    # ---- the end

    def _end(self, status: int) -> None:
        self._state = _ENDED
        self._try(self._show)
        if self._rank == 0:
            self._try(self._outlast)

    def _outlast(self) -> None:
        """The store ends with this process: not before those who wait have read why."""
        deadline = time.monotonic() + (_GRACE + 3) * PERIOD
        while time.monotonic() < deadline and any(sign.state == _WORKS for sign in self._signs.values()):
            self._read_signs()
            time.sleep(PERIOD / 100)

    def _try(self, call: Callable[[], object]) -> None:
        """The store may be gone, or hang."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            if not self.lost:
                within(PATIENCE + _GRACE, call)


class _Look:
    """At those who are missing in a wait, once in a while."""

    def __init__(self, waiting: Waiting, what: str, longest: float):
        self._waiting, self._what, self._longest = waiting, what, longest
        self._before, self._waited, self._told = time.monotonic(), 0.0, False
        self._answers, self._unanswered = waiting._answers, 0.0
        self._silent: dict[int, tuple[Sign, float]] = {}  # the newest sign, and the seconds since it came
        self._ended = 0

    def again(self) -> None:
        waiting, now = self._waiting, time.monotonic()
        passed = min(now - self._before, 2 * PERIOD)  # a job that was suspended as a whole has not waited meanwhile
        self._before, self._waited = now, self._waited + passed
        news = waiting._answers != self._answers
        self._answers, self._unanswered = waiting._answers, 0.0 if news else self._unanswered + passed
        if self._unanswered > waiting.patience and not waiting.lost:
            self._raise(f"the main process does not answer for {waiting.patience:.0f} s")
        signs = waiting._signs
        missing = [rank for rank, sign in signs.items() if sign.number < waiting._number and rank != waiting._rank]
        ended = [rank for rank in missing if signs[rank].state == _ENDED]
        self._ended += bool(ended) or waiting.lost
        if self._ended > _GRACE:
            self._raise(f"{_names(ended)} has ended" if ended else f"{_names([0])} has ended, or cannot be reached")
        for rank in missing:
            self._look_at(rank, signs[rank], passed)
        if missing and self._waited > self._longest:
            waiting._try(lambda: waiting._signs_store.set("given up", "1"))  # so all processes end, also those that hang
            self._raise(f"{_names(missing)} took {self._longest:.0f} s longer than the other processes")
        if missing and self._waited > TOLD_AFTER and not self._told:
            self._told = True
            if waiting._rank == min(signs.keys() - set(missing)):
                print_progress(f"waiting for {_names(missing)}: {self._what} ({duration(self._waited)} so far)")

    def _look_at(self, rank: int, sign: Sign, passed: float) -> None:
        before, seconds = self._silent.get(rank, (None, 0.0))
        seconds = seconds + passed if sign == before else 0.0
        self._silent[rank] = sign, seconds
        if seconds > self._waiting.patience:
            self._raise(f"{_names([rank])} gives no sign of life for {self._waiting.patience:.0f} s")

    def _raise(self, problem: str) -> None:
        raise LostProcess(f"{problem}; the others waited for this: {self._what}")


def _connections(rank: int, patience: float) -> tuple[dist.TCPStore, dist.TCPStore]:
    """Returns two to the store, which the main process makes."""
    known, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=patience)

    def connect(host: str, port: int, makes: bool = False) -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=makes, wait_for_workers=False, timeout=timeout)

    if rank == 0:
        store = connect("127.0.0.1", 0, makes=True)
        known.set("waiting", f"{_address()} {store.port}")
        return store, connect("127.0.0.1", store.port)
    address, port = known.get("waiting").decode().split()
    return connect(address, int(port)), connect(address, int(port))


def _address() -> str:
    """Returns that under which other processes of this launch reach this host."""
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, place = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        own = probe.getsockname()[0]
    return master if ipaddress.ip_address(own).is_loopback else own


def _place() -> str:
    """Returns machine, namespace and number of this process; no machine where the system does not tell."""
    try:
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    return f"{machine} {os.getpid()}"


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, also if nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _names(ranks: list[int]) -> str:
    others = [str(rank) for rank in ranks if rank]
    names = ["the main process"] * (0 in ranks) + [f"rank{'s' * (len(others) > 1)} {', '.join(others)}"] * bool(others)
    return " and ".join(names)


class Meeting:
    """Around a collective call between two updates, in which the host waits for the slowest process; told to the hang watch."""

    active, number = False, 0

    def __enter__(self) -> None:
        Meeting.active, Meeting.number = True, Meeting.number + 1

    def __exit__(self, *_: object) -> None:
        Meeting.active = False
