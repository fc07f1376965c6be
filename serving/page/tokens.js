// The text as it streams, one element per token, marked by its origin. Elements are appended a
// frame's worth at once, to the last of several stretches: a frame lays out that one and not the
// whole text. A single element is a tab stop, arrow keys move it.

import { element } from "./elements.js";
import { pieces } from "./pieces.js";
import { visible, why } from "./words.js";

const LONGEST = 120; // tokens of a stretch, before its last line becomes the next one
const NEAR_END = 48; // px: a reader who has scrolled further up than this is left there
const MOVES = {
  ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1,
  PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity,
};

export class TokenText {
  #box;
  #prompt;
  #list;
  #tokens = []; // {token, cycle, element}
  #stretch = null; // the last one
  #new = document.createDocumentFragment();
  #stop = null; // the element that Tab goes to
  #popup;

  /**
   * In `box` (which scrolls) the tokens go to `list`, behind the text of `prompt` if there is one.
   * `popup` tells about a token; `choose(cycle, place)` is called when one is clicked or entered.
   */
  constructor({ box, list, prompt = null }, popup, choose) {
    [this.#box, this.#list, this.#prompt, this.#popup] = [box, list, prompt, popup];
    const at = (event) => event.target.closest(".token");
    const tell = (event) => at(event) && this.#tell(at(event));
    const pick = (element) => {
      if (!element) return;
      const { token, cycle } = this.#tokens[element.dataset.index];
      choose(cycle, cycle.tokens.indexOf(token));
    };
    this.#list.addEventListener("pointerover", tell);
    this.#list.addEventListener("pointerout", () => popup.hideSoon());
    this.#list.addEventListener("focusin", (event) => {
      this.#makeStop(at(event));
      tell(event);
    });
    this.#list.addEventListener("focusout", () => popup.hide());
    this.#list.addEventListener("click", (event) => pick(at(event)));
    this.#list.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "Enter" || event.key === " ") pick(at(event));
      else if (!this.#move(event.key)) return;
      event.preventDefault();
    });
  }

  /** The origin of every token so far. */
  get kinds() {
    return this.#tokens.map(({ token }) => token.kind);
  }

  /** Tell the tokens of a cycle from the others. */
  mark(first, count) {
    for (const old of this.#list.querySelectorAll(".current")) old.classList.remove("current");
    for (const { element: one } of this.#tokens.slice(first, first + count)) one.classList.add("current");
  }

  clear(prompt) {
    this.#popup.hide();
    if (this.#prompt) this.#prompt.textContent = prompt;
    // The first stretch goes on in the prompt's last line, the others are blocks.
    this.#stretch = element("span", { role: "none" });
    this.#list.replaceChildren(this.#stretch);
    this.#list.hidden = true;
    this.#tokens = [];
    this.#stop = null;
    this.#box.scrollTop = this.#box.scrollHeight; // to the end of the prompt
  }

  /** Take a cycle's tokens; they are shown with the next flush. */
  add(cycle) {
    const texts = pieces(cycle.tokens.map((token) => token.text), cycle.text);
    cycle.tokens.forEach((token, i) => this.#new.append(this.#element(token, cycle, texts[i])));
    if (this.#new.childElementCount > LONGEST) this.flush();
  }

  /** Show what was added, and follow it unless the reader has scrolled away. */
  flush() {
    if (!this.#new.firstChild) return;
    const box = this.#box;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    this.#stretch.append(this.#new);
    this.#list.hidden = false;
    if (!this.#stop) this.#makeStop(this.#tokens[0].element);
    if (this.#stretch.childElementCount > LONGEST) this.#beginStretch();
    if (follows) box.scrollTop = box.scrollHeight;
  }

  /** Move the last line, what is there of it, to a stretch of its own; nothing is seen to move. */
  #beginStretch() {
    const elements = [...this.#stretch.children];
    const { top } = lastRect(elements.at(-1)) ?? {};
    if (top === undefined) return; // nothing is laid out where it is not seen
    const begin = elements.findLastIndex((token) => lastRect(token).top < top - 1) + 1;
    if (begin === 0) return;
    const [first, ...line] = elements.slice(begin);
    const begins = first.getClientRects().length > 1 ? splitOff(first) : first;
    if (!begins) return; // a later line will do
    this.#stretch = element("div", { role: "none" }, begins, ...line);
    this.#list.append(this.#stretch);
  }

  #element(token, cycle, text) {
    // What ends a text or a turn is a token without text of its own: its name is shown.
    const isEnd = !text && /^<.+>$/.test(token.text);
    const made = element("span", {
      class: `token ${token.kind}${text.includes("\n") ? " break" : ""}${isEnd ? " special" : ""}`,
      role: "option",
      tabindex: -1,
      "aria-selected": "false",
      "aria-label": `${visible(token.text)}, ${token.kind}`,
      "data-index": this.#tokens.length,
    }, isEnd ? token.text : text);
    this.#tokens.push({ token, cycle, element: made });
    return made;
  }

  #tell(element) {
    const { token, cycle } = this.#tokens[element.dataset.index];
    this.#popup.show(element, why(token, cycle));
  }

  #makeStop(element) {
    this.#stop?.setAttribute("tabindex", -1);
    this.#stop?.setAttribute("aria-selected", "false");
    element.setAttribute("tabindex", 0);
    element.setAttribute("aria-selected", "true");
    this.#stop = element;
  }

  #move(key) {
    if (!(key in MOVES)) return false;
    const wanted = Number(this.#stop.dataset.index) + MOVES[key];
    const last = this.#tokens.length - 1;
    this.#tokens[Math.max(0, Math.min(last, wanted))].element.focus();
    return true;
  }
}

/** Where an element's last line is. */
const lastRect = (element) => [...element.getClientRects()].at(-1);

/**
 * What a token has on its second line, as an element to begin a stretch with: behind a line break,
 * or behind the blank at which the line was broken. Null if it was broken elsewhere.
 */
function splitOff(token) {
  const text = token.textContent;
  const at = text.lastIndexOf("\n") + 1 || (text.startsWith(" ") ? 1 : 0);
  if (!at) return null;
  token.textContent = text.slice(0, at);
  const attributes = { class: `${token.className} rest`, role: "none" };
  return element("span", { ...attributes, "data-index": token.dataset.index }, text.slice(at));
}
