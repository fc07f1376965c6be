// HTML and SVG elements in one call each. Strings become text nodes and nothing here parses HTML:
// prompts and outputs are untrusted.

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address: nothing is fetched

export const byId = (id) => document.getElementById(id);

/** element("li", {class: "slot"}, "text", child); null and false are left out. */
export const element = (name, attributes = {}, ...children) => (filled(document.createElement(name), attributes, children));

/** The same for SVG. */
export const drawing = (name, attributes = {}, ...children) => (filled(document.createElementNS(SVG, name), attributes, children));

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

/** A button that can be off without `disabled`, which would take the focus from who has pressed it. */
export const enable = (id, isOn) => byId(id).setAttribute("aria-disabled", !isOn);

export const onPress = (id, act) => byId(id).addEventListener("click", () => { if (byId(id).getAttribute("aria-disabled") !== "true") act(); });

/** Whether pictures may move. */
export const mayMove = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Scroll as little as needed to see a node, below the sticky bar. */
export const reveal = (node) => node.scrollIntoView({ block: "nearest" });
