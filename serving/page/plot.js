// Axes and marks of one small chart in SVG, drawn anew at the width that its box has.

import { drawing } from "./elements.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 12, 38];

export class Plot {
  #box;
  #svg;

  /** x from xMin to xMax, y from 0 to yMax; ticks are [value, text]. `label` is read out. */
  constructor(box, label, { xMin = 0, xMax, yMax, xTicks, yTicks, xTitle, yTitle }) {
    this.#box = box;
    this.width = Math.max(260, box.clientWidth || 480);
    this.height = box.clientHeight || 200;
    Object.assign(this, { xMin, xMax, yMax });
    const size = `0 0 ${this.width} ${this.height}`;
    this.#svg = drawing("svg", { viewBox: size, role: "img", "aria-label": label });
    for (const [value, text] of yTicks) this.#yTick(this.y(value), text);
    for (const [value, text] of xTicks) {
      this.text(this.x(value), this.y(0) + 15, text, "tick middle");
    }
    this.line(this.x(xMin), this.y(0), this.x(xMax), this.y(0), "axis");
    this.text((this.x(xMin) + this.x(xMax)) / 2, this.height - 5, xTitle, "title middle");
    this.text(4, TOP - 2, yTitle, "title");
  }

  x(value) {
    const share = (value - this.xMin) / (this.xMax - this.xMin || 1);
    return LEFT + share * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return this.height - BOTTOM - (value / (this.yMax || 1)) * (this.height - BOTTOM - TOP - 8);
  }

  add(name, attributes, ...children) {
    this.#svg.append(drawing(name, attributes, ...children));
  }

  line(x1, y1, x2, y2, kind) {
    this.add("line", { x1, y1, x2, y2, class: kind });
  }

  text(x, y, words, kind) {
    this.add("text", { x, y, class: kind }, words);
  }

  /** A bar from x1 to x2 (pixels) of height `value`. */
  bar(x1, x2, value, kind) {
    const y = this.y(value);
    const [width, height] = [Math.max(1, x2 - x1), this.y(0) - y];
    this.add("rect", { x: x1, y, width, height, class: kind });
  }

  diamond(x, y, size, kind) {
    const points = [[x, y - size], [x + size, y], [x, y + size], [x - size, y]];
    this.add("polygon", { points: points.join(" "), class: kind });
  }

  curve(points, kind) {
    this.add("polyline", { points: points.join(" "), class: kind });
  }

  show() {
    this.#box.replaceChildren(this.#svg);
  }

  #yTick(y, text) {
    this.line(this.x(this.xMin), y, this.x(this.xMax), y, "grid");
    this.text(LEFT - 6, y + 4, text, "tick end");
  }
}

/** Whole numbers from `low` to `high`, at most `count` or so of them, as ticks. */
export function wholeTicks(low, high, count = 6) {
  const step = [1, 2, 4, 5, 10, 20, 25, 50, 100, 200, 250, 500]
    .find((size) => (high - low) / size <= count) ?? 1000;
  const first = Math.ceil(low / step) * step;
  const ticks = [];
  for (let value = first; value <= high; value += step) ticks.push([value, String(value)]);
  return ticks;
}

export const SHARE_TICKS = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, `${share * 100} %`]);
