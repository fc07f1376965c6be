// HTML and SVG elements in one call each. Strings become text nodes and nothing here parses HTML:
// prompts and outputs are untrusted.

const SVG = "http://www.w3.org/2000/svg"; // a name, not an address: nothing is fetched

export const byId = (id) => document.getElementById(id);

/** element("li", {class: "slot"}, "text", child); null and false are left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children);
  return node;
}
