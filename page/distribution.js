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
import { numAccepted, ruleOf } from "./trace.js";
import { chance, grammarWords, MARKS, quoted, short, visible } from "./words.js";

const SHOWN = 8; // rows
const SEED = 634; // of draws by rejection, of which the first is rejected
const [DEEPEST, HIGHEST] = [-8, 4]; // scores with noise that are drawn; lower ones are marked

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
/** The entry where this is largest. */
export const top = (entries, name) => entries.reduce((a, b) => (b[name] > a[name] ? b : a));

/** Noise of one token under another seed: of the server's distribution, made here. */
function gumbel(seed, id) {
  let x = Math.imul(id + 1, 0x9e3779b1) ^ Math.imul(seed, 0x85ebca6b);
  for (const factor of [0x7feb352d, 0x846ca68b]) x = Math.imul(x ^ (x >>> 15), factor);
  x ^= x >>> 16;
  return -Math.log(-Math.log(((x >>> 0) + 0.5) / 2 ** 32));
}

/**
 * The entries with log p + noise and log q + noise, `target` and `draft`: of the run, or of a seed. A share
 * of the noise may be `added`.
 */
export const withNoise = (entries, seed = 0, added = 1) => entries.map((entry) => {
  const noise = added * (seed ? gumbel(seed, entry.id) : entry.noise);
  return { ...entry, noise, target: Math.log(entry.p) + noise, draft: Math.log(entry.q) + noise };
});

/** The likeliest entries by p or by q, and those of the ids that must be seen. */
export const likeliest = (entries, must = [], most = SHOWN) => [...entries]
  .sort((a, b) => Math.max(b.p, b.q) - Math.max(a.p, a.q))
  .filter(({ id }, i) => i < most - 2 || must.includes(id)).slice(0, most);

/**
 * Draw so often with the same noise for both. Gives the entries and the others, each with the noise of a seed
 * and the `share` that it has won by p, and how often both landed on one token.
 */
export function drawnWithNoise(entries, count, seed, added) {
  const all = withOthers(entries);
  const draws = Array.from({ length: count }, (_, i) => {
    const scores = withNoise(all, i + 1);
    return [top(scores, "target").id, top(scores, "draft").id];
  });
  return { all: withShares(withNoise(all, seed, added), draws.map(([own]) => own)),
    same: draws.filter(([own, guess]) => own === guess).length / count };
}

/** Draw so often by rejection: the entries and the others, each with its `share`, and the last draw. */
export function drawnByRejection(entries, count) {
  let seed = SEED;
  const all = withOthers(entries);
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647; // the same draws each time
  const pick = (weightOf) => {
    let left = random() * sum(all.map(weightOf));
    return all.find((entry) => (left -= weightOf(entry)) < 0) ?? all[0];
  };
  const draws = Array.from({ length: count || 1 }, () => {
    const [guess, u] = [pick((entry) => entry.q), random()];
    const isKept = u * guess.q < guess.p;
    return { guess, u, isKept, token: isKept ? guess : pick((entry) => Math.max(0, entry.p - entry.q)) };
  });
  return { all: withShares(all, count ? draws.map(({ token }) => token.id) : []), ...draws.at(-1) };
}

/** The entries with the `share` of each in the ids that were drawn; null where none were. */
const withShares = (entries, ids) => entries.map((entry) => (
  { ...entry, share: ids.length ? ids.filter((id) => id === entry.id).length / ids.length : null }));

/** The entries, and all others as one. */
function withOthers(entries) {
  const [p, q] = ["p", "q"].map((name) => Math.max(0, 1 - sum(entries.map((entry) => entry[name]))));
  return [...entries.map(({ target, draft, ...entry }) => entry), { id: null, text: "others", p, q }];
}

/** How often a guess is accepted, by rejection and with the same noise for both; others are one token. */
export function acceptanceOf(entries) {
  const all = withOthers(entries);
  const beside = (a) => sum(all.map((b) => Math.max(b.p / a.p, b.q / a.q)));
  return { byRejection: sum(all.map(({ p, q }) => Math.min(p, q))),
    byNoise: sum(all.filter(({ p, q }) => p && q).map((entry) => 1 / beside(entry))) };
}

/**
 * Words, and a row for each token: p above q, the residual shaded, or both with noise as marks on the
 * right, and the share of what was drawn. `kinds` has the rows' kinds, by token id.
 */
