// What if: the expected speed-up over K for an α, c and v of one's choice, beside the curves of what
// was measured on this server. At K = 0 nothing is drafted, t_verify is 1, and so is the speed-up.

import { byId, drawing, element, slider, write } from "./elements.js";
import { breakEvenAlpha, expectedSpeedup } from "./measured.js";
import { short, times } from "./words.js";

const LARGEST_K = 16;
const [LEFT, TOP, RIGHT, BOTTOM] = [46, 20, 150, 38]; // px around the plot; labels stand at the right
const LABEL = 16; // px, the height of one
const SLIDERS = {
  alpha: ["alpha", "α, the chance that a drafted token is accepted once all before it were", 0.7,
    [0, 1, 0.01]],
  k: ["whatif-k", "K, tokens drafted per cycle", 5, [0, LARGEST_K, 1]],
  c: ["cost", "c, the time of a draft step in passes", 0.1, [0, 1.5, 0.01]],
  v: ["row-cost", "v, what each further token adds to a pass", 0, [0, 0.3, 0.005]],
};
const inputOf = (name) => byId(SLIDERS[name][0]);

const curveOf = ({ alpha, c, v }) => (
  Array.from({ length: LARGEST_K + 1 }, (_, k) => expectedSpeedup(alpha, k, c, 1 + v * k))
);

export class WhatIf {
  #points = []; // of measured.js
  constructor() {
    byId("whatif-sliders").append(...Object.values(SLIDERS).map((about) => slider(...about)));
    for (const name of Object.keys(SLIDERS)) inputOf(name).addEventListener("input", () => this.draw());
    this.draw();
  }
  /** Points of measured.js, one for each drafter: a newer one takes the place of one that is not better. */
  add(points) {
    if (!points.length) return;
    const known = new Map(this.#points.map((point) => [point.name, point]));
    for (const point of points) if (!(known.get(point.name)?.rank > point.rank)) known.set(point.name, point);
    this.#points = [...known.values()].sort((a, b) => b.speedup - a.speedup);
    for (const name of ["c", "v"]) { // every slider reaches what was measured
      const input = inputOf(name);
      input.max = Math.max(input.max, ...points.map((point) => Math.ceil(point[name] * 11) / 10));
    }
    const take = (point) => {
      for (const name of Object.keys(SLIDERS)) inputOf(name).value = point[name];
      this.draw();
    };
    byId("measured").replaceChildren(...this.#points.map((point) => element("p.note", measuredWords(point),
      element("button.quiet", { click: () => take(point) }, `Take ${point.name}`))));
    this.draw();
  }
  draw() {
    const chosen = {};
    for (const [name, [id]] of Object.entries(SLIDERS)) {
      chosen[name] = Number(byId(id).value);
      write(`${id}-value`, short(chosen[name], { k: 0, v: 3 }[name]));
    }
    const speedups = curveOf(chosen);
    write("whatif-says", sentence(chosen, speedups));
    this.#plot(byId("chart-whatif"), chosen.k, speedups);
  }
  #plot(box, chosen, speedups) {
    const curves = this.#points.map(curveOf);
    const most = Math.max(1.5, ...speedups, ...curves.flat(), ...this.#points.map((p) => p.speedup)) * 1.08;
    const [width, height] = [Math.max(300, box.clientWidth), box.clientHeight || 300];
    const x = (k) => LEFT + (Math.min(k, LARGEST_K) / LARGEST_K) * (width - LEFT - RIGHT);
    const y = (speedup) => height - BOTTOM - (speedup / most) * (height - BOTTOM - TOP);
    const label = `Expected speed-up over K. ${byId("whatif-says").textContent}`;
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    const text = (at, to, words, kind) => svg.append(drawing(`text.${kind}`, { x: at, y: to }, words));
    const line = (x1, y1, x2, y2, kind) => svg.append(drawing(`line.${kind}`, { x1, y1, x2, y2 }));
    const circle = (k, r, kind) => svg.append(drawing(`circle.${kind}`, { cx: x(k), cy: y(speedups[k]), r }));
    const polygon = (tag, points) => svg.append(drawing(tag, { points: points.join(" ") }));
    const curve = (values, tag) => polygon(tag, values.map((value, k) => [x(k), y(value)]));
    const step = [0.5, 1, 2, 5].find((size) => most / size < 7) ?? 10;
    for (let tick = 0; tick <= most; tick += step) {
      line(x(0), y(tick), x(LARGEST_K), y(tick), "grid");
      text(LEFT - 6, y(tick) + 4, `${tick}×`, "end");
    }
    line(x(0), y(1), x(LARGEST_K), y(1), "break-even");
    for (let k = 0; k <= LARGEST_K; k += 2) text(x(k), y(0) + 15, k, "middle");
    text(x(LARGEST_K / 2), height - 5, "K", "middle");
    text(4, 10, "expected speed-up", "start");
    for (const values of curves) curve(values, "polyline.curve.thin");
    curve(speedups, "polyline.curve");
    for (let k = 0; k <= LARGEST_K; k += 1) circle(k, 2.5, "dot");
    circle(chosen, 7, "ring");
    let free = 0; // Labels go down a column, none over another, each with a line to its diamond.
    this.#points.forEach(({ name, k, speedup }, i) => {
      const [left, top] = [x(k), y(speedup)];
      const at = Math.max(free, Math.min(top, y(0) - LABEL * (this.#points.length - i - 1)));
      free = at + LABEL;
      line(left, top, x(LARGEST_K) + 6, at, "leader");
      polygon("polygon.measured", [[left, top - 7], [left + 7, top], [left, top + 7], [left - 7, top]]);
      text(x(LARGEST_K) + 9, at + 4, `${name} ${times(speedup)}`, "value");
    });
    box.replaceChildren(svg);
  }
}

function sentence({ alpha, k, c, v }, speedups) {
  const best = speedups.indexOf(Math.max(...speedups));
  const breakEven = k === 0 ? null : breakEvenAlpha(k, c, 1 + v * k);
  const pays = k === 0 ? "this is plain decoding"
    : breakEven === null ? "it cannot pay" : `it pays from α ${short(breakEven)} on`;
  return `K=${k}: expected ${times(speedups[k])}, t_verify ${short(1 + v * k)}, ${pays}. `
    + `Best for α ${short(alpha)} and c ${short(c)}: K=${best}, ${times(speedups[best])}.`;
}

function measuredWords({ name, alpha, k, c, v, speedup, source, base, disturbed }) {
  const doubt = disturbed ? ", disturbed: the machine was busy" : "";
  return `${name}, measured (${source}${doubt}): ${times(speedup)} as fast as ${base}, α ${short(alpha)}, `
    + `${k.toFixed(1)} drafted per cycle, c ${short(c)}, t_verify ${short(1 + v * k)}.`;
}
