"""Whether what the network is told beside the noise level differs between images, where it should, and is that of its image."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from utils.diagnostics.audit.seen import MicroStep, Update
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.labels import Labels, are_reordered, as_labels
from utils.diagnostics.watching.places import begins_alike, conditions_of, number_told, same, tensors_within
from utils.diagnostics.watching.seen import Seen

LOOKS_REPEATED = 3  # looks before conditions that micro steps share are judged
SEVERAL = 3  # labels that have one text, for it to stand for none
FEWEST = 4  # images with a label, for a batch to say whether it is of one class
ENOUGH = 4  # looks before labels that are all alike are judged
MOST_DROPPED = 0.5  # of the labels: classifier-free guidance is trained with 0.1 or 0.2, and seldom with as much
MANY_TEXTS = 32  # before it is said which share of them is one and the same
FAINT = 0.02  # of an image, whose values are from -1 to 1 or from 0 to 1
MANY = 1 << 16  # labels that were not dropped, of a table that is not theirs
SIGMAS = 4  # that a share is beyond it, to be no chance


class Conditions:
    """Collects them over the looks."""

    def __init__(self) -> None:
        self._shared: dict[int, list[torch.Tensor | None]] = defaultdict(
            list
        )  # the row that all images share; None: they differ
        self._texts: dict[int, Counter[float]] = defaultdict(Counter)  # sums of their numbers
        self._told_apart: dict[int, bool] = defaultdict(bool)  # whether some batch had several texts beside the usual one
        self._varied: set[int] = set()  # places for which the script had labels or tokens that differ between images
        self._labels: dict[int, list[torch.Tensor]] = defaultdict(list)  # int64 [B] of each pass
        self._belonging: dict[int, Labels] = defaultdict(Labels)
        self._repeated: list[torch.Tensor | None] = []  # of each look, the conditions that its micro steps share, if they do
        # Of each label that the script had, by its place, and by the embedding where the network drops it.
        self._dropped: dict[int, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))

    def look(self, update: Update, rows: Mapping[str, torch.Tensor]) -> list[Check]:
        """`rows`: of the embeddings that are trained, which were reached by the gradient."""
        moved, labels_given, shown = False, defaultdict(list), None
        repeated: list[torch.Tensor | None] = []
        checks: list[Check] = []
        for step in update.micro_steps:
            call = step.calls.get("network")
            if call is None or not isinstance(call.inputs[0], torch.Tensor) or len(call.inputs[0]) < 2:
                continue
            batch, seen = len(call.inputs[0]), step.batch.get("seen") or Seen()
            beside = step.batch.get("beside") or ()  # what a control network gets, which is trained beside the network
            beside_it = conditions_of(beside if begins_alike(beside, call.inputs) else (None, *beside), step)
            values = [*conditions_of(call.inputs, step), *beside_it]
            given = tensors_within((*call.inputs[1:], *beside))
            labels = seen.labels_of(batch)
            free = _free(labels, given, values)
            clean = step.batch.get("sample_numbers")
            if clean is not None:
                inner = step.calls.get("raw")  # what is given apart may be joined to the image inside
                inputs = [c.inputs[0] for c in (call, inner) if c is not None and isinstance(c.inputs[0], torch.Tensor)]
                checks += [_beside_the_image(inputs, values, clean), *_faint(values)]
                if shown is not None and shown[0].shape == clean.shape and not same(shown[0], clean):
                    repeated.append(_repeated(shown[1], values))
                shown = clean, values
            self._see_dropped(labels, values, seen)
            moved |= _are_of_other_images(labels, values, seen, step)
            for place, value in enumerate(values):
                of_each = value.reshape(batch, -1)
                if value.is_floating_point() and value.ndim > 2:
                    self._texts[place].update(of_each.double().sum(1).tolist())
                if value.is_floating_point() and value.ndim == 3:
                    self._see_texts_dropped(place, of_each.double().sum(1).cpu(), step.batch.get("loaded") or ())
                if value.dtype is torch.int64 and value.ndim == 1:
                    labels_given[place].append(value.cpu())
                    self._labels[place].append(value.cpu())
                if (numbers := as_labels(value)) is not None:
                    shuffled = clean is not None and _reordered(clean, step.batch.get("means") or ())
                    self._belonging[place].look(numbers, labels, step.batch.get("loaded") or (), shuffled)
                    self._see_rows_dropped(place, value, step.batch.get("vectors") or [])
                self._shared[place].append(of_each[:1] if _alike(of_each) else None)
                same_kind = [other for other in seen.conditions.values() if other.shape == value.shape]
                others = (other for other in same_kind if not any(same(other, one) for one in given))
                labeled = any(_belongs(tokens, of_each, [len(table) for table in rows.values()]) for tokens in free)
                if _alike(of_each) and (labeled or not all(map(_alike, others))):
                    self._varied.add(place)
        checks += self._judged_repeated(repeated)
        for place, given_to in labels_given.items():
            self._see_dropped_within(place, torch.cat(given_to), rows)
        checks += [check for place in sorted(self._shared) if (check := self._judged(place)) is not None]
        if self._shared:
            text = (
                "the network gets the labels or texts of other images of the batch: they are exchanged, and the images are not"
            )
            name, wanted = "labels or texts of a batch", "in the order of the images"
            checks.append(
                Check("condition", name, wanted, "exchanged" if moved else "not exchanged", not moved, text, "warning")
            )
        checks += [check for each in self._belonging.values() for check in each.checks()]
        return [*checks, *self._sorted(), *self._share()]

    def _sorted(self) -> list[Check]:
        """Whether each batch has one class, and the batches have different ones; a label that stands for none is left out."""
        checks = []
        for batches in self._labels.values():
            parts = [labels.unique().tolist() for labels in batches]
            empty = max({label for part in parts for label in part})  # the null class comes last, or there is none
            those = [labels[labels != empty] for labels in batches] if any(len(part) > 1 for part in parts) else batches
            those = [labels for labels in those if len(labels) >= FEWEST]
            one = len(those) >= ENOUGH and all(bool((labels == labels[0]).all()) for labels in those)
            several = one and len({int(labels[0]) for labels in those}) > 1
            text = f"each of {len(those)} batches has images of one class: are they in the order of their classes?"
            name, found = "classes of a batch", "one" if several else "several, or always the same"
            checks.append(Check("data", name, "several", found, not several, text, "warning"))
        return checks[:1]

    def _see_dropped(self, labels: list[torch.Tensor], values: list[torch.Tensor], seen: Seen) -> None:
        """Of labels or texts of which the script had others: one of them stands where they differ."""
        for place, value in enumerate(values):
            for other in (*labels, *seen.conditions.values()):
                if other.shape == value.shape and not same(other, value):
                    differs = (other.to(value.device) != value).reshape(len(value), -1).any(1)
                    if _alike(value[differs]) and not _alike(value):
                        self._dropped[place][""] += differs.tolist()
                        return

    def _see_texts_dropped(self, place: int, texts: torch.Tensor, loaded: Sequence[torch.Tensor]) -> None:
        """Of images with one text, where the loader brought different labels with all its batches: it stands for none. `texts`:
        a number of each, float64 [B]; an embedding that is trained has another one in each update."""
        values, counts = texts.unique(return_counts=True)
        common = texts == values[counts.argmax()]
        self._told_apart[place] |= len(values) > 2
        known = [labels for labels in loaded if labels.ndim == 1 and len(labels) == len(texts)]
        if known and len(texts) >= FEWEST:
            several = all(len(labels.cpu()[common].unique()) >= SEVERAL for labels in known)
            self._dropped[place]["text"] += common.tolist() if several else [False] * len(texts)

    def _see_rows_dropped(self, place: int, value: torch.Tensor, vectors: list[torch.Tensor]) -> None:
        """Of labels that are rows of 0 and 1, given to the network or, within it, to a layer: those of zeros stand for none."""
        within = [v for v in vectors if v.shape == value.shape and _of_same_rows(v, value)] if value.ndim == 2 else []
        for rows in within[:1] or ([value] if value.ndim == 2 else []):
            self._dropped[place]["rows"] += (~rows.bool().any(1)).tolist()

    def _see_dropped_within(self, place: int, labels: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> None:
        """Of labels that the network drops by itself: the gradient does not reach their rows. `labels`: of an update."""
        numbers, counts = labels.unique(return_counts=True)
        highest = max(2, int(numbers[-1]))
        for name, reached in rows.items() if len(numbers) > 1 else ():
            if not highest < len(reached) < 1.2 * highest + 11 or not reached.any():  # a table of something else
                continue
            others = reached.clone()
            others[numbers] = False
            if int(others.sum()) > 1:  # more than the one that stands for none
                self._dropped[place][name] = [False] * MANY
            else:
                self._dropped[place][name] += (~reached[numbers]).repeat_interleave(counts).tolist()

    def _share(self) -> list[Check]:
        found = []
        for place, dropped in self._dropped.items():
            shares = {name: (sum(those) / len(those), len(those)) for name, those in dropped.items()}
            if not self._told_apart[place]:  # one caption for all, or two of them
                shares.pop("text", None)
            found += [shares.pop("")] if "" in shares else []
            found += [min(shares.values())] if shares else []  # of several tables it is that of the labels
        texts = [(max(of.values()) / of.total(), of.total()) for of in self._texts.values() if of.total() >= MANY_TEXTS]
        checks = [self._share_of(*max(found), "warning")] if found else []
        return checks + ([self._share_of(*max(texts), "info")] if texts else [])  # most of them may have one caption, or mask

    @staticmethod
    def _share_of(share: float, count: int, severity: str) -> Check:
        text = f"{share:.0%} of the labels or texts are dropped: the network hardly learns them (10 to 20 % are usual)"
        chance = ((share * (1 - share) + 1 / count) / count) ** 0.5
        fine = share - SIGMAS * chance <= MOST_DROPPED
        name = (
            "share of the labels that is dropped" if severity == "warning" else "share of the texts that are one and the same"
        )
        return Check("condition", name, "a small one", f"{share:.0%}", fine, text, severity)

    def _judged_repeated(self, repeated: list[torch.Tensor | None]) -> list[Check]:
        """`repeated`: of each two micro steps of an update. Balanced batches, fixed cameras and two texts for all are none."""
        if not repeated:
            return []
        self._repeated.append(None if any(rows is None for rows in repeated) else repeated[0])
        first, *others = self._repeated
        always = len(others) + 1 >= LOOKS_REPEATED and all(rows is not None for rows in self._repeated)
        again = always and not any(one.shape == first.shape and same(one, first) for one in others)
        text = "micro steps of an update have other images and the same labels, texts or hints: those of the first for all?"
        name, wanted = "conditions of the micro steps", "other ones in each"
        return [Check("condition", name, wanted, "the same" if again else "others", not again, text, "warning")]

    def _judged(self, place: int) -> Check | None:
        rows = self._shared[place]
        if len(rows) < ENOUGH:
            return None
        first = rows[0]
        one = first is not None and all(row is not None and torch.equal(row, first) for row in rows)
        text = f"the network gets the same label or text for all images, in all {len(rows)} passes looked at"
        if all(row is not None for row in rows) and not one:
            one, text = (
                True,
                f"the network gets one label or text for all images of a batch, in all {len(rows)} passes looked at",
            )
        of_batches = one and first is not None and not all(row is not None and torch.equal(row, first) for row in rows)
        varied = one and (place in self._varied or (of_batches and place in self._texts))
        text += (
            ", though the script has different ones for them: are they always dropped, or those of one image?" if varied else ""
        )
        name = "label or text" if place == 0 else f"label or text, input {place + 3}"
        observed = "one for all" if one else "different"
        return Check(
            "condition", name, "different for different images", observed, not one, text, "warning" if varied else "info"
        )


def _reordered(clean: torch.Tensor, loaded: Sequence[torch.Tensor]) -> bool:
    """Whether the images are those of one of the loader's batches, of which the means are given, in another order."""
    means = clean.detach().double().flatten(1).mean(1).cpu()
    return any(are_reordered(means, one) for one in loaded)