export function chanceRows(entries, kinds, hasResidual = false) {
  const [hasQ, isDrawn] = [entries[0].q !== null, "share" in entries[0]];
  const isNoisy = "target" in entries[0];
  const numbers = ({ p, q }) => (hasQ ? `${chance(p)} / ${chance(q)}` : chance(p));
  const [low, high] = isNoisy ? rangeOf(entries) : [0, 1];
  const at = (value) => (Math.max(value, low) - low) / (high - low || 1);
  const wins = { p: isNoisy && top(entries, "target"), q: isNoisy && top(entries, "draft") };
  const marked = (kind, end, entry) => (!Number.isFinite(end) ? [] : [
    bar(`noise.${kind}`, at(Math.min(end, end - entry.noise)), at(Math.max(end, end - entry.noise))),
    placed(element(wins[kind] === entry ? `span.mark.wins.${kind}` : `span.mark.${kind}`,
      end < low ? "‹" : MARKS[kind]), at(end))]);
  const rows = entries.map((entry) => {
    const { id, text, p, q, target, draft, share } = entry;
    const [kind, name] = [kinds.get(id), visible(text)];
    const bars = [bar("p", 0, p), hasResidual && p > q && bar("recovered", q, p), hasQ && bar("q", 0, q),
      share > 0 && placed(element("span.drawn"), share)];
    const right = isNoisy ? element("span.marks", ...marked("p", target, entry), ...marked("q", draft, entry))
      : isDrawn ? `${short(p)}, ${short(q)} → ${short(share)}` : numbers(entry);
    return row(kind ? `.${kind}` : "", kind ? `${MARKS[kind]} ${name}` : name, bars, right);
  });
  const foot = isNoisy ? element("span.marks", ...scale(low, high)) : isDrawn ? "p, q → drawn" : "";
  const says = (entry) => (
    isDrawn ? `p ${chance(entry.p)}, q ${chance(entry.q)}, drawn ${chance(entry.share)}` : numbers(entry));
  return [`Chances: ${entries.map((entry) => `${visible(entry.text)} ${says(entry)}`).join("; ")}`,
    ...rows, row(".scale", "chance", scale(0, 1), foot)];
}

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
    const entries = withNoise(given, number).map((entry) => (
      drafted && hasQ ? entry : { ...entry, draft: -Infinity }));
    const [own, guess] = [top(entries, "target"), drafted && (hasQ ? top(entries, "draft") : drafted)];
    const [mine, theirs, isSame] = [quoted(own), guess && quoted(guess), own.id === guess?.id];
    const words = !guess ? `${none} With its noise ${mine} is the largest of p: the target’s choice.`
      : !hasQ ? `The drafter names ${theirs}. With the noise the target lands on ${isSame ? "it" : mine}: `
        + `${isSame ? "accepted" : "rejected"}.`
        : isSame ? `The same noise was added to both, and both land on ${mine}: accepted.`
          : `With the same noise the drafter lands on ${theirs}, the target on ${mine}: rejected.`;
    const says = words + (number ? " (Noise made here; the run had another.)" : "");
    return { entries, same: own.id, says, guess: guess?.id, isNoisy: true };
  }
  #bars({ entries, same, guess = null, hasResidual = false, isNoisy = false }) {
    const { drafted, chosen } = this.#about;
    const hasQ = entries[0].q !== null;
    const ours = same === drafted?.id ? "accepted" : drafted ? "recovered" : chosen.kind;
    const noisy = this.#about.hasQ ? "log p, log q + noise, in nats" : "log p + noise, in nats";
    this.#keys.replaceChildren(keyOf("p", "p, the target"), hasQ ? keyOf("q", "q, the drafter") : "",
      hasResidual ? keyOf("recovered", "max(0, p − q)") : "", isNoisy ? ` right: ${noisy}` : "");
    const [kinds, shown] = [[[drafted?.id, "drafting"], [same, ours]], [same, drafted?.id, guess]];
    drawRows(byId("chances"), ...chanceRows(likeliest(entries, shown), new Map(kinds), hasResidual));
  }
}

/** The likeliest weights that make up `nucleus` of them all, as shares; 0 for the others. */
function withTopP(weights, nucleus) {
  const isIn = (weight) => sum(weights.filter((other) => other > weight)) < nucleus * sum(weights);
  const kept = weights.map((weight) => (isIn(weight) ? weight : 0));
  return kept.map((weight) => weight / sum(kept));
}

/** From where to where scores with noise are drawn: the same for all noises that are usual. */
const rangeOf = (entries) => [DEEPEST, Math.max(HIGHEST, ...entries.flatMap(({ target, draft, noise }) => (
  [target, draft, target - noise, draft - noise].filter(Number.isFinite))))];
