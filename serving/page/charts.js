// The charts of a run: accepted per cycle, acceptance per position, where the time went, and what
// the controller decided.

import { byId, drawing, element } from "./elements.js";
import { Plot, SHARE_TICKS, wholeTicks } from "./plot.js";
import { milliseconds, short } from "./words.js";

const NARROWEST = 4; // px of a cycle's bar; more cycles than fit are shown as means
const EMPTY = "Nothing to show yet.";

/** Draw all four of them. */
export function drawCharts(figures) {
  drawAccepted(byId("chart-accepted"), figures);
  drawPositions(byId("chart-positions"), figures);
  drawTime(byId("chart-time"), byId("time-split"), figures);
  drawController(byId("chart-controller"), byId("controller-says"), figures);
}

const isEmpty = (box, count) => {
  if (!count) box.replaceChildren(element("p", { class: "hint" }, EMPTY));
  return !count;
};

/** Neighbouring cycles as means of at most `most` stretches: [{from, to, drafted, accepted}]. */
function stretches(cycles, most) {
  const size = Math.ceil(cycles.length / Math.max(1, Math.floor(most)));
  const result = [];
  for (let from = 0; from < cycles.length; from += size) {
    const part = cycles.slice(from, from + size);
    const mean = (name) => part.reduce((sum, cycle) => sum + cycle[name], 0) / part.length;
    const to = from + part.length;
    result.push({ from, to, drafted: mean("drafted"), accepted: mean("accepted") });
  }
  return result;
}

/** A plot over the cycles: x is their number, y tokens. */
function cyclesPlot(box, label, cycles, yTitle) {
  const most = Math.max(1, ...cycles.map((cycle) => cycle.drafted));
  return new Plot(box, label, {
    xMax: cycles.length, yMax: most, yTitle, xTitle: "cycle",
    xTicks: wholeTicks(1, cycles.length).map(([value, text]) => [value - 0.5, text]),
    yTicks: wholeTicks(0, most, 5),
  });
}

function drawAccepted(box, { perCycle, accepted, drafted }) {
  if (isEmpty(box, perCycle.length)) return;
  const label = `${accepted} of ${drafted} drafted tokens accepted in ${perCycle.length} cycles`;
  const plot = cyclesPlot(box, label, perCycle, "tokens");
  const width = plot.x(plot.xMax) - plot.x(0);
  for (const part of stretches(perCycle, width / NARROWEST)) {
    const [from, to] = [plot.x(part.from), plot.x(part.to)];
    const gap = Math.min(3, (to - from) / 6);
    if (part.drafted) plot.bar(from + gap, to - gap, part.drafted, "drafted-bar");
    if (part.accepted) plot.bar(from + gap, to - gap, part.accepted, "accepted-bar");
  }
  plot.show();
}

function drawPositions(box, { positions }) {
  if (isEmpty(box, positions.length)) return;
  const words = positions.map(({ conditional }, i) => `position ${i + 1}: ${short(conditional)}`);
  const plot = new Plot(box, `Conditional acceptance, ${words.join(", ")}`, {
    xMax: positions.length, yMax: 1, yTitle: "accepted", xTitle: "position in the draft",
    xTicks: positions.map((_, i) => [i + 0.5, String(i + 1)]),
    yTicks: SHARE_TICKS,
  });
  positions.forEach(({ conditional, unconditional }, i) => {
    const [from, to] = [plot.x(i), plot.x(i + 1)];
    const half = Math.min(22, (to - from) * 0.35);
    const middle = (from + to) / 2;
    if (conditional !== null) plot.bar(middle - half, middle + half, conditional, "accepted-bar");
    if (unconditional !== null) plot.diamond(middle, plot.y(unconditional), 5, "diamond");
  });
  plot.show();
}

function drawTime(box, list, { ms, totalMs }) {
  list.replaceChildren();
  if (isEmpty(box, totalMs)) return;
  const [width, height] = [Math.max(260, box.clientWidth || 480), 48];
  const parts = Object.entries(ms);
  const label = parts.map(([name, spent]) => `${name} ${milliseconds(spent)}`).join(", ");
  const size = `0 0 ${width} ${height}`;
  const svg = drawing("svg", { viewBox: size, role: "img", "aria-label": label }, hatch());
  let x = 0;
  for (const [name, spent] of parts) {
    const share = (spent / totalMs) * width;
    const bar = { x, y: 4, width: share, height: height - 8 };
    svg.append(drawing("rect", { ...bar, class: `time-${name}` }));
    if (name === "verify") svg.append(drawing("rect", { ...bar, fill: "url(#hatch)" }));
    x += share;
    const percent = Math.round((spent / totalMs) * 100);
    list.append(element("li", {},
      element("span", { class: `swatch time-${name}` }),
      ` ${name} ${milliseconds(spent)}, ${percent} %`));
  }
  box.replaceChildren(svg);
}

/** Stripes that tell the verify from its neighbours without colour. */
function hatch() {
  const stripe = drawing("path", { d: "M-1 7 L7 -1 M-1 1 L1 -1 M5 7 L7 5", class: "stripe" });
  const size = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return drawing("defs", {}, drawing("pattern", size, stripe));
}

function drawController(box, says, { perCycle, controller, controllerStep }) {
  says.textContent = controller
    ? `Cycle ${controllerStep}: ${controller}`
    : "No controller has spoken: plain decoding, or a server with --fixed-k.";
  if (isEmpty(box, perCycle.length)) return;
  const drafting = perCycle.filter((cycle) => cycle.drafted).length;
  const label = `Tokens were drafted in ${drafting} of ${perCycle.length} cycles`;
  const plot = cyclesPlot(box, label, perCycle, "drafted");
  const width = plot.x(plot.xMax) - plot.x(0);
  const points = stretches(perCycle, width / NARROWEST).flatMap((part) => [
    [plot.x(part.from), plot.y(part.drafted)], [plot.x(part.to), plot.y(part.drafted)],
  ]);
  plot.curve(points, "step-line");
  plot.show();
}