def _of_same_rows(layer: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether a layer gets what the network is given, [B, classes], times a number, but for rows of zeros."""
    kept = layer.bool().any(1)
    return torch.equal(layer[kept].bool(), given.to(layer.device)[kept].bool())


def _alike(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:1]).all())


def _beside_the_image(inputs: list[torch.Tensor], values: list[torch.Tensor], clean: torch.Tensor) -> Check:
    """`inputs`: the noised image, and what is joined to it. An encoder or a reference network may get the image on purpose."""
    made = clean.shape[1] if clean.ndim > 2 else 0
    parts = [x[:, n : n + made] for x in inputs if made and x.ndim == clean.ndim for n in range(x.shape[1] - made + 1)]
    joined, beside = (any(v.shape == clean.shape and same(v, clean) for v in those) for those in (parts, values))
    leaks = bool(clean.any()) and (joined or beside)
    text = "the network gets the clean image beside the noised one: what it should find out is told"
    name, wanted = "image beside the noised one", "not the clean one"
    severity = "warning" if joined else "info"
    return Check("condition", name, wanted, "the clean one" if leaks else "another or none", not leaks, text, severity)


def _faint(values: list[torch.Tensor]) -> list[Check]:
    """Of conditions that are images; more channels are what a network makes of them."""
    images = (value for value in values if value.ndim > 3 and value.shape[1] <= 4 and value.is_floating_point())
    sizes = [float(value.abs().max()) for value in images]
    faint = [size for size in sizes if 0 < size < FAINT]
    text = f"an image that is a condition is nearly 0: up to {min(faint, default=0.0):.2g}. Was it divided by 255 (twice)?"
    found = ", ".join(f"{size:.2g}" for size in sizes)
    name, wanted = "largest value of an image beside", f"above {FAINT}"
    return [Check("condition", name, wanted, found, not faint, text, "warning")] if sizes else []


def _repeated(before: list[torch.Tensor], now: list[torch.Tensor]) -> torch.Tensor | None:
    """Of the first condition of two micro steps that has the same rows in both, their sums, float64 [B]; at least three of them
    are different ones."""
    for one, other in zip(before, now):
        sums = one.double().reshape(len(one), -1).sum(1).cpu()
        if one.shape == other.shape and len(one) > 3 and len(sums.unique()) > 2 and same(one, other):
            return sums
    return None


def _free(labels: list[torch.Tensor], given: list[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Labels and tokens that differ between images, and of which no input was made, as far as can be known: each input that
    differs is made of one of them, if it differs between the same images."""
    free: list[torch.Tensor] = []
    for tokens in labels:
        if not _alike(tokens) and not any(same(tokens, other) for other in (*given, *free)):
            free.append(tokens)
    for value in values:
        rows = value.reshape(len(value), -1)
        if not _alike(rows) and not any(same(tokens, value) for tokens in labels):
            place = next((n for n, tokens in enumerate(free) if torch.equal(_groups(tokens), _groups(rows))), None)
            free = [tokens for n, tokens in enumerate(free) if n != place]
    return free


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """Which rows are equal, bool [B, B], on the CPU: a loader's labels may be elsewhere than what is made of them."""
    number = torch.unique(rows, dim=0, return_inverse=True)[1].cpu()
    return number[:, None] == number


def _are_of_other_images(labels: list[torch.Tensor], values: list[torch.Tensor], seen: Seen, step: MicroStep) -> bool:
    """Whether they are in another order than the script had them, and the images are not."""
    clean = step.batch.get("sample_numbers")
    if clean is None or any(_is_reordered(clean, other) for other in seen.tensors.values()):
        return False
    told = number_told(step.calls["network"].inputs, step)
    labels = [tokens for tokens in labels if not _is_order(tokens) and not (told is not None and _same_numbers(tokens, told))]
    pairs = [(one, other) for place, one in enumerate(labels) for other in labels[place + 1 :]]
    pairs += [(value, other) for value in values for other in (*seen.conditions.values(), *labels)]
    return any(_is_reordered(one, other) for one, other in pairs)


def _is_order(tokens: torch.Tensor) -> bool:
    """Of the places of the images in the batch."""
    return _same_numbers(tokens, torch.arange(len(tokens)))


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and same(one.double().sort(0)[0], other.double().sort(0)[0])


def _is_reordered(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the rows are the same in another order."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device or torch.equal(one, other):
        return False
    rows, others = (tensor.detach().reshape(len(tensor), -1) for tensor in (one, other))
    sums, sums_of_other = (values.double().sum(1).sort()[0] for values in (rows, others))
    if not torch.equal(sums, sums_of_other):  # which is quick
        return False
    return torch.equal(torch.unique(rows, dim=0), torch.unique(others, dim=0))


def _belongs(tokens: torch.Tensor, rows: torch.Tensor, tables: list[int]) -> bool:
    """Whether these may be the labels, or the texts, from which the network's input was made: of labels the one that stands
    for none is the highest or 0, and a text has many tokens. A mask is not made of them."""
    if tokens.ndim == 1:
        highest = float(tokens.max())
        looked_up = not rows.any() and any(highest < count for count in tables)
        return rows.shape[1] == 1 and (looked_up or highest <= float(rows.max()))
    is_mask = bool(rows.any()) and bool(((rows == 0) | (rows == 1)).all())
    return rows.shape[1] > 1 and rows.shape[1] >= tokens.shape[1] and not is_mask
