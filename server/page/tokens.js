// A text as it streams, one element per token, marked by its origin. Elements are appended a frame's
// worth at once. A single element is a tab stop, arrow keys move it.

import { element } from "./elements.js";
import { explain, hidePopup } from "./popup.js";
import { originOf, visible, why } from "./words.js";

const PART = "\ufffd"; // what a tokenizer writes for the bytes of an unfinished character
const NEAR_END = 48; // px: a reader who has scrolled further up than this is left there
const MOVES = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, PageUp: -20, PageDown: 20,
  Home: -Infinity, End: Infinity };
const LABEL = "Tokens of the text; arrow keys move, Enter shows the cycle";

/** An element for each of `tokens`, which have released `text`. */
export function tokensOf({ tokens, text }, attributesOf = () => ({})) {
  const texts = pieces(tokens.map((token) => token.text), text);
  return tokens.map((token, i) => {
    // What ends a text or a turn is a token without text of its own: its name is shown.
    const isEnd = !texts[i] && /^<.+>$/.test(token.text);
    const kinds = [token.kind, texts[i].includes("\n") && "break", isEnd && "special"].filter(Boolean);
    return element(`span.token.${kinds.join(".")}`, attributesOf(token, i), isEnd ? token.text : texts[i]);
  });
}

export class TokenText {
  #box;
  #prompt = element("span.soft.prompt");
  #list = element("span.tokens", { role: "listbox", "aria-label": LABEL });
  #tokens = []; // {token, cycle, element}
  #new = document.createDocumentFragment();
  #stop = null; // the element that Tab goes to
  /** In `box`, which scrolls. `choose(cycle, place)` is called when a token is clicked or entered. */
  constructor(box, choose) {
    this.#box = box;
    box.append(this.#prompt, this.#list);
    const pick = ({ target }) => {
      const { token, cycle } = this.#tokens[target.closest(".token")?.dataset.index] ?? {};
      if (!cycle) return;
      hidePopup();
      choose(cycle, cycle.tokens.indexOf(token));
    };
    this.#list.addEventListener("focusin", ({ target }) => this.#makeStop(target));
    this.#list.addEventListener("click", pick);
    this.#list.addEventListener("keydown", (event) => {
      const isPick = event.key === "Enter" || event.key === " ";
      if (event.ctrlKey || event.altKey || event.metaKey || (!isPick && !(event.key in MOVES))) return;
      event.preventDefault();
      if (isPick) return pick(event);
      const wanted = Number(this.#stop.dataset.index) + MOVES[event.key];
      return this.#tokens[Math.max(0, Math.min(this.#tokens.length - 1, wanted))].element.focus();
    });
  }
  /** Tell the tokens of a cycle from the others, and scroll the box as little as shows them. */
  mark(first, count, mayScroll) {
    for (const old of this.#list.querySelectorAll(".current")) old.classList.remove("current");
    const marked = this.#tokens.slice(first, first + count).map(({ element: one }) => one);
    for (const one of marked) one.classList.add("current");
    if (!mayScroll || !marked.length) return;
    const [box, top, end] = [this.#box, marked[0], marked.at(-1)].map((one) => one.getBoundingClientRect());
    this.#box.scrollTop += Math.min(top.top - box.top, Math.max(0, end.bottom - box.bottom));
  }
  /** Begin anew, behind a prompt. */
  clear(prompt) {
    hidePopup();
    this.#prompt.textContent = prompt;
    this.#list.replaceChildren();
    this.#list.hidden = true; // a list without options is none
    [this.#tokens, this.#stop] = [[], null];
    this.#box.scrollTop = this.#box.scrollHeight; // to the end of the prompt
  }
  /** Take a cycle's tokens; they are shown with the next flush. */
  add(cycle) {
    const made = tokensOf(cycle, (token, i) => ({
      role: "option", tabindex: -1, "aria-selected": "false", "data-index": this.#tokens.length + i,
      "aria-label": `${visible(token.text)}, ${originOf(token, cycle)}`,
    }));
    cycle.tokens.forEach((token, i) => {
      explain(made[i], () => why(token, cycle));
      this.#tokens.push({ token, cycle, element: made[i] });
    });
    this.#new.append(...made);
  }
  /** Show what was added, and follow it unless the reader has scrolled away. */
  flush() {
    if (!this.#new.firstChild) return;
    const box = this.#box;
    const follows = !this.#stop || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    this.#list.append(this.#new);
    this.#list.hidden = false;
    if (!this.#stop) this.#makeStop(this.#tokens[0].element);
    if (follows) box.scrollTop = box.scrollHeight;
  }
  #makeStop(wanted) {
    for (const one of [this.#stop, wanted]) {
      one?.setAttribute("tabindex", one === wanted ? 0 : -1);
      one?.setAttribute("aria-selected", one === wanted);
    }
    this.#stop = wanted;
  }
}

/**
 * Splits `text`, which a cycle released, among its tokens, whose own texts are `labels`. A token's own
 * text does not say which part it wrote: the bytes of one character may be spread over several tokens,
 * some tokenizers drop a lone token's leading blank, and special tokens write nothing.
 *
 * Example: pieces(["caf", "\ufffd", "\ufffd", "!"], "café!") -> ["caf", "", "é", "!"].
 */
function pieces(labels, text) {
  const result = labels.map(() => "");
  let at = 0;
  labels.forEach((label, i) => {
    const found = label && !label.includes(PART) ? text.indexOf(label, at) : -1;
    if (found < 0) return;
    const before = text.slice(at, found);
    result[i === 0 || before.trim() === "" ? i : i - 1] += before;
    result[i] += label;
    at = found + label.length;
  });
  if (labels.length) result[labels.length - 1] += text.slice(at);
  return result;
}
