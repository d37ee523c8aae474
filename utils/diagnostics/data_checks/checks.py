"""All checks of the images themselves, before the first update; each is a function from a `Sample` to what it saw."""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from utils.core.files import whole_file
from utils.diagnostics.data_checks.changed import changed
from utils.diagnostics.data_checks.copies import copies, leak
from utils.diagnostics.data_checks.pixels import bars, blocks, channels, pattern, repeated_pixels, smooth_enlargement
from utils.diagnostics.data_checks.population import strangers
from utils.diagnostics.data_checks.recognition import contradicted, mirror
from utils.diagnostics.data_checks.sample import Sample, Seen

CHECKS: dict[Callable[[Sample], Iterator[Seen]], str] = {  # and the code that each of them judges
    channels: "data-channels",
    bars: "data-bars",
    pattern: "data-pattern",
    strangers: "data-mixed",
    changed: "data-mixed",
    copies: "data-copies",
    leak: "data-leak",
    repeated_pixels: "data-resampled",
    smooth_enlargement: "data-resampled",
    blocks: "data-compressed",
    contradicted: "class-mislabeled",
    mirror: "data-mirror",
}
PICTURES = "data_check"  # a folder


def look_at(sample: Sample) -> dict:
    """Returns what all checks saw, for `record_of`; it can be written as JSON.

    A check that fails is left out and named under `failed`: it must not end the training that it looks at.

    Returns:
        {images, judged: codes, failed: messages, findings: [{code, severity, evidence, picture: a PNG in base64, or ""}]}.
    """
    judged: dict[str, None] = {}
    findings: list[dict] = []
    failed: list[str] = []
    for check, code in CHECKS.items():
        try:
            seen = list(check(sample))
            judged[code] = None
        except Exception as error:
            seen = []
            failed.append(f"{check.__name__}: {type(error).__name__}: {error}")
        for finding in seen:
            shown = {"code": finding.code, "severity": finding.severity, "evidence": finding.evidence}
            findings.append(shown | {"picture": _as_text(finding.picture)})
    return {"images": len(sample.images), "judged": list(judged), "failed": failed, "findings": findings}


def record_of(seen: dict, folder: Path | None = None) -> dict:
    """Returns what `look_at` gave, as a record of the history: with the paths of the pictures below `folder`, which are written
    to its data_check."""
    findings = [
        finding | {"picture": _write(finding["picture"], folder, f"{number:02}-{finding['code']}.png")}
        for number, finding in enumerate(seen["findings"])
    ]
    return seen | {"findings": findings}


def _as_text(image: Image.Image | None) -> str:
    if image is None:
        return ""
    image.save(file := io.BytesIO(), format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def _write(picture: str, folder: Path | None, name: str) -> str:
    """The path of the picture below `folder`; "" where there is none, or the disk does not take it."""
    if not picture or folder is None:
        return ""
    try:
        (folder / PICTURES).mkdir(parents=True, exist_ok=True)
        with whole_file(folder / PICTURES / name) as draft:
            draft.write_bytes(base64.b64decode(picture))
    except OSError:
        return ""
    return f"{PICTURES}/{name}"
