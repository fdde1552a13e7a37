// Requests to the API, and what a stream of events tells about its own speed.

/** An answer that the server refused, or could not finish. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The JSON of a GET. */
export async function getJson(path, key) {
  const response = await send(path, { headers: headers(key) });
  return response.json();
}

/** The events of a streamed POST, parsed, until the server says that they are all. */
export async function* streamEvents(path, body, key, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let complete = false;
  for await (const data of eventData(response.body)) {
    complete = data === "[DONE]";
    if (complete) continue; // the next request must not begin before the server is done with this one
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
  if (!complete) throw new ApiError("the connection ended before the answer did");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached; is it still running?");
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not this server's words: a proxy's, perhaps.
  }
  throw new ApiError(message, response.status);
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return; // the connection broke, which the caller notices
    }
    if (piece.done) return;
    held += piece.value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

/**
 * Counts tokens and steps as they come. The first event is the prompt's own step. The times are the server's, so
 * that a slow network or browser does not change them.
 */
export class Meter {
  tokens = 0;
  steps = 0;
  accepted = 0;
  #first = null;
  #last = 0;
  #firstTokens = 0;

  add(step) {
    this.#last = step.seconds;
    this.tokens += step.texts.length;
    if (this.#first === null) {
      this.#first = this.#last;
      this.#firstTokens = step.texts.length;
    } else if (step.texts.length) {
      this.steps += 1;
      this.accepted += step.accepted;
    }
  }

  /** Takes the server's own counts, which are exact. */
  settle(usage) {
    this.tokens = usage.completion_tokens;
    this.steps = usage.speculation.steps;
    this.accepted = usage.speculation.accepted;
  }

  /** Seconds to the first token; null before it. */
  get firstSeconds() {
    return this.#first;
  }

  /** Tokens a second after the first; null while there is nothing to divide. */
  get rate() {
    const seconds = this.#last - this.#first;
    const tokens = this.tokens - this.#firstTokens;
    return tokens > 0 && seconds > 0 ? tokens / seconds : null;
  }

  get acceptedPerStep() {
    return this.steps ? this.accepted / this.steps : null;
  }
}
