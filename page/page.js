// The page: a story to scroll, told of a recording, and the workbench below it. What the server measures
// goes to both.

import { byId, element } from "./elements.js";
import { keyOf } from "./popup.js";
import { Story } from "./story.js";
import { recording } from "./stream.js";
import { MARKS } from "./words.js";
import "./workbench.js";

const story = new Story();
for (const legend of document.querySelectorAll(".legend")) {
  legend.append(...Object.keys(MARKS).map((kind) => keyOf(kind)));
}
recording.then((recorded) => story.tell(recorded), (error) => (
  byId("story").replaceChildren(element("p.error", `The story cannot be told: ${error.message}`))));
addEventListener("curve", ({ detail: { curve, health } }) => (
  recording.then(() => story.measured(curve, health), () => {})));
