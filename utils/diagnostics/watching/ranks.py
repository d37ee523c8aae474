"""What the processes of a run see together. Passed on by torch's store, so that none of them can wait for another for ever."""

import io
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from utils.diagnostics.audit.observer import Observer
from utils.diagnostics.audit.ranks import check_ranks, digests_of
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.verdict import Check, not_observed

PATIENCE = timedelta(seconds=10)
LEVELS = 2.0**24  # the noise levels are not compared where they are few


@dataclass
class Everyone:
    mean: torch.Tensor | None = None  # of the gradients that the backward passes left, sampled; None: of this process alone
    alone: bool = True  # the gradient at the step is that of this process
    checks: list[Check] = field(default_factory=list)


def gather(update: Update, observer: Observer) -> Everyone:
    """Of the main process. The others only tell."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Everyone()
    store, rank, count = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    last = update.micro_steps[-1].gradient_after if update.micro_steps else None
    digests = digests_of(update, observer, LEVELS)
    mine = {"gradient": None if last is None else last.cpu(), "digests": torch.stack([v.cpu() for v in digests.values()])}
    keys = [f"watch/{update.step}/{number}" for number in range(count)]
    if rank:
        file = io.BytesIO()
        torch.save(mine, file)
        store.set(keys[rank], file.getvalue())  # type: ignore[arg-type]  # bytes are taken too
        return Everyone(alone=False)
    try:
        store.wait(keys[1:], PATIENCE)
    except Exception:  # of the store, which has several kinds
        why = "another process did not tell in time"
        return Everyone(alone=False, checks=[not_observed("ranks", "weights", "the same on all processes", why)])
    everyone = [mine] + [torch.load(io.BytesIO(store.get(key)), weights_only=True) for key in keys[1:]]
    for key in keys[1:]:
        store.delete_key(key)
    gradients = [one["gradient"] for one in everyone]
    mean = None
    if last is not None and all(g is not None and g.shape == last.shape for g in gradients):
        mean = torch.stack(gradients).mean(0).to(last.device)
    checks = check_ranks(list(digests), torch.stack([one["digests"] for one in everyone]))
    # Averages are often made before the weights are passed on, and saved by the main process alone.
    return Everyone(mean, False, [replace(c, severity="info") if c.name == "averages" else c for c in checks])
