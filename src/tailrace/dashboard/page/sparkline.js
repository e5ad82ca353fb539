// A small line of figures, as wide as a word.

import { element } from "./element.js";

const WIDTH = 48;
const HEIGHT = 18;

export function sparkline() {
  const path = element("path", {});
  return element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "sparkline", "aria-hidden": "true" }, path);
}

/** Draw other figures in it. Without any, or with nothing but zeros, it is a line on the ground. */
export function drawSparkline(svg, values) {
  const most = Math.max(...values, 1);
  const step = WIDTH / Math.max(values.length - 1, 1);
  const points = values.map(
    (value, index) => `${(index * step).toFixed(1)} ${(HEIGHT - 1.5 - (value / most) * (HEIGHT - 3)).toFixed(1)}`,
  );
  const drawn = points.length > 1 ? `M${points.join("L")}` : `M0 ${HEIGHT - 1.5}H${WIDTH}`;
  if (svg.firstChild.getAttribute("d") !== drawn) svg.firstChild.setAttribute("d", drawn);
}
