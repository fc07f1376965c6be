// HTML and SVG elements in one call each. Strings become text nodes and nothing here parses HTML:
// prompts and outputs are untrusted.

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address: nothing is fetched

export const byId = (id) => document.getElementById(id);
/** Put words into the element of this id. */
export const write = (id, words) => { byId(id).textContent = words; };
/** element("li.slot", {title: "x", click: act}, "text", child); what is null or false is left out. */
export const element = (tag, ...parts) => filled((name) => document.createElement(name), tag, parts);
/** The same for SVG. */
export const drawing = (tag, ...parts) => filled((name) => document.createElementNS(SVG, name), tag, parts);

function filled(make, tag, parts) {
  const [name, ...classes] = tag.split(".");
  const [attributes, ...children] = parts[0]?.constructor === Object ? parts : [{}, ...parts];
  const node = make(name);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if ((value ?? false) !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

/** A word that the popup explains. */
export const explained = (word, words, kind = "word") => (
  element(`button.${kind}`, { type: "button", "data-word": word }, words));
/** A slider below its label, which ends with its value. */
export const slider = (id, words, value, [min, max, step]) => element("label", { for: id }, `${words} `,
  element("output", { id: `${id}-value`, "aria-live": "off" }),
  element("input", { id, type: "range", min, max, step, value }));

/** A button is off without `disabled`, which would take the focus from who has pressed it. */
export const enable = (id, isOn) => byId(id).setAttribute("aria-disabled", !isOn);
export const isOff = (id) => byId(id).getAttribute("aria-disabled") === "true";
export const onPress = (id, act) => byId(id).addEventListener("click", () => isOff(id) || act());
/** Whether pictures may move. */
export const mayMove = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;
/** Whether the window is so narrow that pictures stand above their text. */
export const isNarrow = () => matchMedia("(max-width: 56rem)").matches;
/** Scroll as little as needed to see a node, below what sticks to the window's top. */
export const reveal = (node) => node.scrollIntoView({ block: "nearest" });
