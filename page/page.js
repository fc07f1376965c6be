// The page: a story first, then one request at a time through its views.
//
//   form → begin → Run ──cycles──→ session {cycles, figures, text} → the cycle, the charts
//                   └──plain────→ race       answer → verdict, what if, the address
//
// A session is what one request gave. `now` is the one that is looked at, `run` the one under way; an
// experiment's runs are looked at only when the reader asks for it, and never change the form.

import { drawStatistics } from "./charts.js";
import { Chat } from "./chat.js";
import { Distribution } from "./distribution.js";
import { hideTraces, toldWords } from "./elsewhere.js";
import { byId, element, enable, explained, isOff, mayMove, onPress, reveal, write } from "./elements.js";
import { RequestForm } from "./form.js";
import { Guide } from "./guide.js";
import { fromHealth, fromRace } from "./measured.js";
import { drawModel } from "./model.js";
import { phasesOf, Picture } from "./picture.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { Story } from "./story.js";
import { getJson } from "./stream.js";
import { TokenText } from "./tokens.js";
import { figuresOf, numAccepted, readCycle, ruleOf } from "./trace.js";
import { WhatIf } from "./whatif.js";
import { pace, summary } from "./words.js";

const PICTURE_MS = 1000; // between two pictures while a run streams
const LOADING = "The model is being loaded. The cycle below was recorded earlier.";
const LOADING_MS = 500; // between two questions whether the model is loaded
const SLOW_MS = 700; // of a phase that is shown slowly

const form = new RequestForm();
const story = new Story();
const race = new Race();
const whatIf = new WhatIf();
const distribution = new Distribution();
const picture = new Picture(byId("picture"), (place) => showPlace(place, true));
const text = new TokenText(byId("text"), (cycle, place) => showCycle(cycle.step, place, true));
const chat = new Chat((messages, answer) => begin("running", { messages, answer }), (cycle, answer) => {
  now = answer.session;
  showCycle(cycle.step, null, true);
});
const guide = new Guide(experiment, (session, step) => {
  look(session);
  select("text");
  showAnswer(session);
  showCycle(step);
  writeLink();
});

const fresh = (more) => ({ request: {}, cycles: [], answer: null, at: -1, text, view: "text", ...more });
let now = fresh();
const latest = { text: now, chat: now }; // sessions, by the view that they are seen in
let run = null; // {stream: a Run, session, ended: called with the session or null, follows}
let mode = "idle"; // idle | running | stepping | racing
let view = "story";
let drawnAt = 0;
let slowly = 0; // a timer
let health = null;
let isTold = false; // the recorded story
let isLoading = false;
let isOpening = true; // until the server was asked for all that the page needs
let isChanged = false; // whether the form was, since the last run

// ---------------------------------------------------------------------------------- a run

/** Start what the form asks for, or a conversation; false, with an error shown, if it cannot be sent. */
function begin(wanted, { messages = null, answer = null, ended = () => {} } = {}) {
  showError(null);
  let request;
  try {
    request = form.request(wanted === "racing", messages);
  } catch (error) {
    showError(error);
    return false;
  }
  const session = fresh({ request });
  if (answer) {
    answer.session = session;
    Object.assign(session, { view: "chat", text: answer.text, asAnswer: answer });
  }
  look(session);
  isChanged = false;
  form.open(false);
  if (request.compare) race.start();
  start(wanted, session, ended);
  return true;
}

function start(wanted, session, ended) {
  setMode(wanted);
  run = { session, ended, follows: true };
  run.stream = new Run(session.request, form.key, shown, wanted === "stepping");
}

/** An experiment's run of a request with these fields: its session, or null if there is none. */
function experiment({ demo, ...fields }) {
  if (mode !== "idle" || isLoading) return null;
  showError(null);
  const request = { stream: true, trace: true, prompt: form.prompts[demo], temperature: 0, ...fields };
  return new Promise((resolve) => start("running", fresh({ request }), resolve));
}

