"""What the looks at a script's updates show together: checks, as in the history of a run, and what the script does."""

from dataclasses import dataclass, field

from torch import nn

from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.averages import WANTED
from utils.diagnostics.watching.conditions import Conditions
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.forward import ForwardJudge
from utils.diagnostics.watching.generators import Generators
from utils.diagnostics.watching.loading import Loading
from utils.diagnostics.watching.network import Settings, check_beside, check_network
from utils.diagnostics.watching.options import Schedule, evaluation_at
from utils.diagnostics.watching.probes import CopyProbe
from utils.diagnostics.watching.ranks import gather
from utils.diagnostics.watching.updating import LastLook, UpdateJudge

MOST_RATES = 4096  # learning rates that are kept
MOST_SKIPPED = 12  # steps that a GradScaler leaves out in a row, until its scale has come down


def _said(trained: nn.Module) -> str:
    return "parameters" if isinstance(trained, nn.ParameterList) else type(trained).__name__


@dataclass
class Judge:
    history: list[dict] = field(default_factory=list)  # as in a run's history
    words: dict[str, str] = field(default_factory=dict)  # what the script is found to do, by stage
    rates: list[tuple[int, list[float]]] = field(default_factory=list)
    loading: Loading = field(default_factory=Loading)
    generators: Generators = field(default_factory=Generators)
    _facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        self._forward, self._update = ForwardJudge(self.words), UpdateJudge(self.words)
        self._conditions, self._schedule, self._settings = Conditions(), Schedule(), Settings()

    @property
    def mixed(self) -> bool:
        """Whether the network was seen to get a mixture of image and noise."""
        return self._forward.mixed

    def begin(self, network: nn.Module, trained: nn.Module | None) -> None:
        """`trained`: what the optimizer trains, where it is not the network."""
        beside = "" if trained is None else f" by {_said(trained)} beside it"
        self.words["network"] = type(network).__name__ + beside

    def after_step(self, update: int, rates: list[float]) -> None:
        """`rates`: learning rates of the step; none where they are not known."""
        self.generators.see(update)
        if rates:
            self._schedule.see_step(self._facts, rates)
        if rates and (not self.rates or self.rates[-1][1] != rates):
            self.rates.append((update, rates))
            if len(self.rates) > MOST_RATES:
                del self.rates[1:-1:2]

    def record(self, step: int, checks: list[Check]) -> None:
        if checks:
            self.history.append({"step": step, "audit": {"checks": [check.to_json() for check in checks]}})

    def look(self, look: LastLook, encoded: tuple[float, float] | None, others: bool) -> None:
        """`encoded`: the range of images that an autoencoder got, if it did; `others`: another network may be the denoiser."""
        self._facts = look.facts
        checks = self._forward.look(look.update, look.facts, look.loss_scale, encoded)
        look.everyone = gather(look.update, look.observer)  # all processes take part in it
        if others and not self.mixed:
            return
        of_network, precision = check_network(look.update, look.observer, look.facts.precision)
        if precision:
            self.words["precision"] = precision
        checks += [*of_network, *check_beside(look.facts, look.observer.stepped), *self._settings.look(look.observer)]
        checks += self._conditions.look(look.update, look.rows)
        checks += next((step.batch["leaves"] for step in look.update.micro_steps if step.batch.get("leaves")), [])
        checks += self._update.look(look)
        checks += look.everyone.checks
        self._schedule.look(look.facts, look.update.step + 1)
        self.record(look.update.step + 1, checks)

    def end(self, updates: int, ended: bool, copies: list[CopyProbe], skipped: int) -> None:
        """`ended`: the script came to its own end; `skipped`: the last steps in a row that a GradScaler left out."""
        checks = self._schedule.end(self._facts, self.rates, updates, ended)
        if skipped >= MOST_SKIPPED:
            text = f"the last {skipped} steps were left out by the GradScaler: gradients are NaN or infinite at every scale"
            checks.append(Check("gradient", "finite gradients", "now and then", "none", False, text))
        checks += [*self.generators.end(), *self.loading.end(updates), *self._forward.end(self.loading.images)]
        if ended:
            checks += self._update.end()
        for probe in copies:
            probe.compare()
            evaluation = evaluation_at(self._facts, probe.moves_in_each)
            if ended and (probe.seldom or evaluation) and not self._update.is_beside(probe.name):
                text = f"{probe.name} moves in {probe.moves} of the {probe.since} updates after it first did"
                text += f", once in each {evaluation}: is it updated where the network is evaluated?" if evaluation else ""
                rhythm = (probe.of_epochs or probe.in_rhythm) and not evaluation
                severity = "info" if rhythm or self._update.another_moves(probe.name) else "warning"  # which may fill it
                checks.append(Check("ema", probe.name, "an update of it in each", f"in {probe.moves}", False, text, severity))
            if probe.copies and not probe.averages:
                text = f"{probe.name} was a copy of the weights in all {updates} updates: it averages nothing"
                severity = "warning" if ended and updates > 2 * probe.begins else "info"  # it may average later, and seldom
                checks.append(Check("ema", probe.name, WANTED, "copies", False, text, severity))
        self.record(updates, checks)
