"""Whether all processes train one network, each with images and noise of its own."""

from collections.abc import Iterator

from steady_doctor.found import Found
from steady_doctor.seen import Seen

LOOKS = 3  # updates


def apart(seen: Seen) -> Iterator[Found]:
    """What should be one is another in each process."""
    for name in ("gradient", "weights"):
        looks = _looks(seen, name)
        if len(looks) >= LOOKS and all(len(set(told)) > 1 for _, told in looks):
            update, told = looks[0]
            yield Found(f"ranks-{name}", update, {"different": len(set(told)), "processes": len(told)})


def alike(seen: Seen) -> Iterator[Found]:
    """What each process should have of its own is the same in all."""
    for name in ("images", "noise"):
        looks = _looks(seen, name)
        if len(looks) >= LOOKS and all(len(set(told)) == 1 for _, told in looks):
            yield Found(f"ranks-{name}", looks[0][0], {"processes": len(looks[0][1])})


def _looks(seen: Seen, name: str) -> list[tuple[int, list[str]]]:
    """What each process told, at the updates at which all did."""
    return [(u, [one[name] for one in everyone]) for u, everyone in sorted(seen.ranks.items()) if all(name in x for x in everyone)]


LAWS = (apart, alike)
