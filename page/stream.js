// The server as the page sees it: JSON at GET, server-sent events at POST /generate, and its
// refusals as errors whose message is a sentence for the reader.

const GONE = "The server cannot be reached. Is it still running? "
  + "Start it with: python 08_speculative_decoding.py --port 5000";
const CUT = "The connection to the server broke off before the answer was complete.";

/** What went wrong, in words; `param` is the field, `status` HTTP's; with isGone nobody answers. */
export class ServerError extends Error {
  constructor(message, { param = null, status = null, isGone = false } = {}) {
    super(message);
    Object.assign(this, { param, status, isGone });
  }
}

/** The JSON at `path`; `good` are the statuses that have it. Raises ServerError. */
export async function getJson(path, key = "", good = [200]) {
  const response = await reached(fetch(`../${path}`, { headers: headersWith(key) }), GONE);
  if (!good.includes(response.status)) throw await refusal(response);
  return response.json();
}

/**
 * The events of one request, each parsed, up to [DONE]. Aborting `signal` hangs up, which frees the
 * server. Raises ServerError, or the signal's AbortError.
 */
export async function* generate(request, key, signal) {
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

const headersWith = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** What the network gives; where it fails, and nobody has hung up, `words` as an error. */
async function reached(promise, words, signal = null) {
  try {
    return await promise;
  } catch (error) {
    throw signal?.aborted ? error : new ServerError(words, { isGone: true });
  }
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
