// Lines and bars over time, drawn by uPlot; what they say in words is there for those who cannot see them.

import "./language.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";
import { element, refill } from "./element.js";
import { short } from "./format.js";
import { color, onTheme } from "./theme.js";

const HEIGHT = 180;
const LOW_HEIGHT = 140;
const BAR_SECONDS = 3600;
const HOUR = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

/** A chart with its key. `lines` say what is drawn: `{label, color, dash, bar}`; `format` makes text of a value. */
export class TimeChart {
  #lines;
  #format;
  #title;
  #plot = null;
  #data = null;
  #marks = [];
  #host = element("div", { class: "plot", role: "img" });
  #key = element("p", { class: "key" });
  #watch = new ResizeObserver(() => this.#resize());
  #endTheme = onTheme(() => this.#draw());

  constructor(title, lines, { format = short } = {}) {
    this.#title = title;
    this.#lines = lines;
    this.#format = format;
    this.#watch.observe(this.#host);
  }

  get nodes() {
    return [this.#key, this.#host];
  }

  /** Draw values by time: `at` in seconds, a list of values for each line, `marks` as `{at, text}`. */
  show(at, values, marks = []) {
    this.#data = { at, values };
    this.#marks = marks;
    this.#host.setAttribute("aria-label", this.#inWords());
    this.#showKey(null);
    if (this.#plot) this.#plot.setData(this.#drawn());
    else this.#draw();
  }

  close() {
    this.#watch.disconnect();
    this.#endTheme();
    this.#plot?.destroy();
    this.#plot = null;
  }

  #draw() {
    const width = this.#host.clientWidth;
    if (!this.#data || width === 0) return;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(width), this.#drawn(), this.#host);
  }

  #resize() {
    const width = this.#host.clientWidth;
    if (!this.#plot) this.#draw();
    else if (width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: heightFor(width) });
  }

  /** Bars stand on each other: the first line is the sum of all, each next one of those that remain. */
  #drawn() {
    const { at, values } = this.#data;
    if (!this.#lines[0].bar) return [at, ...values];
    return [at, ...values.map((_, line) => at.map((_, index) => sum(values.slice(line).map((each) => each[index]))))];
  }

  #options(width) {
    const soft = color("soft");
    const axis = { stroke: soft, font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: color("line"), width: 1 };
    return {
      width,
      height: heightFor(width),
      padding: [10, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { range: (_, first, last) => this.#span(first, last) },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.12 : 1] },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 26,
          space: 70,
          values: (_, splits) => splits.map((at) => HOUR.format(at * 1000)),
        },
        { ...axis, grid, size: 62, space: 36, values: (_, splits) => splits.map((value) => this.#format(value)) },
      ],
      series: [{}, ...this.#lines.map(styled)],
      hooks: { setCursor: [(plot) => this.#showKey(plot.cursor.idx)], draw: [(plot) => this.#drawMarks(plot)] },
    };
  }

  /** Bars need room at both ends. */
  #span(first, last) {
    const { at } = this.#data;
    const room = this.#lines[0].bar ? (at.length > 1 ? (at.at(-1) - at[0]) / (at.length - 1) : BAR_SECONDS) / 2 : 0;
    return [first - room, last + room];
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("bad");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    let last = -Infinity;
    for (const { at, text } of this.#marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      // Where several stopped at once, one name is said and the others are lines.
      if (Math.abs(x - last) < bbox.width / 2) continue;
      last = x;
      const isLeft = x > bbox.left + bbox.width / 2;
      ctx.textAlign = isLeft ? "right" : "left";
      ctx.fillText(text, x + (isLeft ? -5 : 5) * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
    }
    ctx.restore();
  }

  /** The values at the pointer or, without one, the last that are known. */
  #showKey(index) {
    const { at, values } = this.#data;
    const when = index === null || index === undefined ? null : HOUR.format(at[index] * 1000);
    const entries = this.#lines.map((line, number) => {
      const value = when === null ? lastKnown(values[number]) : values[number][index];
      const mark = element("i", { class: `mark ${line.color}${line.dash ? " dashed" : ""}`, "aria-hidden": "true" });
      const text = value === null ? "–" : this.#format(value);
      return element("span", {}, mark, `${line.label} `, element("b", {}, text));
    });
    refill(this.#key, entries, when === null ? null : element("span", { class: "at" }, `at ${when}`));
  }

  #inWords() {
    const parts = this.#lines.map((line, number) => {
      const known = this.#data.values[number].filter((value) => value !== null);
      if (known.length === 0) return `${line.label}: nothing recorded`;
      const [now, low, high] = [known.at(-1), Math.min(...known), Math.max(...known)].map((value) =>
        this.#format(value),
      );
      return `${line.label}: ${now} at the end, between ${low} and ${high}`;
    });
    return `${this.#title}. ${parts.join(". ")}`;
  }
}

function styled({ color: name, dash = false, bar = false }) {
  const stroke = color(name);
  if (bar)
    return { stroke, fill: stroke, width: 0, paths: uPlot.paths.bars({ size: [0.7, 28] }), points: { show: false } };
  return {
    stroke,
    width: 2,
    dash: dash ? [6, 4] : undefined,
    fill: dash ? undefined : `${stroke}1f`,
    points: { show: false },
    spanGaps: false,
  };
}

function heightFor(width) {
  return width < 420 ? LOW_HEIGHT : HEIGHT;
}

function lastKnown(values) {
  return values.findLast((value) => value !== null) ?? null;
}

function sum(values) {
  return values.reduce((total, value) => total + (value ?? 0), 0);
}
