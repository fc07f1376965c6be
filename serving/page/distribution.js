// Why one token was kept or not, as a picture of the two distributions there. Each rule has its own:
//
//   greedy      the tallest bar of p is the target's choice; no chance, no u
//   coupled     noise is added to log p and to log q: do the two land on the same token?
//   rejection   the draft is kept if u < p / q; else one is drawn from max(0, p − q), the shaded part
//
// The bars are the server's. When the reader moves temperature or top-p they are worked out here, of
// the tokens that are shown, and the page says so.

import { byId, drawing, element } from "./elements.js";
import { numAccepted, ruleOf } from "./trace.js";
import { chance, fixed, visible } from "./words.js";

const [ROW, LEFT, SHOWN] = [20, 92, 8]; // px, px, bars

const U = () => element("button", { type: "button", class: "word", "data-word": "u" }, "What is u?");
const slider = (id, words, value, max, step) => element("div", {},
  element("label", { for: id }, words, element("output", { id: `${id}-value`, for: id, "aria-live": "off" })),
  element("input", { id, type: "range", min: 0, max, step, value, class: id === "needle" && max === 1 ? "share" : null }));

export class Distribution {
  #box = byId("distribution");
  #svg = element("div", { class: "bars" });
  #says = element("p", { class: "says", role: "status", id: "verdict" });
  #note = element("p", { class: "note" });
  #about = null; // what is shown: entries, rule, drafted, chosen, judged, temperature, topP
  clear() {
    this.#about = null;
    this.#box.replaceChildren();
  }
  /** Show place `i` of `cycle`; `request` is what the run was asked with. */
  show(cycle, i, request) {
    const entries = cycle.distributions[i];
    if (!entries?.length) return this.clear();
    const chosen = cycle.tokens[i];
    const drafted = cycle.proposals[i] ?? null;
    const judged = i === numAccepted(cycle) && cycle.rejected ? cycle.rejected : chosen;
    const rule = ruleOf(chosen);
    const temperature = Number(request.temperature ?? 0) || (rule === "greedy" ? 0 : 1);
    this.#about = { entries, rule, drafted, chosen, judged, temperature, topP: Number(request.top_p ?? 1) };
    const controls = element("div", { class: "knobs" });
    if (rule === "rejection" && drafted) controls.append(slider("needle", "u, drawn from 0 to 1 ", judged.u, 1, 0.001));
    if (rule === "coupled") controls.append(slider("needle", "another noise ", 0, 20, 1));
    if (rule !== "greedy") {
      controls.append(slider("heat", "temperature ", Math.min(2, temperature), 2, 0.05), slider("nucleus", "top-p ", this.#about.topP, 1, 0.01));
      controls.querySelector("#heat").min = 0.05;
      controls.querySelector("#nucleus").min = 0.05;
    }
    for (const input of controls.querySelectorAll("input")) {
      input.dataset.first = input.value;
      input.addEventListener("input", () => this.draw());
    }
    const place = drafted ? `d${i + 1}, “${visible(drafted.text)}”` : `“${visible(chosen.text)}”`;
    this.#box.replaceChildren(element("h3", {}, `Why: ${place}`), this.#says, controls, this.#svg, this.#note);
    this.draw();
  }
  draw() {
    if (!this.#about) return;
    const { entries, rule } = this.#about;
    const isMoved = ["heat", "nucleus"].some((id) => byId(id) && byId(id).value !== byId(id).dataset.first);
    const shown = isMoved ? this.#recomputed(entries) : entries;
    for (const input of this.#box.querySelectorAll("input")) {
      byId(`${input.id}-value`).textContent = rule === "coupled" && input.id === "needle"
        ? (input.value === "0" ? "this run’s" : `no. ${input.value}`) : chance(Number(input.value));
    }
    const needle = byId("needle") ? Number(byId("needle").value) : null;
    if (rule === "rejection") this.#rejection(shown, isMoved ? needle : this.#sameAsRun(needle), isMoved);
    else if (rule === "coupled") this.#coupled(shown, needle);
    else this.#greedy(shown);
    const hasQ = entries.some(({ q }) => q !== undefined);
    const missing = this.#about.drafted && !hasQ && rule !== "greedy"
      ? " This drafter draws nothing: all of its q is on the token that it names." : "";
    this.#note.replaceChildren((isMoved ? "Worked out here, of the tokens that are shown; the rest is left out."
      : rule === "greedy" ? "p before any temperature: greedy decoding takes the largest, so nothing is drawn and there is no u."
        : "The likeliest tokens, as the server had them.") + missing, rule === "rejection" ? " " : "", rule === "rejection" ? U() : "");
  }
  /** The run's own u, as exactly as it came; another one as the needle says. */
  #sameAsRun(needle) {
    return needle !== null && String(needle) === String(Number(byId("needle").dataset.first)) ? this.#about.judged.u : needle;
  }
  /** q of an entry; all on the draft where the drafter has no distribution, null without a draft. */
  #q(entry) {
    const { drafted } = this.#about;
    return entry.q ?? (drafted ? Number(entry.id === drafted.id) : null);
  }
  #recomputed(entries) {
    const [heat, nucleus, was] = [Number(byId("heat").value), Number(byId("nucleus").value), this.#about.temperature];
    const cut = (weights) => {
      const total = weights.reduce((sum, w) => sum + w, 0);
      const order = weights.map((w, i) => [w / total, i]).sort(([a], [b]) => b - a);
      let before = 0;
      const kept = weights.map(() => 0);
      for (const [share, i] of order) {
        if (before < nucleus) kept[i] = share;
        before += share;
      }
      const rest = kept.reduce((sum, w) => sum + w, 0);
      return kept.map((w) => w / rest);
    };
    const best = Math.max(...entries.map(({ score }) => score));
    const p = cut(entries.map(({ score }) => Math.exp((score - best) / heat)));
    const q = entries.some((entry) => entry.q !== undefined) ? cut(entries.map((entry) => (entry.q ?? 0) ** (was / heat))) : null;
    return entries.map((entry, i) => ({ ...entry, p: p[i], ...(q ? { q: q[i] } : {}) }));
  }
  #greedy(entries) {
    const { drafted, chosen } = this.#about;
    this.#bars(entries, { same: chosen.id });
    this.#says.textContent = !drafted ? `The target’s best is “${visible(chosen.text)}”. Nothing was drafted here.`
      : drafted.id === chosen.id ? `The target’s best is the draft, “${visible(drafted.text)}”: kept.`
        : `The target’s best is “${visible(chosen.text)}”, the draft was “${visible(drafted.text)}”: rejected.`;
  }
  #rejection(entries, u) {
    const { drafted, chosen, judged } = this.#about;
    if (!drafted) {
      this.#bars(entries, { same: chosen.id });
      this.#says.textContent = `Nothing was drafted here: “${visible(chosen.text)}” was drawn from p by u = ${chance(chosen.u)}.`;
      return;
    }
    const entry = entries.find(({ id }) => id === drafted.id);
    const [p, q] = [entry.p, this.#q(entry)];
    const share = q ? p / q : p ? Infinity : 0;
    const isKept = u * q < p;
    this.#bars(entries, { same: isKept ? drafted.id : null, residual: true });
    byId("needle").style.setProperty("--share", `${Math.min(1, share) * 100}%`);
    const moved = u === judged.u ? "" : ` (The run had u = ${chance(judged.u)}.)`;
    this.#says.textContent = `u = ${chance(u)} ${isKept ? "<" : "≥"} p / q = ${chance(p)} / ${chance(q)} = ${chance(share)}: `
      + `“${visible(drafted.text)}” is ${isKept ? "kept" : "rejected; another is drawn from the shaded part, max(0, p − q)"}.${moved}`;
  }
  #coupled(entries, number) {
    const { drafted } = this.#about;
    const noisy = entries.map((entry) => {
      const noise = number ? gumbel(number, entry.id) : entry.noise;
      const q = this.#q(entry);
      return { ...entry, target: Math.log(entry.p) + noise, draft: q === null ? -Infinity : Math.log(q) + noise };
    });
    const top = (name) => noisy.reduce((a, b) => (b[name] > a[name] ? b : a));
    const [own, guess] = [top("target"), drafted ? top("draft") : null];
    this.#bars(noisy, { same: own.id, noisy, guess });
    this.#says.textContent = !guess ? `Nothing was drafted here. With its noise “${visible(own.text)}” is the largest of p: the target’s choice.`
      : own.id === guess.id ? `The same noise was added to both, and both land on “${visible(own.text)}”: kept.`
        : `With the same noise the drafter lands on “${visible(guess.text)}”, the target on “${visible(own.text)}”: rejected.`;
    if (number) this.#says.textContent += " (Noise made here; the run had another.)";
  }
  /** A row for each token: p above q, the residual shaded, or both with noise as marks on the right. */
  #bars(entries, { same, residual = false, noisy = null, guess = null }) {
    const { drafted } = this.#about;
    const must = new Set([same, drafted?.id, guess?.id]);
    const ranked = [...entries].sort((a, b) => Math.max(b.p, b.q ?? 0) - Math.max(a.p, a.q ?? 0));
    const rows = ranked.filter((entry, i) => i < SHOWN - 2 || must.has(entry.id)).slice(0, SHOWN);
    const hasQ = drafted && this.#about.rule !== "greedy";
    const width = Math.max(280, this.#box.clientWidth || 480);
    const end = noisy ? width * 0.56 : width - 66;
    const x = (share) => LEFT + share * (end - LEFT - (noisy ? 40 : 0));
    const words = rows.map((e) => `${visible(e.text)} p ${chance(e.p)}${hasQ ? ` q ${chance(this.#q(e))}` : ""}`).join(", ");
    const height = rows.length * ROW + 18;
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Probabilities: ${words}` });
    const text = (at, y, said, kind) => svg.append(drawing("text", { x: at, y, class: kind }, said));
    const bar = (from, to, y, high, kind) => svg.append(drawing("rect", { x: from, y, width: Math.max(0.5, to - from), height: high, class: kind }));
    text(LEFT, 11, hasQ ? "p target" : "p", "key-p");
    if (hasQ) text(LEFT + 62, 11, residual ? "q drafter · shaded: max(0, p − q)" : "q drafter", "key-q");
    const place = noisy && this.#scale(noisy, width);
    if (noisy) text(width * 0.56 + 8, 11, hasQ ? "+ noise: ● p  ◇ q" : "+ noise", "");
    rows.forEach((entry, i) => {
      const y = 17 + i * ROW;
      const q = this.#q(entry);
      if (entry.id === drafted?.id || entry.id === same) bar(0, width, y, ROW - 1, entry.id === same ? "row-chosen" : "row-drafted");
      text(4, y + 14, short(visible(entry.text)), "token-name");
      bar(LEFT, x(entry.p), y + 2, hasQ ? 8 : 15, "bar-p");
      if (residual && entry.p > q) bar(x(q), x(entry.p), y + 2, 8, "bar-more");
      if (hasQ) bar(LEFT, x(q), y + 11, 7, "bar-q");
      if (!noisy) text(x(Math.max(entry.p, hasQ ? q : 0)) + 4, y + 14, chance(entry.p) + (hasQ ? ` / ${chance(q)}` : ""), "number");
      if (noisy) this.#marks(svg, entry, y + 10, place, hasQ);
    });
    this.#svg.replaceChildren(svg);
  }
  #scale(noisy, width) {
    const values = noisy.flatMap(({ target, draft }) => [target, draft]).filter(Number.isFinite);
    const [high, low] = [Math.max(...values), Math.max(Math.min(...values), Math.max(...values) - 9)];
    const place = (value) => width * 0.56 + 8 + ((Math.max(value, low) - low) / (high - low || 1)) * (width * 0.44 - 20);
    return Object.assign(place, { from: place(low), to: place(high) });
  }
  #marks(svg, { target, draft }, y, place, hasQ) {
    svg.append(drawing("line", { x1: place.from, x2: place.to, y1: y, y2: y, class: "grid" }));
    if (Number.isFinite(target)) svg.append(drawing("circle", { cx: place(target), cy: y, r: 4.5, class: "mark-p" }, drawing("title", {}, fixed(target, 2))));
    if (!hasQ || !Number.isFinite(draft)) return;
    const at = place(draft);
    svg.append(drawing("polygon", { points: [[at, y - 7], [at + 7, y], [at, y + 7], [at - 7, y]].join(" "), class: "mark-q" }));
  }
}

const short = (text) => (text.length > 11 ? `${text.slice(0, 10)}…` : text);

/** Noise for one token under another seed: of the same distribution as the server's, made here. */
function gumbel(seed, id) {
  let x = Math.imul(id + 1, 0x9e3779b1) ^ Math.imul(seed, 0x85ebca6b);
  for (const factor of [0x7feb352d, 0x846ca68b]) x = Math.imul(x ^ (x >>> 15), factor);
  x ^= x >>> 16;
  return -Math.log(-Math.log(((x >>> 0) + 0.5) / 2 ** 32));
}
