// A conversation with an instruct model: system, turns, and each answer token by token. Every answer
// is a request of its own, with all turns before it put into the model's chat template.

import { byId, element, enable, onPress } from "./elements.js";
import { TokenText } from "./tokens.js";
import { counted, milliseconds, short } from "./words.js";

export class Chat {
  #turns = byId("turns");
  #messages = []; // {role, content}, the last one the user's
  #message = byId("message");
  #say;
  #popup;
  #choose;
  /** `say(messages, answer)` starts a run that is shown in `answer`; `choose(cycle, answer)` picks a cycle. */
  constructor(popup, say, choose) {
    [this.#popup, this.#say, this.#choose] = [popup, say, choose];
    byId("say").addEventListener("submit", (event) => {
      event.preventDefault();
      if (byId("send").getAttribute("aria-disabled") !== "true") this.#send();
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
    answer.ended = (whole) => { if (whole) this.#messages.push(turn, { role: "assistant", content: whole.text }); };
    const question = element("div", { class: "turn user" }, element("p", { class: "role" }, "user"), element("p", {}, text));
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
    const list = element("span", { role: "listbox", class: "tokens", hidden: true, "aria-label": "Tokens of this answer; Enter shows the cycle" });
    const box = element("div", { class: "answer" }, list);
    this.read = element("pre", { tabindex: 0, "aria-label": "The prompt as the model reads it" });
    this.figures = element("p", { class: "note" }, "…");
    this.element = element("div", { class: "turn assistant" }, element("p", { class: "role" }, "assistant"), box, this.figures,
      element("details", {}, element("summary", {}, "The prompt as the model reads it"), this.read));
    this.text = new TokenText({ box, list }, popup, choose);
    this.text.clear("");
  }
  /** The end of its run: the answer's event, or null where it was stopped or failed. */
  finish(whole, figures, cycles) {
    this.read.textContent = cycles[0]?.promptText ?? "";
    const end = !whole ? "Stopped here; it does not count as a turn." : whole.finish_reason === "stop" ? "The model ended its turn." : "Cut at the limit of tokens.";
    this.figures.textContent = `${counted(figures.tokens, "token")} in ${counted(figures.passes, "pass", "passes")}, `
      + `${short(figures.tokensPerPass)} tokens per pass, acceptance ${short(figures.acceptanceRate)}, ${milliseconds(figures.totalMs)}. ${end}`;
    this.ended(whole);
    this.follow();
  }
}
