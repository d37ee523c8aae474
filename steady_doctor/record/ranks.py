"""What the processes of a run tell each other, by torch's store. Nobody waits: the main process takes what is there."""

import json
from typing import Any

import torch.distributed as dist
from torch import Tensor

PARTS = ("DTensor", "FlatParameter")  # parameters of which a process has a part
MARKS = ("_fsdp_flattened", "ds_id")  # and those that such frameworks mark


class Ranks:
    """`everyone`: what each process told of an update, by its number; in the main process alone."""

    def __init__(self) -> None:
        self.everyone: dict[int, list[dict[str, str]]] = {}
        self._mine: dict[int, dict[str, str]] = {}

    def tell(self, update: int, digests: dict[str, str]) -> None:
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        try:
            store = dist.distributed_c10d._get_default_store()
            if dist.get_rank():
                store.set(_key(update, dist.get_rank()), json.dumps(digests))
            else:
                self._mine[update] = digests
                self._take(store, dist.get_world_size())
        except Exception:  # of the store, which has several kinds: then nothing is known
            self._mine.clear()

    def forget(self, update: int) -> None:
        self.everyone.pop(update, None)
        self._mine.pop(update, None)

    def collect(self) -> None:
        """Takes what has come since, where the processes still know each other."""
        if self._mine and dist.is_initialized():
            try:
                self._take(dist.distributed_c10d._get_default_store(), dist.get_world_size())
            except Exception:
                self._mine.clear()

    def _take(self, store: Any, count: int) -> None:
        for update, mine in list(self._mine.items()):
            keys = [_key(update, rank) for rank in range(1, count)]
            if store.check(keys):
                self.everyone[update] = [mine, *(json.loads(store.get(key)) for key in keys)]
                del self._mine[update]
                for key in keys:
                    store.delete_key(key)


def _key(update: int, rank: int) -> str:
    return f"steady_doctor/{update}/{rank}"


def in_parts(parameters: list[Tensor]) -> bool:
    """Whether each process has a part of the weights alone."""
    return any(type(p).__name__ in PARTS or any(hasattr(p, mark) for mark in MARKS) for p in parameters)
