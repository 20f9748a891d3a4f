"use strict";
// Tells the values under the pointer.  The charts can be read without it.
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart);
  const tip = document.createElement("div");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  tip.className = "tip";
  tip.hidden = true;
  for (const [name, value] of [["y1", 30], ["y2", 206], ["stroke", "#888"], ["visibility", "hidden"]]) {
    line.setAttribute(name, value);
  }
  svg.append(line);
  svg.parentNode.append(tip);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - box.left) / scale;
    const nearest = chart.series
      .filter((one) => one.points.length)
      .map((one) => [one.name, one.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))]);
    if (!nearest.length) return;
    const closest = nearest.reduce((a, b) => (Math.abs(b[1][0] - at) < Math.abs(a[1][0] - at) ? b : a))[1];
    tip.replaceChildren();
    for (const [name, point] of nearest) {
      const row = document.createElement("div");
      const seconds = chart.over === "step" ? "step " + point[2] : point[2];
      row.textContent = (nearest.length > 1 ? name + ", " : "") + seconds + ": " + point[3];
      tip.append(row);
    }
    for (const name of ["x1", "x2"]) line.setAttribute(name, closest[0]);
    line.setAttribute("visibility", "visible");
    tip.hidden = false;
    const left = closest[0] * scale + 10;
    tip.style.left = Math.max(0, left + tip.offsetWidth > box.width ? left - tip.offsetWidth - 20 : left) + "px";
    tip.style.top = 34 * scale + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    line.setAttribute("visibility", "hidden");
  });
}
