"""A denoiser around a raw network: D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), identified from both."""

import torch

from utils.diagnostics.audit.fitting import constant, fit, flat, span, worst
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.levels import Levels

SMALL = 2e-3


def check_preconditioning(
    levels: Levels, x: torch.Tensor, output: torch.Tensor, raw_x: torch.Tensor, raw: torch.Tensor
) -> tuple[list[Check], str]:
    """(checks, the kind) of one micro step. `x`, `output`: of the denoiser; `raw_x`, `raw`: of the network in it; [B, ...]."""
    name, wanted = "c_in, c_skip, c_out", "those of one sigma_data"
    if raw_x.shape != x.shape or raw.shape != output.shape or not torch.isfinite(raw).all():
        return [], ""
    sigma = levels.sigma[: len(x)]
    c_in, off = fit(flat(raw_x), flat(x))
    if worst(off) > SMALL:
        return [not_observed("network", name, wanted, "the raw network's input is not the noised image times a number")], ""
    c_in = c_in[:, 0]
    if not flat(raw).any():
        return [not_observed("network", name, wanted, "the raw network gives zeros")], ""
    (skip, out), residual = (lambda r: (r[0].T, r[1]))(fit(flat(output), flat(x), flat(raw)))
    if worst(residual) > 10 * SMALL:
        return [not_observed("network", name, wanted, "the output is not made of the noised image and the raw network's")], ""
    observed = f"c_in {span(c_in)}, c_skip {span(skip)}, c_out {span(out)}"
    if worst(skip) < SMALL and constant(out) is not None:
        return [Check("network", name, wanted, f"{observed}: none", True)], ""
    for kind, (want_in, want_skip, want_out) in _families(sigma, c_in, skip).items():
        parts = {"c_in": (c_in, want_in), "c_skip": (skip, want_skip), "c_out": (out, want_out)}
        wrong = [text for text, (seen, want) in parts.items() if not _alike(seen, want)]
        if not wrong:
            return [Check("network", name, wanted, f"{kind}: {observed}", True)], kind
        if _alike(skip, want_out) and _alike(out, want_skip):
            return [Check("network", name, wanted, observed, False, f"c_skip and c_out are exchanged: {kind}")], ""
        if len(wrong) == 1:
            text = f"{wrong[0]} does not belong to the others: they are {kind}"
            return [Check("input" if wrong == ["c_in"] else "network", name, wanted, observed, False, text)], ""
    return [not_observed("network", name, wanted, f"they do not belong to a known preconditioning ({observed})")], ""


def _families(sigma: torch.Tensor, c_in: torch.Tensor, skip: torch.Tensor) -> dict[str, tuple]:
    """Karras et al. 2022, table 1; sigma_data from c_in, or from c_skip."""
    families = {}
    of_input = constant(1 / c_in**2 - sigma**2, 2e-2)
    of_skip = constant(skip * sigma**2 / (1 - skip).clamp(min=1e-12), 2e-2)
    for squared in (of_input, of_skip):
        if squared is not None and squared > 0:
            total = sigma**2 + squared
            key = f"EDM's with sigma_data {squared**0.5:.3g}"
            families[key] = (total.rsqrt(), squared / total, sigma * squared**0.5 * total.rsqrt())
    families["the noise's prediction"] = ((sigma**2 + 1).rsqrt(), torch.ones_like(sigma), -sigma)
    return families


def _alike(seen: torch.Tensor, want: torch.Tensor) -> bool:
    return bool(((seen - want).abs() <= SMALL * (1 + want.abs())).all())
