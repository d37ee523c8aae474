"""A GPU without a GPU: a device whose tensors the scripts can launch work on, but whose values reach the host only by a copy
that is noted.

Its tensors are of torch's `meta` device, which holds no values: whatever reads one (`.item()`, `bool()`, `.tolist()`, `.cpu()`)
has to come by here. What the device computes is computed all the same, by the CPU's kernels in memory that hangs on the meta
tensor's storage, so that a read gives the true value and a rehearsed run trains, samples and reports as a real one does; and
the code takes the ways that it takes on a GPU (`device.type` is not "cpu").

    with Device() as device:
        x = torch.ones(3, device="meta")
        x.sum().item()
    device.events            # [Event(kind="read", op="aten._local_scalar_dense.default", ...)]

What it cannot tell: times, memory, what CUDA's own kernels refuse or wait for inside (those of `torch.linalg` do), what DDP
sends, and what torch.compile makes of the code. What stands in for something that torch or accelerate lacks on `meta` is in
`stand_ins`, with the reason.
"""

import sys
from contextlib import ContextDecorator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT = f"{Path(__file__).parent.parent}/"
META = torch.device("meta")
# Not of pointwise kernels, which take a number of the CPU as an argument: these copy it to the device.
COPIES_NUMBERS = (torch.ops.aten.where.self, torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
LITERALS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
# What an autocast context casts down among the functions of the two networks (torch's list for CUDA has more).
CAST_DOWN = (
    torch.conv2d,
    torch.nn.functional.linear,
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    torch.nn.functional.scaled_dot_product_attention,
)


PERIODIC = {"Periodic.catch_up", "Periodic.after_update", "Periodic.finish"}
OF_UPDATES = {"Monitor.show_first", "Monitor.report"}


@dataclass(frozen=True, repr=False)
class Event:
    """Something that crossed between host and device."""

    kind: str  # "read" of values or sizes, for which the host waits; or "upload"
    op: str
    waits: bool  # whether the host waits until the device has come here
    step: int | None  # updates finished before; None outside of the loop
    calls: tuple[str, ...]  # functions of the repository under way, the outermost first
    place: str  # file:line of the innermost one

    @property
    def milestone(self) -> bool:
        """Whether it is of what a run makes between two updates: validation, pictures, checkpoints ..."""
        return not PERIODIC.isdisjoint(self.calls) and OF_UPDATES.isdisjoint(self.calls)

    def __repr__(self) -> str:
        update = "outside of the loop" if self.step is None else f"update {self.step + 1}"
        waits = "the host waits" if self.waits else "the host goes on"
        return f"{update}: {self.kind} at {self.place} ({' > '.join(self.calls)}): {self.op}, {waits}"


class Device(TorchDispatchMode):
    """Inside it `meta` tensors have values, and `events` grows with each crossing."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self.launches = 0  # of operations on the device; one of them may be several kernels
        self._memory: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._sweep_at = 1024
        self._pinned: set[StorageWeakRef] = set()
        self._literals = _Literals()

    def __enter__(self):
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the memory of a CPU tensor for pinned: copies of it to the device may go on beside the host."""
        self._pinned.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def of_update(self, number: int) -> list[Event]:
        """Those of update `number`, from 1, its report included; not of what is made after it."""
        return [event for event in self.events if event.step == number - 1 and not event.milestone]

    # ---- memory

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a meta tensor holds: a CPU tensor that shares the memory."""
        known = self._memory.get(tensor.untyped_storage()._cdata)
        if known is None:
            raise RuntimeError(f"a meta tensor {tuple(tensor.shape)} that was not made on the rehearsal's device")
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(known[1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _on_device(self, made: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for the CPU tensor `made`."""
        if made.storage_offset():
            made = made.clone()
        tensor = torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=META)
        storage = tensor.untyped_storage()
        self._memory[storage._cdata] = StorageWeakRef(storage), made.untyped_storage()
        if len(self._memory) > self._sweep_at:
            self._memory = {key: known for key, known in self._memory.items() if not known[0].expired()}
            self._sweep_at = 2 * len(self._memory) + 1024
        return tensor

    # ---- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device")
        given: list[torch.Tensor] = []
        _collect(args, given)
        _collect(kwargs.values(), given)
        on_meta = [tensor for tensor in given if tensor.is_meta]
        if not on_meta and (target is None or torch.device(target) != META):
            return func(*args, **kwargs)
        if on_meta and any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            shown = func(*args, **kwargs)
            if not isinstance(shown, torch.Tensor) or shown.untyped_storage()._cdata in self._memory:
                return shown  # a view: of the same storage. `aten.to`, called within another mode, may make a copy
        goes_to = META if target is None else torch.device(target)
        self._note(func, args, kwargs, given, goes_to)
        known = {id(tensor): self.values(tensor) for tensor in on_meta}
        meta_of = {id(value): tensor for value, tensor in zip(known.values(), on_meta)}
        args, kwargs = _replace(args, known), {name: _replace(value, known) for name, value in kwargs.items()}
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        made = func(*args, **kwargs)
        if goes_to != META:
            return made
        return self._to_meta(made, {id(tensor) for tensor in given}, meta_of)

    def _to_meta(self, made, given: set[int], meta_of: dict[int, torch.Tensor]):
        """What an operation gives on the device, of what it `made` on the CPU; `meta_of`: of what it changed in place."""
        if isinstance(made, (list, tuple)):
            return type(made)(self._to_meta(part, given, meta_of) for part in made)
        if not isinstance(made, torch.Tensor) or id(made) in given:
            return made
        changed = meta_of.get(id(made))
        return self._on_device(made) if changed is None else changed

    def _note(self, func, args, kwargs, given, goes_to) -> None:
        tags, op = func.tags, str(func)
        if op.startswith(("aten._to_copy.", "aten.copy_.")):
            written_to = goes_to if op.startswith("aten._to_copy.") else args[0].device
            source = args[0] if op.startswith("aten._to_copy.") else args[1]
            if source.device != written_to:
                non_blocking = kwargs.get("non_blocking", args[2] if op.startswith("aten.copy_.") and len(args) > 2 else False)
                if source.is_meta:
                    self._event("read", op, True)
                else:
                    self._event("upload", op, not (non_blocking and StorageWeakRef(source.untyped_storage()) in self._pinned))
                return
        elif torch.Tag.data_dependent_output in tags:
            self._event("read", op, True)
        elif func is torch.ops.aten.index.Tensor or func is torch.ops.aten.index_put_.default:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                self._event("read", f"{op} by a mask, whose sum is the size", True)
        elif torch.Tag.dynamic_output_shape in tags:
            self._event("read", op, True)
        self.launches += 1
        for tensor in given:
            if tensor.is_meta:
                continue
            if func in COPIES_NUMBERS:
                self._event("upload", f"{op} of a tensor on the CPU", True)
            elif tensor.ndim > 0 or not (torch.Tag.pointwise in tags or "_foreach_" in op or "fill_" in op):
                raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found at least two devices")

    def _event(self, kind: str, op: str, waits: bool) -> None:
        calls, place, step = [], "", None
        frame = sys._getframe(1)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(ROOT) and path != __file__ and "site-packages" not in path:  # an environment inside the clone
                place = place or f"{path.removeprefix(ROOT)}:{frame.f_lineno}"
                calls.append(frame.f_code.co_qualname.replace("main.<locals>.", ""))
                if frame.f_code.co_qualname == "main":
                    step = frame.f_locals.get("step")
                    break
            frame = frame.f_back
        self.events.append(Event(kind, op, waits, step, tuple(reversed(calls)), place))


