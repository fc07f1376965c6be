// The charts of a run: accepted per cycle, acceptance per position, and where the time went.

import { byId, element, write } from "./elements.js";
import { Plot, wholeTicks } from "./plot.js";
import { milliseconds, short } from "./words.js";

const NARROWEST = 4; // px of a cycle's bar; more cycles than fit are shown as means
const SHARES = [0, 0.25, 0.5, 0.75, 1].map((share) => [share, `${share * 100} %`]);

/** Draw the figures of a run, and all charts of it. */
export function drawStatistics(figures) {
  const rows = [
    ["tokens", figures.tokens, "accepted + recovered + bonus"],
    ["target passes", figures.passes, "target forwards after prefill"],
    ["tokens per pass", short(figures.tokensPerPass), "tokens after prefill / passes"],
    ["draft acceptance rate", short(figures.acceptanceRate), "accepted / drafted"],
    ["mean acceptance length", short(figures.acceptanceLength), "1 + accepted / cycles with a draft"],
    ["time", milliseconds(figures.totalMs), "draft + verify + other, after prefill"],
  ];
  byId("figures").replaceChildren(...rows.map((row) => entry(...row)));
  drawAccepted(byId("chart-accepted"), figures);
  drawPositions(byId("chart-positions"), figures);
  drawTime(byId("chart-time"), byId("time-split"), figures);
  write("controller-says", figures.controller ? `Cycle ${figures.controllerStep}: ${figures.controller}`
    : "No controller has spoken: plain decoding, or a server with --fixed-k.");
}

/** A figure with its name and its formula. */
export const entry = (name, value, more = "") => element("div", element("dt", name),
  element("dd.figure", { "data-figure": name }, value), element("dd.formula", more));

function isEmpty(box, count) {
  if (!count) box.replaceChildren(element("p.note", "Nothing to show yet."));
  return !count;
}

function drawAccepted(box, { perCycle, accepted, drafted }) {
  if (isEmpty(box, perCycle.length)) return;
  const [count, most] = [perCycle.length, Math.max(1, ...perCycle.map((cycle) => cycle.drafted))];
  const plot = new Plot(box, `${accepted} of ${drafted} drafted tokens accepted in ${count} cycles`, {
    xMax: count, yMax: most, yTitle: "tokens", xTitle: "cycle", yTicks: wholeTicks(0, most, 5),
    xTicks: wholeTicks(1, count).map(([value, text]) => [value - 0.5, text]),
  });
  const size = Math.ceil(count / Math.max(1, Math.floor((plot.x(count) - plot.x(0)) / NARROWEST)));
  for (let from = 0; from < count; from += size) {
    const part = perCycle.slice(from, from + size);
    const [x1, x2] = [plot.x(from), plot.x(from + part.length)];
    const gap = Math.min(3, (x2 - x1) / 6);
    for (const name of ["drafted", "accepted"]) {
      const mean = part.reduce((sum, cycle) => sum + cycle[name], 0) / part.length;
      if (mean) plot.bar(x1 + gap, x2 - gap, mean, `${name}-bar`);
    }
  }
  plot.show();
}

function drawPositions(box, { positions }) {
  if (isEmpty(box, positions.length)) return;
  const words = positions.map(({ conditional }, i) => `position ${i + 1}: ${short(conditional)}`);
  const plot = new Plot(box, `Conditional acceptance, ${words.join(", ")}`, {
    xMax: positions.length, yMax: 1, yTitle: "accepted", xTitle: "position in the draft", yTicks: SHARES,
    xTicks: positions.map((_, i) => [i + 0.5, String(i + 1)]),
  });
  positions.forEach(({ conditional, unconditional }, i) => {
    const [middle, half] = [plot.x(i + 0.5), Math.min(22, (plot.x(1) - plot.x(0)) * 0.35)];
    if (conditional !== null) plot.bar(middle - half, middle + half, conditional, "accepted-bar");
    if (unconditional !== null) plot.diamond(middle, plot.y(unconditional), 5, "diamond");
  });
  plot.show();
}

function drawTime(box, list, { ms, totalMs }) {
  list.replaceChildren();
  if (isEmpty(box, totalMs)) return;
  box.replaceChildren(...Object.entries(ms).map(([name, spent]) => {
    const words = ` ${name} ${milliseconds(spent)}, ${Math.round((spent / totalMs) * 100)} %`;
    list.append(element("li", element(`span.swatch.time-${name}`), words));
    const bar = element(`div.time-${name}`);
    bar.style.flexGrow = spent;
    return bar;
  }));
}
