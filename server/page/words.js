// Marks, numbers, tokens and verdicts in words.

import texts from "./texts.json" with { type: "json" };
import { numAccepted, ownToken } from "./trace.js";

/** The mark of each thing that has a colour; its class has the same name. */
export const MARKS = { drafting: "◇", pass: "▮", accepted: "✓", rejected: "✗", recovered: "↻", bonus: "+",
  plain: "○", p: "●", q: "◆" };
/** Two places, as the controller writes them: 0.714 -> ".71", null -> "–". */
export const short = (value, places = 2) => (
  Number.isFinite(value) ? value.toFixed(places).replace(/^(-?)0\./, "$1.") : "–");
/** So many places, and no minus before a zero; null -> "–". */
export const fixed = (value, places) => (
  value?.toFixed(places).replace(/^-(?=[0.]*$)/, "").replace("-", "−") ?? "–");

/** A probability or a ratio of two: exact at 0 and 1, and never rounded to them. */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0 || Math.abs(value - 1) < 2e-6) return String(Math.round(value));
  if (value < 0.001) return value.toExponential(1);
  if (value > 0.999 && value < 1) return "> .999";
  return short(value, value < 1 ? 3 : 2);
}

export const milliseconds = (ms) => (
  ms < 10_000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(1)} s`);
/** 538060032 -> "538 MB". */
export const bytes = (count) => {
  const power = count >= 1e9 ? 3 : count >= 1e6 ? 2 : 1;
  const value = count / 1000 ** power;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${["", "kB", "MB", "GB"][power]}`;
};

export const times = (factor) => (Number.isFinite(factor) ? `${factor.toFixed(2)}×` : "–");
export const counted = (count, noun, plural = `${noun}s`) => (`${count} ${count === 1 ? noun : plural}`);
/** A token whose blanks can be seen: " blue\n" -> "␣blue↵"; "∅" where it has no text. */
export const visible = (text) => (
  text.replace(/\r?\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅");

/** A token in quotes, with its blanks to be seen; one that is written from right to left stays apart. */
export function quoted({ text }) {
  const shown = `“${visible(text)}”`;
  return /[\u0590-\u08ff\u202a-\u202e\u2066-\u2069\ufb1d-\ufefc]/.test(text) ? `\u2068${shown}\u2069` : shown;
}

/** The rule of rejection: "u .31 < p/q .83". Else what the target's choice went by. */
export function comparison({ p, q, u, kind, score, total }) {
  if (u !== undefined) return `u ${chance(u)} ${kind === "rejected" ? "≥" : "<"} p/q ${chance(p / q)}`;
  if (score === null) return "no chance here, p = 0";
  if (score === total) return `the target’s logit ${fixed(score, 2)}`;
  return `log p ${fixed(score, 2)} + noise ${fixed(total - score, 2)} = ${fixed(total, 2)}`;
}

/** Where a token comes from, in words. */
export function originOf({ kind }, { step }) {
  if (kind !== "plain") return kind;
  return step ? "the target’s own token; nothing was drafted" : "the target’s first token, after the prefill";
}

export const nameOfPrompt = (name) => texts.prompts[name] ?? name.replaceAll("_", " ");
/** What a run gave, in figures that add up: the prefill gives the first token. */
export const pace = ({ tokens, passes, tokensPerPass }) => (
  `${counted(tokens, "token")}, ${Math.max(0, tokens - 1)} of them in ${counted(passes, "pass", "passes")}: `
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
  const { kind, text, u } = token;
  const instead = kind !== "recovered" ? ""
    : `${quoted(cycle.rejected)} was drafted here and rejected (${comparison(cycle.rejected)}). Instead `;
  const chosen = kind === "accepted" ? `accepted, as drafted (${comparison(token)})`
    : u === undefined ? `the target’s own choice (${comparison(token)})`
      : kind === "recovered" ? "drawn from norm(max(0, p − q)) by another u" : "drawn from p by its u";
  const origin = ["accepted", "recovered"].includes(kind) ? "" : `${originOf(token, cycle)}: `;
  const part = text.includes("\ufffd") ? "It is a part of a character. " : "";
  const grammar = grammarWords(cycle, cycle.tokens.indexOf(token));
  return `${MARKS[kind]} ${instead}${origin}${chosen}. ${part}${grammar}`;
}

/** What happened in a cycle of a request, in sentences; and why it is shown, as the one of `most` cycles. */
export function summary(cycle, { drafter: asked, fixed_k: isFixed, num_speculative_tokens: k }, most = 0) {
  const { step, tokens, fed, proposals: { length: n }, rejected, drafter, controller, cached, ms } = cycle;
  const spent = Object.entries(ms).map(([name, took]) => `${name} ${milliseconds(took)}`).join(", ");
  const own = ownToken(cycle);
  if (step === 0) {
    return `The prefill read the prompt (${counted(cached[1], "token")}) and gave ${quoted(own)}, now `
      + `pending (${spent}).`;
  }
  const [kept, why] = [numAccepted(cycle), rejected ? "then a rejection" : "the most of all"];
  const tells = most && kept ? ` of ${most}, which tells most: ${kept} accepted, ${why}. ` : ": ";
  const of = fed.length > n ? ` (${n} in the branch that the text took)` : "";
  const parts = n ? [`${drafter ?? "the drafter"} proposed ${fed.length}${of}`, `${kept} accepted`]
    : ["plain decoding"];
  if (rejected) parts.push(`${quoted(rejected)} rejected`);
  if (own) parts.push(`${quoted(own)} ${n ? "" : "is "}${originOf(own, cycle)}`);
  const limit = asked === "none" ? 0 : isFixed ? k : Number(/K=(\d+)/.exec(controller)?.[1] ?? n);
  const early = fed.length < limit ? ` ${fed.length} of at most ${limit}: ${texts.says.early}.` : "";
  const told = n || !controller ? "" : ` The controller: ${controller}.`;
  return `Cycle ${step}${tells}${parts.join(", ")}. ${counted(tokens.length, "token")} for one pass `
    + `(${spent}).${early}${told}`;
}
