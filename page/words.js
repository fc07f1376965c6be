// Numbers, tokens and verdicts in words.

import { numAccepted, ownToken } from "./trace.js";

/** Two places, as the controller writes them: 0.714 -> ".71", null -> "–". */
export function short(value, places = 2) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toFixed(places).replace(/^(-?)0\./, "$1.");
}

/** So many places, and no minus before a zero; null -> "–". */
export function fixed(value, places) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(places).replace(/^-(?=[0.]*$)/, "").replace("-", "−");
}

/** A probability or a ratio of two: exact at 0 and 1, and never rounded to them. */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || Math.abs(value - 1) < 2e-6) return String(Math.round(value));
  if (value < 0.001) return value.toExponential(1);
  if (value > 0.999 && value < 1) return "> .999";
  return short(value, value < 1 ? 3 : 2);
}

export const milliseconds = (ms) => (
  ms < 10_000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(1)} s`
);

/** 538060032 -> "538 MB". */
export const bytes = (count) => {
  const power = count >= 1e9 ? 3 : count >= 1e6 ? 2 : 1;
  const value = count / 1000 ** power;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${["", "kB", "MB", "GB"][power]}`;
};

export const times = (factor) => (Number.isFinite(factor) ? `${factor.toFixed(2)}×` : "–");

export const counted = (count, noun, plural = `${noun}s`) => (`${count} ${count === 1 ? noun : plural}`);

/** A token whose blanks can be seen: " blue\n" -> "␣blue↵"; "∅" where it has no text. */
export function visible(text) {
  const shown = text.replace(/\r?\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
  return shown === "" ? "∅" : shown;
}

/** A token in quotes, with its blanks to be seen. */
export const quoted = (token) => `“${visible(token.text)}”`;

/** The rule of rejection: "u .31 < p/q .83". Else what the target's choice went by. */
export function comparison({ p, q, u, kind, score, total }) {
  if (u !== undefined) return `u ${chance(u)} ${kind === "rejected" ? "≥" : "<"} p/q ${chance(p / q)}`;
  if (score === null) return "no chance here, p = 0";
  if (score === total) return `score ${fixed(score, 2)}`;
  return `log p ${fixed(score, 2)} + noise ${fixed(total - score, 2)} = ${fixed(total, 2)}`;
}

/** Where a token comes from, in a word; what is nobody's bonus has no such name. */
export function originOf({ kind }, { proposals }) {
  return kind === "bonus" && !proposals.length ? "the target’s own token; nothing was drafted" : kind;
}

/** What a run gave, in figures that add up: the prefill gives the first token. */
export const pace = ({ tokens, passes, tokensPerPass }) => (
  `${counted(tokens, "token")}, ${tokens - 1} after the first in ${counted(passes, "pass", "passes")}: `
    + `${short(tokensPerPass)} tokens per pass`);

/** What the grammar said at place `i` of a cycle, in sentences; "" without one. */
export function grammarWords({ grammar }, i) {
  const at = grammar?.[i];
  if (!at) return "";
  const [allowed, all] = [at.allowed, at.vocabulary].map((count) => count.toLocaleString("en"));
  const says = at.forced ? "The grammar forces this token: it allows no other of "
    : `The grammar allows ${allowed} of `;
  const [first] = at.forbidden;
  const forbade = !first ? "" : ` It forbade ${quoted(first)} (p ${chance(first.p)})`
    + `${at.overruled ? ", which the model liked best" : ""}.`;
  return `${says}${all} tokens${at.forced ? "" : " here"}.${forbade}`;
}

/** Why a token stands in the text: sentences on `token` of `cycle`. */
export function why(token, cycle) {
  return [whyKept(token, cycle), grammarWords(cycle, cycle.tokens.indexOf(token))].join(" ").trim();
}

function whyKept(token, { step, proposals, rejected }) {
  const isCoupled = token.u === undefined;
  const reason = comparison(token);
  if (token.kind === "accepted") {
    return `Drafted, and ${isCoupled ? `the target’s own choice (${reason})` : reason}: accepted.`;
  }
  if (token.kind === "recovered") {
    const how = isCoupled ? `This one is the target’s own choice (${reason}).`
      : "This one was drawn from norm(max(0, p − q)); its u is that draw.";
    return `${quoted(rejected)} was drafted here and rejected (${comparison(rejected)}). ${how}`;
  }
  const source = isCoupled ? `the target’s own choice (${reason})` : "drawn from p by its u";
  if (step === 0) {
    return `The prefill’s token: ${source}, once the prompt was read; nothing was drafted yet.`;
  }
  return proposals.length ? `The whole draft was accepted, so the pass gives one more token, ${source}.`
    : `Nothing was drafted in this cycle: plain decoding, ${source}.`;
}

/** What happened in a cycle, in a sentence. */
export function summary(cycle) {
  const { step, tokens, proposals: { length: n }, rejected, drafter, cached, ms } = cycle;
  const spent = Object.entries(ms).map(([name, took]) => `${name} ${milliseconds(took)}`).join(", ");
  const own = ownToken(cycle);
  if (step === 0) {
    const prompt = counted(cached[1], "token");
    return `The prefill read the prompt (${prompt}) and gave ${quoted(own)}, now pending (${spent}).`;
  }
  const parts = n ? [`${drafter ?? "the drafter"} proposed ${n}`, `${numAccepted(cycle)} accepted`]
    : ["plain decoding"];
  if (rejected) parts.push(`${quoted(rejected)} rejected`);
  if (own) parts.push(`${quoted(own)} ${n ? "" : "is "}${originOf(own, cycle)}`);
  return `Cycle ${step}: ${parts.join(", ")}. ${counted(tokens.length, "token")} for one pass (${spent}).`;
}
