"""What the step audit says of one quantity of a training step: what it is declared to be, and what was observed."""

from dataclasses import asdict, dataclass

STAGES = (
    *("data", "noise", "timestep", "input", "condition", "network", "target", "weight"),
    *("gradient", "optimizer", "learning_rate", "ema", "state", "ranks", "export"),
)


@dataclass(frozen=True)
class Check:
    """One quantity. `declared` and `observed` are short texts for a table; `message` says in plain words what the step does
    instead, and is empty where nothing is wrong."""

    stage: str  # of STAGES
    name: str  # of the quantity
    declared: str
    observed: str
    healthy: bool | None  # None: not observed
    message: str = ""
    severity: str = "critical"  # of what is wrong; see `finding.SEVERITIES`
    code: str = ""  # of the finding; empty: that of the stage

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ValueError(f"unknown stage {self.stage!r}")
        if self.healthy is not False:
            object.__setattr__(self, "message", "")

    def to_json(self) -> dict:
        return asdict(self)


def not_observed(stage: str, name: str, declared: str, why: str) -> Check:
    return Check(stage, name, declared, f"not observed: {why}", None)
