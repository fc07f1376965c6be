// A short text beside what is pointed at or focused: the reason for a token, or what a word means.
// It stays while the pointer is on it, and closes with Escape.

import { byId } from "./elements.js";

const GAP = 8; // px between the anchor and the popup, and to the window's edge
const LEAVE_MS = 150; // to get from the anchor to the popup
const WORDS = {
  pass: "One forward of the target through all its layers. It reads every weight once, whether it looks "
    + "at one position or at six.",
  drafter: "Whatever proposes tokens: a lookup in the text, a small model, an extra layer. It never "
    + "decides.",
  target: "The model whose text is wanted. It judges the drafts, and only its own choices are written.",
  pending: "The last token of the text. It is chosen, but not in the KV cache yet: the next pass reads "
    + "it first.",
  recovered: "The target’s own token in the place of the first rejected one. It costs nothing extra: "
    + "the pass has it anyway.",
  bonus: "The target’s own token after a draft that was accepted as a whole. The same pass gives it. "
    + "Where nothing was drafted, the same look marks the target’s own token.",
  alpha: "α, the acceptance: the chance that a drafted token is accepted, once all before it were.",
  c: "c, the cost: the time of one draft step, in passes of plain decoding. At c = 0.1 ten drafted "
    + "tokens cost one pass.",
  tverify: "t_verify, the time of a pass over K + 1 tokens, in passes over one. It is near 1 while "
    + "reading the weights takes longest.",
  cache: "The KV cache keeps each read token’s keys and values, so that a pass has to read the new "
    + "tokens only. To truncate it is to lower a length.",
  rule: "How drafts of sampled text are judged. Coupled: drafter and target add the same noise, and a draft "
    + "is kept if the target lands on it, too; a seed’s text is plain decoding’s, whatever is drafted. "
    + "Rejection: a draft is kept with the chance p / q; only the distribution is plain decoding’s.",
  noise: "One random number for each token of the vocabulary, made from the seed and the place. The token "
    + "with the largest log p + noise is a draw from p. The drafter adds the same noise to log q, so both "
    + "often land on the same token.",
  u: "u is a number drawn evenly from 0 to 1. p and q are the chances that the target and the drafter "
    + "give the drafted token. It is kept if u < p / q: always where the target likes it better, else "
    + "with the chance p / q.",
};

export class Popup {
  #box = byId("popup");
  #anchor = null;
  #leaving = 0;
  constructor() {
    this.#box.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
    this.#box.addEventListener("pointerleave", () => this.hideSoon());
    addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    addEventListener("scroll", () => this.#place(), { capture: true, passive: true });
    addEventListener("resize", () => this.#place());
    const word = (event) => event.target.closest?.("[data-word]");
    const tell = (event) => word(event) && this.show(word(event), WORDS[word(event).dataset.word]);
    for (const kind of ["pointerover", "focusin", "click"]) addEventListener(kind, tell);
    addEventListener("pointerout", (event) => word(event) && this.hideSoon());
    addEventListener("focusout", (event) => word(event) && this.hide());
  }
  /** Say `content`, a text or elements, about what `anchor` shows. */
  show(anchor, ...content) {
    this.hide();
    this.#anchor = anchor;
    anchor.setAttribute("aria-describedby", this.#box.id);
    this.#box.replaceChildren(...content);
    this.#box.hidden = false;
    this.#place();
  }
  hide() {
    clearTimeout(this.#leaving);
    this.#anchor?.removeAttribute("aria-describedby");
    this.#anchor = null;
    this.#box.hidden = true;
  }
  hideSoon() {
    clearTimeout(this.#leaving);
    this.#leaving = setTimeout(() => this.hide(), LEAVE_MS);
  }
  /** Below the anchor, or above it where there is no room; within the window. */
  #place() {
    if (!this.#anchor) return;
    const anchor = this.#anchor.getClientRects()[0] ?? this.#anchor.getBoundingClientRect();
    const own = this.#box.getBoundingClientRect();
    const fitsBelow = anchor.bottom + GAP + own.height < innerHeight;
    const top = fitsBelow ? anchor.bottom + GAP : Math.max(GAP, anchor.top - GAP - own.height);
    const right = document.documentElement.clientWidth - own.width - GAP;
    this.#box.style.top = `${top}px`;
    this.#box.style.left = `${Math.max(GAP, Math.min(anchor.left, right))}px`;
  }
}
