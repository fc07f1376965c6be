// Where answers come from: the server's routes, with JSON at GET and server-sent events at POST
// /generate; or, where no server of ours sends this page, the recording beside it. Refusals are errors
// whose message is a sentence for the reader.

import { mayMove } from "./elements.js";
import { spentMs } from "./trace.js";

const page = document.documentElement.dataset;

const GONE = "The server cannot be reached. Is it still running? "
  + "Start it with: python 08_speculative_decoding.py --port 5000";
const CUT = "The connection to the server broke off before the answer was complete.";
const SLOWER = 4; // times, so that one can follow a recorded run

/** What went wrong, in words; `param` is the field, `status` HTTP's; with isGone nobody answers. */
export class ServerError extends Error {
  constructor(message, { param = null, status = null, isGone = false } = {}) {
    super(message);
    Object.assign(this, { param, status, isGone });
  }
}

/** Whether every answer is one of the recording's. */
export const isRecorded = !("server" in page);

/** A promise of the recording: {model, recorded_at, machine, health, curve, prompts, runs}. */
export const recording = read(new URLSearchParams(location.search).get("model"));
let recorded = null; // what it is, once it is there
recording.then((all) => { recorded = all; }, () => {}); // whoever needs it is told why there is none

async function read(name) {
  const path = /^[a-z0-9_.-]+$/.test(name ?? "") ? `recordings/${name}.json` : page.recording;
  const response = await reached(fetch(path), `The recording ${path} cannot be reached.`);
  if (!response.ok) throw new ServerError(`There is no recording ${path}.`, { status: response.status });
  return response.json();
}

/** The JSON at a route; `good` are the statuses that have it. Raises ServerError. */
export async function getJson(path, key = "", good = [200]) {
  if (isRecorded) return path === "prompts" ? recording : (await recording)[path]; // which has `prompts`, too
  const response = await reached(fetch(`../${path}`, { headers: headersWith(key) }), GONE);
  if (!good.includes(response.status)) throw await refusal(response);
  return response.json();
}

/**
 * The events of one request, each parsed, up to [DONE]. Aborting `signal` hangs up, which frees the
 * server. Raises ServerError, or the signal's AbortError.
 */
export async function* generate(request, key, signal) {
  if (isRecorded) return yield* replay(request, signal);
  const headers = { "Content-Type": "application/json", ...headersWith(key) };
  const sent = fetch("../generate", { method: "POST", headers, body: JSON.stringify(request), signal });
  const response = await reached(sent, GONE, signal);
  if (!response.ok) throw await refusal(response);
  for await (const data of messages(response.body.getReader(), signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(`The run failed: ${event.error.message}`, event.error);
    yield event;
  }
  throw new ServerError(CUT, { isGone: true });
}

export const recordedRun = ({ drafter, temperature = 0, verification, ...asked }) => (
  recorded?.runs.find(({ prompt, request }) => (
    recorded.prompts[prompt] === asked.prompt && request.drafter === (drafter || request.drafter)
    && request.temperature === temperature && !asked.json_schema
    && (!temperature || request.verification === (verification || "coupled")))));

/** Whether this page has no answer to such a request; where a server judges, nobody knows before. */
export const isUnrecorded = (request) => isRecorded && recorded !== null && !recordedRun(request);

/** The events of its recorded run where pictures may move: slowed, but for a race in their own time. */
async function* replay(request, signal) {
  const run = await recording && recordedRun(request);
  if (!run) throw unrecorded();
  for (const { compare, ...event } of run.events) {
    if ("plain" in event && !request.compare) continue;
    const ms = spentMs((event.plain ?? event).ms) * (request.compare ? 1 : SLOWER);
    if (mayMove()) await new Promise((resolve) => setTimeout(resolve, ms));
    signal?.throwIfAborted();
    yield compare && request.compare ? { ...event, compare } : event;
  }
}

/** That there is no such run, as an error that says what was recorded, and how to ask for something else. */
export function unrecorded() {
  const { model, recorded_at: day, runs } = recorded;
  const names = new Set(runs.map(({ request }) => request.drafter));
  return new ServerError(`This page has no server. Its menus offer what ${model} has done on ${day}, `
    + `with ${[...names].join(", ")}. For anything else: python 08_speculative_decoding.py --port 5000`);
}

const headersWith = (key) => (key ? { Authorization: `Bearer ${unescape(encodeURIComponent(key))}` } : {});

/** What the network gives; where it fails, and nobody has hung up, `words` as an error. */
function reached(promise, words, signal = null) {
  return promise.catch((error) => {
    throw signal?.aborted ? error : new ServerError(words, { isGone: true });
  });
}

/** The data of each server-sent event; comments such as ": ping" are skipped. */
async function* messages(reader, signal) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reached(reader.read(), CUT, signal);
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const { message = response.statusText, param = null } = body?.error ?? {};
  const seconds = response.headers.get("Retry-After");
  const words = {
    401: "The server asks for an API key: enter it in the bar above, then try again.",
    429: `The server is busy (${message}). Try again in ${seconds ? `${seconds} s` : "a moment"}.`,
  }[response.status];
  const verb = response.status >= 500 ? "cannot do this now" : "refused this request";
  return new ServerError(words ?? `The server ${verb}: ${message}.`, { param, status: response.status });
}
