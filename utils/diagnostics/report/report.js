// Reads values off a plot under the pointer or finger. Everything is there without it; the points are those of the drawn paths.
for (const frame of document.querySelectorAll(".frame")) {
  const [firstStep, lastStep] = frame.dataset.x.split(" ").map(Number);
  const [low, high] = frame.dataset.y.split(" ").map(Number);
  const logarithmic = frame.dataset.log === "1";
  const curves = [...frame.querySelectorAll("path[data-label]")].map((path) => ({
    label: path.dataset.label,
    points: [...path.getAttribute("d").matchAll(/(-?[\d.]+) (-?[\d.]+)/g)].map((pair) => [pair[1] / 1000, 1 - pair[2] / 1000]),
  }));
  const cursor = Object.assign(document.createElement("div"), { className: "cursor", hidden: true });
  const readout = Object.assign(document.createElement("div"), { className: "readout", hidden: true });
  frame.append(cursor, readout);
  const value = (y) => (logarithmic ? low * (high / low) ** y : low + (high - low) * y);
  const words = (number) => {
    const size = Math.abs(number);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? number.toExponential(2) : String(Number(number.toPrecision(3)));
  };
  const hide = () => (cursor.hidden = readout.hidden = true);

  frame.addEventListener("pointermove", (event) => {
    const box = frame.querySelector("svg").getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    if (at < -0.02 || at > 1.02) return hide();
    const nearest = curves
      .map(({ label, points }) => ({
        label,
        point: points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best)),
      }))
      .sort((a, b) => Math.abs(a.point[0] - at) - Math.abs(b.point[0] - at));
    if (!nearest.length) return;
    const x = nearest[0].point[0];
    const here = curves.flatMap(({ label }) => nearest.filter((entry) => entry.label === label && Math.abs(entry.point[0] - x) < 0.005));
    const step = Math.round(firstStep + (lastStep - firstStep) * x);
    readout.textContent = [
      `${frame.dataset.unit} ${step.toLocaleString("en")}`,
      ...here.map(({ label, point }) => `${label}: ${words(value(point[1]))}`),
    ].join("\n");
    cursor.style.left = `${100 * x}%`;
    readout.style.left = x < 0.5 ? `calc(${100 * x}% + 10px)` : "auto";
    readout.style.right = x < 0.5 ? "auto" : `calc(${100 - 100 * x}% + 10px)`;
    cursor.hidden = readout.hidden = false;
  });
  frame.addEventListener("pointerleave", hide);
}