def _collect(values, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _replace(value, known: dict[int, torch.Tensor]):
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(part, known) for part in value)
    return known.get(id(value), value) if isinstance(value, torch.Tensor) else value


class _Literals(TorchFunctionMode):
    """What torch does above its dispatcher: tensors made of numbers, and autocast."""

    def __init__(self):
        super().__init__()
        self.autocast: list[torch.dtype | None] = [None]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LITERALS:
            beside = args[0].device if func is torch.Tensor.new_tensor else None
            device = torch.device(kwargs.get("device") or beside or "cpu")
            if device == META and not (isinstance(args[0], torch.Tensor) and func is not torch.Tensor.new_tensor):
                # On a GPU too the numbers are laid out on the CPU and copied; to a meta device torch sends the shape alone.
                return func(*args, **kwargs | {"device": "cpu"}).to(META)
        elif self.autocast[-1] is not None and func in CAST_DOWN:
            dtype = self.autocast[-1]

            def cast(value):
                return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value

            args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        return func(*args, **kwargs)


class _Autocast(ContextDecorator):
    """torch's own refuses the device, and would find nothing to cast: this one casts the arguments of CAST_DOWN."""

    def __init__(self, casts: list[torch.dtype | None], dtype: torch.dtype | None):
        self._casts, self._dtype = casts, dtype

    def __enter__(self):
        self._casts.append(self._dtype)

    def __exit__(self, *error):
        self._casts.pop()


class _Accelerator(Accelerator):
    """accelerate knows by name which devices can do fp16."""

    def __init__(self, *, mixed_precision: str | None = None, **options):
        fp16 = mixed_precision == "fp16"
        super().__init__(mixed_precision=None if fp16 else mixed_precision, **options)
        if fp16:
            self.state._mixed_precision = "fp16"
            self.native_amp, self.scaler = True, torch.amp.GradScaler("meta")


class _Loader(torch.utils.data.DataLoader):
    """Without an accelerator torch's loader leaves the pinning out; what this one would have pinned is noted instead."""

    device: Device

    def __init__(self, *arguments, pin_memory: bool = False, **options):
        super().__init__(*arguments, **options)
        self._pins = pin_memory

    def __iter__(self):
        for batch in super().__iter__():
            if self._pins:
                batch = tree_map(lambda x: self.device.pin(x) if isinstance(x, torch.Tensor) else x, batch)
            yield batch


def stand_ins(device: Device, monkeypatch) -> None:
    """Makes the scripts train on `device`, and fills in what torch and accelerate lack on it."""
    import utils.core.distributed
    import utils.data.loader

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    monkeypatch.setattr(utils.core.distributed, "Accelerator", _Accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # or fp16 would be refused
    # As `torch.cuda` is: what the scripts ask of a device's own module.
    generator = torch.default_generator
    module = SimpleNamespace(manual_seed=generator.manual_seed, get_rng_state=lambda device: generator.get_state())
    monkeypatch.setattr(torch, "meta", module, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)  # of a build for CUDA
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device=None: 0)
    # `Module.to` keeps the Parameters on the way to a GPU; on the way to meta it would make new ones, unknown to the optimizer.
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    # The fused optimizers' kernels are those of the CPU, with the protocol that they have on a GPU (`found_inf`).
    optimizer = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim has no attribute of this name
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta", "cpu"])
    real_autocast = torch.autocast

    def autocast(device_type, dtype=None, enabled=True, **options):
        if device_type == "meta":
            return _Autocast(device._literals.autocast, (dtype or torch.bfloat16) if enabled else None)
        return real_autocast(device_type, dtype=dtype, enabled=enabled, **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(utils.data.loader, "DataLoader", type("Loader", (_Loader,), {"device": device}))
