"""Which modules were to load stored weights, and took none of them."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class StoredWeights:
    def __init__(self) -> None:
        self._loaded: set[int] = set()  # parameters of modules that took some
        self._not_loaded: list[tuple[set[int], tuple[str, int, str, str]]] = []

    def loaded(self, module: Any, state: Any, result: Any) -> None:
        """After `result = module.load_state_dict(state)`."""
        missing, unexpected = (getattr(result, name, ()) for name in ("missing_keys", "unexpected_keys"))
        own = {id(parameter) for parameter in module.parameters()}
        if missing and unexpected and len(unexpected) == len(state):  # nothing of it had a place
            self._not_loaded.append((own, (type(module).__name__, len(state), missing[0], unexpected[0])))
        else:
            self._loaded |= own

    def without_a_place(self, parameters: Iterable[Tensor]) -> list[tuple[str, int, str, str]]:
        """Of each module with any of these that was to load weights and took none at any time: its class, how many weights
        were stored, and a key of each side."""
        trained = {id(parameter) for parameter in parameters}
        return [told for own, told in self._not_loaded if own & trained and not own & self._loaded]
