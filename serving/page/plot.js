// Axes and marks of one small chart in SVG, drawn anew at the width that its box has.

import { drawing } from "./elements.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [46, 12, 12, 38];

/** A mark with its corners `size` away from its middle; `kind` names its classes, joined by dots. */
export const diamond = (x, y, size, kind) => drawing(`polygon.${kind}`, {
  points: [[x, y - size], [x + size, y], [x, y + size], [x - size, y]].join(" "),
});

export class Plot {
  #box;
  #svg;
  /** x from 0 to xMax, y from 0 to yMax; ticks are [value, text]. `label` is read out. */
  constructor(box, label, { xMax, yMax, xTicks, yTicks, xTitle, yTitle }) {
    [this.#box, this.xMax, this.yMax] = [box, xMax, yMax];
    [this.width, this.height] = [Math.max(260, box.clientWidth || 480), box.clientHeight || 200];
    const viewBox = `0 0 ${this.width} ${this.height}`;
    this.#svg = drawing("svg", { viewBox, role: "img", "aria-label": label });
    for (const [value, text] of yTicks) {
      this.line(this.x(0), this.y(value), this.x(xMax), this.y(value), "grid");
      this.text(LEFT - 6, this.y(value) + 4, text, "end");
    }
    for (const [value, text] of xTicks) this.text(this.x(value), this.y(0) + 15, text, "middle");
    this.line(this.x(0), this.y(0), this.x(xMax), this.y(0), "axis");
    this.text((this.x(0) + this.x(xMax)) / 2, this.height - 5, xTitle, "middle");
    this.text(4, TOP - 2, yTitle, "start");
  }
  x(value) { return LEFT + (value / (this.xMax || 1)) * (this.width - LEFT - RIGHT); }
  y(value) { return this.height - BOTTOM - (value / (this.yMax || 1)) * (this.height - BOTTOM - TOP - 8); }
  add(...made) { this.#svg.append(drawing(...made)); }
  line(x1, y1, x2, y2, kind) { this.add(`line.${kind}`, { x1, y1, x2, y2 }); }
  text(x, y, words, kind) { this.add(`text.${kind}`, { x, y }, words); }
  /** A bar from x1 to x2 (pixels) of height `value`. */
  bar(x1, x2, value, kind) {
    const y = this.y(value);
    this.add(`rect.${kind}`, { x: x1, y, width: Math.max(1, x2 - x1), height: this.y(0) - y });
  }
  diamond(...about) { this.#svg.append(diamond(...about)); }
  curve(points, kind) { this.add(`polyline.${kind}`, { points: points.join(" ") }); }
  show() { this.#box.replaceChildren(this.#svg); }
}

/** Whole numbers from `low` to `high`, at most `count` or so of them, as ticks. */
export function wholeTicks(low, high, count = 6) {
  const sizes = [1, 2, 4, 5, 10, 20, 25, 50, 100, 200, 250, 500];
  const step = sizes.find((size) => (high - low) / size <= count) ?? 1000;
  const ticks = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push([at, String(at)]);
  return ticks;
}
