// One cycle as a picture: the draft token by token, one pass over all of it, the verdicts, and the
// KV cache whose rejected tail is truncated. It is drawn whole, and `show` tells how far the cycle
// has come: parts that come later are unseen. So a story plays it and a step shows its end.

import { element, explained } from "./elements.js";
import { numAccepted, ownToken, placesOf, tokensIn } from "./trace.js";
import { counted, MARKS, quoted, visible } from "./words.js";

const WINDOW = 4; // cells of what was cached before; what lies further back is a number
const MANY = 9; // slots side by side, at most

/** The phases of a cycle, in order: [{stage, says, gives}]; `gives` does not speak of the cache. */
export function phasesOf(cycle) {
  const { proposals, tokens, cached: [verified, kept] } = cycle;
  const [n, own] = [proposals.length, ownToken(cycle)];
  const cut = verified === kept ? "Nothing to cut: the cache keeps all"
    : `The cache drops the ${counted(verified - kept, "token")} that no longer belong to the text`;
  const next = own ? `; ${quoted(own)} is pending now` : "";
  const gives = `${counted(tokens.length, "token")} for one pass${next}.`;
  return [
    ...proposals.map((token, i) => ["draft",
      `The drafter guesses ${quoted(token)}, ${i + 1} of ${n}. Only the drafter works here.`]),
    ["verify", passWords(cycle)],
    ...tokens.slice(0, numAccepted(cycle)).map((token) => ["accept",
      `The target’s choice here is ${quoted(token)}, too: accepted.`]),
    ...own ? [["accept", ownWords(cycle, own)]] : [],
    ["truncate", `${cut}. ${gives}`, gives],
  ].map(([stage, says, gives = says]) => ({ stage, says, gives }));
}

function passWords({ fed: { length: n }, pending, cached }) {
  if (!pending) return `One pass reads the prompt, ${counted(cached[1], "token")}.`;
  if (n === 0) return `Nothing was drafted: one pass reads the pending token ${quoted(pending)}.`;
  return `One pass of the target reads ${quoted(pending)} and the ${counted(n, "guess", "guesses")} `
    + `together, and says what comes after each of the ${n + 1}.`;
}

function ownWords({ proposals, rejected }, own) {
  if (own.kind === "recovered") {
    return `Here the target wants ${quoted(own)} and not ${quoted(rejected)}: rejected, with all behind it. `
      + `${quoted(own)} takes the place.`;
  }
  if (!proposals.length) return `It says what comes next: ${quoted(own)}.`;
  return `All were accepted. The pass also says what comes next: ${quoted(own)}, a bonus.`;
}

/**
 * The positions of a pass side by side, or one below the other where there is little room: `slots`, and the
 * pass, which crosses them all. What the target says at a position stands in the slot behind it.
 */
export function stage(slots, beam, least = 0) {
  const empty = Array.from({ length: Math.max(0, least - slots.length) }, () => element("div.slot.empty"));
  const all = [...slots, ...empty];
  const label = { "aria-label": "The positions of a pass" };
  const list = element(all.length > MANY ? "ol.draft.many" : "ol.draft", label,
    ...all.map((slot) => element("li", slot)), element("li.beam.pass", element("span", beam)));
  const behind = slots.length > 1 ? (all.length - slots.length + 1) / all.length : 0;
  list.style.setProperty("--behind", behind); // where the pass is no more
  list.style.setProperty("--slots", all.length);
  return list;
}

const nothing = () => element("span");
/** A slot: its label, what the pass reads there, where the pass is, what the target says, and a verdict. */
export const slotOf = (tag, attributes, label, reads, says, verdict, more = null) => element(tag, attributes,
  label || nothing(), reads || nothing(), element("span.gap"), says || nothing(), verdict || nothing(), more);
/** What the first slot has in the place of what the target says. */
export const SAYS = "target:";

