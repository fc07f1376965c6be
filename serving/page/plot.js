// Axes and marks of one small chart in SVG, drawn anew at the width that its box has.

import { drawing } from "./elements.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 12, 38];

export class Plot {
  #box;
  #svg;
  /** x from 0 to xMax, y from 0 to yMax; ticks are [value, text]. `label` is read out. */
  constructor(box, label, { xMax, yMax, xTicks, yTicks, xTitle, yTitle }) {
    [this.#box, this.xMax, this.yMax] = [box, xMax, yMax];
    [this.width, this.height] = [Math.max(260, box.clientWidth || 480), box.clientHeight || 200];
    this.#svg = drawing("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": label });
    for (const [value, text] of yTicks) {
      this.line(this.x(0), this.y(value), this.x(xMax), this.y(value), "grid");
      this.text(LEFT - 6, this.y(value) + 4, text, "tick end");
    }
    for (const [value, text] of xTicks) this.text(this.x(value), this.y(0) + 15, text, "tick middle");
    this.line(this.x(0), this.y(0), this.x(xMax), this.y(0), "axis");
    this.text((this.x(0) + this.x(xMax)) / 2, this.height - 5, xTitle, "title middle");
    this.text(4, TOP - 2, yTitle, "title");
  }
  x(value) { return LEFT + (value / (this.xMax || 1)) * (this.width - LEFT - RIGHT); }
  y(value) { return this.height - BOTTOM - (value / (this.yMax || 1)) * (this.height - BOTTOM - TOP - 8); }
  add(name, attributes, ...children) { this.#svg.append(drawing(name, attributes, ...children)); }
  line(x1, y1, x2, y2, kind) { this.add("line", { x1, y1, x2, y2, class: kind }); }
  text(x, y, words, kind) { this.add("text", { x, y, class: kind }, words); }
  /** A bar from x1 to x2 (pixels) of height `value`. */
  bar(x1, x2, value, kind) {
    this.add("rect", { x: x1, y: this.y(value), width: Math.max(1, x2 - x1), height: this.y(0) - this.y(value), class: kind });
  }
  diamond(x, y, size, kind) {
    this.add("polygon", { points: [[x, y - size], [x + size, y], [x, y + size], [x - size, y]].join(" "), class: kind });
  }
  curve(points, kind) { this.add("polyline", { points: points.join(" "), class: kind }); }
  show() { this.#box.replaceChildren(this.#svg); }
}

/** Whole numbers from `low` to `high`, at most `count` or so of them, as ticks. */
export function wholeTicks(low, high, count = 6) {
  const step = [1, 2, 4, 5, 10, 20, 25, 50, 100, 200, 250, 500].find((size) => (high - low) / size <= count) ?? 1000;
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) ticks.push([value, String(value)]);
  return ticks;
}
