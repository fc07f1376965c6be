// The request's form: what the server offers goes in, a checked request comes out. Values are
// judged by the server, which names the field; here only what cannot be sent is refused.

import { byId, element } from "./elements.js";

const NUMBERS = ["num_speculative_tokens", "temperature", "max_tokens", "seed"];
const FIELDS = ["prompt", "drafter", "verification", ...NUMBERS];
const FIRST_PROMPT = "code_function";

/** A value that cannot be sent; `param` names its field. */
export class FieldError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

export class RequestForm {
  #demo = byId("demo-prompt");
  #prompt = byId("prompt");
  #prompts = {};

  constructor() {
    this.#demo.addEventListener("change", () => this.#pick());
    this.#prompt.addEventListener("input", () => {
      this.#demo.value = "";
    });
  }

  /** Offer the demo prompts, grouped by the first word of their names. */
  offerPrompts(prompts) {
    this.#prompts = prompts;
    const groups = new Map();
    for (const name of Object.keys(prompts)) {
      const [kind, ...rest] = name.split("_");
      if (!groups.has(kind)) groups.set(kind, element("optgroup", { label: kind }));
      groups.get(kind).append(element("option", { value: name }, rest.join(" ") || kind));
    }
    this.#demo.replaceChildren(this.#demo.options[0], ...groups.values());
    if (this.#prompt.value) return; // somebody was faster than the server
    const first = Object.keys(prompts)[0] ?? ""; // a chat model's are those of the kind chat
    const isChat = first.startsWith("chat") || !(FIRST_PROMPT in prompts);
    this.#demo.value = isChat ? first : FIRST_PROMPT;
    this.#pick();
  }

  /** Offer the server's drafters, once, and the chat template if the model has one. */
  offerDrafters({ drafters, drafter, chat_template, speculative_decoding: { num_spec_tokens: k } }) {
    byId("chat-field").hidden = !chat_template;
    if (byId("drafter").options.length) return;
    const options = drafters.map((name) => element("option", { value: name }, name));
    byId("drafter").replaceChildren(...options);
    byId("drafter").value = drafter;
    byId("num_speculative_tokens").value = k;
  }

  get key() {
    return byId("key").value;
  }

  askForKey() {
    byId("key-field").hidden = false;
  }

  /** The request as the server wants it; empty fields are left to its defaults. */
  request(isRace) {
    const body = { prompt: this.#prompt.value, stream: true, trace: true };
    if (isRace) body.compare = true;
    if (!byId("chat-field").hidden && byId("chat").checked) body.chat = true;
    for (const name of ["drafter", "verification"]) {
      if (byId(name).value) body[name] = byId(name).value;
    }
    for (const name of NUMBERS) {
      const input = byId(name);
      if (input.validity.badInput) throw new FieldError(`${labelOf(name)} is not a number.`, name);
      if (input.value !== "") body[name] = Number(input.value);
    }
    if ("seed" in body && Number.isInteger(body.seed) && !Number.isSafeInteger(body.seed)) {
      throw new FieldError("Seed: a browser cannot send a number of more than 53 bits.", "seed");
    }
    return body;
  }

  /** Mark the field that an error is about, if it is one of these; null marks none. */
  mark(param) {
    for (const name of FIELDS) {
      byId(name).toggleAttribute("data-wrong", name === param);
      byId(name).setAttribute("aria-invalid", name === param);
    }
  }

  #pick() {
    if (this.#demo.value) this.#prompt.value = this.#prompts[this.#demo.value];
  }
}

const labelOf = (name) => document.querySelector(`label[for="${name}"]`).textContent;
