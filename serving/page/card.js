// The card beside a token: the numbers that decided, and why it stands there. It opens for the token that is
// pointed at or focused, stays while the pointer is on it, and closes with Escape.

import { byId, element } from "./elements.js";
import { chance, fixed, visible, why } from "./words.js";

const GAP = 8; // px between token and card, and to the window's edge
const LEAVE_MS = 150; // to get from the token to the card

export class TokenCard {
  #card = byId("token-card");
  #anchor = null;
  #leaving = 0;

  constructor() {
    this.#card.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
    this.#card.addEventListener("pointerleave", () => this.hideSoon());
    addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    addEventListener("scroll", () => this.#place(), { capture: true, passive: true });
    addEventListener("resize", () => this.#place());
  }

  /** Tell about `token` of `cycle`, which `anchor` shows. */
  show(anchor, token, cycle) {
    clearTimeout(this.#leaving);
    this.#anchor?.removeAttribute("aria-describedby");
    this.#anchor = anchor;
    anchor.setAttribute("aria-describedby", this.#card.id);
    this.#card.replaceChildren(
      element("p", { class: "card-title" },
        element("span", { class: `chip ${token.kind}` }, visible(token.text)),
        ` ${token.kind}, cycle ${cycle.step}`),
      element("dl", {}, ...numbers(token)),
      element("p", {}, why(token, cycle)),
    );
    this.#card.hidden = false;
    this.#place();
  }

  hide() {
    clearTimeout(this.#leaving);
    this.#anchor?.removeAttribute("aria-describedby");
    this.#anchor = null;
    this.#card.hidden = true;
  }

  hideSoon() {
    clearTimeout(this.#leaving);
    this.#leaving = setTimeout(() => this.hide(), LEAVE_MS);
  }

  /** Below the token, or above it where there is no room; within the window. */
  #place() {
    if (!this.#anchor) return;
    const token = this.#anchor.getClientRects()[0] ?? this.#anchor.getBoundingClientRect();
    const card = this.#card.getBoundingClientRect();
    const fitsBelow = token.bottom + GAP + card.height < innerHeight;
    const top = fitsBelow ? token.bottom + GAP : Math.max(GAP, token.top - GAP - card.height);
    const right = document.documentElement.clientWidth - card.width - GAP;
    this.#card.style.top = `${top}px`;
    this.#card.style.left = `${Math.max(GAP, Math.min(token.left, right))}px`;
  }
}

/** What decided: p, q and u under the rule of rejection, else the race of score and noise. */
function numbers(token) {
  if (token.u !== undefined) {
    return [
      ...row("p", "target’s probability", chance(token.p)),
      ...row("q", "drafter’s probability", chance(token.q)),
      ...row("u", "uniform in [0, 1)", chance(token.u)),
    ];
  }
  const second = token.runnerUp;
  const isGreedy = token.score !== null && token.total === token.score;
  return [
    ...row("", isGreedy ? "target’s score" : "log of the target’s p", fixed(token.score, 3)),
    ...(isGreedy ? [] : row("", "with noise", fixed(token.total, 3))),
    ...(second ? row("", `runner-up “${visible(second.text)}”`, fixed(second.total, 3)) : []),
  ];
}

const row = (name, meaning, value) => [
  element("dt", {}, element("var", {}, name), ` ${meaning}`),
  element("dd", {}, value),
];