/** Look at a session: its text, with its cycles as far as they have come. */
function look(session) {
  [now, latest[session.view], drawnAt] = [session, session, 0];
  const { prompt, chat: isChat } = session.request;
  session.text.clear(session.view === "chat" ? "" : isChat ? `${prompt}\n` : prompt);
  for (const cycle of session.cycles) session.text.add(cycle);
  session.text.flush();
  picture.clear();
  distribution.clear();
  if (!health?.engine) write("cycle-says", "Cycles are drawn here as they come.");
  byId("warnings").replaceChildren();
  write("whole-text", "");
}

const shown = {
  take(event) {
    const { session } = run;
    if ("plain" in event) return race.add("plain", event.plain);
    if (!("step" in event)) return Object.assign(session, { answer: event });
    if (health?.engine) return session === latest[session.view] && session.text.write(event.text);
    const cycle = readCycle(event, session.cycles.at(-1) ?? null);
    session.cycles.push(cycle);
    if (session === latest[session.view]) session.text.add(cycle);
    return session.request.compare && race.add("speculative", event);
  },
  flush() {
    run.session.text.flush();
    run.session.asAnswer?.follow();
    if (mode === "stepping" || performance.now() - drawnAt > PICTURE_MS) drawPictures();
  },
  ended({ state, error }) {
    const { session, ended } = run;
    const isFinished = state === "finished";
    drawPictures();
    run = null;
    setMode("idle");
    if (state === "failed") showError(error);
    if (isFinished && session === latest[session.view]) showAnswer(session);
    else say({ finished: "Finished.", stopped: "Stopped.", failed: "Failed." }[state]);
    if (session.request.compare && !isFinished) race.say("The race did not come to its end.");
    session.asAnswer?.finish(session);
    if (state !== "failed") askHealth();
    writeLink();
    ended(isFinished ? session : null);
  },
};

function showAnswer({ answer, cycles, request }) {
  const { finish_reason: reason, seed, warnings } = answer;
  const figures = cycles.length ? `${pace(figuresOf(cycles))}, seed ${seed}` : toldWords(answer);
  say(`Finished (${reason}): ${figures}.`);
  write("whole-text", `The whole text: ${answer.text}`);
  byId("warnings").replaceChildren(...warnings.map((words) => element("li", words)));
  if (!request.compare) return;
  const tokens = cycles.flatMap((cycle) => [...cycle.tokens, ...cycle.distributions.flat()]);
  const known = new Map(tokens.map((token) => [token.id, token.text]));
  race.finish(answer, (id) => known.get(id) ?? `#${id}`);
  whatIf.add(fromRace(answer));
}

// -------------------------------------------------------------------------------- pictures

function drawPictures() {
  drawnAt = performance.now();
  if (view === "statistics") drawStatistics(now);
  if (run.session !== now) return;
  if (run.follows) showCycle(now.cycles.length - 1);
  else showCycle(now.at, now.place);
}

/** Show a cycle of the session that is looked at, and the place in it that says most. */
function showCycle(step, place = null, isAsked = false) {
  clearTimeout(slowly);
  const cycle = now.cycles[step];
  if (!cycle) return;
  now.at = step;
  const [number, last] = [byId("cycle-number"), now.cycles.length - 1];
  number.disabled = false;
  [number.max, number.value] = [last, step];
  const count = `${step} of ${last}${step === 0 ? ", the prefill" : ""}`;
  write("cycle-count", count);
  number.setAttribute("aria-valuetext", `cycle ${count}`);
  write("cycle-says", summary(cycle));
  picture.draw(cycle, now.cycles);
  showPlace(place ?? Math.min(numAccepted(cycle), cycle.tokens.length - 1));
  now.text.mark(cycle.first, cycle.tokens.length, isAsked || mode !== "running");
  enable("back", step > 0);
  if (!isAsked) return;
  form.open(false);
  if (run) run.follows = step === last;
  reveal(byId("cycle"));
  writeLink();
}

/** Show the two distributions at a place of the cycle. */
function showPlace(place, isAsked = false) {
  now.place = place;
  picture.mark(place);
  distribution.show(now.cycles[now.at], place, now.request);
  if (isAsked) reveal(byId("verdict") ?? byId("picture"));
}

