"""In one sentence, what a script was seen to train."""

from utils.diagnostics.watching.watcher import Watcher

_TARGETS = {
    "epsilon": "epsilon-prediction",
    "sample": "x_0-prediction",
    "v_prediction": "v-prediction",
    "velocity": "the flow's velocity",
    "backward": "the flow's velocity",
    "velocity of its path": "the velocity of its path",
    "raw": "EDM's target",
}


def describe(watcher: Watcher) -> str:
    if not watcher.updates:
        others = ", ".join(f"{optimizer} of {count:,} parameters" for _, optimizer, count in watcher.networks)
        if others:
            return f"optimizer steps ({others}), but no network whose output has the shape of its input: nothing was judged"
        return "no optimizer step was seen: nothing was judged"
    words = watcher.judge.words
    target = words.get("target", "")
    target = _TARGETS.get(target, target) or "an unknown target"
    parts = [f"{watcher.updates} updates of {words.get('network', 'a network')}, which trains {target}"]
    if "schedule" in words:
        parts[0] += f" on a {words['schedule']}"
    if "weight" in words:
        parts.append("errors weighed " + ("equally" if words["weight"] == "1" else f"by {words['weight']}"))
    parts += [words[key] for key in ("noise", "perturbation", "optimizer", "accumulation", "clipping") if key in words]
    if words.get("precision", "fp32") != "fp32":
        parts.append(words["precision"])
    if "ema" in words:
        parts.append(f"averaged weights: {words['ema']}")
    text = "; ".join(parts)
    if len(watcher.networks) > 1:
        listed = ", ".join(f"{network} by {optimizer}" for network, optimizer, _ in watcher.networks)
        text += f"; several optimizers ({listed}): the one whose network gets the noised images is judged"
    return text
