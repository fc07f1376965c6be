// A short text beside what is pointed at or focused: the reason for a token, or what a word means.
// It stays while the pointer is on it, and closes with Escape.

import { byId } from "./elements.js";

const GAP = 8; // px between the anchor and the popup, and to the window's edge
const LEAVE_MS = 150; // to get from the anchor to the popup
const WORDS = {
  pass: "One forward of the target through all its layers. It reads every weight once, whether it looks "
    + "at one position or at six.",
  drafter: "Whatever proposes tokens: a lookup in the text, a small model, an extra layer. It never decides.",
  target: "The model whose text is wanted. It judges the drafts, and only its own choices are written.",
  pending: "The last token of the text: chosen, but not yet in the KV cache. The next pass reads it first.",
  accepted: "A token that was drafted, judged and kept.",
  recovered: "The target’s own token in the place of the first rejected one. The pass has it anyway.",
  bonus: "The target’s own token after a draft that was accepted as a whole. The same pass gives it. "
    + "Where nothing was drafted, the same look marks the target’s own token.",
  alpha: "α, the acceptance: the chance that a drafted token is accepted, once all before it were.",
  c: "c, the cost: the time of one draft step in plain passes. At c = 0.1 ten steps cost one pass.",
  tverify: "t_verify, the time of a pass over K + 1 tokens, in passes over one. It is near 1 while "
    + "reading the weights takes longest.",
  cache: "The KV cache keeps each read token’s keys and values, so that a pass has to read the new "
    + "tokens only. To truncate it is to lower a length.",
  state: "Some layers keep no keys but one state, which every token changes; it has no earlier version, so "
    + "the one from before the pass was kept, and steps again through the tokens that stay.",
  rule: "How drafts of sampled text are judged. Coupled: drafter and target add the same noise, and a draft "
    + "is kept if the target lands on it, too; a seed’s text is plain decoding’s, whatever is drafted. "
    + "Rejection: a draft is kept with the chance p / q; only the distribution is plain decoding’s.",
  noise: "One random number for each token of the vocabulary, made from the seed and the place. The token "
    + "with the largest log p + noise is a draw from p. The drafter adds the same noise to log q, so both "
    + "often land on the same token.",
  u: "u is drawn evenly from 0 to 1. The target gives the drafted token the chance p, the drafter q. It is "
    + "kept if u < p / q: always where the target likes it better, else with the chance p / q.",
  draw: "u picks a place on a line made of all chances, in the vocabulary’s order.",
  own: "Greedy and coupled text is plain decoding’s; by the rule of rejection only its distribution is.",
};

const box = byId("popup");
const reasons = new WeakMap(); // by element, a function that says it
let anchor = null; // what the popup is about
let leaving = 0;

/** Let the popup say `words()` of `node`. */
export const explain = (node, words) => reasons.set(node, words);

export function hidePopup() {
  clearTimeout(leaving);
  anchor?.removeAttribute("aria-describedby");
  anchor = null;
  box.hidden = true;
}

function hideSoon() {
  clearTimeout(leaving);
  leaving = setTimeout(hidePopup, LEAVE_MS);
}

/** What an event is about, if anything. */
const aboutOf = ({ target }) => target.closest?.("[data-word], [data-index]") ?? null;

function show(event) {
  const node = aboutOf(event);
  if (!node || (event.type === "click" && !node.dataset.word)) return; // a token's click shows its cycle
  hidePopup();
  anchor = node;
  anchor.setAttribute("aria-describedby", box.id);
  box.textContent = WORDS[node.dataset.word] ?? reasons.get(node)();
  box.hidden = false;
  place();
}

/** Below the anchor, or above it where there is no room; within the window. */
function place() {
  if (!anchor) return;
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const isBelow = at.bottom + GAP + height < innerHeight;
  const right = document.documentElement.clientWidth - width - GAP;
  box.style.top = `${isBelow ? at.bottom + GAP : Math.max(GAP, at.top - GAP - height)}px`;
  box.style.left = `${Math.max(GAP, Math.min(at.left, right))}px`;
}

for (const kind of ["pointerover", "focusin", "click"]) addEventListener(kind, show);
addEventListener("pointerout", (event) => aboutOf(event) && hideSoon());
addEventListener("focusout", (event) => aboutOf(event) && hidePopup());
addEventListener("keydown", ({ key }) => key === "Escape" && hidePopup());
addEventListener("scroll", place, { capture: true, passive: true });
addEventListener("resize", place);
// What it is about may be drawn anew or go with its view.
new MutationObserver(() => anchor && !anchor.checkVisibility() && hidePopup())
  .observe(document.body, { subtree: true, childList: true, attributeFilter: ["hidden"] });
box.addEventListener("pointerenter", () => clearTimeout(leaving));
box.addEventListener("pointerleave", hideSoon);