/** Show the cycle that is looked at once more, phase by phase. */
function playSlowly(phase = 0) {
  const phases = now.at < 0 ? [] : phasesOf(now.cycles[now.at]);
  if (!phases.length || !mayMove()) return;
  clearTimeout(slowly);
  picture.show(phase, true);
  write("cycle-says", phases[phase - 1]?.says ?? "Slowly:");
  if (phase < phases.length) slowly = setTimeout(() => playSlowly(phase + 1), (phase ? 3 : 1) * SLOW_MS);
}

const back = () => now.at > 0 && showCycle(now.at - 1, null, true);

/** Go one cycle on, and ask for a new one where the last one is shown. */
function onward() {
  if (now.at >= 0 && now.at < now.cycles.length - 1) return showCycle(now.at + 1, null, true);
  const isEnd = now.answer && !isChanged && view !== "story";
  if (mode === "idle" && isEnd) return say("This is the last cycle. Run begins anew.");
  if (mode === "idle") return begin("stepping") && select("text");
  if (mode === "racing") return null;
  if (mode === "running") setMode("stepping");
  run.follows = true;
  return run.stream.step();
}

// -------------------------------------------------------------------- words, views, address

const say = (words) => write("status", words);

/** An error in words, marking the field that it is about and asking for a key where one is due. */
function showError(error) {
  byId("error").replaceChildren(...(error ? [element("p", form.words(error))] : []));
  form.mark(error?.param ?? null);
  if (error?.status === 401) form.askForKey();
  if (error?.isGone) write("server", "The server does not answer.");
}

function setMode(wanted) {
  mode = wanted;
  const isIdle = mode === "idle";
  enable("run", !isLoading && (isIdle || mode === "stepping"));
  enable("step", !isLoading && mode !== "racing");
  enable("back", now.at > 0);
  enable("stop", !isIdle);
  enable("race", !isLoading && isIdle);
  chat.isBusy = isLoading || !isIdle;
  write("run", mode === "stepping" ? "Run on" : "Run");
  byId("text").setAttribute("aria-busy", !isIdle);
  if (!isIdle) say({ running: "Running.", stepping: "Step by step.", racing: "Racing." }[mode]);
}

/** Show one of the views; those of texts share the panel of the cycle. */
function select(wanted) {
  view = wanted;
  for (const tab of byId("tabs").children) {
    const isChosen = tab.id === `tab-${wanted}`;
    tab.setAttribute("aria-selected", isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
    if (isChosen) tab.scrollIntoView({ block: "nearest", inline: "center" });
  }
  if (wanted in latest) {
    byId(`view-${wanted}`).append(byId("cycle"));
    if (!now.cycles.length || now.view !== wanted) now = latest[wanted];
    if (now.cycles.length && !run) showCycle(now.at);
  }
  if (wanted !== "story") story.pause();
  if (wanted === "statistics") drawStatistics(now);
  if (wanted === "whatif") whatIf.draw();
  const bar = byId("bar").getBoundingClientRect();
  const top = document.querySelector("main").getBoundingClientRect().top - bar.bottom;
  if (top < 0) scrollBy({ top, behavior: "instant" });
}

/** Keep the run in the address: its request, its seed, and the cycle that is shown. */
function writeLink() {
  const { request, answer, at } = now;
  if (typeof request.prompt !== "string") return; // a conversation is no single request
  const fields = new URLSearchParams({ ...request, seed: answer?.seed ?? request.seed ?? "", at });
  for (const name of ["stream", "trace", "compare", "fixed_k"]) fields.delete(name);
  history.replaceState(null, "", `#${fields}`);
}

/** Run again what the address tells of, and go to its cycle. */
function followLink() {
  const { at, ...fields } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!("prompt" in fields) || mode !== "idle") return;
  form.fill({ verification: "", seed: "", json_schema: "", ...fields, chat: fields.chat === "true" });
  select("text");
  const place = Number(at) || 0;
  const ended = (session) => session && showCycle(Math.min(place, session.cycles.length - 1), null, true);
  begin("running", { ended });
}

