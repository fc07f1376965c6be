// One cycle as a picture: the draft with the target's verdict on each token and the cut, and the
// KV cache as a strip of cells whose rejected tail is truncated. The truncation is a CSS animation
// towards what is drawn here anyway, so that less motion shows the same picture at once.

import { byId, element } from "./elements.js";
import { numAccepted } from "./trace.js";
import { comparison, milliseconds, summary, visible } from "./words.js";

const WINDOW = 32; // cells of what was cached before; what lies further back is a number

export class CyclePicture {
  #draft = byId("draft");
  #cache = byId("cache");
  #says = byId("cycle-says");

  clear() {
    this.#draft.replaceChildren();
    this.#cache.replaceChildren();
    this.#cache.setAttribute("aria-label", "The KV cache, empty");
    this.#says.textContent = "Cycles are drawn here as they come.";
  }

  /** Draw `cycle`; `kinds` are the origins of all output tokens. */
  draw(cycle, kinds) {
    const { draft, verify, other } = cycle.ms;
    const spent = `draft ${milliseconds(draft)}, verify ${milliseconds(verify)}, other `
      + `${milliseconds(other)}`;
    const decision = cycle.controller ? ` The controller: ${cycle.controller}.` : "";
    this.#says.textContent = `${summary(cycle)} Time: ${spent}.${decision}`;
    this.#draft.replaceChildren(...slots(cycle));
    this.#cache.replaceChildren(...cells(cycle, kinds));
    this.#cache.setAttribute("aria-label", cacheLabel(cycle));
  }
}

/** Left of the cut what stays, right of it what is thrown away. */
function slots(cycle) {
  const accepted = cycle.tokens.slice(0, numAccepted(cycle));
  const own = cycle.tokens.at(-1).kind === "accepted" ? null : cycle.tokens.at(-1);
  const tail = cycle.proposals.slice(accepted.length);
  const result = [];
  if (cycle.pending) {
    result.push(slot("pending", "pending", cycle.pending.text, "committed"));
  }
  accepted.forEach((token, i) => {
    result.push(slot("accepted", `d${i + 1}`, token.text, "✓ accepted", [
      comparison(token), choiceAt(cycle, i),
    ]));
  });
  if (own) result.push(slot(own.kind, ...ownWords(own, cycle, accepted.length)));
  if (!tail.length) return result;
  result.push(element("li", { class: "cut" }, element("span", {}, "✂"), " cut"));
  tail.forEach((token, i) => {
    const label = `d${accepted.length + i + 1}`;
    if (i === 0 && cycle.rejected) {
      const words = [comparison(cycle.rejected), choiceAt(cycle, accepted.length)];
      result.push(slot("rejected", label, token.text, "✗ rejected", words));
    } else {
      const verdict = cycle.rejected ? "… not judged" : "… behind the end";
      result.push(slot("unjudged", label, token.text, verdict));
    }
  });
  return result;
}

const choiceAt = (cycle, i) => `target’s best: ${visible(cycle.choices[i].text)}`;

function ownWords(own, cycle, place) {
  const isCoupled = own.u === undefined;
  if (own.kind === "recovered") {
    const source = isCoupled ? comparison(own) : "from norm(max(0, p − q))";
    return [`instead of d${place + 1}`, own.text, "↺ recovered", [source]];
  }
  const label = cycle.proposals.length ? `after d${place}` : "no draft";
  return [label, own.text, "+ bonus", [isCoupled ? comparison(own) : "drawn from p"]];
}

function slot(kind, label, text, verdict, numbers = []) {
  return element("li", { class: `slot ${kind}` },
    element("span", { class: "label" }, label),
    element("span", { class: `chip ${kind}` }, visible(text)),
    element("span", { class: "verdict" }, verdict),
    ...numbers.map((words) => element("span", { class: "numbers" }, words)));
}

function cells(cycle, kinds) {
  const [verified, kept] = cycle.cached;
  const isPrefill = cycle.step === 0;
  const start = Math.max(0, (isPrefill ? verified : cycle.before) - WINDOW);
  const result = start ? [element("span", { class: "more" }, `${start} more …`)] : [];
  for (let i = start; i < verified; i += 1) {
    const isTail = i >= kept;
    const isNew = i >= cycle.before && !isPrefill;
    const origin = i < cycle.numPrompt ? "prompt" : kinds[i - cycle.numPrompt];
    const token = i === cycle.before ? cycle.pending : cycle.proposals[i - cycle.before - 1];
    const classes = `cell${isNew ? " new" : ""} ${isTail ? "tail" : origin}`;
    result.push(element("span", { class: classes }, isNew ? visible(token.text) : ""));
  }
  return result;
}

function cacheLabel(cycle) {
  const [verified, kept] = cycle.cached;
  return `The KV cache holds ${cycle.before} tokens before the cycle, ${verified} after the `
    + `verify, ${kept} after the truncation`;
}
