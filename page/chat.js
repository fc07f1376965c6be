// A conversation with an instruct model: system, turns, and each answer token by token. Every answer
// is a request of its own, with all turns before it put into the model's chat template.

import { byId, element, enable, isOff, onPress } from "./elements.js";
import { TokenText } from "./tokens.js";
import { figuresOf } from "./trace.js";
import { milliseconds, pace, short } from "./words.js";

const PROMPT = "The prompt as the model reads it";

export class Chat {
  #turns = byId("turns");
  #messages = []; // {role, content}, the last one the assistant's
  /** `say(messages, answer)` shows a run in `answer`; `choose(cycle, place, answer)` picks a token of it. */
  constructor(say, choose) {
    byId("say").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!isOff("send")) this.#send(say, choose);
    });
    onPress("forget", () => { this.#messages = []; this.#turns.replaceChildren(); });
  }
  set isBusy(isBusy) { for (const id of ["send", "forget"]) enable(id, !isBusy); }
  #send(say, choose) {
    const [message, system] = [byId("message"), byId("system").value.trim()];
    const turn = { role: "user", content: message.value.trim() };
    if (!turn.content) return;
    const answer = new Answer((cycle, place) => choose(cycle, place, answer));
    answer.follow = () => { this.#turns.scrollTop = this.#turns.scrollHeight; };
    answer.keep = (content) => this.#messages.push(turn, { role: "assistant", content });
    const first = system ? [{ role: "system", content: system }] : [];
    if (!say([...first, ...this.#messages, turn], answer)) return;
    message.value = "";
    const words = element("p", { dir: "auto" }, turn.content);
    this.#turns.append(element("div.turn.user", element("p.role", "user"), words), answer.element);
    answer.follow();
  }
}

/** One answer: its tokens, the prompt that the template made, and its figures. */
class Answer {
  #read = element("pre", { tabindex: 0, "aria-label": PROMPT });
  #figures = element("p.note", "…");
  #box = element("div.answer");
  element = element("div.turn.assistant", element("p.role", "assistant"), this.#box, this.#figures,
    element("details", element("summary", PROMPT), this.#read));
  constructor(choose) { this.text = new TokenText(this.#box, choose); }
  /** The end of its run; its answer is null where it was stopped or failed. */
  finish({ answer, cycles }) {
    this.#read.textContent = cycles[0]?.prompt.text ?? "";
    const end = !answer ? "Stopped here; it does not count as a turn."
      : answer.finish_reason === "stop" ? "The model ended its turn." : "Cut at the limit of tokens.";
    const figures = figuresOf(cycles);
    const told = cycles.length ? `${pace(figures)}, acceptance ${short(figures.acceptanceRate)}, `
      + `${milliseconds(figures.totalMs)}. ` : "";
    this.#figures.textContent = told + end;
    if (answer) this.keep(answer.text);
    this.follow();
  }
}
