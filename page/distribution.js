// Why one token was kept or not, as a picture of the two distributions there. Each rule has its own:
//
//   greedy      the tallest bar of p is the target's choice; nothing is drawn
//   coupled     noise is added to log p and to log q: do the two land on the same token?
//   rejection   the draft is kept if u < p / q; else one is drawn from max(0, p − q), the shaded part
//
// The bars are the server's. When the reader moves temperature or top-p they are worked out here, of
// the tokens that are shown, and the page says so.

import { bar, drawRows, placed, row, scale } from "./charts.js";
import { byId, element, explained, slider, write } from "./elements.js";
import { keyOf } from "./popup.js";
import { gumbel } from "./scene.js";
import { numAccepted, ruleOf } from "./trace.js";
import { chance, grammarWords, MARKS, quoted, visible } from "./words.js";

const SHOWN = 8; // bars
const DEEPEST = 9; // below the best score with noise: lower ones are drawn there

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

export class Distribution {
  #box = byId("distribution");
  #keys = element("p.legend");
  #says = element("p.says", { role: "status", id: "verdict" });
  #note = element("p.note");
  #about = null; // entries, rule, drafted, chosen, temperature, none, hasQ, first (what sliders began with)
  clear() { this.#about = null; this.#box.replaceChildren(); }
  /** Show place `i` of `cycle`; `request` is what the run was asked with. */
  show(cycle, i, request) {
    if (!cycle.distributions[i]?.length) return this.clear();
    const [chosen, drafted, rule] = [cycle.tokens[i], cycle.proposals[i] ?? null, ruleOf(cycle.tokens[i])];
    const hasQ = cycle.distributions[i].some(({ q }) => q !== undefined);
    // A drafter without probabilities has all of its q on the token that it names.
    const qOf = ({ id, q = drafted ? Number(id === drafted.id) : null }) => (rule === "greedy" ? null : q);
    const entries = cycle.distributions[i].map((entry) => ({ ...entry, q: qOf(entry) }));
    const temperature = Number(request.temperature ?? 0) || 1;
    const judged = i < numAccepted(cycle) ? chosen : cycle.rejected ?? chosen;
    const first = rule === "coupled" ? { needle: 0 } : {};
    if (drafted && rule === "rejection") first.needle = judged.u;
    if (rule !== "greedy") {
      Object.assign(first, { heat: Math.min(2, temperature), nucleus: Number(request.top_p ?? 1) });
    }
    const none = `Nothing was drafted${cycle.proposals.length ? " here: the draft ended before" : ""}.`;
    this.#about = { entries, rule, drafted, chosen, temperature, none, hasQ, first };
    const about = { heat: ["temperature", [0.05, 2, "any"]], nucleus: ["top-p", [0.05, 1, "any"]],
      needle: rule === "coupled" ? ["another noise", [0, 20, 1]] : ["u, drawn from 0 to 1", [0, 1, "any"]] };
    const knobs = Object.entries(first).map(([id, value]) => slider(id, about[id][0], value, about[id][1]));
    const words = grammarWords(cycle, i);
    this.#box.replaceChildren(
      element("h4", `Why: ${drafted ? `d${i + 1}, ${quoted(drafted)}` : quoted(chosen)}`), this.#says,
      element("p.says", { id: "grammar", hidden: !words }, words),
      element("div.knobs", { input: () => this.draw() }, ...knobs),
      this.#keys, element("div.rows", { id: "chances" }), this.#note);
    this.draw();
  }
  draw() {
    if (!this.#about) return;
    const { entries, rule, drafted, hasQ, first } = this.#about;
    const at = Object.fromEntries(Object.keys(first).map((id) => [id, Number(byId(id).value)]));
    for (const [id, value] of Object.entries(at)) {
      const isNoise = rule === "coupled" && id === "needle";
      write(`${id}-value`, !isNoise ? chance(value) : value ? `no. ${value}` : "this run’s");
    }
    const isMoved = at.heat !== first.heat || at.nucleus !== first.nucleus;
    const { says, ...picture } = this[rule](isMoved ? this.#recomputed(at) : entries, at.needle);
    this.#says.textContent = says;
    this.#bars(picture);
    this.#note.textContent = rule === "greedy"
      ? "p before any temperature. Greedy decoding takes the largest: nothing is drawn."
      : isMoved ? "Worked out here, of the tokens that are shown; the rest is left out. "
        : "The likeliest tokens, as the run had them. ";
    if (rule === "greedy") return;
    if (drafted && !hasQ) this.#note.append("This drafter draws nothing: q is 1 for what it names. ");
    if (rule === "coupled") this.#note.append(explained("noise", "What is the noise?"));
    else this.#note.append(explained(drafted ? "u" : "draw", "What is u?"));
  }
  /** The entries at another temperature and top-p. */
  #recomputed({ heat, nucleus }) {
    const { entries, temperature, hasQ } = this.#about;
    const scores = entries.map(({ score }) => score ?? -Infinity); // a grammar forbids it
    const p = withTopP(scores.map((score) => Math.exp((score - Math.max(...scores)) / heat)), nucleus);
    const q = hasQ && withTopP(entries.map((entry) => entry.q ** (temperature / heat)), nucleus);
    return entries.map((entry, i) => ({ ...entry, p: p[i], q: q ? q[i] : entry.q }));
  }
  // Each rule: what it says of the entries, and what to draw of them.
  greedy(entries) {
    const { drafted, chosen, none } = this.#about;
    const draft = !drafted ? `${quoted(chosen)}. ${none}`
      : drafted.id === chosen.id ? `the draft, ${quoted(drafted)}: accepted.`
        : `${quoted(chosen)}, the draft was ${quoted(drafted)}: rejected.`;
    return { entries, same: chosen.id, says: `The target’s best is ${draft}` };
  }
  rejection(entries, u) {
    const { drafted, chosen, none, first } = this.#about;
    const drawn = `${none} ${quoted(chosen)} was drawn from p by u = ${chance(chosen.u)}.`;
    if (!drafted) return { entries, same: chosen.id, says: drawn };
    const { p, q } = entries.find(({ id }) => id === drafted.id);
    const share = q ? p / q : p ? Infinity : 0;
    const isKept = u * q < p;
    byId("needle").style.setProperty("--share", `${Math.min(1, share) * 100}%`);
    const verdict = isKept ? "accepted" : "rejected; another is drawn from the shaded part, max(0, p − q)";
    const moved = u === first.needle ? "" : ` (The run had u = ${chance(first.needle)}.)`;
    const says = `u = ${chance(u)} ${isKept ? "<" : "≥"} p / q = ${chance(p)} / ${chance(q)} = `
      + `${chance(share)}: ${quoted(drafted)} is ${verdict}.${moved}`;
    return { entries, same: isKept ? drafted.id : null, says, hasResidual: true };
  }
  coupled(given, number) {
    const { drafted, none, hasQ } = this.#about;
    const entries = given.map((entry) => {
      const noise = number ? gumbel(number, entry.id) : entry.noise;
      const draft = drafted && hasQ ? Math.log(entry.q) + noise : -Infinity;
      return { ...entry, target: Math.log(entry.p) + noise, draft };
    });
    const top = (name) => entries.reduce((a, b) => (b[name] > a[name] ? b : a));
    const [own, guess] = [top("target"), drafted && (hasQ ? top("draft") : drafted)];
    const [mine, theirs, isSame] = [quoted(own), guess && quoted(guess), own.id === guess?.id];
    const words = !guess ? `${none} With its noise ${mine} is the largest of p: the target’s choice.`
      : !hasQ ? `The drafter names ${theirs}. With the noise the target lands on ${isSame ? "it" : mine}: `
        + `${isSame ? "accepted" : "rejected"}.`
        : isSame ? `The same noise was added to both, and both land on ${mine}: accepted.`
          : `With the same noise the drafter lands on ${theirs}, the target on ${mine}: rejected.`;
    const says = words + (number ? " (Noise made here; the run had another.)" : "");
    return { entries, same: own.id, says, guess: guess?.id, isNoisy: true };
  }
  /** A row for each token: p above q, the residual shaded, or both with noise as marks on the right. */
  #bars({ entries, same, guess = null, hasResidual = false, isNoisy = false }) {
    const { drafted, chosen } = this.#about;
    const must = [same, drafted?.id, guess];
    const rows = [...entries].sort((a, b) => Math.max(b.p, b.q) - Math.max(a.p, a.q))
      .filter(({ id }, i) => i < SHOWN - 2 || must.includes(id)).slice(0, SHOWN);
    const hasQ = rows[0].q !== null;
    const numbers = ({ p, q }) => (hasQ ? `${chance(p)} / ${chance(q)}` : chance(p));
    const [low, high] = isNoisy ? rangeOf(rows) : [0, 1];
    const marked = (kind, value) => Number.isFinite(value)
      && placed(element(`span.mark.${kind}`, MARKS[kind]), (Math.max(value, low) - low) / (high - low || 1));
    const ours = same === drafted?.id ? "accepted" : drafted ? "recovered" : chosen.kind;
    const noisy = this.#about.hasQ ? "log p, log q + noise, in nats" : "log p + noise, in nats";
    this.#keys.replaceChildren(keyOf("p", "p, the target"), hasQ ? keyOf("q", "q, the drafter") : "",
      hasResidual ? keyOf("recovered", "max(0, p − q)") : "", isNoisy ? ` right: ${noisy}` : "");
    drawRows("chances", `Chances: ${rows.map((one) => `${visible(one.text)} ${numbers(one)}`).join(", ")}`,
      ...rows.map((entry) => {
        const { id, text, p, q, target, draft } = entry;
        const kind = id === same ? ours : id === drafted?.id ? "drafting" : "";
        const marks = isNoisy && element("span.marks", marked("p", target), marked("q", draft));
        const bars = [bar("p", 0, p), hasResidual && p > q && bar("recovered", q, p), hasQ && bar("q", 0, q)];
        const name = kind ? `${MARKS[kind]} ${visible(text)}` : visible(text);
        return row(kind && `.${kind}`, name, bars, marks || numbers(entry));
      }),
      row(".scale", "chance", scale(0, 1), isNoisy && element("span.marks", ...scale(low, high))));
  }
}

/** The likeliest weights that make up `nucleus` of them all, as shares; 0 for the others. */
function withTopP(weights, nucleus) {
  const [total, kept] = [sum(weights), weights.map(() => 0)];
  let before = 0;
  for (const [weight, i] of weights.map((w, at) => [w, at]).sort(([a], [b]) => b - a)) {
    if (before < nucleus * total) kept[i] = weight;
    before += weight;
  }
  return kept.map((weight) => weight / sum(kept));
}

/** From where to where scores with noise are drawn; what is lower stands at the lower end. */
function rangeOf(entries) {
  const values = entries.flatMap(({ target, draft }) => [target, draft]).filter(Number.isFinite);
  const high = Math.max(...values);
  return [Math.max(Math.min(...values), high - DEEPEST), high];
}
