// The request's form: what the server offers goes in, a checked request comes out. Ranges are judged
// by the server, which names the field; here what is no number is refused. An address can hold it all.

import { byId, element, onPress } from "./elements.js";
import { ServerError } from "./stream.js";

const NUMBERS = ["num_speculative_tokens", "temperature", "top_p", "max_tokens", "seed"];
const CHOICES = ["drafter", "verification"];
const FIELDS = ["prompt", ...CHOICES, ...NUMBERS];
const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
const FIRST_PROMPT = "code_function";

export class RequestForm {
  #demo = byId("demo-prompt");
  #prompt = byId("prompt");
  #prompts = {};
  constructor() {
    this.#demo.addEventListener("change", () => this.fill({ demo: this.#demo.value }));
    this.#prompt.addEventListener("input", () => { this.#demo.value = ""; });
    // The prompt is tall while it is written. A click is done before it shrinks and moves the buttons.
    const resize = ({ target }) => this.#prompt.classList.toggle("tall", target === this.#prompt);
    for (const kind of ["click", "keyup"]) addEventListener(kind, resize, true);
    this.#prompt.addEventListener("focus", resize);
    onPress("settings-button", () => this.open(!byId("settings").classList.contains("open")));
  }
  /** Show the settings, or hide them where the window is narrow. */
  open(isOpen) {
    byId("settings").classList.toggle("open", isOpen);
    byId("settings-button").setAttribute("aria-expanded", isOpen);
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
    this.fill({ demo: first.startsWith("chat") || !(FIRST_PROMPT in prompts) ? first : FIRST_PROMPT });
  }
  /** Offer the server's drafters, once, and the chat template if the model has one. */
  offerDrafters({ drafters, drafter, chat_template, speculative_decoding: { num_spec_tokens: k } }) {
    byId("chat-field").hidden = !chat_template;
    if (byId("drafter").options.length) return;
    const options = [...drafters, "none"].map((name) => element("option", { value: name }, name));
    byId("drafter").replaceChildren(...options);
    this.fill({ drafter, num_speculative_tokens: k });
  }
  /** Set some fields; `demo` is the name of a demo prompt. */
  fill({ demo = "", chat = null, ...fields }) {
    if (demo in this.#prompts) [this.#demo.value, this.#prompt.value] = [demo, this.#prompts[demo]];
    if (chat !== null) byId("chat").checked = chat;
    for (const name of FIELDS.filter((field) => field in fields)) {
      byId(name).value = fields[name];
      if (name === "prompt") this.#demo.value = "";
    }
  }
  get key() { return byId("key").value; }
  get asksForChat() { return !byId("chat-field").hidden; }
  askForKey() {
    byId("key-field").hidden = false;
    this.open(true);
  }
  /**
   * The request as the server wants it; empty fields are left to its defaults. A named drafter drafts as
   * many tokens as K says; with auto the controller decides. `messages` go instead of the prompt.
   */
  request(isRace, messages = null) {
    const body = { prompt: messages ?? this.#prompt.value, stream: true, trace: true };
    if (!body.prompt.length) throw new ServerError("Write a prompt first.", { param: "prompt" });
    if (isRace) body.compare = true;
    if (messages || (this.asksForChat && byId("chat").checked)) body.chat = true;
    for (const name of CHOICES) if (byId(name).value) body[name] = byId(name).value;
    if (body.drafter && body.drafter !== "auto") body.fixed_k = true;
    for (const name of NUMBERS) {
      const text = byId(name).value.trim().replace(",", ".");
      if (text === "") continue;
      if (!NUMBER.test(text)) {
        throw new ServerError(`${labelOf(name)}: “${text}” is not a number.`, { param: name });
      }
      body[name] = Number(text);
    }
    if (Number.isInteger(body.seed) && !Number.isSafeInteger(body.seed)) {
      throw new ServerError("Seed: a browser cannot send a number of more than 53 bits.", { param: "seed" });
    }
    return body;
  }
  /** Mark the field that an error is about, if it is one of these; null marks none. */
  mark(param) {
    for (const name of FIELDS) {
      byId(name).toggleAttribute("data-wrong", name === param);
      byId(name).setAttribute("aria-invalid", name === param);
    }
    if (FIELDS.includes(param)) this.open(true);
  }
  /** An error's words, with the field called as it is here. */
  words({ message, param }) {
    return NUMBERS.includes(param) ? message.replace(param, labelOf(param)) : message;
  }
}

const labelOf = (name) => document.querySelector(`label[for="${name}"]`).textContent;
