// Why one token was kept or not, as a picture of the two distributions there. Each rule has its own:
//
//   greedy      the tallest bar of p is the target's choice; no chance, no u
//   coupled     noise is added to log p and to log q: do the two land on the same token?
//   rejection   the draft is kept if u < p / q; else one is drawn from max(0, p − q), the shaded part
//
// The bars are the server's. When the reader moves temperature or top-p they are worked out here, of
// the tokens that are shown, and the page says so.

import { byId, drawing, element, explained, write } from "./elements.js";
import { diamond } from "./plot.js";
import { numAccepted, ruleOf } from "./trace.js";
import { chance, fixed, quoted, visible } from "./words.js";

const [ROW, LEFT, SHOWN] = [20, 92, 8]; // px, px, bars

const slider = (id, words, value, [min, max, step]) => element("div",
  element("label", { for: id }, words, element("output", { id: `${id}-value`, for: id, "aria-live": "off" })),
  element("input", { id, type: "range", min, max, step, value }));

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

export class Distribution {
  #box = byId("distribution");
  #svg = element("div");
  #says = element("p.says", { role: "status", id: "verdict" });
  #note = element("p.note");
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
    const none = cycle.proposals.length ? "Nothing was drafted for this place: the draft ended before it."
      : "Nothing was drafted.";
    this.#about = { entries, rule, drafted, chosen, judged, temperature, none };
    this.#about.topP = Number(request.top_p ?? 1);
    const place = drafted ? `d${i + 1}, ${quoted(drafted)}` : quoted(chosen);
    const knobs = element("div.knobs", ...this.#sliders());
    this.#box.replaceChildren(element("h3", `Why: ${place}`), this.#says, knobs, this.#svg, this.#note);
    for (const input of knobs.querySelectorAll("input")) {
      input.dataset.first = input.value;
      input.addEventListener("input", () => this.draw());
    }
    this.draw();
  }
  #sliders() {
    const { rule, drafted, judged, temperature, topP } = this.#about;
    if (rule === "greedy") return [];
    const sliders = [
      slider("heat", "temperature ", Math.min(2, temperature), [0.05, 2, 0.05]),
      slider("nucleus", "top-p ", topP, [0.05, 1, 0.01]),
    ];
    if (rule === "coupled") return [slider("needle", "another noise ", 0, [0, 20, 1]), ...sliders];
    if (!drafted) return sliders;
    const needle = slider("needle", "u, drawn from 0 to 1 ", judged.u, [0, 1, 0.001]);
    needle.lastChild.className = "share";
    return [needle, ...sliders];
  }
  draw() {
    if (!this.#about) return;
    const { entries, rule } = this.#about;
    const isMoved = ["heat", "nucleus"].some((id) => byId(id) && byId(id).value !== byId(id).dataset.first);
    const shown = isMoved ? this.#recomputed(entries) : entries;
    for (const { id, value } of this.#box.querySelectorAll("input")) {
      const seed = value === "0" ? "this run’s" : `no. ${value}`;
      write(`${id}-value`, rule === "coupled" && id === "needle" ? seed : chance(Number(value)));
    }
    const needle = byId("needle") ? Number(byId("needle").value) : null;
    if (rule === "rejection") this.#rejection(shown, isMoved ? needle : this.#sameAsRun(needle));
    else if (rule === "coupled") this.#coupled(shown, needle);
    else this.#greedy(shown);
    this.#note.replaceChildren(this.#source(isMoved));
    if (rule === "rejection") this.#note.append(" ", explained("u", "What is u?"));
    if (rule === "coupled") this.#note.append(" ", explained("noise", "What is the noise?"));
  }
  /** Where the bars come from. */
  #source(isMoved) {
    const { entries, rule, drafted } = this.#about;
    const words = isMoved ? "Worked out here, of the tokens that are shown; the rest is left out."
      : "The likeliest tokens, as the server had them.";
    if (rule === "greedy") {
      return "p before any temperature: greedy decoding takes the largest, "
        + "so nothing is drawn and there is no u.";
    }
    if (!drafted || entries.some(({ q }) => q !== undefined)) return words;
    return `${words} This drafter draws nothing: all of its q is on the token that it names.`;
  }
  /** The run's own u, as exactly as it came; another one as the needle says. */
  #sameAsRun(needle) {
    return needle !== null && needle === Number(byId("needle").dataset.first) ? this.#about.judged.u : needle;
  }
  /** q of an entry; all on the draft where the drafter has no distribution, null without a draft. */
  #q(entry) {
    const { drafted } = this.#about;
    return entry.q ?? (drafted ? Number(entry.id === drafted.id) : null);
  }
  #recomputed(entries) {
    const [heat, nucleus] = [Number(byId("heat").value), Number(byId("nucleus").value)];
    const cut = (weights) => {
      const total = sum(weights);
      const order = weights.map((w, i) => [w / total, i]).sort(([a], [b]) => b - a);
      let before = 0;
      const kept = weights.map(() => 0);
      for (const [share, i] of order) {
        if (before < nucleus) kept[i] = share;
        before += share;
      }
      return kept.map((w) => w / sum(kept));
    };
    const best = Math.max(...entries.map(({ score }) => score));
    const p = cut(entries.map(({ score }) => Math.exp((score - best) / heat)));
    if (entries.every(({ q }) => q === undefined)) return entries.map((entry, i) => ({ ...entry, p: p[i] }));
    const q = cut(entries.map((entry) => (entry.q ?? 0) ** (this.#about.temperature / heat)));
    return entries.map((entry, i) => ({ ...entry, p: p[i], q: q[i] }));
  }
  #greedy(entries) {
    const { drafted, chosen, none } = this.#about;
    this.#bars(entries, { same: chosen.id });
    const draft = !drafted ? `${quoted(chosen)}. ${none}`
      : drafted.id === chosen.id ? `the draft, ${quoted(drafted)}: kept.`
        : `${quoted(chosen)}, the draft was ${quoted(drafted)}: rejected.`;
    this.#says.textContent = `The target’s best is ${draft}`;
  }
  #rejection(entries, u) {
    const { drafted, chosen, judged, none } = this.#about;
    if (!drafted) {
      this.#bars(entries, { same: chosen.id });
      const draw = `${quoted(chosen)} was drawn from p by u = ${chance(chosen.u)}`;
      this.#says.textContent = `${none} ${draw}.`;
      return;
    }
    const entry = entries.find(({ id }) => id === drafted.id);
    const [p, q] = [entry.p, this.#q(entry)];
    const share = q ? p / q : p ? Infinity : 0;
    const isKept = u * q < p;
    this.#bars(entries, { same: isKept ? drafted.id : null, residual: true });
    byId("needle").style.setProperty("--share", `${Math.min(1, share) * 100}%`);
    const verdict = isKept ? "kept" : "rejected; another is drawn from the shaded part, max(0, p − q)";
    const moved = u === judged.u ? "" : ` (The run had u = ${chance(judged.u)}.)`;
    this.#says.textContent = `u = ${chance(u)} ${isKept ? "<" : "≥"} p / q = ${chance(p)} / ${chance(q)} = `
      + `${chance(share)}: ${quoted(drafted)} is ${verdict}.${moved}`;
  }
  #coupled(entries, number) {
    const { drafted, none } = this.#about;
    const noisy = entries.map((entry) => {
      const noise = number ? gumbel(number, entry.id) : entry.noise;
      const q = this.#q(entry);
      const draft = q === null ? -Infinity : Math.log(q) + noise;
      return { ...entry, target: Math.log(entry.p) + noise, draft };
    });
    const top = (name) => noisy.reduce((a, b) => (b[name] > a[name] ? b : a));
    const [own, guess] = [top("target"), drafted ? top("draft") : null];
    this.#bars(noisy, { same: own.id, noisy, guess });
    const lands = `With the same noise the drafter lands on ${guess && quoted(guess)}`;
    const words = !guess
      ? `${none} With its noise ${quoted(own)} is the largest of p: the target’s choice.`
      : own.id === guess.id ? `The same noise was added to both, and both land on ${quoted(own)}: kept.`
        : `${lands}, the target on ${quoted(own)}: rejected.`;
    this.#says.textContent = words + (number ? " (Noise made here; the run had another.)" : "");
  }
  /** A row for each token: p above q, the residual shaded, or both with noise as marks on the right. */
  #bars(entries, { same, residual = false, noisy = null, guess = null }) {
    const { drafted } = this.#about;
    const must = new Set([same, drafted?.id, guess?.id]);
    const ranked = [...entries].sort((a, b) => Math.max(b.p, b.q ?? 0) - Math.max(a.p, a.q ?? 0));
    const rows = ranked.filter((entry, i) => i < SHOWN - 2 || must.has(entry.id)).slice(0, SHOWN);
    const hasQ = drafted && this.#about.rule !== "greedy";
    const width = Math.max(280, this.#box.clientWidth || 480);
    const end = noisy ? width * 0.56 - 40 : width - 66;
    const x = (share) => LEFT + share * (end - LEFT);
    const words = rows.map((entry) => (
      `${visible(entry.text)} p ${chance(entry.p)}${hasQ ? ` q ${chance(this.#q(entry))}` : ""}`
    ));
    const label = `Probabilities: ${words.join(", ")}`;
    const viewBox = `0 0 ${width} ${rows.length * ROW + 18}`;
    const svg = drawing("svg", { viewBox, role: "img", "aria-label": label });
    const text = (at, y, said, kind) => svg.append(drawing(`text.${kind}`, { x: at, y }, said));
    const bar = (from, to, y, height, kind) => {
      svg.append(drawing(`rect.${kind}`, { x: from, y, width: Math.max(0.5, to - from), height }));
    };
    text(LEFT, 11, hasQ ? "p target" : "p", "key-p");
    if (hasQ) text(LEFT + 62, 11, residual ? "q drafter · shaded: max(0, p − q)" : "q drafter", "key-q");
    if (noisy) text(width * 0.56 + 8, 11, hasQ ? "+ noise: ● p  ◇ q" : "+ noise", "key");
    const place = noisy && scale(noisy, width);
    rows.forEach((entry, i) => {
      const [y, q] = [17 + i * ROW, this.#q(entry)];
      if (entry.id === same) bar(0, width, y, ROW - 1, "row-chosen");
      else if (entry.id === drafted?.id) bar(0, width, y, ROW - 1, "row-drafted");
      text(4, y + 14, short(visible(entry.text)), "token-name");
      bar(LEFT, x(entry.p), y + 2, hasQ ? 8 : 15, "bar-p");
      if (residual && entry.p > q) bar(x(q), x(entry.p), y + 2, 8, "bar-more");
      if (hasQ) bar(LEFT, x(q), y + 11, 7, "bar-q");
      if (noisy) return marks(svg, entry, y + 10, place, hasQ);
      const numbers = hasQ ? `${chance(entry.p)} / ${chance(q)}` : chance(entry.p);
      return text(x(Math.max(entry.p, hasQ ? q : 0)) + 4, y + 14, numbers, "number");
    });
    this.#svg.replaceChildren(svg);
  }
}

/** Where a score with noise goes, from place.from to place.to; 9 below the best is as low as it gets. */
function scale(noisy, width) {
  const values = noisy.flatMap(({ target, draft }) => [target, draft]).filter(Number.isFinite);
  const high = Math.max(...values);
  const low = Math.max(Math.min(...values), high - 9);
  const [from, room] = [width * 0.56 + 8, width * 0.44 - 20];
  const place = (value) => from + ((Math.max(value, low) - low) / (high - low || 1)) * room;
  return Object.assign(place, { from, to: place(high) });
}

function marks(svg, { target, draft }, y, place, hasQ) {
  svg.append(drawing("line.grid", { x1: place.from, x2: place.to, y1: y, y2: y }));
  if (Number.isFinite(target)) {
    const title = drawing("title", fixed(target, 2));
    svg.append(drawing("circle.mark-p", { cx: place(target), cy: y, r: 4.5 }, title));
  }
  if (hasQ && Number.isFinite(draft)) svg.append(diamond(place(draft), y, 7, "mark-q"));
}

const short = (text) => (text.length > 11 ? `${text.slice(0, 10)}…` : text);

/** Noise for one token under another seed: of the same distribution as the server's, made here. */
function gumbel(seed, id) {
  let x = Math.imul(id + 1, 0x9e3779b1) ^ Math.imul(seed, 0x85ebca6b);
  for (const factor of [0x7feb352d, 0x846ca68b]) x = Math.imul(x ^ (x >>> 15), factor);
  x ^= x >>> 16;
  return -Math.log(-Math.log(((x >>> 0) + 0.5) / 2 ** 32));
}
