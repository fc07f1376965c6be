// The text as it streams, one element per token, marked by its origin. Elements are only ever
// appended, a frame's worth at once; a single one of them is a tab stop, arrow keys move it.

import { byId, element } from "./elements.js";
import { pieces } from "./pieces.js";
import { visible } from "./words.js";

const NEAR_END = 48; // px: a reader who has scrolled further up than this is left there
const MOVES = {
  ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1,
  PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity,
};

export class TokenText {
  #box = byId("text");
  #prompt = byId("prompt-text");
  #list = byId("tokens");
  #tokens = []; // {token, cycle} in the order of the elements
  #new = document.createDocumentFragment();
  #stop = null; // the element that Tab goes to
  #card;

  /** `card` tells about a token; `choose(cycle)` is called when one is clicked or entered. */
  constructor(card, choose) {
    this.#card = card;
    const at = (event) => event.target.closest(".token");
    const tell = (event) => at(event) && this.#tell(at(event));
    const pick = (element) => element && choose(this.#tokens[element.dataset.index].cycle);
    this.#list.addEventListener("pointerover", tell);
    this.#list.addEventListener("pointerout", () => card.hideSoon());
    this.#list.addEventListener("focusin", (event) => {
      this.#makeStop(at(event));
      tell(event);
    });
    this.#list.addEventListener("focusout", () => card.hide());
    this.#list.addEventListener("click", (event) => pick(at(event)));
    this.#list.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") pick(at(event));
      else if (!this.#move(event.key)) return;
      event.preventDefault();
    });
  }

  /** The origin of every token so far. */
  get kinds() {
    return this.#tokens.map(({ token }) => token.kind);
  }

  get text() {
    return this.#list.textContent;
  }

  clear(prompt) {
    this.#card.hide();
    this.#prompt.textContent = prompt;
    this.#list.replaceChildren();
    this.#list.hidden = true;
    this.#tokens = [];
    this.#stop = null;
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
    if (!this.#stop) this.#makeStop(this.#list.firstChild);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  #element(token, cycle, text) {
    const index = this.#tokens.push({ token, cycle }) - 1;
    return element("span", {
      class: `token ${token.kind}${text.includes("\n") ? " break" : ""}`,
      role: "option",
      tabindex: -1,
      "aria-selected": "false",
      "aria-label": `${visible(token.text)}, ${token.kind}`,
      "data-index": index,
    }, text);
  }

  #tell(element) {
    const { token, cycle } = this.#tokens[element.dataset.index];
    this.#card.show(element, token, cycle);
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
    const last = this.#list.childElementCount - 1;
    this.#list.children[Math.max(0, Math.min(last, wanted))].focus();
    return true;
  }
}
