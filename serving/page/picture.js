// One cycle as a picture: the draft token by token, one pass over all of it, the verdicts, and the
// KV cache whose rejected tail is truncated. It is drawn whole, and `show` tells how far the cycle
// has come: parts that come later are unseen. So a story plays it and a step shows its end.

import { element } from "./elements.js";
import { numAccepted, numJudged, ownToken } from "./trace.js";
import { counted, visible } from "./words.js";

const WINDOW = 16; // cells of what was cached before; what lies further back is a number
const quote = (token) => `“${visible(token.text)}”`;

/** The phases of a cycle, in order: [{stage, says}]. */
export function phasesOf(cycle) {
  const [n, accepted, own] = [cycle.proposals.length, numAccepted(cycle), ownToken(cycle)];
  const [verified, kept] = cycle.cached;
  const phases = cycle.proposals.map((token, i) => ({
    stage: "draft",
    says: `The drafter guesses ${quote(token)}, ${i + 1} of ${n}. Only the small drafter works here.`,
  }));
  phases.push({
    stage: "verify",
    says: !cycle.pending ? `One pass reads the prompt, ${counted(kept, "token")}.`
      : n === 0 ? `Nothing was drafted: one pass reads the pending token ${quote(cycle.pending)}.`
        : `One pass of the target reads ${quote(cycle.pending)} and the ${counted(n, "guess", "guesses")} together, `
          + `and says what comes after each of the ${n + 1}.`,
  });
  cycle.tokens.slice(0, accepted).forEach((token) => phases.push({
    stage: "accept", says: `The target’s choice here is ${quote(token)}, too: accepted.`,
  }));
  if (own) {
    phases.push({
      stage: "accept",
      says: own.kind === "recovered"
        ? `Here the target wants ${quote(own)} and not ${quote(cycle.rejected)}: rejected, with all behind it. ${quote(own)} takes the place.`
        : n ? `All were accepted. The pass also says what comes next: ${quote(own)}, a bonus.` : `It says what comes next: ${quote(own)}.`,
    });
  }
  const cut = verified - kept;
  phases.push({
    stage: "truncate",
    says: `${cut ? `The cache drops the ${counted(cut, "token")} that no longer belong to the text` : "Nothing to cut: the cache keeps all"}. `
      + `${counted(cycle.tokens.length, "token")} for one pass${own ? `; ${quote(own)} is pending now` : ""}.`,
  });
  return phases;
}

