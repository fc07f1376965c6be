// One cycle as a picture: the draft token by token, one pass over all of it, the verdicts, and the
// KV cache whose rejected tail is truncated. It is drawn whole, and `show` tells how far the cycle
// has come: parts that come later are unseen. So a story plays it and a step shows its end.

import { button, element, explained } from "./elements.js";
import { numAccepted, numJudged, ownToken } from "./trace.js";
import { counted, quoted, visible } from "./words.js";

const WINDOW = 16; // cells of what was cached before; what lies further back is a number

/** The phases of a cycle, in order: [{stage, says}]. */
export function phasesOf(cycle) {
  const { proposals, tokens } = cycle;
  const [n, own] = [proposals.length, ownToken(cycle)];
  const phases = proposals.map((token, i) => ({
    stage: "draft",
    says: `The drafter guesses ${quoted(token)}, ${i + 1} of ${n}. Only the small drafter works here.`,
  }));
  phases.push({ stage: "verify", says: passWords(cycle) });
  for (const token of tokens.slice(0, numAccepted(cycle))) {
    phases.push({ stage: "accept", says: `The target’s choice here is ${quoted(token)}, too: accepted.` });
  }
  if (own) phases.push({ stage: "accept", says: ownWords(cycle, own) });
  const cut = cycle.cached[0] - cycle.cached[1];
  const cutWords = cut ? `The cache drops the ${counted(cut, "token")} that no longer belong to the text`
    : "Nothing to cut: the cache keeps all";
  const next = own ? `; ${quoted(own)} is pending now` : "";
  const gained = counted(tokens.length, "token");
  phases.push({ stage: "truncate", says: `${cutWords}. ${gained} for one pass${next}.` });
  return phases;
}

function passWords({ proposals, pending, cached }) {
  const n = proposals.length;
  if (!pending) return `One pass reads the prompt, ${counted(cached[1], "token")}.`;
  if (n === 0) return `Nothing was drafted: one pass reads the pending token ${quoted(pending)}.`;
  const guesses = counted(n, "guess", "guesses");
  return `One pass of the target reads ${quoted(pending)} and the ${guesses} together, `
    + `and says what comes after each of the ${n + 1}.`;
}

function ownWords({ proposals, rejected }, own) {
  if (own.kind === "recovered") {
    return `Here the target wants ${quoted(own)} and not ${quoted(rejected)}: rejected, with all behind it. `
      + `${quoted(own)} takes the place.`;
  }
  if (!proposals.length) return `It says what comes next: ${quoted(own)}.`;
  return `All were accepted. The pass also says what comes next: ${quoted(own)}, a bonus.`;
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
    const read = cycle.pending ? `one pass of the target over ${counted(n + 1, "position")}`
      : "one pass over the prompt";
    const beam = this.#on(element("p.beam", element("span", read)), "lit", n + 1);
    const label = { "aria-label": "The draft and the target’s verdicts" };
    const list = element(n > 7 ? "ol.draft.many" : "ol.draft", label, ...this.#slots(cycle));
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
    for (const slot of this.#box.querySelectorAll("button.slot")) {
      slot.setAttribute("aria-pressed", Number(slot.dataset.place) === place);
    }
  }
  #on(part, name, from) {
    this.#parts.push([part, name, from]);
    return part;
  }
  /** What is seen from a phase on. */
  #later(from, tag, ...children) { return this.#on(element(`${tag}.later`, ...children), "on", from); }
  #slots(cycle) {
    const { proposals, pending, rejected, tokens } = cycle;
    const [n, accepted, own] = [proposals.length, numAccepted(cycle), ownToken(cycle)];
    const result = [];
    if (pending) {
      const chip = element("span.chip", visible(pending.text));
      const slot = element("li.slot.pending", explained("pending", "pending"), chip);
      this.#on(slot, "read", n + 1);
      result.push(this.#on(slot, "judged", n + 2));
    }
    proposals.forEach((token, i) => {
      if (i === numJudged(cycle) || (rejected && i === accepted)) {
        const scissors = element("span", { "aria-hidden": "true" }, "✂");
        result.push(this.#later(tokens.length + n + 2, "li.cut", scissors, " cut"));
      }
      const at = n + 2 + Math.min(i, accepted);
      const guess = this.#later(i + 1, "span.chip", visible(token.text));
      const slot = i < accepted ? ["accepted", "✓ kept", tokens[i]]
        : i === accepted && rejected ? ["rejected", "✗ rejected", own] : ["unjudged", "not judged", null];
      result.push(this.#slot(i, n, at, `d${i + 1}`, guess, slot));
    });
    if (own?.kind === "bonus") {
      const guess = element("span.chip.none", "\u00a0");
      const label = n ? `after d${n}` : "next";
      const [at, sign] = [n + 2 + accepted, n ? "+ bonus" : "target’s own"];
      result.push(this.#on(this.#slot(n, n, at, label, guess, ["bonus", sign, own]), "on", at));
      result.at(-1).classList.add("later");
    }
    return result;
  }
  /** A place's slot: what was guessed, and from phase `at` on the verdict and the target's token. */
  #slot(place, n, at, label, guess, [kind, sign, target]) {
    const parts = [element("span.label", label), guess, this.#later(at, "span.verdict", sign)];
    if (target) parts.push(this.#later(at, `span.chip.own.${target.kind}`, visible(target.text)));
    let inner = element(`div.slot.${kind}`, ...parts);
    if (target) {
      inner = button("", () => this.#choose(place), `button.slot.${kind}`);
      inner.append(...parts);
      inner.dataset.place = place;
      inner.setAttribute("aria-pressed", "false");
    }
    this.#on(inner, "read", n + 1);
    this.#on(inner, "judged", at);
    return element("li", inner);
  }
  #strip(cycle, kinds) {
    const { before, cached: [verified, kept], pending, proposals, promptTail, numPrompt } = cycle;
    const isPrefill = cycle.step === 0;
    const start = Math.max(0, (isPrefill ? verified : before) - WINDOW);
    const [read, cut] = [proposals.length + 1, phasesOf(cycle).length];
    const cells = [explained("cache", "KV cache")];
    if (start) cells.push(element("span.more", `${start} more …`));
    for (let i = start; i < verified; i += 1) {
      const origin = i < numPrompt ? "prompt" : kinds[i - numPrompt] ?? "prompt";
      if (i < before && !isPrefill) {
        cells.push(element(`span.cell.${origin}`));
        continue;
      }
      const drafted = i === before ? pending : proposals[i - before - 1];
      const text = isPrefill ? promptTail.at(i - verified) ?? "" : drafted.text;
      const cell = element("span.cell.new", visible(text));
      this.#on(cell, "on", read);
      cells.push(this.#on(cell, i < kept ? origin : "tail", cut));
    }
    const lengths = kept < verified ? [before, verified, kept] : [before, verified];
    const after = this.#on(element("span.more.length", `${lengths.join(" → ")} tokens`), "on", cut);
    const label = `The KV cache holds ${before} tokens before the cycle, `
      + `${verified} after the verify, ${kept} after the truncation`;
    return element("div.cache", { role: "group", "aria-label": label }, ...cells, after);
  }
}