for (const legend of document.querySelectorAll(".kinds")) {
  const kinds = ["accepted", "recovered", "bonus"];
  legend.append("Tokens: ", ...kinds.map((kind) => explained(kind, kind, `token.${kind}`)));
}
byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isOff("run")) return;
  if (mode === "stepping") {
    setMode("running");
    run.follows = true;
    run.stream.release();
  } else if (begin("running")) {
    select("text");
  }
});
onPress("back", back);
onPress("step", onward);
onPress("stop", () => run.stream.stop());
onPress("race", () => begin("racing") && select("race"));
onPress("slow", () => playSlowly());
onPress("story-try", () => select("try"));
onPress("link", async () => {
  const isCopied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  const isDrawn = now.cycles.length && ruleOf(now.cycles[0].tokens[0]) === "rejection";
  const { drafter } = now.request;
  const varies = ["auto", "suffix"].includes(drafter) ? `; with ${drafter} its cycles may differ` : "";
  say(`The address ${isCopied ? "is copied" : "stands above"}: it holds the request, the seed and the cycle. `
    + `${isDrawn ? "By rejection the text depends on the drafts" : "The text returns"}${varies}.`);
});
byId("cycle-number").addEventListener("input", ({ target }) => showCycle(Number(target.value), null, true));
byId("tabs").addEventListener("click", ({ target }) => target.id !== "tabs" && select(target.id.slice(4)));
addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const isTaken = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || event.defaultPrevented;
  if (!by || isTaken || event.target.closest?.("input, select, textarea, pre, [role=listbox]")) return;
  if (event.target.closest?.("[role=tablist]")) {
    const tabs = [...byId("tabs").children].filter((tab) => !tab.hidden);
    const next = tabs.at((tabs.indexOf(event.target) + by) % tabs.length);
    select(next.id.slice(4));
    next.focus();
  } else if (view === "story") story.move(by);
  else if (view in latest) (by < 0 ? back : onward)();
});
byId("request").addEventListener("input", ({ target }) => {
  isChanged = true;
  if (target.matches("[aria-invalid=true], #demo-prompt")) showError(null); // it is being corrected
});
addEventListener("resize", () => whatIf.draw());
addEventListener("hashchange", followLink);

// ------------------------------------------------------------------------------ the server

/** Show what the server says of itself, with 503, too; false and an error shown if nothing. */
async function askHealth() {
  try {
    health = await getJson("health", form.key, [200, 503]);
  } catch (error) {
    showError(error);
    return false;
  }
  isLoading = health.status === "loading";
  if (mode === "idle") setMode("idle");
  if (isLoading) {
    const seconds = Math.round(health.elapsed_s);
    write("server", `The server loads ${health.model}: ${health.stage} (${seconds} s).`);
    say(LOADING);
    setTimeout(load, LOADING_MS);
    return false;
  }
  const state = health.status === "ok" ? "" : ` (${health.status})`;
  write("server", `Target: ${health.model}${state}. Drafters: ${health.drafters.join(", ")}.`);
  form.offerDrafters(health);
  if (health.engine) hideTraces(health);
  guide.drafters = health.drafters;
  byId("tab-chat").hidden = !health.chat_template;
  whatIf.add(fromHealth(health));
  drawModel(health);
  return true;
}

async function load() {
  try {
    if (!isTold) story.tell(await getJson("page/stored_story.json"));
    isTold = true;
    if (!await askHealth()) return;
    if (byId("status").textContent === LOADING) say("Ready.");
    form.offerPrompts((await getJson("prompts", form.key)).prompts);
    if (isOpening) followLink(); // later the address tells of a run that was made here
    isOpening = false;
  } catch (error) {
    showError(error);
  }
}

byId("key").addEventListener("change", () => {
  showError(null);
  load();
});
text.clear("Press Run or Step: the text appears here.");
setMode("idle");
select("story");
load();
