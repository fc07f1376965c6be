// The page: a story to scroll, told of a recording, and the workbench below it. What the server measures
// goes to both.

import { byId, element } from "./elements.js";
import { Story } from "./story.js";
import { recording } from "./stream.js";
import "./workbench.js";

const story = recording.then((recorded) => new Story(recorded));
story.catch(({ message }) => (
  byId("story").replaceChildren(element("p.error", `The story cannot be told: ${message}`))));
addEventListener("curve", ({ detail: { curve, health } }) => (
  story.then((told) => told.measured(curve, health), () => {})));
