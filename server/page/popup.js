// A short text on what is pointed at or focused: the reason for a token, or what a word means. The meaning
// of a word stands above it, a token's reason beside its column, and where there is no room at the window's
// edge. It lets the mouse through, and closes with Escape.

import { byId, explained } from "./elements.js";
import texts from "./texts.json" with { type: "json" };
import { MARKS } from "./words.js";

const GAP = 8; // px
const isWide = matchMedia("(min-width: 62rem)"); // where there are columns
const box = byId("popup");
const reasons = new WeakMap(); // by element, a function that says it
let anchor = null; // what the popup is about

/** Let the popup say `words()` of `node`. */
export const explain = (node, words) => reasons.set(node, words);

/** A thing's mark and name in its colour, which the popup explains. */
export const keyOf = (kind, words = kind) => explained(kind, `${MARKS[kind]} ${words}`, `key.${kind}`);

export function hidePopup() { anchor?.removeAttribute("aria-describedby"); anchor = null; box.hidden = true; }

const aboutOf = ({ target }) => target.closest?.("[data-word], [data-index]") ?? null;

function show(event) {
  const node = aboutOf(event);
  if (!node || (event.type === "click" && !node.dataset.word)) return; // a token's click shows its cycle
  hidePopup();
  anchor = node;
  anchor.setAttribute("aria-describedby", box.id);
  box.textContent = texts.words[node.dataset.word] ?? reasons.get(node)();
  box.hidden = false;
  place();
}

/** Above a word, or below; for a token beside its column, and without columns at the window's edge. */
function place() {
  if (!anchor) return;
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const column = isWide.matches && anchor.closest("[data-column], article, #scene")?.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const [right, lowest] = [document.documentElement.clientWidth, innerHeight - height - GAP];
  const isFree = at.bottom + GAP < lowest;
  const above = at.top - height - GAP;
  const [left, top] = anchor.dataset.word ? [Math.max(GAP, Math.min(at.left, right - width - GAP)),
    above < GAP ? at.bottom + GAP : above]
    : !column ? [(right - width) / 2, isFree ? lowest : GAP]
    : [column.left > width + 2 * GAP ? column.left - width - GAP : column.right + GAP, at.top];
  [box.style.left, box.style.top] = [left, Math.max(GAP, Math.min(top, lowest))].map((px) => `${px}px`);
}

for (const legend of document.querySelectorAll(".legend")) {
  legend.append(...Object.keys(MARKS).map((kind) => keyOf(kind)));
}
for (const kind of ["pointerover", "focusin", "click"]) addEventListener(kind, show);
for (const kind of ["pointerout", "focusout"]) addEventListener(kind, (at) => aboutOf(at) && hidePopup());
addEventListener("keydown", ({ key }) => key === "Escape" && hidePopup());
const isTouch = matchMedia("(hover: none)"); // where nothing else would close it
addEventListener("scroll", () => (isTouch.matches ? hidePopup() : place()), { capture: true, passive: true });
addEventListener("resize", place);
// What it is about may be drawn anew or go with its view.
new MutationObserver(() => anchor && !anchor.checkVisibility() && hidePopup())
  .observe(document.body, { subtree: true, childList: true, attributeFilter: ["hidden"] });
