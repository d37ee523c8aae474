"""The small part of Lightning that our experiments need: a module with self.log, callbacks and one Trainer."""
import os

import torch
from torch import nn


class LitModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.logged = {}
        self.trainer = None

    def log(self, name, value):
        self.logged[name] = float(value.detach()) if torch.is_tensor(value) else float(value)

    def training_step(self, batch, batch_idx):
        raise NotImplementedError

    def configure_optimizers(self):
        raise NotImplementedError


class Callback:
    def on_fit_start(self, trainer, module): ...

    def on_optimizer_step_end(self, trainer, module): ...

    def on_fit_end(self, trainer, module): ...


class Trainer:
    def __init__(self, max_steps, accumulate_grad_batches=1, gradient_clip_val=0.0, precision="32", callbacks=(), root_dir="."):
        assert precision in ("32", "bf16-mixed")
        self.max_steps, self.accumulate = max_steps, accumulate_grad_batches
        self.clip_val, self.precision = gradient_clip_val, precision
        self.callbacks, self.root_dir = list(callbacks), root_dir
        self.global_step = self.current_epoch = 0
        os.makedirs(root_dir, exist_ok=True)

    def call(self, hook, module):
        for callback in self.callbacks:
            getattr(callback, hook)(self, module)

    def fit(self, module, datamodule):
        module.trainer = self
        config = module.configure_optimizers()
        self.optimizer = config["optimizer"]
        self.scheduler, self.interval = config["lr_scheduler"]["scheduler"], config["lr_scheduler"]["interval"]
        module.train()
        self.call("on_fit_start", module)
        while self.global_step < self.max_steps:
            self.run_epoch(module, datamodule.train_dataloader())
            self.current_epoch += 1
        self.call("on_fit_end", module)
        self.save_checkpoint(module, "last.ckpt")

    def run_epoch(self, module, loader):
        for batch_idx, batch in enumerate(loader):
            if batch_idx % self.accumulate == 0:
                self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed"):
                loss = module.training_step(batch, batch_idx)
            (loss / self.accumulate).backward()
            if (batch_idx + 1) % self.accumulate:
                continue
            if self.clip_val:
                nn.utils.clip_grad_norm_(module.parameters(), self.clip_val)
            self.optimizer.step()
            if self.interval == "step":
                self.scheduler.step()
            self.global_step += 1
            self.call("on_optimizer_step_end", module)
            values = " ".join(f"{k}={v:.5g}" for k, v in module.logged.items())
            print(f"[epoch {self.current_epoch} step {self.global_step}] {values}", flush=True)
            if self.global_step >= self.max_steps:
                return
        if self.interval == "epoch":
            self.scheduler.step()

    def save_checkpoint(self, module, name):
        state = {"state_dict": module.state_dict(), "optimizer": self.optimizer.state_dict(), "global_step": self.global_step}
        for callback in self.callbacks:
            if hasattr(callback, "state_dict"):
                state[type(callback).__name__] = callback.state_dict()
        torch.save(state, os.path.join(self.root_dir, name))
