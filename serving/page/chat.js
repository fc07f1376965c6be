// A conversation with an instruct model: system, turns, and each answer token by token. Every answer
// is a request of its own, with all turns before it put into the model's chat template.

import { byId, element, enable, isOff, onPress } from "./elements.js";
import { TokenText } from "./tokens.js";
import { counted, milliseconds, short } from "./words.js";

const PROMPT = "The prompt as the model reads it";

export class Chat {
  #turns = byId("turns");
  #messages = []; // {role, content}, the last one the user's
  #message = byId("message");
  #say;
  #popup;
  #choose;
  /** `say(messages, answer)` shows a run in `answer`; `choose(cycle, answer)` picks a cycle of it. */
  constructor(popup, say, choose) {
    [this.#popup, this.#say, this.#choose] = [popup, say, choose];
    byId("say").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!isOff("send")) this.#send();
    });
    onPress("forget", () => {
      this.#messages = [];
      this.#turns.replaceChildren();
    });
  }
  set isBusy(isBusy) { for (const id of ["send", "forget"]) enable(id, !isBusy); }
  #send() {
    const text = this.#message.value.trim();
    if (!text) return;
    const system = byId("system").value.trim();
    const turn = { role: "user", content: text };
    const asked = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages, turn];
    const answer = new Answer(this.#popup, (cycle) => this.#choose(cycle, answer));
    answer.ended = ({ text: content }) => this.#messages.push(turn, { role: "assistant", content });
    const question = element("div.turn.user", element("p.role", "user"), element("p", text));
    if (!this.#say(asked, answer)) return;
    this.#message.value = "";
    this.#turns.append(question, answer.element);
    answer.follow = () => { this.#turns.scrollTop = this.#turns.scrollHeight; };
    answer.follow();
  }
}

/** One answer: its tokens, the prompt that the template made, and its figures. */
class Answer {
  ended = () => {};
  follow = () => {};
  constructor(popup, choose) {
    const label = "Tokens of this answer; Enter shows the cycle";
    const list = element("span", { role: "listbox", hidden: true, "aria-label": label });
    const box = element("div.answer", list);
    this.read = element("pre", { tabindex: 0, "aria-label": PROMPT });
    this.figures = element("p.note", "…");
    const details = element("details", element("summary", PROMPT), this.read);
    this.element = element("div.turn.assistant", element("p.role", "assistant"), box, this.figures, details);
    this.text = new TokenText({ box, list }, popup, choose);
    this.text.clear("");
  }
  /** The end of its run: the answer's event, or null where it was stopped or failed. */
  finish(whole, figures, cycles) {
    this.read.textContent = cycles[0]?.promptText ?? "";
    const end = !whole ? "Stopped here; it does not count as a turn."
      : whole.finish_reason === "stop" ? "The model ended its turn." : "Cut at the limit of tokens.";
    const { tokens, passes, tokensPerPass, acceptanceRate, totalMs } = figures;
    this.figures.textContent = `${counted(tokens, "token")} in ${counted(passes, "pass", "passes")}, `
      + `${short(tokensPerPass)} tokens per pass, acceptance ${short(acceptanceRate)}, `
      + `${milliseconds(totalMs)}. ${end}`;
    if (whole) this.ended(whole);
    this.follow();
  }
}
