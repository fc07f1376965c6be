// The request's form: what the server offers goes in, a checked request comes out. Ranges are judged
// by the server, which names the field; here what is no number is refused. An address can hold it all.

import { byId, element, write } from "./elements.js";
import { isRecorded, ServerError } from "./stream.js";
import { nameOfPrompt } from "./words.js";

const NUMBERS = ["num_speculative_tokens", "temperature", "top_p", "max_tokens", "seed"];
const FIELDS = ["prompt", "drafter", "verification", "json_schema", ...NUMBERS];
const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
const FIRST_PROMPT = "code_function";

const labelOf = (name) => byId(name).labels[0].textContent.split(",")[0].trim();

export class RequestForm {
  #demo = byId("demo-prompt");
  #prompt = byId("prompt");
  #prompts = {}; // by name
  constructor() {
    this.#demo.addEventListener("change", () => this.fill({ demo: this.#demo.value }));
    this.#prompt.addEventListener("input", () => { this.#demo.value = ""; });
    byId("request").addEventListener("input", () => write("settings-now", this.settings));
  }
  /** Offer the demo prompts, by their names, whose first word is their kind. */
  offerPrompts(prompts) {
    this.#prompts = prompts;
    const names = Object.keys(prompts);
    const options = names.map((name) => element("option", { value: name }, nameOfPrompt(name)));
    this.#demo.replaceChildren(this.#demo.options[0], ...options);
    if (this.#prompt.value || document.activeElement === this.#prompt) return; // somebody was faster
    const isChat = names[0]?.startsWith("chat"); // a chat model's are those of that kind
    this.fill({ demo: isChat || !(FIRST_PROMPT in prompts) ? names[0] : FIRST_PROMPT });
  }
  /** Offer these drafters, once, and the chat template if the model has one; begin with these fields. */
  offer({ chat_template }, drafters, fields) {
    byId("chat-field").hidden = !chat_template;
    if (byId("drafter").options.length) return;
    byId("drafter").append(...drafters.map((name) => element("option", name)));
    this.fill(fields);
  }
  /** Set some fields; `demo` is the name of a demo prompt. With `isWhole` all others become empty. */
  fill({ demo = "", chat = null, isWhole = false, ...fields }) {
    if (demo in this.#prompts) [this.#demo.value, this.#prompt.value] = [demo, this.#prompts[demo]];
    if (chat !== null) byId("chat").checked = chat;
    const set = FIELDS.filter((name) => name in fields || (isWhole && name !== "drafter"));
    for (const name of set) byId(name).value = fields[name] ?? "";
    if ("prompt" in fields) {
      const isIt = (name) => this.#prompts[name] === fields.prompt;
      this.#demo.value = Object.keys(this.#prompts).find(isIt) ?? "";
    }
    write("settings-now", this.settings);
  }
  get key() { return byId("key").value; }
  askForKey() { byId("key-field").hidden = !(byId("more").open = true); }
  /** What is filled in, by field, as it stands there: without the prompt. */
  get #filled() {
    const texts = FIELDS.slice(1).map((name) => [name, byId(name).value.trim()]);
    const dotted = ([name, text]) => [name, /^(temp|top)/.test(name) ? text.replace(",", ".") : text];
    return Object.fromEntries(texts.filter(([, text]) => text).map(dotted));
  }
  /** The request; empty fields are left to the server. A named drafter drafts as many tokens as K says. */
  request(isRace) {
    const body = { prompt: this.#prompt.value, stream: true, trace: true, ...this.#filled };
    if (!body.prompt.length) throw new ServerError("Write a prompt first.", { param: "prompt" });
    for (const name of NUMBERS.filter((number) => number in body)) body[name] = numberIn(name, body[name]);
    if (isRace) body.compare = true;
    if (!byId("chat-field").hidden && byId("chat").checked) body.chat = true;
    if (body.drafter && body.drafter !== "auto") body.fixed_k = true;
    return body;
  }
  get settings() { return settingsWords(this.#filled); }
  /** Mark the field that an error is about, if it is one of these; null marks none. */
  mark(param) {
    for (const name of FIELDS) byId(name).setAttribute("aria-invalid", name === param);
    if (FIELDS.includes(param) && byId("more").contains(byId(param))) byId("more").open = true;
  }
  /** An error's words, with the field called as it is here. */
  words({ message, param }) {
    return NUMBERS.includes(param) ? message.replace(param, labelOf(param)) : message;
  }
}

function numberIn(name, text) {
  const wrong = !(NUMBER.test(text) && Number.isFinite(Number(text))) ? `“${text}” is not a number.`
    : name === "seed" && Math.abs(text) > Number.MAX_SAFE_INTEGER
      ? "a browser cannot send a number of more than 53 bits." : "";
  if (wrong) throw new ServerError(`${labelOf(name)}: ${wrong}`, { param: name });
  return Number(text);
}

/** The settings of a request, in words; fields that are left out, or empty, have none. */
export function settingsWords({ num_speculative_tokens: k = "", seed = "", ...request }) {
  const { temperature, top_p: topP, verification, max_tokens: most, json_schema: schema } = request;
  const isGreedy = (temperature ?? "") === "" ? isRecorded : Number(temperature) === 0;
  const sampled = [`temperature ${Number(temperature)}`, topP < 1 && `top-p ${Number(topP)}`, verification,
    seed !== "" && `seed ${seed}`];
  return [k !== "" && `K = ${k}`, ...temperature > 0 ? sampled : [isGreedy && "greedy"],
    most && `${most} tokens`, schema && "a JSON schema"].filter(Boolean).join(", ") || "nothing set";
}
