// What if: the expected speed-up over K for an α, c and v of one's choice, beside the curves of what
// was measured on this server. At K = 0 nothing is drafted, t_verify is 1, and so is the speed-up.

import { button, byId, element, write } from "./elements.js";
import { breakEvenAlpha, expectedSpeedup } from "./formulas.js";
import { Plot, wholeTicks } from "./plot.js";
import { short, times } from "./words.js";

const LARGEST_K = 16;
const INPUTS = { alpha: "alpha", k: "whatif-k", c: "cost", v: "row-cost" };

const curveOf = ({ alpha, c, v }) => (
  Array.from({ length: LARGEST_K + 1 }, (_, k) => expectedSpeedup(alpha, k, c, 1 + v * k))
);

export class WhatIf {
  #points = []; // of measured.js
  constructor() {
    for (const id of Object.values(INPUTS)) byId(id).addEventListener("input", () => this.draw());
    this.draw();
  }
  /** Points of measured.js, one for each drafter: a newer one takes the place of one that is not better. */
  add(points) {
    const known = new Map(this.#points.map((point) => [point.name, point]));
    for (const point of points) if (!(known.get(point.name)?.rank > point.rank)) known.set(point.name, point);
    this.#points = [...known.values()];
    for (const point of points) this.#reach(point);
    byId("take").replaceChildren(...this.#points.map((point) => (
      button(`Take ${point.name}`, () => this.#take(point), "button.quiet")
    )));
    this.draw();
  }
  /** Let every slider reach what was measured. */
  #reach(point) {
    for (const name of ["c", "v"]) {
      const input = byId(INPUTS[name]);
      input.max = Math.max(Number(input.max), Math.ceil(point[name] * 11) / 10);
      input.min = Math.min(Number(input.min), Math.floor(point[name] * 11) / 10);
    }
  }
  #take(point) {
    for (const [name, id] of Object.entries(INPUTS)) byId(id).value = point[name];
    this.draw();
  }
  draw() {
    const chosen = {};
    for (const [name, id] of Object.entries(INPUTS)) {
      chosen[name] = Number(byId(id).value);
      write(`${id}-value`, name === "k" ? chosen.k : short(chosen[name], name === "v" ? 3 : 2));
    }
    const speedups = curveOf(chosen);
    write("whatif-says", sentence(chosen, speedups));
    const measured = this.#points.map((point) => element("span", measuredWords(point)));
    const none = "Nothing was measured yet: run or race with a drafter.";
    byId("measured-says").replaceChildren(...(measured.length ? measured : [none]));
    this.#plot(chosen, speedups);
  }
  #plot(chosen, speedups) {
    const curves = this.#points.map(curveOf);
    const measured = this.#points.map(({ speedup }) => speedup);
    const most = Math.max(1.5, ...speedups, ...curves.flat(), ...measured) * 1.08;
    const parts = most < 3 ? 2 : 1;
    const plot = new Plot(byId("chart-whatif"), `Expected speed-up over K. ${sentence(chosen, speedups)}`, {
      xMax: LARGEST_K, yMax: most, xTitle: "K", yTitle: "expected speed-up",
      xTicks: wholeTicks(0, LARGEST_K, 8),
      yTicks: wholeTicks(0, most * parts).map(([value]) => [value / parts, `${value / parts}×`]),
    });
    plot.line(plot.x(0), plot.y(1), plot.x(LARGEST_K), plot.y(1), "break-even");
    const trace = (curve, kind) => plot.curve(curve.map((y, k) => [plot.x(k), plot.y(y)]), kind);
    curves.forEach((curve, i) => {
      const { name, k, speedup } = this.#points[i];
      trace(curve, "curve.thin");
      const [at, y] = [Math.min(k, LARGEST_K), plot.y(speedup)];
      plot.diamond(plot.x(at), y, 7, "diamond.measured");
      plot.text(plot.x(at), y + 21 + 15 * i, `${name} ${times(speedup)}`, `value.${sideOf(at)}`);
    });
    trace(speedups, "curve");
    speedups.forEach((y, k) => plot.add("circle.dot", { cx: plot.x(k), cy: plot.y(y), r: 2.5 }));
    const [x, y] = [plot.x(chosen.k), plot.y(speedups[chosen.k])];
    plot.add("circle.ring", { cx: x, cy: y, r: 7 });
    plot.text(x, y - 13, times(speedups[chosen.k]), `value.${sideOf(chosen.k)}`);
    plot.show();
  }
}

/** Where a point's label goes, so that it stays inside the plot. */
const sideOf = (k) => (k < 3 ? "start" : k > LARGEST_K - 3 ? "end" : "middle");

function sentence({ alpha, k, c, v }, speedups) {
  const best = speedups.indexOf(Math.max(...speedups));
  const breakEven = k === 0 ? null : breakEvenAlpha(k, c, 1 + v * k);
  const pays = k === 0 ? "this is plain decoding"
    : breakEven === null ? "it cannot pay" : `it pays from α ${short(breakEven)} on`;
  return `K=${k}: expected ${times(speedups[k])}, t_verify ${short(1 + v * k)}, ${pays}. `
    + `Best for α ${short(alpha)} and c ${short(c)}: K=${best}, ${times(speedups[best])}.`;
}

function measuredWords({ name, alpha, k, c, v, speedup, source, disturbed }) {
  const doubt = disturbed ? ", disturbed: the machine was busy" : "";
  return `${name}, measured (${source}${doubt}): ${times(speedup)} with α ${short(alpha)}, `
    + `${k.toFixed(1)} drafted per cycle, c ${short(c)}, t_verify ${short(1 + v * k)}.`;
}
