"""All checks of the images themselves, before the first update; each is a function from a `Sample` to what it saw."""

from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from utils.core.images import save_png
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


def look_at(sample: Sample, folder: Path | None = None) -> dict:
    """Returns what all checks saw, as a record of the history; their pictures are written to `folder`/data_check.

    A check that fails is left out and named under `failed`: it must not end the training that it looks at.

    Returns:
        {judged: codes, failed: messages, findings: [{code, severity, evidence, picture: path below `folder` or ""}]}.
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
            path = _write(finding.picture, folder, f"{len(findings):02}-{finding.code}.png")
            shown = {"code": finding.code, "severity": finding.severity, "evidence": finding.evidence, "picture": path}
            findings.append(shown)
    return {"images": len(sample.images), "judged": list(judged), "failed": failed, "findings": findings}


def _write(image: Image.Image | None, folder: Path | None, name: str) -> str:
    """The path of the picture below `folder`; "" where there is none, or the disk does not take it."""
    if image is None or folder is None:
        return ""
    try:
        save_png(image, folder / PICTURES / name)
    except OSError:
        return ""
    return f"{PICTURES}/{name}"
