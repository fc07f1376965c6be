// What if: the expected speed-up over K for an α, c and t_verify of one's choice, the break-even
// line at 1, and the point that this server measured.

import { byId } from "./elements.js";
import { breakEvenAlpha, expectedSpeedup } from "./formulas.js";
import { Plot, wholeTicks } from "./plot.js";
import { short, times } from "./words.js";

const LARGEST_K = 16;
const INPUTS = { alpha: "alpha", k: "whatif-k", c: "cost", tVerify: "verify-cost" };

export class WhatIf {
  #box = byId("chart-whatif");
  #measured = null;

  constructor() {
    for (const id of Object.values(INPUTS)) byId(id).addEventListener("input", () => this.draw());
    byId("take-measured").addEventListener("click", () => this.#take());
    this.draw();
  }

  /** A point of measured.js, or null where there is none; an older one then stays. */
  set measured(point) {
    this.#measured = point ?? this.#measured;
    this.draw();
  }

  draw() {
    const chosen = this.#values();
    for (const [name, id] of Object.entries(INPUTS)) {
      byId(`${id}-value`).textContent = name === "k" ? chosen.k : short(chosen[name]);
    }
    const speedups = Array.from({ length: LARGEST_K + 1 }, (_, k) => (
      expectedSpeedup(chosen.alpha, k, chosen.c, chosen.tVerify)));
    byId("whatif-says").textContent = sentence(chosen, speedups);
    byId("take-measured").setAttribute("aria-disabled", this.#measured === null);
    byId("measured-says").textContent = measuredWords(this.#measured);
    this.#plot(chosen, speedups);
  }

  #values() {
    const entries = Object.entries(INPUTS).map(([name, id]) => [name, Number(byId(id).value)]);
    return Object.fromEntries(entries);
  }

  #take() {
    if (!this.#measured) return;
    for (const [name, id] of Object.entries(INPUTS)) byId(id).value = this.#measured[name];
    this.draw();
  }

  #plot(chosen, speedups) {
    const point = this.#measured;
    const most = Math.max(1.5, ...speedups, point ? point.speedup : 0) * 1.08;
    const plot = new Plot(this.#box, `Expected speed-up over K. ${sentence(chosen, speedups)}`, {
      xMax: LARGEST_K, yMax: most, xTitle: "K", yTitle: "expected speed-up",
      xTicks: wholeTicks(0, LARGEST_K, 8),
      yTicks: speedupTicks(most),
    });
    plot.line(plot.x(0), plot.y(1), plot.x(LARGEST_K), plot.y(1), "break-even");
    plot.text(plot.x(LARGEST_K) - 2, plot.y(1) - 5, "break-even", "tick end");
    plot.curve(speedups.map((speedup, k) => [plot.x(k), plot.y(speedup)]), "curve");
    speedups.forEach((speedup, k) => {
      plot.add("circle", { cx: plot.x(k), cy: plot.y(speedup), r: 2.5, class: "dot" });
    });
    const [x, y] = [plot.x(chosen.k), plot.y(speedups[chosen.k])];
    plot.add("circle", { cx: x, cy: y, r: 7, class: "ring" });
    plot.text(x, y - 13, times(speedups[chosen.k]), `value ${sideOf(chosen.k)}`);
    if (point) this.#mark(plot, point);
    plot.show();
  }

  #mark(plot, { k, speedup }) {
    const [x, y] = [plot.x(Math.min(k, LARGEST_K)), plot.y(speedup)];
    plot.diamond(x, y, 7, "diamond measured");
    plot.text(x, y + 21, `measured ${times(speedup)}`, `value ${sideOf(k)}`);
  }
}

/** Halves where there is room for them. */
function speedupTicks(most) {
  const parts = most < 3 ? 2 : 1;
  return wholeTicks(0, most * parts).map(([value]) => [value / parts, `${value / parts}×`]);
}

/** Where a point's label goes, so that it stays inside the plot. */
const sideOf = (k) => (k < 3 ? "start" : k > LARGEST_K - 3 ? "end" : "middle");

function sentence({ alpha, k, c, tVerify }, speedups) {
  const best = speedups.indexOf(Math.max(...speedups));
  const breakEven = k === 0 ? null : breakEvenAlpha(k, c, tVerify);
  const need = breakEven === null ? "it cannot pay" : `it pays from α ${short(breakEven)} on`;
  const pays = k === 0 ? "this is plain decoding" : need;
  return `K=${k}: expected ${times(speedups[k])}, ${pays}. Best for α ${short(alpha)} and `
    + `c ${short(c)}: K=${best}, ${times(speedups[best])}.`;
}

function measuredWords(point) {
  if (!point) {
    return "Nothing was measured yet: race with a drafter, or just run where the server has a "
      + "controller.";
  }
  const { alpha, k, c, tVerify, speedup, source, disturbed } = point;
  const doubt = disturbed ? ", disturbed: the machine was busy" : "";
  return `Measured (${source}${doubt}): ${times(speedup)} with α ${short(alpha)}, `
    + `${k.toFixed(1)} drafted per cycle, c ${short(c)}, t_verify ${short(tVerify)}.`;
}
