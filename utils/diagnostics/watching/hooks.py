"""Where a script's training loop can be seen: torch's global hooks, and functions of torch and diffusers that are wrapped."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from utils.diagnostics.watching.seen import Noising
from utils.diagnostics.watching.watcher import Watcher, run_eagerly


def install(watcher: Watcher) -> ExitStack:
    """Closing the result takes all of them away."""
    hooks = ExitStack()
    safely = watcher.safely
    every = ExitStack()  # the hooks of all modules, which cost something in each of them

    def before_forward(module: Any, inputs: tuple) -> None:
        safely(watcher.before_any_forward, module)

    def after_forward(module: Any, inputs: tuple, options: dict, output: Any) -> None:
        safely(watcher.after_any_forward, module, (*inputs, *options.values()), output)

    def before_step(optimizer: Any, *arguments: Any) -> None:
        watcher.in_step = True
        safely(watcher.before_step, optimizer)
        watcher.in_step = False

    def after_step(optimizer: Any, *arguments: Any) -> None:
        watcher.in_step = True
        safely(watcher.after_step, optimizer)
        if watcher.armed:
            safely(_watch_schedulers, hooks, watcher)
        watcher.in_step = False
        if not watcher.discovering:
            every.close()

    if watcher.discovering:
        run_eagerly(True)  # until the network is found
        hooks.callback(run_eagerly, False)
        every.callback(register_module_forward_pre_hook(before_forward).remove)
        every.callback(register_module_forward_hook(after_forward, with_kwargs=True).remove)
    hooks.callback(every.close)
    hooks.callback(register_optimizer_step_pre_hook(before_step).remove)
    # The observer's own hooks must come first: they see the step, and `after_step` closes it.
    hooks.callback(register_optimizer_step_post_hook(after_step).remove)

    def backward(original: Callable, *arguments: Any, **options: Any) -> Any:
        safely(watcher.before_backward)
        result = original(*arguments, **options)
        safely(watcher.after_backward)
        return result

    def clip(kind: str, original: Callable, *arguments: Any, **options: Any) -> Any:
        try:
            call = inspect.signature(original).bind(*arguments, **options)
        except TypeError:
            return original(*arguments, **options)  # which says what is wrong
        parameters, limit = list(call.arguments.values())[:2]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        safely(watcher.clipped, kind, limit, parameters)
        return original(parameters, *call.args[1:], **call.kwargs)

    def scale(original: Callable, scaler: Any, *arguments: Any, **options: Any) -> Any:
        safely(watcher.scaled, scaler)
        return original(scaler, *arguments, **options)

    def scaler_step(original: Callable, scaler: Any, *arguments: Any, **options: Any) -> Any:
        before = watcher.steps
        result = original(scaler, *arguments, **options)
        safely(watcher.scaler_stepped, next(iter((*arguments, *options.values()))), watcher.steps == before)
        return result

    def compile_(original: Callable, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        safely(watcher.compiled)
        safely(_leave_out, wrapped)
        return result

    def next_batch(original: Callable, iterator: Any) -> Any:
        batch = original(iterator)
        safely(watcher.loaded, iterator, batch)
        return batch

    wrapped: list[tuple[Any, str]] = []

    def wrap(owner: Any, name: str, around: Callable) -> None:
        _wrap(hooks, owner, name, around)
        wrapped.append((owner, name))

    wrap(_BaseDataLoaderIter, "__next__", next_batch)
    wrap(torch, "compile", compile_)
    wrap(torch.autograd, "backward", backward)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        wrap(module, "clip_grad_norm_", functools.partial(clip, "norm"))
        wrap(module, "clip_grad_value_", functools.partial(clip, "value"))
    wrap(torch.amp.GradScaler, "scale", scale)
    wrap(torch.amp.GradScaler, "step", scaler_step)
    return hooks


def _wrap(hooks: ExitStack, owner: Any, name: str, around: Callable) -> None:
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(owner, name, wrapped)
    hooks.callback(setattr, owner, name, original)
    if "torch._dynamo" in sys.modules:
        _leave_out([(owner, name)])


def _leave_out(wrapped: list[tuple[Any, str]]) -> None:
    """Tells torch's compiler to call these functions, and not to go through them. `wrapped`: (owner, name) of each; emptied."""
    while wrapped:
        owner, name = wrapped.pop()
        setattr(owner, name, torch._dynamo.disable(vars(owner)[name]))


def _watch_schedulers(hooks: ExitStack, watcher: Watcher) -> None:
    """`add_noise` of all noise schedulers of diffusers that the script has imported."""
    if (module := sys.modules.get("diffusers.schedulers.scheduling_utils")) is None:
        return
    names = ("original_samples", "noise", "timesteps")

    def add_noise(original: Callable, scheduler: Any, *arguments: Any, **options: Any) -> Any:
        result = original(scheduler, *arguments, **options)
        given = dict(zip(names, arguments)) | options
        tensors = [given[name].detach() for name in names if isinstance(given.get(name), torch.Tensor)]
        if len(tensors) == len(names) and isinstance(result, torch.Tensor):
            clean, noise, timesteps = tensors
            watcher.safely(watcher.noised, Noising(scheduler, clean, noise, timesteps, result.detach()))
        return result

    def kinds(of: type) -> list[type]:
        children: list[type] = of.__subclasses__()
        return children + [kind for child in children for kind in kinds(child)]

    for kind in kinds(module.SchedulerMixin):
        if "add_noise" in vars(kind) and not hasattr(vars(kind)["add_noise"], "__wrapped__"):
            _wrap(hooks, kind, "add_noise", add_noise)
