// What if: what a cycle gives and takes for an α, K, c and a batch of one's choice, on the cost curve
// that was measured here, beside what each drafter has brought here.

import { balanceOf, bestK, breakEven, drawCosts, LARGEST_K } from "./curve.js";
import { byId, element, slider, write } from "./elements.js";
import { nameOfPrompt, short, times } from "./words.js";

const SLIDERS = {
  alpha: ["α, how often a guess is right once all before it were", 0.7, [0, 1, 0.01]],
  k: ["K, tokens drafted per cycle", 5, [0, LARGEST_K, 1]],
  c: ["c, the time of a draft step in passes", 0.1, [0, 1.5, 0.01]],
  batch: ["requests in a pass", 1, [1, 16, 1]],
};
const FIGURES = ["times", "gain"];
const idOf = (name) => `whatif-${name}`;
const ONE = { pass_ms: { 1: 1, 2: 1 } }; // before anything is known: a pass over more costs no more

export class WhatIf {
  #points = new Map(); // by drafter: {name, alpha, k, c, speedup, tokens, source, disturbed, rank}
  #curve = ONE;
  #source = "No pass was timed yet: further positions are taken to be free.";
  #isTouched = false;
  #chosen = null; // the form's drafter
  constructor() {
    const sliders = Object.entries(SLIDERS).map(([name, about]) => slider(idOf(name), ...about));
    byId("whatif").append(element("div.movers", { input: () => this.#touch(true) }, ...sliders),
      element("div.halves", ...FIGURES.map((id) => element("figure", { id: idOf(id) }))),
      element("p.says", { id: "whatif-says" }), element("p.note", { id: "whatif-source" }),
      element("p.note", { id: "measured" }));
    new ResizeObserver(() => this.draw()).observe(byId("whatif")); // and so for the first time
  }
  #touch(isTouched) {
    this.#isTouched = isTouched;
    this.add([]);
  }
  /** Follow the drafter that the form has: the sliders go to where it was measured. */
  follow(name) {
    if (name === this.#chosen) return;
    this.#chosen = name;
    this.#touch(false);
  }
  /** Take /health and /curve; without a curve, what the controller believes. */
  learn(health, curve) {
    const costs = health.controller?.costs_by_batch?.["1"];
    if (Object.keys(curve?.pass_ms ?? {}).length > 1) {
      this.#curve = curve;
      const six = costs?.token_ms && times(1 + (5 * costs.token_ms) / costs.pass_ms); // if it was seen
      const believed = six ? `The controller believes that six positions take ${six}.` : "";
      this.#source = `The curve was measured in idle time on ${curve.measured_at.slice(0, 10)}. ${believed}`;
    } else if (costs?.pass_ms) {
      this.#curve = { pass_ms: { 1: costs.pass_ms, 2: costs.pass_ms + costs.token_ms } };
      this.#source = "No curve was measured yet: this is what the controller believes.";
    }
    this.add(costs?.pass_ms ? fromHealth(health, costs) : []);
  }
  /** Points, one for each drafter: a newer one takes the place of one that is not better. */
  add(points) {
    const isBetter = ({ name, rank }) => !(this.#points.get(name)?.rank > rank);
    for (const point of points.filter(isBetter)) this.#points.set(point.name, point);
    const [best] = [...this.#points.values()].sort((a, b) => b.speedup - a.speedup);
    const point = this.#points.get(this.#chosen) ?? best;
    for (const name of point && !this.#isTouched ? ["alpha", "k", "c"] : []) {
      const input = byId(idOf(name));
      input.max = Math.max(SLIDERS[name][2][1], point[name]);
      input.value = point[name];
    }
    const press = { type: "button", click: () => this.#touch(false) };
    const take = element("button.quiet", press, "Set the sliders to it");
    if (point) byId("measured").replaceChildren(measuredWords(point), take);
    this.draw();
  }
  draw() {
    const at = {};
    for (const name of Object.keys(SLIDERS)) {
      at[name] = Number(byId(idOf(name)).value);
      write(`${idOf(name)}-value`, Number.isInteger(at[name]) ? at[name] : short(at[name]));
    }
    const points = [...at.batch > 1 ? [] : this.#points.values()].map((point) => (
      { ...point, isChosen: point.name === this.#chosen })).sort((a, b) => a.isChosen - b.isChosen);
    drawCosts(FIGURES.map((id) => byId(idOf(id))), this.#curve, at, { points });
    write("whatif-says", sentence(this.#curve, at));
    write("whatif-number", `${times(balanceOf(this.#curve, at).speedup)} as fast at α ${short(at.alpha)}, `
      + `K = ${at.k}, c ${short(at.c)}`);
    write("whatif-source", this.#source);
  }
}

function sentence(curve, at) {
  if (!at.k) return "K = 0 is plain decoding: 1.00×.";
  const { tokens, passes, speedup } = balanceOf(curve, at);
  const [least, best] = [breakEven(curve, at), bestK(curve, at)];
  const pays = least === null ? "it cannot pay" : `it pays from α ${short(least)} on`;
  const ofBest = best ? `K = ${best}, ${times(balanceOf(curve, { ...at, k: best }).speedup)}` : "no draft";
  return `K = ${at.k}: expected ${times(speedup)}, ${short(tokens)} tokens in ${short(passes)} plain passes; `
    + `${pays}. Best is ${ofBest}.`;
}

function measuredWords({ name, alpha, k, c, speedup, source, disturbed }) {
  return `With ${name} it was ${times(speedup)} as fast as plain decoding `
    + `(${source}${disturbed ? ", disturbed: the machine was busy" : ""}): `
    + `α ${short(alpha)}, ${k.toFixed(1)} drafted per cycle, c ${short(c)}. `;
}

const draftedPerCycle = (metrics) => metrics.num_draft_tokens / metrics.target_passes;

/** From an answer with a comparison; none where nothing was drafted. */
export function fromRace({ compare, metrics: { speculative_decoding: told } }, recordedOn = "") {
  const { costs: { alpha, c }, measured_speedup: speedup, disturbed } = compare;
  if (alpha === null || c === null || speedup === null) return [];
  const [name, k, tokens] = [told.drafter, draftedPerCycle(told), told.tokens_per_pass];
  const source = recordedOn ? `recorded on “${nameOfPrompt(recordedOn)}”` : "the last race";
  return [{ name, alpha, k, c, speedup, tokens, disturbed, source, rank: recordedOn ? 1 : 2 }];
}

/** From each drafter's life so far, against the controller's idea of a plain pass. */
function fromHealth(health, { pass_ms: pass, token_ms: more, draft_step_ms: steps = {} }) {
  return Object.entries(health.speculative_decoding.per_drafter).flatMap(([name, metrics]) => {
    const alpha = metrics.conditional_acceptance_rate_per_position?.[0] ?? null;
    if (alpha === null || steps[name] === undefined || !metrics.target_passes) return [];
    const [k, c, tokens] = [draftedPerCycle(metrics), steps[name] / pass, metrics.tokens_per_pass];
    const speedup = tokens / (k * c + 1 + (k * more) / pass);
    return [{ name, alpha, k, c, tokens, speedup, source: `all runs of ${name} so far`, rank: 0 }];
  });
}
