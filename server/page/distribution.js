// Why one token was kept or not, as a picture of the two distributions there. Each rule has its own:
//
//   greedy      the tallest bar of p is the target's choice; nothing is drawn
//   coupled     noise is added to log p and to log q: do the two land on the same token?
//   rejection   the draft is kept if u < p / q; else one is drawn from max(0, p − q), the shaded part

import { bar, drawRows, placed, row, scale } from "./charts.js";
import { byId, element, explained } from "./elements.js";
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

/** Why one token of a run was kept or not, as the run had it. */
export class Distribution {
  #box = byId("distribution");
  clear() { this.#box.replaceChildren(); }
  /** Show place `i` of `cycle`. */
  show(cycle, i) {
    if (!cycle.distributions[i]?.length) return this.clear();
    const [chosen, drafted, rule] = [cycle.tokens[i], cycle.proposals[i] ?? null, ruleOf(cycle.tokens[i])];
    const hasQ = cycle.distributions[i].some(({ q }) => q !== undefined);
    // A drafter without probabilities has all of its q on the token that it names.
    const qOf = ({ id, q = drafted ? Number(id === drafted.id) : null }) => (rule === "greedy" ? null : q);
    const entries = cycle.distributions[i].map((entry) => ({ ...entry, q: qOf(entry) }));
    const judged = i < numAccepted(cycle) ? chosen : cycle.rejected ?? chosen;
    const none = `Nothing was drafted${cycle.proposals.length ? " here: the draft ended before" : ""}.`;
    const { says, ...picture } = RULES[rule]({ entries, drafted, chosen, none, hasQ, u: judged.u });
    const words = grammarWords(cycle, i);
    const notes = rule === "greedy"
      ? ["p before any temperature. Greedy decoding takes the largest: nothing is drawn."]
      : ["The likeliest tokens, as the run had them. ",
        drafted && !hasQ ? "This drafter draws nothing: q is 1 for what it names. " : "",
        rule === "coupled" ? explained("noise", "What is the noise?")
          : explained(drafted ? "u" : "draw", "What is u?")];
    const rows = element("div.rows", { id: "chances" });
    this.#box.replaceChildren(
      element("h4", `Why: ${drafted ? `d${i + 1}, ${quoted(drafted)}` : quoted(chosen)}`),
      element("p.says", { role: "status", id: "verdict" }, says),
      element("p.says", { id: "grammar", hidden: !words }, words),
      keys({ entries, hasQ, ...picture }), rows, element("p.note", ...notes));
    const { same, guess = null, hasResidual = false } = picture;
    const ours = same === drafted?.id ? "accepted" : drafted ? "recovered" : chosen.kind;
    const [kinds, shown] = [[[drafted?.id, "drafting"], [same, ours]], [same, drafted?.id, guess]];
    drawRows(rows, ...chanceRows(likeliest(picture.entries ?? entries, shown), new Map(kinds), hasResidual));
  }
}

const keys = ({ entries, hasQ, hasResidual = false, isNoisy = false }) => element("p.legend",
  keyOf("p", "p, the target"), entries[0].q !== null && keyOf("q", "q, the drafter"),
  hasResidual && keyOf("recovered", "max(0, p − q)"),
  isNoisy && ` right: ${hasQ ? "log p, log q + noise, in nats" : "log p + noise, in nats"}`);

/** By rule: what it says of the entries, and what to draw of them. */
const RULES = {
  greedy({ drafted, chosen, none }) {
    const draft = !drafted ? `${quoted(chosen)}. ${none}`
      : drafted.id === chosen.id ? `the draft, ${quoted(drafted)}: accepted.`
        : `${quoted(chosen)}, the draft was ${quoted(drafted)}: rejected.`;
    return { same: chosen.id, says: `The target’s best is ${draft}` };
  },
  rejection({ entries, drafted, chosen, none, u }) {
    const drawn = `${none} ${quoted(chosen)} was drawn from p by u = ${chance(chosen.u)}.`;
    if (!drafted) return { same: chosen.id, says: drawn };
    const { p, q } = entries.find(({ id }) => id === drafted.id);
    const isKept = u * q < p;
    const verdict = isKept ? "accepted" : "rejected; another is drawn from the shaded part, max(0, p − q)";
    const says = `u = ${chance(u)} ${isKept ? "<" : "≥"} p / q = ${chance(p)} / ${chance(q)} = `
      + `${chance(q ? p / q : p ? Infinity : 0)}: ${quoted(drafted)} is ${verdict}.`;
    return { same: isKept ? drafted.id : null, says, hasResidual: true };
  },
  coupled({ entries: given, drafted, none, hasQ }) {
    const entries = withNoise(given).map((entry) => (
      drafted && hasQ ? entry : { ...entry, draft: -Infinity }));
    const [own, guess] = [top(entries, "target"), drafted && (hasQ ? top(entries, "draft") : drafted)];
    const [mine, theirs, isSame] = [quoted(own), guess && quoted(guess), own.id === guess?.id];
    const says = !guess ? `${none} With its noise ${mine} is the largest of p: the target’s choice.`
      : !hasQ ? `The drafter names ${theirs}. With the noise the target lands on ${isSame ? "it" : mine}: `
        + `${isSame ? "accepted" : "rejected"}.`
        : isSame ? `The same noise was added to both, and both land on ${mine}: accepted.`
          : `With the same noise the drafter lands on ${theirs}, the target on ${mine}: rejected.`;
    return { entries, same: own.id, says, guess: guess?.id, isNoisy: true };
  },
};

/** From where to where scores with noise are drawn: the same for all noises that are usual. */
const rangeOf = (entries) => [DEEPEST, Math.max(HIGHEST, ...entries.flatMap(({ target, draft, noise }) => (
  [target, draft, target - noise, draft - noise].filter(Number.isFinite))))];