export class Picture {
  #box;
  #choose;
  #parts = []; // [element, class, phase from which it has the class]
  /** `choose(i)` is called with the place in the draft whose slot was pressed. */
  constructor(box, choose = () => {}) { [this.#box, this.#choose] = [box, choose]; }
  clear() { this.#box.replaceChildren(); }
  /** Draw `cycle` and show its end; `kinds` are the origins of all output tokens. */
  draw(cycle, kinds) {
    this.#parts = [];
    const n = cycle.proposals.length;
    const beam = element("p", { class: "beam" },
      element("span", {}, cycle.pending ? `one pass of the target over ${counted(n + 1, "position")}` : "one pass over the prompt"));
    this.#on(beam, "lit", n + 1);
    const list = element("ol", { class: n > 7 ? "draft many" : "draft", "aria-label": "The draft and the target’s verdicts" }, ...this.#slots(cycle));
    this.#box.replaceChildren(list, beam, this.#strip(cycle, kinds));
    this.show(Infinity);
  }
  /** Show the first `phase` phases of phasesOf(cycle). Where they are played, they move. */
  show(phase, isPlayed = false) {
    this.#box.classList.toggle("played", isPlayed);
    for (const [part, name, from] of this.#parts) part.classList.toggle(name, phase >= from);
  }
  /** Mark the slot whose distribution is shown. */
  mark(place) {
    for (const slot of this.#box.querySelectorAll("button.slot")) slot.setAttribute("aria-pressed", Number(slot.dataset.place) === place);
  }
  #on(part, name, from) {
    this.#parts.push([part, name, from]);
    return part;
  }
  /** What is seen from a phase on. */
  #later(from, name, attributes, ...children) {
    return this.#on(element(name, { ...attributes, class: `later ${attributes.class}` }, ...children), "on", from);
  }
  #slots(cycle) {
    const [n, accepted, own] = [cycle.proposals.length, numAccepted(cycle), ownToken(cycle)];
    const result = [];
    if (cycle.pending) {
      const word = element("button", { type: "button", class: "word label", "data-word": "pending" }, "pending");
      const slot = element("li", { class: "slot pending" }, word, element("span", { class: "chip" }, visible(cycle.pending.text)));
      this.#on(slot, "read", n + 1);
      result.push(this.#on(slot, "judged", n + 2));
    }
    for (let i = 0; i < n; i += 1) {
      if (i === numJudged(cycle) || (cycle.rejected && i === accepted)) {
        result.push(this.#later(cycle.tokens.length + n + 2, "li", { class: "cut" }, element("span", { "aria-hidden": "true" }, "✂"), " cut"));
      }
      const kind = i < accepted ? "accepted" : i === accepted && cycle.rejected ? "rejected" : "unjudged";
      const [sign, target] = { accepted: ["✓ kept", cycle.tokens[i]], rejected: ["✗ rejected", own], unjudged: ["not judged"] }[kind];
      const at = n + 2 + Math.min(i, accepted);
      const parts = [
        element("span", { class: "label" }, `d${i + 1}`),
        this.#later(i + 1, "span", { class: "chip" }, visible(cycle.proposals[i].text)),
        this.#later(at, "span", { class: "verdict" }, sign),
        target ? this.#later(at, "span", { class: `chip own ${target.kind}` }, visible(target.text)) : "",
      ];
      result.push(this.#slot(kind, i, at, n, parts, kind === "unjudged"));
    }
    const at = n + 2 + accepted;
    if (own && own.kind === "bonus") {
      result.push(this.#slot("bonus", n, at, n, [
        element("span", { class: "label" }, n ? `after d${n}` : "next"),
        element("span", { class: "chip none" }, "\u00a0"),
        this.#later(at, "span", { class: "verdict" }, "+ bonus"),
        this.#later(at, "span", { class: "chip own bonus" }, visible(own.text)),
      ]));
    }
    return result;
  }
  #slot(kind, place, at, n, parts, isPlain = false) {
    const inner = isPlain ? element("div", { class: `slot ${kind}` }, ...parts)
      : element("button", { type: "button", class: `slot ${kind}`, "data-place": place, "aria-pressed": "false" }, ...parts);
    if (!isPlain) inner.addEventListener("click", () => this.#choose(place));
    this.#on(inner, "read", n + 1);
    this.#on(inner, "judged", at);
    return element("li", {}, inner);
  }
  #strip(cycle, kinds) {
    const [verified, kept] = cycle.cached;
    const isPrefill = cycle.step === 0;
    const start = Math.max(0, (isPrefill ? verified : cycle.before) - WINDOW);
    const [read, cut] = [cycle.proposals.length + 1, phasesOf(cycle).length];
    const cells = [element("button", { type: "button", class: "word", "data-word": "cache" }, "KV cache")];
    if (start) cells.push(element("span", { class: "more" }, `${start} more …`));
    for (let i = start; i < verified; i += 1) {
      const isNew = isPrefill || i >= cycle.before;
      const origin = i < cycle.numPrompt ? "prompt" : kinds[i - cycle.numPrompt] ?? "prompt";
      const named = i === cycle.before ? cycle.pending : cycle.proposals[i - cycle.before - 1];
      const token = isPrefill ? { text: cycle.promptTail.at(i - verified) ?? "" } : isNew ? named : { text: "" };
      const cell = element("span", { class: `cell ${isNew ? "new" : origin}` }, isNew ? visible(token.text) : "");
      if (isNew) this.#on(cell, "on", read);
      if (isNew) this.#on(cell, i < kept ? origin : "tail", cut);
      cells.push(cell);
    }
    const after = element("span", { class: "more length" }, `${cycle.before} → ${verified}${kept < verified ? ` → ${kept}` : ""} tokens`);
    this.#on(after, "on", cut);
    return element("div", { class: "cache", role: "group", "aria-label": `The KV cache holds ${cycle.before} tokens before the cycle, `
      + `${verified} after the verify, ${kept} after the truncation` }, ...cells, after);
  }
}
