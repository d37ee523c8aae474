"""The ledger in the loop: writes its lines, and says where the ranks, or a checkpoint and its line, hold different bits."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from utils.core.digests import bits_of, digest, digests, fingerprint
from utils.core.distributed import from_all
from utils.core.waiting import Meeting
from utils.diffusion.objective import Losses
from utils.optim.ema import UNIT_VECTORS
from utils.runs.history import History
from utils.runs.ledger import HASHES, LEDGER, OF_THE_STATE, OF_THE_UPDATE, VERSION, read_ledger
from utils.training.run import Run

SMALL = 4096  # elements


class Ledger:
    """To be called on every process, in the order below. The device adds up bits, and only the sums come to the host."""

    def __init__(self, run: Run):
        self._run, self._device = run, run.accelerator.device
        self.due = False  # whether the update under way gets a line
        self.parted = False  # whether the ranks hold different states
        self._samples = 0  # of the update under way, in this process
        self._seen: dict[str, Tensor] = {}
        self._kinds: list[str] = []  # of the state, of which there was something when it was measured
        step, main = run.state.step, run.accelerator.is_main_process
        self._file = History(run.output_dir, first_step=step, enabled=main, name=LEDGER)
        self._file.records.clear()
        self._written = None if run.resumed_from is None else step  # the newest update with a line
        if run.resumed_from is not None:
            self._compare_checkpoint(run.resumed_from)
        self.write()  # what a new run begins with

    def begin(self, step: int, reported: bool) -> None:
        """Before the update that follows `step` finished ones."""
        every, done = self._run.options.ledger_steps, step + 1
        self.due = reported if every is None else done % every == 0 or done == self._run.length.max_train_steps
        self.due |= done % self._run.options.checkpointing_steps == 0
        self._samples, self._seen = 0, {}

    def add_batch(self, batch: dict) -> None:
        """What a micro step is to be of, while it is on the host."""
        if self.due:
            self._samples += int(fingerprint(batch["sample_numbers"][:, None]).sum())

    def add(self, losses: Losses, drawn: Mapping[str, Tensor]) -> None:
        """What a micro step was of, and what it lost."""
        for name, tensors in (("batch", drawn.values()), ("loss", [losses.trained])) if self.due else ():
            # Sample by sample, so that any split of a batch gives the same; fingerprints have no gradient.
            sums = torch.stack([(2 * place + 1) * fingerprint(tensor).sum() for place, tensor in enumerate(tensors)])
            self._seen[name] = sums.sum() + self._seen.get(name, 0)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """int64 [processes x number of HASHES], on the device."""
        seen = {"samples": number_on(self._device, self._samples), **self._seen}
        own = [seen.get(name, number_on(self._device, 0)) for name in OF_THE_UPDATE]
        states = {kind: list(tensors_of(self._run, kind).values()) for kind in OF_THE_STATE}
        own += [hash_of(tensors, self._device) for tensors in states.values()]
        self._kinds = [kind for kind, tensors in states.items() if tensors]
        return self._run.accelerator.gather(torch.stack(own))

    def _measured(self) -> list[int]:
        with Meeting():
            return self.measure().tolist()

    def write(self, values: list[int] | None = None) -> bool:
        """Writes the line of the newest update, unless it has one; `values`: those of `measure`, where they were read. Returns
        whether all ranks hold the same state; if not, it says which tensor of which ranks differs."""
        step = self._run.state.step
        if not self.parted and self._written != step:
            values, self._written = self._measured() if values is None else values, step
            columns = {name: values[place :: len(HASHES)] for place, name in enumerate(HASHES)}
            kind = next((kind for kind in OF_THE_STATE if len(set(columns[kind])) > 1), None)
            if kind is not None:
                self.parted = True
                self._say_parted(kind)
                return False
            # Of an update, the sum over all ranks, which does not depend on how they share it out.
            hashes = {name: sum(columns[name]) for name in OF_THE_UPDATE} if self._seen else {}
            hashes |= {kind: columns[kind][0] for kind in self._kinds}
            self._file.add(step, {"version": VERSION} | {name: f"{value % 2**64:016x}" for name, value in hashes.items()})
            self._file.records.clear()
        return not self.parted

    def _say_parted(self, kind: str) -> None:
        """The first tensor of the first kind that differs, and the ranks that differ from most others."""
        tensors = tensors_of(self._run, kind)
        each = digests(moved(tensors.values(), self._device))
        everyone = from_all(self._run.accelerator, each[None])
        places = [place for place, column in enumerate(zip(*everyone)) if len(set(column)) > 1]
        usual = Counter(map(tuple, everyone)).most_common(1)[0][0]  # of two ranks, that of rank 0
        ranks = ", ".join(str(rank) for rank, own in enumerate(everyone) if tuple(own) != usual)
        more = f" and {len(places) - 1} more tensors" if len(places) > 1 else ""
        name = list(tensors)[places[0]] if places else "order of its tensors"
        self._run.print_line(
            f"stopped: after update {self._run.state.step}, rank {ranks} differs from the other ranks in {HASHES[kind]}: "
            f"{name}{more}. No checkpoint was saved of this. All ranks had the same state at the last checkpoint: continue "
            "with --resume_from_checkpoint latest. If it happens again, test the memory of the device of that rank"
        )

    def _compare_checkpoint(self, checkpoint: Path) -> None:
        """What was loaded beside the line that was written when it was saved; what the user lets change is left out."""
        run = self._run
        ledger = read_ledger(checkpoint.parent)
        line = ledger.get(run.state.step, {})
        if not ledger and (checkpoint.parent / LEDGER).exists():
            run.print_line(f"{checkpoint} is not compared with {LEDGER}, whose hashes another version has made")
        values = dict(zip(HASHES, self._measured()))
        changed = {"optimizer", "momentum"} & set(run.options.allow_option_change)  # momentum: RMSprop keeps more with it
        kinds = {"weights", "ema"} if changed else set(OF_THE_STATE)
        names = [name for name in self._kinds if name in line and name in kinds]
        differ = [HASHES[name] for name in names if f"{values[name] % 2**64:016x}" != line[name]]
        if differ:
            run.print_line(
                f"{checkpoint} is not what the ledger has of update {run.state.step}; other bits: {', '.join(differ)}. "
                f"The run continues, but it is not the run that was saved"
            )


def tensors_of(run: Run, kind: str, all_of_them: bool = False) -> dict[str, Tensor]:
    """Returns those of a kind of OF_THE_STATE by their names, in the same order on each rank. Singular vectors are left out
    unless `all_of_them`: they are of each rank's own passes, and DDP copies those of the main process before the next one."""
    network = run.objective.network
    if kind == "optimizer":
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        return {
            f"{state} of {names.get(id(parameter), 'a parameter')}": tensor
            for optimizer in run.accelerator._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for state, tensor in optimizer.state.get(parameter, {}).items()
            if isinstance(tensor, Tensor)
        }
    if kind == "ema":
        tensors = {} if run.ema is None else run.ema.state_dict()
    else:
        tensors = dict((*network.named_parameters(), *network.named_buffers()))
    return {name: tensor for name, tensor in tensors.items() if all_of_them or not name.endswith(UNIT_VECTORS)}


def moved(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Returns all on that device; those of float64 as integers of the same bits, for MPS has no float64."""
    same = (t.detach().view(torch.int64) if t.dtype == torch.float64 else t for t in tensors)
    return [tensor.to(device, non_blocking=True) for tensor in same]


def hash_of(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns int64 [] on the device: of the bits of all, and the places of the large ones. It is the same wherever the small
    ones lie: on a GPU, counters stay on the host, and the device gets nothing but their sum."""
    small: dict[tuple, list[Tensor]] = {}  # of which hundreds cost as many calls
    large: list[Tensor] = []
    for tensor in tensors:
        is_small = tensor.numel() <= SMALL
        (small.setdefault((tensor.is_cpu, tensor.dtype), []) if is_small else large).append(tensor.detach())
    found = digest(moved(large, device)) if large else number_on(device, 0)
    for together in small.values():
        bits = bits_of(_flatten_dense_tensors(together)).sum(dtype=torch.int64)
        found = found + (bits if bits.device.type == device.type else number_on(device, int(bits)))
    return found


def number_on(device: torch.device, value: int) -> Tensor:
    """Returns it modulo 2^64, as int64 []: by a kernel's argument, for which the host does not wait."""
    return torch.full((), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
