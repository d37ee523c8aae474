"""Stage "condition" of the step audit: which labels the network was told, beside those that were drawn."""

import torch

from utils.diagnostics.audit.fitting import neighbors
from utils.diagnostics.audit.seen import MicroStep
from utils.diagnostics.audit.verdict import Check


def check_told(micro_steps: list[MicroStep], network: str, no_class: int = -1) -> list[Check]:
    """Whether `network` (its name among the calls) is told the labels that were drawn, third among its inputs.

    Drawn labels are -1 for no class, and told as `no_class`, or left out. Empty where none were drawn.
    """
    pairs = [(step.batch.get("labels"), (*step.calls[network].inputs[2:3], None)[0]) for step in micro_steps]
    if any(drawn is None for drawn, _ in pairs):
        return []
    drawn = torch.cat([drawn for drawn, _ in pairs]).long().cpu()
    drawn = torch.where(drawn < 0, no_class, drawn)
    none = torch.full_like(drawn, no_class)
    told = torch.cat([none[: len(drawn)] if given is None else given.reshape(-1).long().cpu() for drawn, given in pairs])
    text, name = "", "labels that the network gets"
    if not (same := torch.equal(drawn, told)):
        known = neighbors("those", drawn) | {"none": none, "one too high": drawn + 1, "always 0": drawn * 0}
        how = next((how for how, labels in known.items() if torch.equal(labels, told)), "others")
        text = f"the network gets other labels than those drawn: {how}"
    return [Check("condition", name, "those drawn", "the same" if same else "others", same, text)]
