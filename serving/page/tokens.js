// A text as it streams, one element per token, marked by its origin. Elements are appended a frame's
// worth at once. A single element is a tab stop, arrow keys move it.

import { element } from "./elements.js";
import { pieces } from "./pieces.js";
import { originOf, visible, why } from "./words.js";

const NEAR_END = 48; // px: a reader who has scrolled further up than this is left there
const MOVES = {
  ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1,
  PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity,
};

export class TokenText {
  #box;
  #prompt;
  #list;
  #popup;
  #tokens = []; // {token, cycle, element}
  #new = document.createDocumentFragment();
  #stop = null; // the element that Tab goes to
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
      popup.hide();
      const { token, cycle } = this.#tokens[element.dataset.index];
      choose(cycle, cycle.tokens.indexOf(token));
    };
    list.addEventListener("pointerover", tell);
    list.addEventListener("pointerout", () => popup.hideSoon());
    list.addEventListener("focusin", (event) => {
      this.#makeStop(at(event));
      tell(event);
    });
    list.addEventListener("focusout", () => popup.hide());
    list.addEventListener("click", (event) => pick(at(event)));
    list.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "Enter" || event.key === " ") pick(at(event));
      else if (!this.#move(event.key)) return;
      event.preventDefault();
    });
  }
  /** The origin of every token so far. */
  get kinds() { return this.#tokens.map(({ token }) => token.kind); }
  /** Tell the tokens of a cycle from the others. */
  mark(first, count) {
    for (const old of this.#list.querySelectorAll(".current")) old.classList.remove("current");
    for (const { element: one } of this.#tokens.slice(first, first + count)) one.classList.add("current");
  }
  clear(prompt) {
    this.#popup.hide();
    if (this.#prompt) this.#prompt.textContent = prompt;
    this.#list.replaceChildren();
    this.#list.hidden = true;
    [this.#tokens, this.#stop] = [[], null];
    this.#box.scrollTop = this.#box.scrollHeight; // to the end of the prompt
  }
  /** Take a cycle's tokens; they are shown with the next flush. */
  add(cycle) {
    const texts = pieces(cycle.tokens.map((token) => token.text), cycle.text);
    cycle.tokens.forEach((token, i) => this.#new.append(this.#element(token, cycle, texts[i])));
  }
  /** Show what was added, and follow it unless the reader has scrolled away. */
  flush() {
    if (!this.#new.firstChild) return;
    const box = this.#box;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    this.#list.append(this.#new);
    this.#list.hidden = false;
    if (!this.#stop) this.#makeStop(this.#tokens[0].element);
    if (follows) box.scrollTop = box.scrollHeight;
  }
  #element(token, cycle, text) {
    // What ends a text or a turn is a token without text of its own: its name is shown.
    const isEnd = !text && /^<.+>$/.test(token.text);
    const kinds = [token.kind, text.includes("\n") && "break", isEnd && "special"].filter(Boolean);
    const made = element(`span.token.${kinds.join(".")}`, {
      role: "option", tabindex: -1, "aria-selected": "false",
      "aria-label": `${visible(token.text)}, ${originOf(token, cycle)}`, "data-index": this.#tokens.length,
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
    this.#tokens[Math.max(0, Math.min(this.#tokens.length - 1, wanted))].element.focus();
    return true;
  }
}