export class Picture {
  #box;
  #choose;
  #least; // slots
  #parts = []; // [element, class, phase from which it has the class]
  /** `choose(i)` is called with the place in the draft whose slot was pressed; there are `least` slots. */
  constructor(box, choose = null, least = 0) {
    [this.#box, this.#choose, this.#least] = [box, choose, least];
  }
  clear() { this.#box.replaceChildren(); }
  /** Draw one of `cycles`, as it is at its end. */
  draw(cycle, cycles) {
    this.#parts = [];
    const read = cycle.fed.length ? ` over ${counted(cycle.fed.length + 1, "position")}` : "";
    const draft = stage(this.#slots(cycle), `${MARKS.pass} one pass${read}`, this.#least);
    this.#from(cycle.proposals.length + 1, "lit", draft.lastChild);
    this.#box.replaceChildren(draft, this.#cache(cycle, tokensIn(cycles)),
      cycle.recurrent ? this.#states(cycle) : "");
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
  /** Give a part a class from a phase on. */
  #from(phase, name, part) { this.#parts.push([part, name, phase]); return part; }
  #later(phase, tag, ...children) { return this.#from(phase, "on", element(`${tag}.later`, ...children)); }
  #slots(cycle) {
    const { fed, proposals, pending } = cycle;
    const [n, places] = [proposals.length, placesOf(cycle)];
    const first = pending && slotOf("div.slot.pending", {}, explained("pending", "pending"),
      element("span.chip", visible(pending.text)), this.#later(n + 1, "span.label", SAYS));
    const guesses = proposals.map((token, i) => {
      const rivals = fed.filter(({ parent }, j) => parent === fed[places[i]].parent && j !== places[i]);
      return this.#slot(cycle, i, element("span.label", [`d${i + 1}`, ...rivals.map(quoted)].join(" or ")),
        this.#later(i + 1, "span.chip.drafting", visible(token.text)));
    });
    const last = this.#slot(cycle, n, element("span.label", n ? `after d${n}` : "next"), null);
    return [first && this.#from(n + 1, "read", this.#from(n + 2, "judged", first)), ...guesses, last]
      .filter(Boolean);
  }
  /** A place's slot: what was guessed, and later what the target says there, and the verdict. */
  #slot(cycle, place, label, guess) {
    const { proposals: { length: n }, rejected, tokens } = cycle;
    const [accepted, own] = [numAccepted(cycle), ownToken(cycle)];
    const end = own && (rejected ? accepted : n); // where the target’s own token stands
    const target = place < accepted ? tokens[place] : place === end ? own : null;
    const kind = place === end && rejected ? "rejected" : target?.kind ?? "unjudged";
    const at = n + 2 + Math.min(place, accepted);
    const verdict = this.#later(at, `span.verdict.${target?.kind ?? kind}`,
      target ? `${MARKS[target.kind]} ${target.kind}` : "– not judged");
    const says = this.#later(n + 1, "span.chip.own", target ? visible(target.text) : "…");
    if (target) this.#from(at, target.kind, says);
    const isCut = place === (own ? end : accepted) && place < n;
    const cut = { role: "img", "aria-label": "cut here" };
    const parts = [label, guess, says, (guess || target) && verdict,
      isCut && this.#later(tokens.length + n + 2, "span.cut", cut, "✂")];
    const press = { type: "button", "data-place": place, "aria-pressed": "false",
      click: () => this.#choose(place) };
    const slot = target && this.#choose ? slotOf(`button.slot.${kind}`, press, ...parts)
      : slotOf(`div.slot.${kind}`, {}, ...parts);
    return this.#from(n + 1, "read", this.#from(at, "judged", slot));
  }
  /** The cells of the KV cache, each a token; `output` is all that the text has. */
  #cache(cycle, output) {
    const { step, before, cached: [verified, kept], fed, pending, proposals, prompt } = cycle;
    const stay = placesOf(cycle).slice(0, kept - before - 1).map((place) => before + 1 + place);
    const start = Math.max(0, (step === 0 ? verified : before) - WINDOW); // the prefill's are all new
    const [read, cut] = [proposals.length + 1, phasesOf(cycle).length];
    const cells = [explained("cache", "KV cache")];
    if (start) cells.push(element("span.more", `${start} more …`));
    for (let i = start; i < verified; i += 1) {
      const isOfPrompt = i < prompt.length;
      const kind = isOfPrompt ? "prompt" : output[i - prompt.length]?.kind ?? "prompt";
      const known = isOfPrompt ? prompt.tail.at(i - prompt.length) : output[i - prompt.length]?.text;
      if (step && i < before) cells.push(element(`span.cell.${kind}`, visible(known ?? " ")));
      else {
        const token = step === 0 ? known : [pending, ...fed][i - before]?.text;
        const cell = this.#from(read, "on", element("span.cell.new.pass", visible(token ?? " ")));
        const isNew = step === 0 || i === before;
        cells.push(this.#from(cut, isNew ? kind : stay.includes(i) ? "accepted" : "tail", cell));
      }
    }
    const lengths = kept < verified ? [before, verified, kept] : [before, verified];
    cells.push(this.#from(cut, "on", element("span.more.length", `${lengths.join(" → ")} tokens`)));
    const label = `The KV cache holds ${before} tokens before the cycle, `
      + `${verified} after the verify, ${kept} after the truncation`;
    return element("div.cache", { role: "group", "aria-label": label }, ...cells);
  }
  /** What layers hold that keep a state: of all that was read, then of what stays. */
  #states(cycle) {
    const { before, cached: [verified, kept], fed, pending, prompt, recurrent: { layers, stepped } } = cycle;
    const [read, cut] = [cycle.proposals.length + 1, phasesOf(cycle).length];
    const after = (token) => element("span.cell.new.pass",
      `after ${visible(token?.text ?? prompt.tail.at(-1) ?? "")}`);
    const last = this.#from(read, "on", after(fed.at(-1) ?? pending));
    const stays = after(fed[placesOf(cycle)[kept - before - 2]] ?? pending);
    const again = stepped ? `, ${counted(stepped, "token")} stepped again` : "";
    this.#from(cut, kept < verified ? "tail" : "accepted", last);
    stays.classList.add("accepted", "later");
    const back = kept < verified ? [this.#later(cut, "span", "→"), this.#from(cut, "on", stays)] : [];
    return element("div.cache.states", explained("state", "Recurrent state"), last, ...back,
      this.#later(cut, "span.more", `of ${counted(layers, "layer")}${again}`));
  }
}
